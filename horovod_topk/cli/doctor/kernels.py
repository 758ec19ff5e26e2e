"""Which code compresses on this machine: this package's kernels or framework operations."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from horovod_topk.cli.doctor.finding import Finding, is_installed
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.core.plan.shards import shard, shard_sums
from horovod_topk.kernels import native, triton
from horovod_topk.methods.topk import VALUES, TopK

NAME = "kernels for the GPU"
GPU = "cuda"
NODES = Nodes(((0, 1), (2, 3)))  # an example with several owners on each node
NUMEL = 1 << 20  # elements of a tensor that is compressed, not sent dense
COMPILE = (
    "install a C++17 compiler, then run python -m horovod_topk.kernels.compile (unless you set "
    "HOROVOD_TOPK_NATIVE=0 on purpose)"
)
UPDATE = "run python -m horovod_topk.kernels.compile, in the environment of this TensorFlow"
TRITON = (
    "install a PyTorch that brings Triton 3.6 or newer; without it compression works, but it is "
    "slower"
)


def findings() -> Iterator[Finding]:
    """Yield findings about kernels on the CPU, in TensorFlow graphs and on the GPU."""
    yield Finding("kernels for the CPU", *cpu_kernels())
    yield Finding("in TensorFlow graphs", *tensorflow_operations())
    yield from gpu_kernels()


def cpu_kernels() -> tuple[str, str]:
    """Return a description of the code that encodes and decodes on the CPU, and a cure."""
    found = native.find()
    if found.library is None:
        return f"none, framework operations do the work: {found.description}", COMPILE
    return f"{found.description} ({native.LIBRARY})", ""


def tensorflow_operations() -> tuple[str, str]:
    """Return a description of the code in TensorFlow's graphs, and a cure."""
    if not is_installed("tensorflow"):
        return "TensorFlow is not installed", ""
    try:
        ours = importlib.import_module("horovod_topk.ops.tensorflow")
    except ImportError as error:
        return f"TensorFlow cannot be imported: {error}", "pip install --force-reinstall tensorflow"
    if ours.find_operations() is None:
        return "none, TensorFlow's own operations do the work; the log says why", UPDATE
    return "the same, as operations of a graph", ""


def gpu_kernels() -> Iterator[Finding]:
    """Yield findings about the code that encodes and decodes on a GPU, and its settings."""
    if not is_installed("torch"):
        yield Finding(NAME, "PyTorch is not installed")
        return
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        cure = "pip install --force-reinstall torch"
        yield Finding(NAME, f"PyTorch cannot be imported: {error}", cure)
        return
    if not torch.cuda.is_available():
        yield Finding(NAME, "PyTorch sees no GPU")
        return
    reason = triton.unavailable(GPU)
    if reason:
        yield Finding(NAME, f"none, PyTorch's operations do the work: {reason}", TRITON)
        return
    yield from gpu_settings()


def gpu_settings() -> Iterator[Finding]:
    """Yield which settings have Triton kernels, as `TorchOps.fused` selects for each payload."""
    served = [values for values in VALUES if _served(TopK(values=values))]
    other = [f"values {values}" for values in VALUES if values not in served]
    other += [] if _served(TopK(), "float64") else ["float64 gradients"]
    shown = f"values {', '.join(served)} with every exchange" if served else "no setting"
    yield Finding(NAME, f"Triton, for {shown}")
    without = "; ".join([*other, "masking of momentum correction"])
    yield Finding("  without", f"PyTorch's operations: {without}")


def _served(config: TopK, dtype: str = "float32") -> bool:
    """Whether every payload of every exchange has a kernel on a GPU."""
    (bucket,) = make_plan([TensorSpec("weight", (NUMEL,), dtype, GPU)], config).buckets
    sharded, sums = shard(bucket, sum(NODES.sizes)), shard_sums(bucket, NODES)
    payloads = [bucket, *sharded.scatter, *sharded.arrive, *sharded.gather, sharded.result]
    payloads += [*sums.sums, sums.result]
    return all(triton.unsupported(config.recipe(p), p.device) is None for p in payloads)
