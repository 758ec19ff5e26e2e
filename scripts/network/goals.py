"""Goals for the measured times: how many times faster TopKEF should be than each baseline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from horovod_topk.cli.bench.figures import Figures

DENSE, WAITING, DDP, PEER = "dense", "dense-waiting", "ddp", "powersgd"
BASELINES = (WAITING, DDP, "ddp-fp16", DENSE, PEER)  # the fairest comparison first
TOPK, OVER_DDP = "topk", "ddp+topk"  # TopKEF's default with Horovod and with DDP


@dataclass(frozen=True)
class Goal:
    """Least quotient of a baseline's exchange time and TopKEF's, in the same run."""

    run: str  # a key of RUNS
    ours: str  # a setting of TopKEF
    other: str
    least: float
    words: str


GOALS = (
    Goal("1gbit", TOPK, WAITING, 9, "1 Gbit/s: 9 times less than dense"),
    Goal("1gbit", TOPK, PEER, 2, "1 Gbit/s: 2 times less than PowerSGD rank 4"),
    Goal("1gbit", OVER_DDP, PEER, 2, "1 Gbit/s, DDP: 2 times less than PowerSGD rank 4"),
    Goal("1gbit", OVER_DDP, TOPK, 1, "1 Gbit/s, DDP: no more than with Horovod"),
    Goal("100mbit", TOPK, WAITING, 50, "100 Mbit/s: 50 times less than dense"),
    Goal("100mbit", TOPK, PEER, 5, "100 Mbit/s: 5 times less than PowerSGD rank 4"),
    Goal("100mbit", OVER_DDP, PEER, 5, "100 Mbit/s, DDP: 5 times less than PowerSGD rank 4"),
    Goal("100mbit", OVER_DDP, TOPK, 1, "100 Mbit/s, DDP: no more than with Horovod"),
    Goal(
        "100mbit",
        "topk-plain-float32-0.01",
        WAITING,
        20,
        "100 Mbit/s, plain indices and float32: 20 times less than dense",
    ),
)


def verdicts(found: dict[str, dict[str, Figures]]) -> Iterator[tuple[str, str, str, str]]:
    """Yield for each goal with results: goal, setting, measured quotient, and whether it is met.

    Args:
        found: key of RUNS -> name of a method -> its figures.
    """
    for goal in GOALS:
        if goal.run in found:
            yield _verdict(goal, found[goal.run])


def _verdict(goal: Goal, methods: dict[str, Figures]) -> tuple[str, str, str, str]:
    factor = methods[goal.ours].faster(methods[goal.other])
    if factor is None:
        return goal.words, goal.ours, "nothing measurable", "**no**"
    met = "yes" if factor >= goal.least else "**no**"
    measured = f"{factor:.1f} times less than `{goal.other}`{_beside(goal, methods)}"
    return goal.words, goal.ours, measured, met


def _beside(goal: Goal, methods: dict[str, Figures]) -> str:
    """Quotients for the other dense baselines, as text, if the goal is about a dense one."""
    if goal.other != WAITING:
        return ""
    factors = {name: methods[goal.ours].faster(methods.get(name)) for name in (DDP, DENSE)}
    known = {name: factor for name, factor in factors.items() if factor is not None}
    return "".join(f"; {factor:.1f} than `{name}`" for name, factor in known.items())
