"""Times an exchange of a ResNet-50's gradients between ranks, beside its floor.

Run under horovodrun, by `make bench-kernels` or by hand; rank 0 prints one line of JSON:

    horovodrun -np 2 --gloo python scripts/bench.py exchange [--ratio 0.01] [--repeats 30]

Each step takes one of three gradients with random signs and a norm that varies by a third, after
the residual has settled. All methods take turns within one run. Each begins with a barrier, and one
thread computes on each rank. A step is backward and the optimizer's step; `exchange` is the time
that TopKEF adds to it. The floor is one `r += g` and one zero-fill of all gradients, on all ranks
at once, and an allgather of the same bytes in the same number of pieces.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
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


def allgathers(sizes: list[int]) -> Callable[[], None]:
    """Named allgathers of so many bytes, all under way at once."""
    payloads = [torch.zeros(size, dtype=torch.uint8) for size in sizes]

    def step() -> None:
        handles = [hvd.allgather_async(p, name=f"floor.{i}") for i, p in enumerate(payloads)]
        for handle in handles:
            hvd.synchronize(handle)

    return step


def milliseconds(ways: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """What the slowest rank took, turn by turn."""

    def slowest(step: Callable[[], None]) -> float:
        elapsed = torch.tensor(1e3 * clocked(step, hvd.barrier)())
        return float(hvd.allreduce(elapsed, op=hvd.Max, name="slowest"))

    return in_turns({n: partial(slowest, step) for n, step in ways.items()}, repeats, warm_up=5)


def summary(taken: dict[str, list[float]]) -> dict[str, float]:
    """Medians; `exchange` and what it is allowed are compared within each turn, and then over all.

    A neighbour who takes memory bandwidth for a second meets all ways of a turn alike.
    """
    exchange = [topk - plain for topk, plain in zip(taken["topk"], taken["plain"], strict=True)]
    floors = zip(taken["memory"], taken["allgather"], strict=True)
    allowed = [1.5 * memory + allgather for memory, allgather in floors]
    return {
        **{name: statistics.median(each) for name, each in taken.items()},
        "exchange": statistics.median(exchange),
        "allowed": statistics.median(allowed),
        "share": statistics.median(e / a for e, a in zip(exchange, allowed, strict=True)),
    }


def main(arguments: Sequence[str]) -> int:
    """Measures; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--selection", default="exact")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--settle", type=int, default=100, help="steps before the first is timed")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hvd.init()
    found = beside_floors(args)
    if hvd.rank() == 0:
        print(json.dumps(found))
    return 0


def beside_floors(args: argparse.Namespace) -> dict[str, float]:
    """Time an exchange beside its lower bound, and return the times of all ranks."""
    plain, _ = varying(Shapes(), None)
    compressed, optimizer = varying(
        Shapes(), TopKEF(args.ratio, values="float32", selection=args.selection, warmup=None)
    )
    plan = TopKEF.of(optimizer)._compressor.plan
    sizes = [bucket.layout.payload_bytes for bucket in plan.buckets]
    for _ in range(args.settle):
        compressed()
    ways = {
        "plain": plain,
        "topk": compressed,
        "memory": memory_floor(),
        "allgather": allgathers(sizes),
    }
    sent = {"ranks": hvd.size(), "buckets": len(sizes), "bytes": sum(sizes)}
    return {**sent, **summary(milliseconds(ways, args.repeats))}
