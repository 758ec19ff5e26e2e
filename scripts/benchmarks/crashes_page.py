"""Figures of docs/trouble.md, from the stored results."""

from __future__ import annotations

from collections.abc import Callable
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


COLUMNS: dict[str, Callable[[dict[str, Any], dict[str, Any]], str]] = {  # undisturbed, disturbed
    "seed": lambda calm, _: str(calm["seed"]),
    "steps": lambda calm, _: f"{calm['steps']:,}",
    "accuracy without kills": lambda calm, _: f"{100 * calm['accuracy']:.2f}%",
    "kills": lambda _, wild: str(wild["kills"]),
    "accuracy with kills": lambda _, wild: f"{100 * wild['accuracy']:.2f}%",
    "points": lambda calm, wild: f"{100 * (wild['accuracy'] - calm['accuracy']):+.2f}",
    "residuals lost": lambda _, wild: str(wild["lost_ranks"]),
    "all ranks end equal": lambda _, wild: "yes" if wild["ranks_agree"] else "**no**",
}


def _table(jobs: list[dict[str, Any]]) -> str:
    pairs = [(job["undisturbed"], job["disturbed"]) for job in jobs]
    return table([*COLUMNS], [[cell(*pair) for cell in COLUMNS.values()] for pair in pairs])
