"""Figures of docs/trouble.md, from the stored results."""

from __future__ import annotations

from typing import Any

from pages import Values
from pages.markdown import table


def values(found: dict[str, Any]) -> Values:
    """The page's figures by name."""
    settings, jobs = found["settings"], found["jobs"]
    returns = [each for job in jobs for each in job["disturbed"]["returns"]]
    redone = [each["reached"] - each["resumed"] for each in returns]
    whole = [each for each in returns if not each["lost"]]
    return {
        "every": settings["commit_every"],
        "hosts": settings["hosts"],
        "jobs": _table(jobs),
        "returns": len(returns),
        "worst": max(redone, default=0),
        "same": sum(each["same_weights"] for each in returns),
        "whole": len(whole),
        "partly": len(returns) - len(whole),
        "unchanged": _unchanged(max((each["owed_apart"] or 0.0 for each in whole), default=0.0)),
    }


def _unchanged(apart: float) -> str:
    """How near the residuals are to what they were, in units of their largest element."""
    within = f", within {apart:.1g} of its largest element" if apart else ", without any difference"
    return f"what it had been at the commit{within}"


def _table(jobs: list[dict[str, Any]]) -> str:
    rows = []
    for job in jobs:
        calm, wild = job["undisturbed"], job["disturbed"]
        rows.append(
            [
                str(calm["seed"]),
                f"{calm['steps']:,}",
                f"{100 * calm['accuracy']:.2f}%",
                str(wild["kills"]),
                f"{100 * wild['accuracy']:.2f}%",
                f"{_points(job):+.2f}",
                str(wild["lost_ranks"]),
                "yes" if wild["ranks_agree"] else "**no**",
            ]
        )
    return table(
        [
            "seed",
            "steps",
            "accuracy without kills",
            "kills",
            "accuracy with kills",
            "points",
            "residuals lost",
            "all ranks end equal",
        ],
        rows,
    )


def _points(job: dict[str, Any]) -> float:
    """How much more accurate the job with kills was, in points."""
    return float(100 * (job["disturbed"]["accuracy"] - job["undisturbed"]["accuracy"]))
