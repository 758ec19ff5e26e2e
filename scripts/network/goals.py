"""What times are held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from horovod_topk.cli.bench.figures import Figures

DENSE, WAITING, PEER = "dense", "dense-waiting", "powersgd"
PLAIN = ("topk-plain",)
COMPACT = ("topk-int8", "topk-int8-sharded", "topk-int8-sampled")
ANY = (*PLAIN, "topk", *COMPACT)


@dataclass(frozen=True)
class Goal:
    """So many times less exchange time than another's, in the same run."""

    run: str  # a key of RUNS
    ours: tuple[str, ...]  # any of them
    other: str
    least: float
    words: str


GOALS = (
    Goal("1gbit", ANY, DENSE, 9, "1 Gbit/s: 9 times less than Horovod dense"),
    Goal("1gbit", ANY, PEER, 2, "1 Gbit/s: 2 times less than PowerSGD rank 4"),
    Goal("100mbit", COMPACT, DENSE, 50, "100 Mbit/s, int8: 50 times less than Horovod dense"),
    Goal("100mbit", COMPACT, PEER, 5, "100 Mbit/s, int8: 5 times less than PowerSGD rank 4"),
    Goal(
        "100mbit",
        PLAIN,
        DENSE,
        20,
        "100 Mbit/s, plain indices and float32: 20 times less than Horovod dense",
    ),
)


def verdicts(found: dict[str, dict[str, Figures]]) -> Iterator[tuple[str, str, str]]:
    """Goal, measured and met, of those whose run there is.

    Args:
        found: key of RUNS -> name of a way -> its figures.
    """
    for goal in GOALS:
        if goal.run in found:
            yield _verdict(goal, found[goal.run])


def _verdict(goal: Goal, ways: dict[str, Figures]) -> tuple[str, str, str]:
    ours = {name: ways[name].faster(ways[goal.other]) for name in goal.ours if name in ways}
    reached = {name: factor for name, factor in ours.items() if factor is not None}
    if not reached:
        return goal.words, "not to be seen", "**no**"
    best = max(reached, key=lambda name: reached[name])
    met = "yes" if reached[best] >= goal.least else "**no**"
    return goal.words, f"{reached[best]:.1f} times ({best}){_beside(goal, ways, best)}", met


def _beside(goal: Goal, ways: dict[str, Figures], best: str) -> str:
    """Against the dense that leaves cores to others, which is no goal."""
    if goal.other != DENSE or WAITING not in ways:
        return ""
    factor = ways[best].faster(ways[WAITING])
    return "" if factor is None else f"; {factor:.1f} times less than {WAITING}"
