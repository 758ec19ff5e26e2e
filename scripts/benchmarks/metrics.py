"""Times a step of a ResNet-50's gradient exchange with all metrics and without any, in turns.

    horovodrun -np 2 --gloo python scripts/bench.py metrics [--repeats 60] [--pair guard]

The optimizer has the default settings, without warm-up; gradients are random. One step of each pair
has writers for JSON lines, Prometheus and TensorBoard, and sums up squares in one step of 256. The
other step has no writers and sums up nothing. Both read the clock a few times a bucket, which
cannot be switched off. Each step begins with a barrier; rank 0 prints medians in ms, the median of
the differences of pairs, and the difference of the means. With `--pair guard` one step of each pair
has a guard with the rule `residual`, which sums up squares in one step of 128, and the other step
has no guard; neither has a writer.

On a busy machine, the noise between the steps of a pair is larger than the cost of metrics. So the
script also prints `spent`: ms a step of this thread's processor time in the functions that sum up
squares, read them, and call the writers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from benchmarks.exchange import training_step
from horovod_topk.core.run import compressor
from horovod_topk.core.run.stats import StepCounters
from horovod_topk.core.run.step import Step
from horovod_topk.guard import Guard
from horovod_topk.metrics import JsonLines
from horovod_topk.metrics.prometheus import Prometheus
from horovod_topk.metrics.tensorboard import TensorBoard
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch import TopKEF

SPENDING = (
    (TorchOps, "square"),
    (Step, "sample"),
    (compressor.Compressor, "_take_sample"),
    (compressor.Compressor, "_end"),
    (Step, "turn"),
)
spent = {"seconds": 0.0, "depth": 0.0}


def count(kind: type, name: str) -> None:
    """Count the seconds of a method, unless another counted method has called it."""
    function = getattr(kind, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        spent["depth"] += 1
        began = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent["depth"] -= 1
            if not spent["depth"]:
                spent["seconds"] += time.thread_time() - began

    setattr(kind, name, counted)


def writers_of(folder: str, names: str) -> list[Callable[[StepCounters], None]]:
    """Create writers from a comma-separated list of names."""
    made: dict[str, Callable[[], Any]] = {
        "json": lambda: JsonLines(f"{folder}/rank{hvd.rank()}.jsonl"),
        "tensorboard": lambda: TensorBoard(f"{folder}/rank{hvd.rank()}"),
        "prometheus": lambda: Prometheus(hvd.rank(), 0),
    }
    return [made[name]() for name in filter(None, names.split(","))]


def main(arguments: Sequence[str]) -> int:
    """Measure on all ranks, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=256, help="pairs of steps")
    parser.add_argument("--writers", default="json,tensorboard,prometheus", help="as a list")
    parser.add_argument("--pair", choices=["metrics", "guard"], default="metrics")
    args = parser.parse_args(arguments)
    repeats = args.repeats
    torch.set_num_threads(1)
    hvd.init()
    with tempfile.TemporaryDirectory() as folder:
        guard = Guard(residual=10.0) if args.pair == "guard" else Guard()
        made = [training_step(TopKEF(warmup=None, guard=guard))] * 2
        writers = writers_of(folder, args.writers if args.pair == "metrics" else "")
        if args.pair == "guard":
            made[1] = training_step(TopKEF(warmup=None, guard=None))
        steps, states = zip(*((step, TopKEF.of(o)._compressor) for step, o in made), strict=True)
        every = states[0]._sampled
        seconds, costs = ([], []), [0.0, 0.0, 0.0]
        for kind, name in SPENDING:
            count(kind, name)
        for repeat in range(-20, repeats):
            for which in (0, 1) if repeat % 2 else (1, 0):
                state, is_sampled = states[which], not which and repeat % every == 1
                state._callbacks[:] = [] if which else writers
                state.steps, state.rolled_back = int(not is_sampled), state.rolled_back + 1
                hvd.barrier()
                before = spent["seconds"]
                began = time.perf_counter()
                steps[which]()
                if repeat >= 0:
                    seconds[which].append(time.perf_counter() - began)
                    costs[2 if is_sampled else which] += spent["seconds"] - before
    on, off = ([1e3 * each for each in one] for one in seconds)
    difference = statistics.median([a - b for a, b in zip(on, off, strict=True)])
    found = {"on": statistics.median(on), "off": statistics.median(off), "difference": difference}
    found |= {"mean difference": statistics.fmean(on) - statistics.fmean(off)}
    writing, without = (1e3 * each / repeats for each in costs[:2])
    sampling = 1e3 * costs[2] / len(range(1, repeats, every))
    total = writing + sampling / every
    found |= {"spent": total, "writers": writing, "a sampled step": sampling, "without": without}
    if hvd.rank() == 0:
        print(json.dumps(found))
    return 0
