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
LOCAL = "TopKEF(ratio=0.05,min_numel=0)"
TOPK = "TopKEF(ratio=0.05,min_numel=0,values='int8')"
ROUNDS = {  # compressors by framework
    "torch": [
        "PowerSGD(rank=2,min_numel=0)",
        "PowerSGD(rank=2,min_numel=0,exchange='allreduce')",
        "RandomK(ratio=0.05,min_numel=0,warmup=[(3,0.5)])",
        "RandomK(ratio=0.05,min_numel=0,exchange='allgather')",
    ],
    "tensorflow": [
        "PowerSGD(rank=2,min_numel=0,exchange='allgather')",
        "RandomK(ratio=0.05,min_numel=0,exchange='allgather')",
    ],
}
late = pytest.mark.slow


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
    ("framework", "compressor", "kept"),
    [
        pytest.param("torch", f"{TOPK[:-1]},warmup=[(3,0.5)])", True, id="torch-commit_dir"),
        pytest.param("torch", f"{TOPK[:-1]},warmup=[(3,0.5)])", False, id="torch", marks=late),
        pytest.param("torch", LOCAL, True, id="torch-local_steps", marks=late),
        pytest.param("tensorflow", TOPK, True, id="tensorflow-commit_dir", marks=late),
        pytest.param("tensorflow", LOCAL, True, id="tensorflow-local_steps", marks=late),
        *(
            pytest.param(framework, each, True, id=f"{framework}-{each}", marks=late)
            for framework, compressors in ROUNDS.items()
            for each in compressors
        ),
    ],
)
def test_nothing_owed_is_lost_on_the_way(
    framework: str, compressor: str, kept: bool, tmp_path: Path
) -> None:
    settings = {"COMMIT_DIR": str(tmp_path / "commits")} if kept else {}
    settings["COMPRESSOR"], job = compressor, f"train_{framework}.py"
    if compressor == LOCAL:  # an outer step in each step that commits
        settings["LOCAL_STEPS"] = "2"
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
    """Who commits a step holds the weights and the shared state that others commit, to the bit.

    It also has the schedule's ratio.
    """
    every: dict[tuple[int, int], Notes] = {}
    for note in (note for each in notes for note in each if note["event"] == "commit"):
        every.setdefault((note["step"], note["size"]), []).append(note)
    assert any(len(together) == 3 for together in every.values())
    for together in every.values():
        for note in together[1:]:
            assert note["weights"] == together[0]["weights"]
            assert note["bits"] == together[0]["bits"]
            assert note.get("ratio") == together[0].get("ratio")
