"""`make bench`: what compressing a ResNet-50's gradients costs, with and without momentum.

One thread, no network. Two ranks of this process take turns; the times are those of the first. Also
compares plain error feedback in PyTorch and in a graph of TensorFlow. Writes docs/benchmarks.md.

    python scripts/bench.py steps [--repeats 10]

The authors' bias: they want small figures, and TensorFlow's close to PyTorch's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# PyTorch's optimizers load it, and its LLVM ends a process that has loaded TensorFlow's before.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

import tensorflow as tf
import torch
from torch import nn
from tqdm import tqdm

from horovod_topk.cli.compare.simulated.exchanges import Compressed, compressed
from horovod_topk.cli.machine import machine
from horovod_topk.cli.models import resnet50_specs
from horovod_topk.core.plan.buckets import TensorSpec
from horovod_topk.core.run.substitute import parse
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.tensorflow import Array, Buffer
from horovod_topk.tensorflow.planning import Settings
from horovod_topk.tensorflow.state import OptimizerState
from horovod_topk.tensorflow.timing import GraphTimer
from horovod_topk.tensorflow.variables import Stores
from pages import RESULTS, Values, stored, write
from pages.markdown import table

read = stored
DEFAULT = "TopKEF(warmup=None)"  # as after its first 60 steps
PLAIN = "TopKEF(momentum=0, follow_lr=False, warmup=None)"
SETTLE = 24  # steps before the first timed one; phi, which begins at 1, has settled then
FLOOR = "`r += g`"
BESIDE = {  # row -> the dense row whose step is not added
    "TopKEF, AdamW": "dense, fused AdamW",
    "TopKEF, SGD with momentum": "dense, SGD with momentum",
    "plain error feedback": "",
}
COLUMNS = (
    *("", "encode, ms", "of `r += g`", "decode two and commit, ms"),
    *("optimizer's step, ms", "added in all"),
)
Parts = dict[str, float]  # milliseconds by part of a step


def compute_with_one_thread() -> None:
    """In both frameworks; TensorFlow takes it before its first operation only."""
    torch.set_num_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


class Clock:
    """Measures the parts of a step one after the other."""

    def __init__(self) -> None:
        self.parts: Parts = {}
        self._last = time.perf_counter()

    def skip(self) -> None:
        """Do not count the time since the last part."""
        self._last = time.perf_counter()

    def end(self, part: str) -> None:
        """Record the time since the last part, or since `skip`, as the time of this part."""
        self.parts[part] = 1e3 * (time.perf_counter() - self._last)
        self.skip()


class InTorch:
    """Steps of a model in PyTorch.

    Args:
        specs: shapes of its parameters.
        optimizer: adamw, fused adamw, sgd or none.
        call: the compressor; None: dense, so that nothing is compressed.
    """

    def __init__(self, specs: Sequence[TensorSpec], optimizer: str, call: str | None) -> None:
        self._model = nn.ParameterDict(
            {spec.name: nn.Parameter(0.02 * torch.randn(spec.shape)) for spec in specs}
        )
        parameters = list(self._model.parameters())
        is_fused = optimizer == "fused adamw"
        self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, fused=is_fused)
        if "adamw" not in optimizer:
            self._optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
        self._steps = optimizer != "none"
        for p in parameters:
            p.grad = torch.randn_like(p)
        self._optimizer.step()  # roots of mean squares of 0 take PyTorch seven times longer
        self._exchange: Compressed | None = None
        if call is not None:
            self._exchange = compressed(self._model, self._optimizer, 2, parse(call))
        self._gradients = [[torch.randn_like(p) for p in parameters] for _ in range(2)]
        self._now = [[torch.empty_like(p) for p in parameters] for _ in range(2)]

    def __call__(self) -> Parts:
        """Make a step with other gradients than in the last one."""
        signs = torch.randint(0, 2, (2,)).mul(2).sub(1).tolist()
        for now, drawn, sign in zip(self._now, self._gradients, signs, strict=True):
            torch._foreach_copy_(now, drawn)
            torch._foreach_mul_(now, sign * 0.5 ** float(torch.rand(())))
        clock = Clock()
        if self._exchange is not None:
            self._compress(clock, self._exchange)
        if self._steps:
            for p, gradient in zip(self._model.parameters(), self._now[0], strict=True):
                p.grad = gradient
            clock.skip()
            self._optimizer.step()
            clock.end("step")
        return clock.parts

    def _compress(self, clock: Clock, exchange: Compressed) -> None:
        pairs = list(zip(exchange.compressors, map(exchange.in_buckets, self._now), strict=True))
        for rank, (compressor, buckets) in enumerate(pairs):
            clock.skip()
            for ordinal, bucket in buckets.items():
                compressor.launch(ordinal, bucket)
            if not rank:
                clock.end("encode")
        for rank, (compressor, buckets) in enumerate(pairs):
            clock.skip()
            for ordinal, bucket in buckets.items():
                compressor.step.finish(ordinal, bucket)
            compressor.commit()
            if not rank:
                clock.end("decode")


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

    def size(self) -> int:
        """Return the number of ranks in the process set."""
        return 2

    def included(self) -> bool:
        """Return whether this rank is in the process set."""
        return True

    def allgather(self, payload: Array, name: str) -> Done:
        """Return this payload, twice."""
        return Done(Buffer(tf.concat([payload.value, payload.value], 0)))


class Collective(Alone):
    """Stands in for a collective of these two ranks."""

    size = 2  # type: ignore[assignment]

    def __init__(self) -> None:
        self.timer = GraphTimer()


class InTensorflow:
    """Steps of plain error feedback in a tf.function; the two ranks send the same."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        variables = [tf.Variable(tf.zeros(s.shape), name=s.name) for s in reversed(specs)]
        method = TopK(momentum=0, follow_lr=False, warmup=None)
        state = OptimizerState(method, variables, Settings("average", None, Alone()), Stores())
        state._state.collective = Collective()
        gradients = [tf.random.normal(v.shape, seed=i) for i, v in enumerate(variables)]

        def step() -> None:  # gradients neither come from Python nor go there, as in training
            tf.group(*state.exchange(gradients, variables))

        self._step = tf.function(step, autograph=False)

    def __call__(self) -> Parts:
        """Make a step."""
        clock = Clock()
        self._step()
        clock.end("all")
        return clock.parts


def triad(specs: Sequence[TensorSpec]) -> Callable[[], Parts]:
    """Return a step that computes `r += g` over as many elements."""
    residual, gradient = (torch.ones(sum(spec.numel for spec in specs)) for _ in range(2))

    def step() -> Parts:
        clock = Clock()
        residual.add_(gradient)
        clock.end("encode")
        return clock.parts

    return step


def ways(specs: Sequence[TensorSpec]) -> dict[str, Callable[[], Parts]]:
    """Return the steps to time, by name."""
    return {
        FLOOR: triad(specs),
        "TopKEF, AdamW": InTorch(specs, "adamw", DEFAULT),
        "dense, AdamW": InTorch(specs, "adamw", None),
        "dense, fused AdamW": InTorch(specs, "fused adamw", None),
        "TopKEF, SGD with momentum": InTorch(specs, "sgd", DEFAULT),
        "dense, SGD with momentum": InTorch(specs, "sgd", None),
        "plain error feedback": InTorch(specs, "none", PLAIN),
        "TensorFlow": InTensorflow(specs),
    }


def measure(steps: dict[str, Callable[[], Parts]], repeats: int) -> dict[str, list[Parts]]:
    """Time the steps in turns, so that other load on the machine slows all of them alike."""
    taken: dict[str, list[Parts]] = {name: [] for name in steps}
    for turn in tqdm(range(SETTLE + repeats), disable=None):
        for name, step in steps.items():
            found = step()
            if turn >= SETTLE:
                taken[name].append(found)
    return taken


def values(results: dict[str, Any]) -> Values:
    """The page's figures by name."""
    taken: dict[str, list[Parts]] = results["taken"]
    found = {
        name: {part: statistics.median(each[part] for each in turns) for part in turns[0]}
        for name, turns in taken.items()
    }
    rows, floors = [], [each["encode"] for each in taken[FLOOR]]
    for name, parts in found.items():
        if name == "TensorFlow":
            continue
        times = ""
        if "encode" in parts:
            pairs = zip(taken[name], floors, strict=True)
            times = f"{statistics.median(each['encode'] / floor for each, floor in pairs):.2f}"
        encode, decode, step = (
            f"{parts[part]:.1f}" if part in parts else "" for part in ("encode", "decode", "step")
        )
        added = ""
        if name in BESIDE:
            dense = [each["step"] for each in taken[BESIDE[name]]] if BESIDE[name] else floors
            each_turn = zip(taken[name], dense, floors, strict=True)
            less = bool(BESIDE[name])
            shares = [(sum(own.values()) - less * d) / floor for own, d, floor in each_turn]
            added = f"{statistics.median(shares):.1f}"
        rows.append([name, encode, times, decode, step, added])
    plain, tensorflow = (sum(found[n].values()) for n in ("plain error feedback", "TensorFlow"))
    return results["machine"] | {
        "repeats": len(taken[FLOOR]),
        "rows": table(COLUMNS, rows),
        "tensorflow_ms": tensorflow,
        "plain": plain,
        "slower": tensorflow / plain,
    }


def main(arguments: Sequence[str]) -> int:
    """Measure, and write results and page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args(arguments)
    compute_with_one_thread()
    torch.manual_seed(0)
    taken = measure(ways(resnet50_specs()), args.repeats)
    there = machine() | {"features": torch.backends.cpu.get_cpu_capability()}
    (RESULTS / "benchmarks.json").write_text(json.dumps({"taken": taken, "machine": there}) + "\n")
    print(write("benchmarks").read_text())
    return 0
