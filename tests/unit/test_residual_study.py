"""The study of residual norms: its bounds, what it measures, and what a rank without data does."""

from __future__ import annotations

import math

import pytest

from study.residuals import bounds, records
from study.residuals.agenda import RUNS, Run


def test_bounds_agree_with_each_other() -> None:
    for delta in (0.001, 0.01, 0.5, 0.99):
        assert bounds.worst_case(delta) <= bounds.karimireddy(delta) <= bounds.stich(delta)
        *_, last = bounds.along(delta, [3.0] * 20_000)
        assert last == pytest.approx(3 * bounds.worst_case(delta), rel=1e-4)


def test_a_contraction_is_the_share_of_the_squares_that_is_gone() -> None:
    assert bounds.contraction(5.0, 3.0) == pytest.approx(16 / 25)
    assert bounds.contraction(0.0, 0.0) == 1.0


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_run_keeps_to_its_bound(run: Run) -> None:
    found = records.train(run, steps=8)
    assert len(found["ranks"]) == 4
    for rank in found["ranks"]:
        assert 0 < rank["largest_residual"] <= rank["largest_bound"]
        assert records.RATIO <= rank["least_contraction"] <= 1
        assert (rank["largest_owned"] > 0) == (run.exchange == "sharded")


def test_without_data_the_residual_is_still_sent() -> None:
    run = Run("idle", "", idle_every=5)
    rank = records.train(run, steps=5)["ranks"][-1]
    assert rank["gradient"] == [0.0]
    assert rank["residual"][0] == rank["last_residual"] < rank["largest_residual"]
    assert math.isfinite(rank["least_contraction"])
