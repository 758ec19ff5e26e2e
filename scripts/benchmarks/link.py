"""Trains on two hosts over an emulated link whose rate changes, with `ByNetwork`.

    sudo .venv/bin/python scripts/bench.py link

Hosts are network namespaces of this machine (`scripts/cluster`) with one rank each. The model has
ten layers of 100 thousand parameters in ten buckets; its backward pass sleeps for 10 ms in each
layer, as if an accelerator computed. The schedule trains 100 steps at each rate in turn. Prints, of
the last 50 steps at each rate, the median and the mean in ms, and how many had which ratio.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.jobs import on_ranks
from cluster import Cluster, Link
from cluster.host import INTERFACE

RATES = ("400mbit", "100mbit", "20mbit", "400mbit")
RATIOS = (0.02, 0.1, 0.25, 1.0)
STEPS = 100  # at each rate
LIMIT_SECONDS = 600.0


def measure(marks: Path, args: argparse.Namespace) -> dict[str, Any] | None:
    """Train on this rank with the schedule; rank 0 returns the seconds and ratio of each step.

    marks: a folder in which rank 0 asks for the next rate.
    """
    import horovod.torch as hvd
    import torch

    from horovod_topk.schedules import ByNetwork
    from horovod_topk.torch import TopKEF

    class Slow(torch.autograd.Function):
        """Identity that sleeps in its backward pass."""

        @staticmethod
        def forward(ctx: Any, values: Any) -> Any:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            time.sleep(0.01)
            return gradient

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(320, 320) for _ in range(10)]
    model = torch.nn.ModuleList(layers)
    schedule, plain = ByNetwork(levels=RATIOS[1:], share=0.15), {"warmup": None, "min_numel": 0}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.001),
        named_parameters=model.named_parameters(),
        compression=TopKEF(RATIOS[0], schedule=schedule, values="float32", **plain),
        groups=[list(layer.parameters()) for layer in layers],
    )
    levels, taken = list[float](), list[float]()
    TopKEF.of(optimizer).on_step(lambda counters: levels.append(counters.level))
    for step in range(STEPS * len(RATES)):
        if step % STEPS == 0 and hvd.rank() == 0:
            (marks / RATES[step // STEPS]).touch()
        began = time.perf_counter()
        values = torch.randn(8, 320)
        for layer in layers:
            values = Slow.apply(torch.relu(layer(values)))
        optimizer.zero_grad()
        values.square().mean().backward()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    return {"taken": taken, "levels": levels} if hvd.rank() == 0 else None


def change(cluster: Cluster, marks: Path) -> None:
    """Change the rate of every link, at both ends, whenever rank 0 asks for it."""
    for rate in RATES:
        while not (marks / rate).exists():
            time.sleep(0.05)
        (marks / rate).unlink()
        shaping = Link.of(rate).shaping()
        for host in cluster.hosts:
            host.check(["tc", "qdisc", "change", "dev", INTERFACE, "root", *shaping])
            host._room.check(["tc", "qdisc", "change", "dev", host._port, "root", *shaping])


def main(args: argparse.Namespace) -> int:
    """Measure and print."""

    def watch(cluster: Cluster) -> None:
        threading.Thread(target=change, args=(cluster, Path(marks)), daemon=True).start()

    with TemporaryDirectory() as marks:
        cluster = Cluster(2, Link.of(RATES[0]))
        found = on_ranks("link", Path(marks), args, cluster, LIMIT_SECONDS, prepare=watch)
    for i, rate in enumerate(RATES):
        last = slice(i * STEPS + STEPS // 2, (i + 1) * STEPS)
        taken, levels = ([*found[each][last]] for each in ("taken", "levels"))
        ratios = {ratio: levels.count(ratio) for ratio in RATIOS}
        median, mean = (1e3 * each(taken) for each in (statistics.median, statistics.fmean))
        print(f"{rate}: median {median:.0f}, mean {mean:.0f}", ratios, flush=True)
    return 0
