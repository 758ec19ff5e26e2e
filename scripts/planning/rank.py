"""One rank of a cell: collectives timed for the fit, and steps that the plan has to guess.

    scripts/netlab --hosts 2 --rate 100mbit -- env PYTHONPATH=scripts horovodrun --gloo
        python scripts/planning/rank.py --models resnet18 --json found.json

Rank 0 first times kernels alone. Then all take steps in one way after the other, and the slowest
rank's count.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from horovod_topk.cli.frameworks import find, launched_rank
from horovod_topk.cli.models import MODELS
from horovod_topk.cli.plan import kernels
from horovod_topk.cli.plan.measure import timed
from horovod_topk.config import TopKConfig
from horovod_topk.cost.traffic import nodes_of
from shapes import Shapes

WAYS = (("none", ""), ("allreduce", "float32"), ("allgather", "float32"), ("sharded", "int8"))
WARM_UP = 2  # steps: names are cached, residuals fill


def training(hvd: Any, model: Shapes, exchange: str, values: str) -> Callable[[], None]:
    """A step in one way."""
    directions = [torch.randn(weight.shape) for weight in model.weights]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-9)
    if exchange != "none":
        from horovod_topk.torch import TopKEF

        ours = exchange != "allreduce"
        compression = TopKEF(exchange=exchange, values=values) if ours else hvd.Compression.none
        names = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=names, compression=compression
        )

    def step() -> None:
        optimizer.zero_grad()
        model.loss(directions).backward()
        optimizer.step()

    return step


def seconds(hvd: Any, step: Callable[[], None], steps: int) -> list[float]:
    """Of each step, the slowest rank's."""
    mine = []
    for turn in range(WARM_UP + steps):
        hvd.barrier()
        began = time.perf_counter()
        step()
        if turn >= WARM_UP:
            mine.append(time.perf_counter() - began)
    everyone = hvd.allgather_object(mine, name="planning.seconds")
    return list(map(max, zip(*everyone, strict=True)))


def main() -> None:
    """Measure; rank 0 writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    framework = find()
    assert framework is not None, "Horovod serves no framework: horovod-topk doctor says why"
    computed = asdict(kernels.measure(framework, TopKConfig())) if launched_rank() == 0 else None
    hvd = framework.hvd
    hvd.init()
    nodes = nodes_of(hvd.size(), hvd.local_size())
    samples = [(asdict(sending), took) for sending, took in timed(framework, nodes)]
    repeats: dict[str, dict[str, list[float]]] = {}
    for name in args.models:
        repeats[name] = {}
        for exchange, values in WAYS:
            step = training(hvd, Shapes(name), exchange, values)
            repeats[name][f"{exchange} {values}".strip()] = seconds(hvd, step, args.steps)
            del step
            gc.collect()
    if hvd.rank() == 0:
        steps = {
            name: {way: statistics.median(each) for way, each in ways.items()}
            for name, ways in repeats.items()
        }
        found = {"ranks": hvd.size(), "kernels": computed, "samples": samples, "steps": steps}
        args.json.write_text(json.dumps({**found, "repeats": repeats}))
    hvd.shutdown()


if __name__ == "__main__":
    main()
