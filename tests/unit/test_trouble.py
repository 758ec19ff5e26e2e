"""The page on slow ranks and lost packets, of invented results, and what a rank counts."""

from __future__ import annotations

from typing import Any

import pytest

from trouble import report
from trouble.runs import RUNS, WAYS


def way(step: float, weights: str, steps: int = 20, at: int = 20) -> dict[str, Any]:
    note = {"weights": weights, "accuracy": 0.9}
    residual = {"residuals": weights[::-1], "residual_norm": 2.0, "gradient_norm": 0.5}
    seconds = [step] * steps
    return {
        "step": seconds,
        "exchange": seconds,
        "waiting": seconds,
        "sent_bytes": 1000,
        "marks": {str(mark): [note | residual] * 4 for mark in range(10, at + 1, 10)},
    }


def job(step: float, weights: str = "ab", **rest: Any) -> dict[str, Any]:
    ways = {name: way(step, weights, **rest) for name in WAYS}
    for note in ways["dense"]["marks"].values():
        for rank in note:
            rank.pop("residuals", None)
    return {
        "ways": ways,
        "segments": [{"sent": 90, "resent": 1}, {"sent": 110, "resent": 3}],
        "planned_steps": 20,
        "load": {"before": 1.0, "after": 2.0},
        "machine": dict.fromkeys(("cpu", "cores", "kernel", "python", "torch", "horovod"), "x")
        | {"date": "2026-11-21 23:59 UTC"},
    }


def test_every_job_and_way_has_its_lines() -> None:
    results = {key: job(0.1) for key in RUNS}
    page = report.page(results)
    for run in RUNS.values():
        assert page.count(f"| {run.title} |") == 4
    assert f"TopKEF: in {len(RUNS) - 1} of {len(RUNS) - 1} jobs, the same weights" in page
    assert "| differ |" not in page


def test_what_differs_is_said() -> None:
    page = report.page({"none": job(0.1), "loss-1": job(0.3, "cd")})
    assert "| differ | differ |" in page
    assert "| 300 (300) | 3.00 |" in page
    assert "dense: in 0 of 1 jobs, the same weights" in page


def test_jobs_are_compared_where_the_shorter_one_ended() -> None:
    results = {"none": job(0.1), "loss-10": job(0.3, steps=10, at=10)}
    step, here, plain = report.compared(results, "loss-10", "TopKEF")
    assert step == "10"
    assert report.is_same(here, plain, "weights")


def test_resent_is_of_all_hosts() -> None:
    assert report.resent(job(0.1)) == pytest.approx(4 / 200)
