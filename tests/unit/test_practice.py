"""The study of what people add to training loops: its runs and its page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from study.practice import agenda, page
from study.practice.agenda import LOOPS, RATIOS, SEEDS, WAYS, Trial
from study.practice.records import Record


def test_every_run_is_made_once_and_beside_dense() -> None:
    trials = agenda.trials()
    assert len(set(trials)) == len(trials)
    for way in WAYS.values():
        assert {Trial(way.dense, None, seed) for seed in SEEDS} <= set(trials)


def test_ways_train_in_dense_s_loop_but_for_what_topkef_does_itself() -> None:
    for way in WAYS.values():
        loop, beside = LOOPS[way.loop], LOOPS[way.dense]
        assert loop == beside or ("clip_norm" in way.settings and beside.clip and not loop.clip)


def record(accuracy: float, sent: int) -> Record:
    return {"accuracy": accuracy, "sent_bytes": sent, "dense_bytes": 1000, "weights": str(accuracy)}


def known(seeds: Iterable[int]) -> dict[Trial, Record]:
    """TopKEF is 0.3 points worse at any ratio, and better with the seed, as dense is."""
    found = {}
    for trial in agenda.trials():
        if trial.seed in seeds:
            dense = trial.ratio is None
            accuracy = (0.9 if dense else 0.897) + trial.seed / 100
            found[trial] = record(accuracy, 1000 if dense else 20)
    return found


def test_costs_are_paired_by_seed() -> None:
    for line in page.lines(known(SEEDS)):
        assert line.costs == pytest.approx([0.3] * len(SEEDS))
        assert line.reduction == 50


def test_a_seed_that_lacks_a_run_is_left_out() -> None:
    found = known(SEEDS)
    del found[Trial("restart", RATIOS[1], 3)]
    assert page.complete(found) == [seed for seed in SEEDS if seed != 3]
    assert {len(line.costs) for line in page.lines(found)} == {len(SEEDS) - 1}


def test_two_seeds_make_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("study.practice.records.read", lambda: known([0, 1]))
    with pytest.raises(ValueError, match="2 of 5 seeds are complete"):
        page.write()


def test_the_page_says_what_cost_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = {"cpu": "a", "cores": 2, "python": "b", "torch": "c", "horovod": "d", "date": "e"}
    found = known([0, 1, 2])
    for trial, each in found.items():
        each |= {"environment": environment, "lr": 0.1, "overflows": 0}
        if trial.name == "adamw" and trial.ratio:
            each["accuracy"] -= 0.02
    monkeypatch.setattr("study.practice.records.read", lambda: found)
    monkeypatch.setattr(page, "PAGE", tmp_path / "practice.md")
    monkeypatch.setattr(page, "PICTURE", tmp_path / "practice.png")
    text = page.write().read_text()
    assert "3 seeds (2 more have not been run)" in text
    assert "The others: AdamW (+2.30)." in text
    assert page.PICTURE.stat().st_size > 0
