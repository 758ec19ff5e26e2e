"""Kill ranks of elastic jobs with SIGKILL at random moments, and account for what is lost.

    make crashes                                        # 100 kills: a quarter of an hour
    python scripts/bench.py crashes --kills 10 --seeds 1      # a look

For each seed the digits are trained twice for as many steps: undisturbed by two ranks, and by up
to three ranks of which one at a time is killed and started again by Horovod, all through the run.
Hosts are names on this machine (`elastic_hosts`). Writes docs/trouble.md and its results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import harness
import torch
from tqdm import tqdm

import pages
from benchmarks.jobs import python_path
from elastic_hosts import Hosts
from pages import Values
from pages.markdown import table

Note = dict[str, Any]  # what a rank noted down

NAMES = ("h1", "h2", "h3")
COMMIT_EVERY, PAUSE = 10, 0.05
WAIT_SECONDS = (0.5, 3.0)  # between two kills, at random, and until all ranks train again
MOMENT_SECONDS = 0.6  # within which the moment is drawn: a dozen steps and a commit
LIMIT_SECONDS = 1800.0  # a job
GLOO_SECONDS = 20  # until ranks notice that one is gone to which they are not connected


def train(seed: int, steps: int, names: tuple[str, ...], kills: int, bar: Any) -> dict[str, Any]:
    """Run one job, disturbed or not, and return what came of it."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        script = [str(Path(__file__).with_name("crashes_rank.py")), text, str(steps), str(seed)]
        cooled = ["--blacklist-cooldown-range", "1", "2"]  # a host may come back
        command = Hosts(folder, names).command(len(names), len(names), *script, options=cooled)
        done = disturb(command, folder, kills, random.Random(seed), bar)
        notes = notes_in(folder)
    ends = [note for note in notes if note["event"] == "end"]
    return {
        "seed": seed,
        "steps": steps,
        "kills": done,
        "accuracy": ends[0]["accuracy"],  # on unseen data, at the end
        "ranks_agree": len({note["weights"] for note in ends}) == 1,
        "lost_ranks": max(note["lost"] for note in notes if note["event"] == "enter"),
        "returns": [*returns(notes)],
    }


def disturb(command: list[str], folder: Path, kills: int, draw: random.Random, bar: Any) -> int:
    """Run a job to its end, killing ranks on the way while all of them train; returns how many.

    Horovod 0.28 does not survive it where ranks are about to meet: those that wait for one that is
    gone abort, and when the last has, the job is over.

    Raises:
        SystemExit: the job failed, or ran into the limit.
    """
    settings = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    settings["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(GLOO_SECONDS)
    printed = folder / "output.txt"
    with printed.open("wb") as output:
        job = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | settings,
            start_new_session=True,
        )
        try:
            done = _kill_until_the_end(job, folder, kills, draw, bar)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            for pid in _ranks(folder):
                _kill(pid)
    if job.returncode != 0:
        sys.exit(f"crashes: the job ended with {job.returncode}\n{printed.read_text()[-4000:]}")
    return done


def _kill_until_the_end(
    job: subprocess.Popen[bytes], folder: Path, kills: int, draw: random.Random, bar: Any
) -> int:
    done, deadline = 0, time.monotonic() + LIMIT_SECONDS
    while job.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(draw.uniform(*WAIT_SECONDS) if done < kills else 0.5)
        while job.poll() is None and done < kills and not _are_training(folder):
            time.sleep(0.05)
        time.sleep(draw.uniform(0, MOMENT_SECONDS))
        ranks = _ranks(folder)
        if job.poll() is None and done < kills and len(ranks) > 1:  # one has to go on
            _kill(draw.choice(ranks))
            done += 1
            bar.update()
    return done


def _are_training(folder: Path) -> bool:
    """Whether all ranks that live take steps together, and are more than one."""
    last = [last_note(folder, pid) for pid in _ranks(folder)]
    sizes = {note.get("size", 0) for note in last if note["event"] in ("step", "enter")}
    recent = all(note["event"] == "step" and time.time() - note["time"] < 1.0 for note in last)
    return recent and sizes == {len(last)} and len(last) > 1


def _ranks(folder: Path) -> list[int]:
    """Processes that train: those that have noted something, and live."""
    pids = sorted(int(file.stem.removeprefix("notes-")) for file in folder.glob("notes-*.jsonl"))
    return [pid for pid in pids if _is_rank(pid, folder)]


def _is_rank(pid: int, folder: Path) -> bool:
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def measure(kills: int, seeds: int, steps: int) -> dict[str, Any]:
    """Undisturbed and disturbed jobs of every seed."""
    jobs = []
    with tqdm(total=kills, unit="kill") as bar:
        for seed in range(seeds):
            bar.set_postfix_str(f"seed {seed}, undisturbed")
            calm = train(seed, steps, NAMES[:2], 0, bar)
            bar.set_postfix_str(f"seed {seed}, disturbed")
            share = -(-(kills - sum(job["disturbed"]["kills"] for job in jobs)) // (seeds - seed))
            wild = train(seed, steps, NAMES, share, bar)
            jobs.append({"undisturbed": calm, "disturbed": wild})
    versions = {"torch": torch.__version__}
    settings = {"commit_every": COMMIT_EVERY, "wait": WAIT_SECONDS, "hosts": len(NAMES)}
    return {"jobs": jobs, "settings": settings, "environment": harness.environment(versions)}


OPTIONS = {"kills": (100, "in all"), "seeds": (3, "pairs of jobs"), "steps": (1000, "of a job")}


def main(args: argparse.Namespace) -> int:
    """Measure and write the page."""
    found = measure(args.kills, args.seeds, args.steps)
    (pages.RESULTS / "crashes.json").write_text(json.dumps(found, indent=1) + "\n")
    pages.write("crashes")
    return 0


def notes_in(folder: Path) -> list[Note]:
    """Return the notes of all ranks in the order of time."""
    files = [file.read_text().splitlines() for file in folder.glob("notes-*.jsonl")]
    notes = [json.loads(line) for lines in files for line in lines]
    return sorted(notes, key=lambda note: float(note["time"]))


def last_note(folder: Path, pid: int) -> Note:
    """Return the latest note of a process."""
    lines = (folder / f"notes-{pid}.jsonl").read_text().splitlines()
    return json.loads(lines[-1]) if lines else {"event": "none", "time": 0.0}


def returns(notes: Iterable[Note]) -> Iterator[dict[str, Any]]:
    """Each time that ranks of the job go back to an earlier step and continue.

    Yields:
        reached: the last step that any rank had ended; resumed: the step it goes on from;
        same_weights: as when that step was committed; owed_apart: the change of the residuals' mean
        over its largest, None without a commit; lost: ranks whose residuals could not be had.
    """
    reached, commits, size, lost = 0, dict[int, Note](), 0, 0
    known = set[int]()
    for note in notes:
        if note["event"] == "step":
            reached = max(reached, note["step"])
        elif note["event"] == "commit":
            commits[note["step"]] = note
        elif note["event"] == "enter":
            shrunk, size = note["size"] < size, note["size"]
            old = note["pid"] in known
            known.add(note["pid"])
            if old and (shrunk or note["step"] < reached):
                before = commits.get(note["step"])
                yield {
                    "reached": reached,
                    "resumed": note["step"],
                    "same_weights": before is None or before["weights"] == note["weights"],
                    "owed_apart": before and _apart(note["owed"], before["owed"]),
                    "lost": note["lost"] - lost,
                }
                reached, lost = note["step"], note["lost"]


def _apart(now: list[float], before: list[float]) -> float:
    largest = max(map(abs, before)) or 1.0
    return max(abs(a - b) for a, b in zip(now, before, strict=True)) / largest


def values(found: dict[str, Any]) -> Values:
    """Return the figures that the page shows, by name."""
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
