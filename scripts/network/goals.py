"""What the measured times are held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from horovod_topk.cli.bench.figures import Figures

DENSE, WAITING, DDP, PEER = "dense", "dense-waiting", "ddp", "powersgd"
BASELINES = (WAITING, DDP, DENSE, PEER)  # the fairest first
PLAIN = ("topk-plain",)
COMPACT = ("topk-int8", "topk-int8-sharded", "topk-int8-sampled")
ANY = (*PLAIN, "topk", *COMPACT)


@dataclass(frozen=True)
class Goal:
    """So many times less exchange time than a baseline in the same run."""

    run: str  # a key of RUNS
    ours: tuple[str, ...]  # any of them
    other: str
    least: float
    words: str


GOALS = (
    Goal("1gbit", ANY, WAITING, 9, "1 Gbit/s: 9 times less than dense"),
    Goal("1gbit", ANY, PEER, 2, "1 Gbit/s: 2 times less than PowerSGD rank 4"),
    Goal("100mbit", COMPACT, WAITING, 50, "100 Mbit/s, int8: 50 times less than dense"),
    Goal("100mbit", COMPACT, PEER, 5, "100 Mbit/s, int8: 5 times less than PowerSGD rank 4"),
    Goal(
        "100mbit",
        PLAIN,
        WAITING,
        20,
        "100 Mbit/s, plain indices and float32: 20 times less than dense",
    ),
)


def verdicts(found: dict[str, dict[str, Figures]]) -> Iterator[tuple[str, str, str, str]]:
    """Goal, setting, measured and met, for each goal whose run has results.

    Args:
        found: key of RUNS -> name of a method -> its figures.
    """
    for goal in GOALS:
        if goal.run in found:
            yield _verdict(goal, found[goal.run])


def _verdict(goal: Goal, methods: dict[str, Figures]) -> tuple[str, str, str, str]:
    ours = {n: methods[n].faster(methods[goal.other]) for n in goal.ours if n in methods}
    reached = {name: factor for name, factor in ours.items() if factor is not None}
    if not reached:
        return goal.words, "", "nothing measurable", "**no**"
    best = max(reached, key=lambda name: reached[name])
    met = "yes" if reached[best] >= goal.least else "**no**"
    measured = f"{reached[best]:.1f} times less than `{goal.other}`{_beside(goal, methods, best)}"
    return goal.words, best, measured, met


def _beside(goal: Goal, methods: dict[str, Figures], best: str) -> str:
    """The same against the other dense baselines, which the goal is not about."""
    if goal.other != WAITING:
        return ""
    factors = {name: methods[best].faster(methods.get(name)) for name in (DDP, DENSE)}
    known = {name: factor for name, factor in factors.items() if factor is not None}
    return "".join(f"; {factor:.1f} than `{name}`" for name, factor in known.items())
