"""The study of what people add to training loops: its runs and its page."""

from __future__ import annotations

import pytest

from study.practice import agenda, page
from study.practice.agenda import LOOPS, RATIOS, SEEDS, WAYS, Trial


def test_every_run_is_made_once_and_beside_dense() -> None:
    trials = agenda.trials()
    assert len(set(trials)) == len(trials)
    for way in WAYS.values():
        assert {Trial(way.dense, None, seed) for seed in SEEDS} <= set(trials)


def test_ways_train_in_dense_s_loop_but_for_what_topkef_does_itself() -> None:
    for way in WAYS.values():
        loop, beside = LOOPS[way.loop], LOOPS[way.dense]
        assert loop == beside or ("clip_norm" in way.settings and beside.clip and not loop.clip)


def record(accuracy: float, sent: int) -> dict[str, object]:
    return {"accuracy": accuracy, "sent_bytes": sent, "dense_bytes": 1000, "weights": str(accuracy)}


def test_costs_are_paired_by_seed() -> None:
    known = {Trial("plain", None, seed): record(0.9 + seed / 100, 1000) for seed in SEEDS}
    known |= {Trial("plain", RATIOS[0], seed): record(0.895 + seed / 100, 20) for seed in SEEDS}
    (line,) = page.lines(known)
    assert line.costs == pytest.approx([0.5] * len(SEEDS))
    assert line.reduction == 50


def test_a_way_that_lacks_a_seed_is_left_out() -> None:
    known = {Trial("plain", None, seed): record(0.9, 1000) for seed in SEEDS}
    known |= {Trial("plain", RATIOS[0], seed): record(0.9, 20) for seed in SEEDS[1:]}
    assert page.lines(known) == []
