"""Which code compresses here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from horovod_topk.cli.doctor.finding import Finding, is_installed
from horovod_topk.kernels import native, triton

COMPILE = (
    "install a C++17 compiler, then python -m horovod_topk.kernels.compile (unless "
    "HOROVOD_TOPK_NATIVE=0 is meant)"
)
UPDATE = "python -m horovod_topk.kernels.compile, in the environment of this TensorFlow"
TRITON = "pip install triton, or leave it: compression works, only slower"


def findings() -> Iterator[Finding]:
    """On the processor, in graphs, and on a GPU."""
    yield Finding("kernels for the CPU", *cpu_kernels())
    yield Finding("in TensorFlow graphs", *tensorflow_operations())
    yield Finding("kernels for the GPU", *gpu_kernels())


def cpu_kernels() -> tuple[str, str]:
    """What encodes and decodes tensors in memory, and a cure."""
    found = native.find()
    if found.library is None:
        return f"none, framework operations do the work: {found.description}", COMPILE
    return f"{found.description} ({native.LIBRARY})", ""


def tensorflow_operations() -> tuple[str, str]:
    """Whether graphs reach the kernels, and a cure."""
    if not is_installed("tensorflow"):
        return "TensorFlow is not installed", ""
    try:
        ours = importlib.import_module("horovod_topk.ops.tensorflow")
    except ImportError as error:
        return f"TensorFlow cannot be imported: {error}", "pip install --force-reinstall tensorflow"
    if ours.find_operations() is None:
        return "none, TensorFlow's own operations do the work; the log says why", UPDATE
    return "the same, as operations of a graph", ""


def gpu_kernels() -> tuple[str, str]:
    """What encodes and decodes tensors on a GPU, and a cure."""
    if not is_installed("torch"):
        return "PyTorch is not installed", ""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return f"PyTorch cannot be imported: {error}", "pip install --force-reinstall torch"
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU", ""
    reason = triton.unavailable("cuda")
    if reason:
        return f"none, PyTorch's operations do the work: {reason}", TRITON
    return "Triton", ""
