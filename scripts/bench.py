"""`make bench`: what compressing a ResNet-50's gradients costs, PyTorch and TensorFlow in one run.

One thread, no network. The payloads of two ranks are this rank's own payload, twice. A step is all
compression work of a training step: encode every bucket, decode both payloads, commit. Writes
docs/benchmarks.md.

    python scripts/bench.py [--repeats 10] [--ratio 0.01]

The authors' bias: they want TensorFlow's figure close to PyTorch's, as the algorithm is the same.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}

import tensorflow as tf
import torch
from tqdm import tqdm

from horovod_topk.cli.models import resnet50_specs
from horovod_topk.cli.processor import cpu_model
from horovod_topk.core.codec import PayloadCodec
from horovod_topk.core.compressor import Compressor
from horovod_topk.core.exchange.allgather import Allgather
from horovod_topk.core.plan import make_plan
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.tensorflow import Array, Buffer
from horovod_topk.ops.torch import TorchOps
from horovod_topk.tensorflow.planning import Settings
from horovod_topk.tensorflow.state import OptimizerState
from horovod_topk.tensorflow.timing import GraphTimer
from horovod_topk.tensorflow.variables import Stores

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"

TEMPLATE = """\
# What compression costs

<!-- Written by `make bench`. Change scripts/bench.py instead of this page. -->

Time of all compression work in a step, on one CPU thread and without a network: encode, decode two
payloads, commit. The gradients have the shapes of a ResNet-50 (161 tensors, 25,557,032 float32).
Ratio {ratio}, float32 values, exact selection. Medians of {repeats} steps; all rows take turns.

| | ms a step | as a multiple of PyTorch's |
| --- | --- | --- |
{rows}

`r += g` adds all gradients to residuals of the same size. No error feedback can cost less.
[kernels.md](kernels.md) times encoding alone: 1.3 to 1.5 times `r += g` with AVX kernels.

Machine: {cpu}, {cores} cores, Python {python}, PyTorch {torch}, TensorFlow {tensorflow}. Date:
{date}. Command: `make bench`. The authors' bias: they want TensorFlow's time close to PyTorch's.
"""


@dataclass(frozen=True)
class Done:
    """A collective that is over."""

    result: Any

    def wait(self) -> Any:
        """The gathered payloads."""
        return self.result


class Alone:
    """Stands in for two ranks that send the same; also for the process set of both."""

    rank, process_set_id = 0, 0

    def __init__(self, twice: Callable[[Any], Any]) -> None:
        self._twice = twice

    def size(self) -> int:
        """As a process set."""
        return 2

    def included(self) -> bool:
        """As a process set."""
        return True

    def allgather(self, payload: Any, name: str) -> Done:
        """This payload, twice."""
        return Done(self._twice(payload))


class Collective(Alone):
    """The same as a collective."""

    size = 2  # type: ignore[assignment]

    def __init__(self, twice: Callable[[Any], Any]) -> None:
        super().__init__(twice)
        self.timer = GraphTimer()


def compute_with_one_thread() -> None:
    """In both frameworks; TensorFlow takes it before its first operation only."""
    torch.set_num_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def in_torch(ratio: float) -> Callable[[], None]:
    """A step in PyTorch."""
    config, ops = TopK(ratio=ratio, values="float32"), TorchOps()
    plan = make_plan(resnet50_specs(), config)
    collective = Collective(lambda payload: torch.cat([payload, payload]))
    compressor = Compressor(plan, ops, PayloadCodec(ops), Allgather(collective), "bench")
    generator = torch.Generator().manual_seed(0)
    fresh = {s.name: torch.randn(s.shape, generator=generator) for s in resnet50_specs()}
    targets = {name: torch.empty_like(gradient) for name, gradient in fresh.items()}

    def step() -> None:
        for bucket in plan.buckets:
            gradients = [fresh[t.spec.name] for t in bucket.tensors]
            compressor.launch(bucket.ordinal, gradients)
        for bucket in plan.buckets:
            written = [targets[t.spec.name] for t in bucket.tensors]
            compressor.step.finish(bucket.ordinal, written)
        compressor.commit()

    return step


def in_tensorflow(ratio: float) -> Callable[[], None]:
    """A step in a tf.function."""
    specs = list(reversed(resnet50_specs()))
    variables = [tf.Variable(tf.zeros(spec.shape), name=spec.name) for spec in specs]

    def twice(payload: Array) -> Array:
        return Buffer(tf.concat([payload.value, payload.value], 0))

    settings = Settings("average", None, Alone(twice))
    state = OptimizerState(TopK(ratio=ratio, values="float32"), variables, settings, Stores())
    collective = Collective(twice)
    state._state.collective = collective
    gradients = [tf.random.normal(v.shape, seed=i) for i, v in enumerate(variables)]

    def step() -> None:  # gradients neither come from Python nor go there, as in training
        tf.group(*state.exchange(gradients, variables))

    return tf.function(step, autograph=False)  # type: ignore[no-any-return]


def triad() -> Callable[[], None]:
    """`r += g` over as many elements: the floor for anything that reads both and writes one."""
    numel = sum(spec.numel for spec in resnet50_specs())
    residual, gradient = torch.zeros(numel), torch.ones(numel)

    def step() -> None:
        residual.add_(gradient)

    return step


def milliseconds(ways: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Medians, the ways taking turns, so that a noisy neighbour meets them all."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for step in ways.values():
        step()  # traces
        step()  # on residuals that are no longer zero
    for _ in tqdm(range(repeats), disable=None):
        for name, step in ways.items():
            started = time.perf_counter()
            step()
            taken[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(each) for name, each in taken.items()}


def report(found: dict[str, float], args: argparse.Namespace) -> str:
    """The page."""
    base = found["PyTorch"]
    return TEMPLATE.format(
        ratio=f"{args.ratio:g}",
        repeats=args.repeats,
        rows="\n".join(f"| {n} | {each:.0f} | {each / base:.2f} |" for n, each in found.items()),
        cpu=cpu_model(),
        cores=os.cpu_count(),
        python=platform.python_version(),
        torch=torch.__version__,
        tensorflow=tf.__version__,
        date=time.strftime("%Y-%m-%d"),
    )


def main() -> int:
    """Measures, prints the table and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--ratio", type=float, default=0.01)
    args = parser.parse_args()
    compute_with_one_thread()
    ways = {
        "PyTorch": in_torch(args.ratio),
        "TensorFlow, tf.function": in_tensorflow(args.ratio),
        "`r += g`": triad(),
    }
    page = report(milliseconds(ways, args.repeats), args)
    print(page)
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
