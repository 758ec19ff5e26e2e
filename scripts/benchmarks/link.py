"""Trains on two hosts over an emulated link whose rate changes, with `ByNetwork` and fixed ratios.

    sudo .venv/bin/python scripts/bench.py link

Hosts are network namespaces of this machine (`scripts/cluster`) with one rank each. The model has
ten layers of 100 thousand parameters in ten buckets; its backward pass sleeps for 10 ms in each
layer, as if an accelerator computed. Each fixed ratio is timed at each rate. Then the schedule
trains 100 steps at each rate in turn. Prints the median step of each fixed ratio in ms. For the
schedule, prints the median of the last 50 steps at each rate, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import python_path
from cluster import Cluster, Link
from cluster.host import INTERFACE
from pages import ROOT

RATES = ("400mbit", "100mbit", "20mbit", "400mbit")
RATIOS = (0.02, 0.1, 0.25, 1.0)
STEPS = 100  # at each rate


def train(out: Path, marks: Path | None, fixed: int) -> None:
    """Train on this rank: at fixed ratios one after another, or with the schedule."""
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

    def run(compression: TopKEF, steps: int) -> list[tuple[float, float]]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(320, 320) for _ in range(10)]
        model = torch.nn.ModuleList(layers)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.001),
            named_parameters=model.named_parameters(),
            compression=compression,
            groups=[list(layer.parameters()) for layer in layers],
        )
        taken = []
        TopKEF.of(optimizer).on_step(lambda counters: levels.append(counters.level))
        levels: list[float] = []
        for step in range(steps):
            if marks is not None and step % STEPS == 0 and step and hvd.rank() == 0:
                (marks / str(step // STEPS)).touch()
            began = time.perf_counter()
            values = torch.randn(8, 320)
            for layer in layers:
                values = Slow.apply(torch.relu(layer(values)))
            optimizer.zero_grad()
            values.square().mean().backward()
            optimizer.step()
            taken.append((time.perf_counter() - began, levels[-1]))
        return taken

    plain = {"values": "float32", "warmup": None, "min_numel": 0}
    if fixed:
        found = {str(r): run(TopKEF(r, **plain), fixed) for r in RATIOS}
    else:
        schedule = ByNetwork(levels=RATIOS[1:], share=0.15)
        compression = TopKEF(RATIOS[0], schedule=schedule, **plain)
        found = {"schedule": run(compression, STEPS * len(RATES))}
    if hvd.rank() == 0:
        out.write_text(json.dumps(found))


def change(cluster: Cluster, rate: str) -> None:
    """Change the rate of every link, at both ends."""
    shaping = Link.of(rate).shaping()
    for host in cluster.hosts:
        host.check(["tc", "qdisc", "change", "dev", INTERFACE, "root", *shaping])
        host._room.check(["tc", "qdisc", "change", "dev", host._port, "root", *shaping])


def measure(folder: Path, arguments: list[str], cluster: Cluster, rates: tuple[str, ...]) -> Any:
    """Train on all hosts, and change the rate whenever rank 0 asks for it."""
    out = folder / "out.json"
    bench = str(ROOT / "scripts" / "bench.py")
    rank = [sys.executable, bench, "link", "--out", str(out), *arguments]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = cluster.start(["horovodrun", "--gloo", *rank], environment, **quiet)
    waiting = list(enumerate(rates))[1:]
    while process.poll() is None:
        time.sleep(0.05)
        if waiting and (folder / str(waiting[0][0])).exists():
            change(cluster, waiting.pop(0)[1])
    return json.loads(out.read_text())


def main(arguments: Sequence[str]) -> int:
    """Measure and print; with --out, train as one rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedule", action="store_true", help="time the schedule alone")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--marks", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fixed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.out:
        train(args.out, args.marks, args.fixed)
        return 0
    with tempfile.TemporaryDirectory() as name, Cluster(2, Link.of(RATES[0])) as cluster:
        folder = Path(name)
        for rate in () if args.schedule else dict.fromkeys(RATES):
            change(cluster, rate)
            found = measure(folder, ["--fixed", "25"], cluster, ())
            medians = {r: 1e3 * statistics.median(s for s, _ in t[5:]) for r, t in found.items()}
            print(rate, {r: round(ms) for r, ms in medians.items()}, flush=True)
        change(cluster, RATES[0])
        taken = measure(folder, ["--marks", name], cluster, RATES)["schedule"]
    for i, rate in enumerate(RATES):
        part = taken[i * STEPS + STEPS // 2 : (i + 1) * STEPS]
        ratios = {r: sum(level == r for _, level in part) for r in RATIOS}
        median = 1e3 * statistics.median(seconds for seconds, _ in part)
        mean = 1e3 * statistics.fmean(seconds for seconds, _ in part)
        print(f"schedule at {rate}: median {median:.0f}, mean {mean:.0f}", ratios, flush=True)
    return 0
