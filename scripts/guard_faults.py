"""Injects faults into training on simulated ranks, to see how soon the guard ends compression.

    python scripts/guard_faults.py [--healthy 27]

Four simulated ranks train a model of scripts/study, in this process, on one core. Each fault runs
with dense training, with compression without a guard, and with compression and `Guard()`; each rank
reports its loss after every step. Steps with a gradient that is not finite are skipped, as with a
loss scaler.

    rate        a learning rate at which dense training is stable, but plain error feedback at
                ratio 0.005 is not
    ratio       the best learning rate of dense training, and ratio 0.005, which is too small for
                300 steps
    rank        after a third of the steps, rank 1's gradients are 5 or 30 times too large
    storm       after a third of the steps, rank 1 has a NaN in each of 40 steps
    link        the seconds of a step follow a formula, for a link that becomes 100 times faster

Appends to docs/results/guard.jsonl a line for each run that it does not have, healthy runs of each
model included, and prints the table of docs/monitoring.md.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from horovod_topk.cli.compare.simulated.exchanges import Compressed
from horovod_topk.cli.compare.simulated.training import Job
from horovod_topk.core.control.guard import FLUSHING
from horovod_topk.core.run.substitute import parse
from pages import RESULTS
from pages.markdown import table
from study import loops, workloads

RUNS = RESULTS / "guard.jsonl"
RANKS = 4
GUARDS = {"dense": None, "no guard": "None", "Guard()": "Guard()"}
PLAIN = "ratio=0.005, values='float32', momentum=0, follow_lr=False, warmup=None"
Spoil = Callable[[int, int, list[Tensor]], None]  # step, rank and its gradients


@dataclass(frozen=True)
class Fault:
    """A training run, and the fault that is injected into it."""

    model: str
    optimizer: str
    lr: float
    steps: int
    settings: str = ""  # arguments of TopKEF
    spoil: Spoil | None = None  # changes gradients in place


def too_large(factor: float, begin: int, step: int, rank: int, gradients: list[Tensor]) -> None:
    """Multiply rank 1's gradients by a factor, in place."""
    if rank == 1 and step >= begin:
        torch._foreach_mul_(gradients, factor)


def not_a_number(begin: int, step: int, rank: int, gradients: list[Tensor]) -> None:
    """Put a NaN into rank 1's gradients in each of 40 steps, in place."""
    if rank == 1 and begin <= step < begin + 40:
        gradients[0].view(-1)[0] = math.nan


FAULTS = {
    "rate, recurrent": Fault("recurrent", "momentum", 2.0, 300, PLAIN),
    "rate, digits": Fault("digits", "sgd", 0.3, 300, PLAIN),
    "ratio, recurrent": Fault("recurrent", "momentum", 1.0, 300, PLAIN),
    "rank, recurrent": Fault("recurrent", "momentum", 1.0, 300, spoil=partial(too_large, 5, 100)),
    "rank, digits": Fault("digits", "sgd", 0.1, 300, spoil=partial(too_large, 5, 100)),
    "rank 30, recurrent": Fault(
        "recurrent", "momentum", 1.0, 300, spoil=partial(too_large, 30, 100)
    ),
    "storm, recurrent": Fault("recurrent", "momentum", 1.0, 300, spoil=partial(not_a_number, 100)),
    "storm, digits": Fault("digits", "sgd", 0.1, 300, spoil=partial(not_a_number, 100)),
}
HEALTHY = {
    "recurrent": Fault("recurrent", "momentum", 1.0, 150),
    "digits": Fault("digits", "sgd", 0.1, 150),
}


class Run(Job):
    """A training run on simulated ranks with an injected fault."""

    def __init__(self, fault: Fault, guard: str | None, seed: int) -> None:
        options: dict[str, Any] = {"optimizer": fault.optimizer, "lr": fault.lr}
        options |= {"steps": fault.steps, "shards": "equal"}
        study: Any = workloads.workload(task="digits", **options)
        if fault.model != "digits":
            study = loops.LOOPS[fault.model](**options)
        settings = ", ".join(filter(None, (fault.settings, f"guard={guard}")))
        asked = "none" if guard is None else f"TopKEF({settings})"
        super().__init__(study, parse(asked), RANKS, seed)
        self._spoil, self._calls = fault.spoil, 0
        self.fell: tuple[int, str] | None = None
        self.warned: int | None = None
        self.losses: list[float] = []
        if isinstance(self.exchange, Compressed):
            self.exchange.compressors[0].on_step(self._note)
        (optimizer,) = self._optimizers
        step, parameters = optimizer.step, list(self.model.parameters())

        def step_if_finite() -> None:
            if all(bool(torch.isfinite(p.grad).all()) for p in parameters if p.grad is not None):
                step()

        optimizer.step = step_if_finite

    def _gradients(self, batch: Any) -> tuple[float, list[Tensor]]:
        loss, gradients = super()._gradients(batch)
        step, rank = divmod(self._calls, RANKS)
        self._calls += 1
        if self._spoil is not None:
            self._spoil(step, rank, gradients)
        self.losses.append(loss)
        return loss, gradients

    def _note(self, counters: Any) -> None:
        assert isinstance(self.exchange, Compressed)
        if counters.fell_back and self.fell is None:
            self.fell = counters.step, counters.fell_back
        if self.exchange.compressors[0].guard.warnings and self.warned is None:
            self.warned = counters.step


def train(fault: Fault, guard: str | None, seed: int) -> dict[str, Any]:
    """Train once; return when the guard warned and fired, and scores."""
    began, run = time.perf_counter(), Run(fault, guard, seed)
    at_fall: dict[str, float | None] = {}
    for _ in range(fault.steps):
        run.step()
        if run.fell is not None and not at_fall:
            at_fall = run.score()
    found = {"fell": run.fell, "warned": run.warned, "score": run.score(), "at_fall": at_fall}
    last = run.losses[-20 * RANKS :]
    found["train"] = sum(last) / len(last)
    return found | {"seconds": round(time.perf_counter() - began, 1)}


def link(seed: int) -> dict[str, Any]:
    """Find the step in which the guard ends compression after a simulated link becomes faster.

    Compression takes 12 ms of computing a step. A collective takes 2 ms and the time of its bytes:
    10 MB dense, 0.1 MB compressed. The link has 100 Mbit/s, and 10 Gbit/s from step 1,000 on.
    Times vary by 10%.
    """
    fault = Fault("recurrent", "momentum", 0.3, 10**6)
    run = Run(fault, "Guard(slower=1.2, trend=None)", seed)
    assert isinstance(run.exchange, Compressed)
    noise = torch.Generator().manual_seed(seed)
    for compressor in run.exchange.compressors:
        compressor.guard.time = partial(_timed, compressor, compressor.guard.time, noise)
    small = [[0.0 * p.detach() + 1e-3 for p in run.model.parameters()] for _ in range(RANKS)]
    for step in range(1, 4000):
        run.exchange.mean([[g.clone() for g in each] for each in small])
        if run.exchange.compressors[0].guard.memory.stage == FLUSHING:
            return {"fell": (step, "slower")}
    return {"fell": None}


def _timed(
    compressor: Any, observe: Callable[..., None], noise: Any, _: float, committed: int
) -> None:
    """Call the guard's rule `slower` with the seconds of a step by the formula of `link`."""
    is_dense = compressor.plan.config.ratio == 1.0
    rate = 12.5e6 if committed < 1000 else 1.25e9  # bytes a second
    seconds = 2e-3 + (10e6 if is_dense else 0.1e6) / rate + (0.0 if is_dense else 12e-3)
    observe(seconds * (1 + 0.1 * float(torch.randn(1, generator=noise))), committed)


def cells(healthy: int) -> Iterator[tuple[tuple[str, str, int], Callable[[], Any]]]:
    """Runs to make: (name, guard, seed), and a function for each."""
    for (name, fault), seed, (shown, guard) in product(FAULTS.items(), (0, 1), GUARDS.items()):
        yield (name, shown, seed), partial(train, fault, guard, seed)
    for seed in (0, 1):
        yield ("link", "Guard(slower=1.2)", seed), partial(link, seed)
    for (name, fault), seed in product(HEALTHY.items(), range(healthy)):
        yield (f"healthy, {name}", "Guard()", seed), partial(train, fault, "Guard()", seed)


def run_all(healthy: int) -> list[dict[str, Any]]:
    """Make the runs that are missing, append them, and return all."""
    found = list(map(json.loads, RUNS.read_text().splitlines()))
    known = {(each["name"], each["guard"], each["seed"]) for each in found}
    for key, run in cells(healthy):
        if key not in known:
            found.append(dict(zip(("name", "guard", "seed"), key, strict=True)) | run())
            print(found[-1], flush=True)
            with RUNS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found[-1]) + "\n")
    return found


def shown(found: dict[str, Any]) -> str:
    """A run's final score, as text: bits a byte, or the accuracy on digits."""
    if "score" not in found:
        return ""
    value = found["score"].get("bits_per_byte", found["score"].get("accuracy"))
    return "not finite" if value is None else f"{value:.3f}"


def tables(runs: Iterable[dict[str, Any]]) -> str:
    """The results as a Markdown table, and a line on healthy runs."""
    by_name: dict[tuple[str, int], dict[str, Any]] = {}
    healthy = []
    for each in runs:
        if each["name"].startswith("healthy"):
            healthy.append(each)
        else:
            by_name.setdefault((each["name"], each["seed"]), {})[each["guard"]] = each
    rows = []
    for (name, seed), found in by_name.items():
        guarded = found.get("Guard()", found.get("Guard(slower=1.2)", {}))
        fell, scores = guarded.get("fell"), (shown(found.get(guard, {})) for guard in GUARDS)
        end = "no" if fell is None else f"{fell[0]}, {fell[1]}"
        rows.append([name, str(seed), *scores, str(guarded.get("warned") or ""), end])
    head = ("fault", "seed", "dense", "no guard", "guard", "warned", "fell back, rule")
    fell_back, warned = (sum(bool(each[what]) for each in healthy) for what in ("fell", "warned"))
    counts = f"{len(healthy)} healthy runs: {fell_back} fell back, {warned} warned"
    return f"{table(head, rows)}\n\n{counts}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--healthy", type=int, default=27, help="healthy runs of each model")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Seems like `optimizer.step")  # skipped on purpose
    print(tables(run_all(asked.healthy)))


if __name__ == "__main__":
    main()
