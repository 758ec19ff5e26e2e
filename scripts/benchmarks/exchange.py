"""Times an exchange of a ResNet-50's gradients between ranks, beside `r += g` and a zero-fill.

Run under horovodrun, by `make bench-kernels` or by hand; rank 0 prints one line of JSON:

    horovodrun -np 2 --gloo python scripts/bench.py exchange [--selection sampled] [--repeats 30]

Each step takes one of three gradients with random signs and a norm that varies by a third, after
the residual has settled. All methods take turns within one run. Each begins with a barrier, and one
thread computes on each rank. A step is backward and the optimizer's step; `exchange` is the time
that TopKEF adds to it. The floor is one `r += g` and one zero-fill of all gradients, on all ranks
at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial

import horovod.torch as hvd
import torch

from benchmarks.shapes import Shapes, varying
from horovod_topk.cli.models import specs_of
from horovod_topk.cli.timing import clocked, in_turns
from horovod_topk.torch import TopKEF


def memory_floor() -> Callable[[], None]:
    """One `r += g` and one fill of each gradient."""
    shapes = [spec.shape for spec in specs_of("resnet50")]
    residuals, gradients, outputs = ([torch.zeros(s) for s in shapes] for _ in range(3))

    def step() -> None:
        for residual, gradient, output in zip(residuals, gradients, outputs, strict=True):
            residual.add_(gradient)
            output.zero_()

    return step


def milliseconds(ways: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """What the slowest rank took, turn by turn."""

    def slowest(step: Callable[[], None]) -> float:
        elapsed = torch.tensor(1e3 * clocked(step, hvd.barrier)())
        return float(hvd.allreduce(elapsed, op=hvd.Max, name="slowest"))

    return in_turns({n: partial(slowest, step) for n, step in ways.items()}, repeats, warm_up=5)


OPTIONS = {
    "selection": ("exact", "of the elements, or sampled"),
    "repeats": (60, "timed steps"),
    "settle": (100, "steps before the first is timed"),
}


def main(args: argparse.Namespace) -> int:
    """Measure; rank 0 prints medians. What TopKEF adds is compared within each turn.

    A neighbour who takes memory bandwidth for a second meets all steps of a turn alike.
    """
    torch.set_num_threads(1)
    hvd.init()
    plain, _ = varying(Shapes(), None)
    topk = TopKEF(0.01, values="float32", selection=args.selection, warmup=None)
    compressed, _ = varying(Shapes(), topk)
    for _ in range(args.settle):
        compressed()
    ways = {"plain": plain, "topk": compressed, "memory": memory_floor()}
    taken = milliseconds(ways, args.repeats)
    taken["exchange"] = [a - b for a, b in zip(taken["topk"], taken["plain"], strict=True)]
    if hvd.rank() == 0:
        print(json.dumps({name: statistics.median(each) for name, each in taken.items()}))
    return 0
