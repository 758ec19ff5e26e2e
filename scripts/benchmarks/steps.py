"""`make bench`: what compressing a ResNet-50's gradients costs, with and without momentum.

One thread, no network. Two ranks of this process take turns; the times are those of the first. Also
compares plain error feedback in PyTorch and in a graph of TensorFlow. Writes docs/kernels.md.

    python scripts/bench.py steps [--repeats 10]

The authors' bias: they want small figures, and TensorFlow's close to PyTorch's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# PyTorch's optimizers load it, and its LLVM ends a process that has loaded TensorFlow's before.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

import tensorflow as tf
import torch

from benchmarks.simulated import PARTS, PLAIN, Training
from horovod_topk.cli.machine import machine
from horovod_topk.cli.models import specs_of
from horovod_topk.cli.timing import clocked, in_turns
from horovod_topk.core.plan.buckets import TensorSpec
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.tensorflow import Array, Buffer
from horovod_topk.tensorflow.collective import GraphTimer
from horovod_topk.tensorflow.planning import TapeSettings
from horovod_topk.tensorflow.state import OptimizerState
from horovod_topk.tensorflow.variables import Stores
from pages import RESULTS, Values, write
from pages.markdown import table

DEFAULT = "TopKEF(warmup=None)"  # as after its first 60 steps
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


def step_of(training: Training) -> Callable[[], Parts]:
    """A step that returns the time of its parts."""

    def step() -> Parts:
        parts: Parts = {}
        training(lambda name, part: parts.update({name: 1e3 * clocked(part)()}))
        return parts

    return step


def whole(name: str, call: Callable[[], object]) -> Callable[[], Parts]:
    """A call whose time is that of one part."""
    return lambda: {name: 1e3 * clocked(call)()}


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

    size = 2

    def __init__(self) -> None:
        self.timer = GraphTimer()


def in_tensorflow(specs: Sequence[TensorSpec]) -> Callable[[], object]:
    """Run a step of plain error feedback in a tf.function, with equal payloads of two ranks."""
    variables = [tf.Variable(tf.zeros(s.shape), name=s.name) for s in reversed(specs)]
    method = TopK(momentum=0, follow_lr=False, warmup=None)
    state = OptimizerState(method, variables, TapeSettings("average", None, Alone()), Stores())
    state._state.collective = Collective()
    gradients = [tf.random.normal(v.shape, seed=i) for i, v in enumerate(variables)]

    def step() -> None:  # gradients neither come from Python nor go there, as in training
        tf.group(*state.exchange(gradients, variables))

    return tf.function(step, autograph=False)


def ways(specs: Sequence[TensorSpec]) -> dict[str, Callable[[], Parts]]:
    """Return the steps to time, by name."""
    residual, gradient = (torch.ones(sum(spec.numel for spec in specs)) for _ in range(2))
    rows = {
        "TopKEF, AdamW": Training(specs, "adamw", DEFAULT),
        "dense, AdamW": Training(specs, "adamw", None),
        "dense, fused AdamW": Training(specs, "fused adamw", None),
        "TopKEF, SGD with momentum": Training(specs, "sgd", DEFAULT),
        "dense, SGD with momentum": Training(specs, "sgd", None),
        "plain error feedback": Training(specs, "none", f"TopKEF({PLAIN})"),
    }
    return {
        FLOOR: whole("encode", lambda: residual.add_(gradient)),
        **{name: step_of(training) for name, training in rows.items()},
        "TensorFlow": whole("all", in_tensorflow(specs)),
    }


def values(results: dict[str, Any]) -> Values:
    """Return the figures that the page shows, by name."""
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
        encode, decode, step = (f"{parts[part]:.1f}" if part in parts else "" for part in PARTS)
        added = ""
        if name in BESIDE:
            dense = [each[PARTS[-1]] for each in taken[BESIDE[name]]] if BESIDE[name] else floors
            each_turn = zip(taken[name], dense, floors, strict=True)
            less = bool(BESIDE[name])
            shares = [(sum(own.values()) - less * d) / floor for own, d, floor in each_turn]
            added = f"{statistics.median(shares):.1f}"
        rows.append([name, encode, times, decode, step, added])
    plain, tensorflow = (sum(found[n].values()) for n in ("plain error feedback", "TensorFlow"))
    return results["machine"] | {
        "rows": table(COLUMNS, rows),
        "slower": tensorflow / plain,
    }


OPTIONS = {"repeats": (10, "timed steps")}


def main(args: argparse.Namespace) -> int:
    """Measure, and write results and page."""
    compute_with_one_thread()
    torch.manual_seed(0)
    taken = in_turns(ways(specs_of("resnet50")), args.repeats, warm_up=SETTLE)
    there = machine() | {"features": torch.backends.cpu.get_cpu_capability()}
    (RESULTS / "benchmarks.json").write_text(json.dumps({"taken": taken, "machine": there}) + "\n")
    write("benchmarks")
    return 0
