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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness
import torch
from tqdm import tqdm

import pages
from benchmarks import crashes_account as account
from elastic_hosts import Hosts

NAMES = ("h1", "h2", "h3")
COMMIT_EVERY, PAUSE = 10, 0.05
WAIT_SECONDS = (0.5, 3.0)  # between two kills, at random, and until all ranks train again
MOMENT_SECONDS = 0.6  # within which the moment is drawn: a dozen steps and a commit
LIMIT_SECONDS = 1800.0  # a job
GLOO_SECONDS = 20  # until ranks notice that one is gone to which they are not connected


def train(seed: int, steps: int, names: tuple[str, ...], kills: int, bar: Any) -> dict[str, Any]:
    """Run one job, disturbed or not, and return what came of it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        settings = ["--steps", str(steps), "--commit-every", str(COMMIT_EVERY)]
        script = [str(Path(__file__).with_name("crashes_rank.py")), text, *settings]
        script += ["--seed", str(seed), "--pause", str(PAUSE)]
        cooled = ["--blacklist-cooldown-range", "1", "2"]  # a host may come back
        command = Hosts(folder, names).command(len(names), len(names), *script, options=cooled)
        done = disturb(command, folder, kills, random.Random(seed), bar)
        notes = account.notes_in(folder)
    ends = [note for note in notes if note["event"] == "end"]
    return {
        "seed": seed,
        "steps": steps,
        "kills": done,
        "seconds": round(time.monotonic() - began, 1),
        "accuracy": ends[0]["accuracy"],  # on unseen data, at the end
        "ranks_agree": len({note["weights"] for note in ends}) == 1,
        "lost_ranks": max(note["lost"] for note in notes if note["event"] == "enter"),
        "returns": [asdict(each) for each in account.returns(notes)],
    }


def disturb(command: list[str], folder: Path, kills: int, draw: random.Random, bar: Any) -> int:
    """Run a job to its end, killing ranks on the way while all of them train; returns how many.

    Horovod 0.28 does not survive it where ranks are about to meet: those that wait for one that is
    gone abort, and when the last has, the job is over.

    Raises:
        SystemExit: the job failed, or ran into the limit.
    """
    paths = [str(pages.ROOT), str(pages.ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
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
    last = [account.last_note(folder, pid) for pid in _ranks(folder)]
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
