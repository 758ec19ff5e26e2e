"""Elastic jobs of real ranks: one is added, one leaves, and one is killed in mid-step.

Hosts are names on this machine (scripts/elastic_hosts.py). Elastic Horovod knows Gloo alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_hosts import Hosts
from launcher import Launch, run

pytestmark = pytest.mark.distributed

JOBS = Path(__file__).parent / "elastic_jobs"
LIMIT = 400.0  # seconds; it needs about 45 beside other work
Notes = list[dict[str, Any]]


def launch(job: str, folder: Path, settings: dict[str, str]) -> Launch:
    """Run the story with hosts that a file names."""
    command = Hosts(folder, ["h1", "h2"]).command(2, 3, str(JOBS / job))
    return run(command, folder, LIMIT, settings)


def notes_of(folder: Path) -> list[Notes]:
    """What each process noted, and the file it is in, by when it began."""
    files = [file.read_text().splitlines() for file in folder.glob("notes-*.jsonl")]
    return sorted(
        ([json.loads(line) for line in file] for file in files), key=lambda n: n[0]["time"]
    )


def mass(note: dict[str, Any]) -> Any:
    return np.array(note["owed"])


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize(
    ("job", "kept"),
    [
        pytest.param("train_torch.py", True, id="torch-commit_dir"),
        pytest.param("train_torch.py", False, id="torch", marks=pytest.mark.slow),
        pytest.param(
            "train_tensorflow.py", True, id="tensorflow-commit_dir", marks=pytest.mark.slow
        ),
    ],
)
def test_nothing_owed_is_lost_on_the_way(job: str, kept: bool, tmp_path: Path) -> None:
    settings = {"COMMIT_DIR": str(tmp_path / "commits")} if kept else {}
    done = launch(job, tmp_path, settings)
    assert done.returncode == 0, done.describe()
    assert not done.immortal
    notes = notes_of(tmp_path)
    assert [each[0]["host"] for each in notes[:2]] in (["h1", "h2"], ["h2", "h1"])
    first = next(each for each in notes if each[0]["host"] == "h1")
    assert [n["size"] for n in first if n["event"] == "enter"] == [2, 3, 2, 1]

    committed: dict[int, dict[str, Any]] = {}  # the last at each step
    for note in first:
        if note["event"] == "commit":
            committed[note["step"]] = note
        if note["event"] != "enter" or note["step"] == 0:
            continue
        before, killed = committed[note["step"]], note["size"] == 1
        if killed and not kept:  # half of it was the survivor's
            assert note["norm"] == pytest.approx(before["norm"] / 2, rel=1e-5)
            continue
        scale = np.abs(mass(before)).max()
        np.testing.assert_allclose(mass(note), mass(before), rtol=1e-6, atol=1e-6 * scale)
    assert first[-1]["event"] == "end"
    assert first[-1]["lost"] == (0 if kept else 1)
    assert_ranks_agree(notes)


def assert_ranks_agree(notes: list[Notes]) -> None:
    """Who commits a step holds the weights that others commit, and the schedule's ratio."""
    every: dict[tuple[int, int], Notes] = {}
    for note in (note for each in notes for note in each if note["event"] == "commit"):
        every.setdefault((note["step"], note["size"]), []).append(note)
    assert any(len(together) == 3 for together in every.values())
    for together in every.values():
        for note in together[1:]:
            assert note["weights"] == together[0]["weights"]
            assert note.get("ratio") == together[0].get("ratio")
