"""Figures of docs/trouble.md, from the stored results."""

from __future__ import annotations

from benchmarks.residuals import LR, RUNS, Record
from benchmarks.residuals_watch import karimireddy
from pages import Values
from pages.markdown import table

TITLES = {run.name: run.title for run in RUNS}


def values(record: Record) -> Values:
    """The page's figures by name."""
    first = record["runs"][0]
    return dict(
        steps=first["steps"],
        ranks=len(first["ranks"]),
        lr=LR,
        ratio=record["ratio"],
        beside=_beside(record),
        **_reading(record),
    )


def worst_rank(run: Record) -> tuple[int, Record]:
    """The rank whose residual became the largest."""
    return max(enumerate(run["ranks"]), key=lambda each: each[1]["largest_residual"])


def _beside(record: Record) -> str:
    header = ["gradients", "accuracy", "largest gradient G", "largest residual", "in G"]
    header += ["Karimireddy's bound, in G"]
    return table(header, (_line(record["ratio"], run) for run in record["runs"]))


def _line(ratio: float, run: Record) -> list[str]:
    _, rank = worst_rank(run)
    largest, residual = rank["largest_gradient"], rank["largest_residual"]
    return [
        TITLES[run["name"]],
        f"{100 * run['accuracy']:.2f}%",
        f"{largest:.3g}",
        f"{residual:.3g}",
        f"{residual / largest:.2f}",
        f"{karimireddy(ratio):.0f}",
    ]


def _reading(record: Record) -> Values:
    runs = {run["name"]: run for run in record["runs"]}
    bound = karimireddy(record["ratio"])
    ranks = [rank for run in runs.values() for rank in run["ranks"]]
    idle, twin = runs["idle"]["ranks"][-1], runs["equal"]["ranks"][-1]
    return {
        "worst_share": max(
            100 * rank["largest_residual"] / (bound * rank["largest_gradient"]) for rank in ranks
        ),
        "idle": idle["largest_residual"] / twin["largest_residual"],
    }
