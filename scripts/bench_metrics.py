"""Times a step of a ResNet-50's exchange with all metrics and without any, in turns.

    horovodrun -np 2 --gloo python scripts/bench_metrics.py [--repeats 60]

Both optimizers have the default settings and compute nothing. The one sums up squares in one step
of 256, and has writers for JSON lines and Prometheus on every step, and for TensorBoard on every
tenth. The other has neither. Both read the clock a few times a bucket, which cannot be switched
off. Steps alternate, and each begins with a barrier; rank 0 prints medians in ms, the median of the
differences of pairs, and the difference of the means, which has the sampled steps too.

Where others use the machine, pairs differ by more than metrics cost. So `spent` is also counted:
ms a step within the functions that sum up squares, read them, and call the writers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch

from bench_exchange import training_step
from horovod_topk.core import compressor
from horovod_topk.core.step import Step
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
)
spent = {"seconds": 0.0, "depth": 0.0}


def count(kind: type, name: str) -> None:
    """Count the seconds of a method, unless it is called by another one that is counted."""
    function = getattr(kind, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        spent["depth"] += 1
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent["depth"] -= 1
            if not spent["depth"]:
                spent["seconds"] += time.perf_counter() - began

    setattr(kind, name, counted)


def with_metrics(folder: str, writers: str) -> Callable[[], None]:
    """A step whose counters go to these writers."""
    step, optimizer = training_step(TopKEF(warmup=None, name="on"))
    made: dict[str, Callable[[], Any]] = {
        "json": lambda: JsonLines(f"{folder}/rank{hvd.rank()}.jsonl"),
        "tensorboard": lambda: TensorBoard(f"{folder}/rank{hvd.rank()}", every=10),
        "prometheus": lambda: Prometheus(hvd.rank(), 0),
    }
    for writer in filter(None, writers.split(",")):
        TopKEF.of(optimizer).on_step(made[writer]())
    return step


def without_metrics() -> Callable[[], None]:
    """A step that measures nothing."""
    step, _ = training_step(TopKEF(warmup=None, name="off"))

    def unsampled() -> None:
        with mock.patch.object(compressor, "SAMPLED", 1 << 60):
            step()

    return unsampled


def main() -> None:
    """Measures; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=256, help="pairs of steps")
    parser.add_argument("--writers", default="json,tensorboard,prometheus", help="as a list")
    args = parser.parse_args()
    repeats = args.repeats
    torch.set_num_threads(1)
    hvd.init()
    with tempfile.TemporaryDirectory() as folder:
        steps, seconds = (with_metrics(folder, args.writers), without_metrics()), ([], [])
        costs = [0.0, 0.0]
        for kind, name in SPENDING:
            count(kind, name)
        for repeat in range(-5, repeats):
            for which in (0, 1) if repeat % 2 else (1, 0):
                hvd.barrier()
                before = spent["seconds"]
                began = time.perf_counter()
                steps[which]()
                if repeat >= 0:
                    seconds[which].append(time.perf_counter() - began)
                    costs[which] += spent["seconds"] - before
    on, off = ([1e3 * each for each in one] for one in seconds)
    difference = statistics.median([a - b for a, b in zip(on, off, strict=True)])
    found = {"on": statistics.median(on), "off": statistics.median(off), "difference": difference}
    found |= {"mean difference": statistics.fmean(on) - statistics.fmean(off)}
    found |= {"spent": 1e3 * costs[0] / repeats, "spent without": 1e3 * costs[1] / repeats}
    if hvd.rank() == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
