"""Break the package on purpose, one line at a time, and print which tests notice.

    python scripts/mutate.py [--baseline] [--only WORD] > mutations.txt

Each mutation (mutate.txt) replaces a text wherever it is in the package, in a copy of the
repository, and runs the tests that are expected to notice: half an hour in all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
LIMIT = 240  # seconds for the tests of one mutation; they take about 20 on an idle machine
FAILED = 1  # pytest's exit code, and a launcher's, if tests fail

# Runs a case file on real ranks, and leaves no process of them behind.
LAUNCH = """\
import sys, tempfile
from pathlib import Path
import launcher

controller, size, case, *more = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    done = launcher.launch_ranks(
        [launcher.HERE / case], size=int(size), controller=controller, folder=Path(folder),
        limit=120.0, arguments=["-x", *more], tier="all",
        settings={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"},
    )
for each in done.failures():
    print("FAILED", each.case)
print(done.output[-300:])
sys.exit(0 if done.returncode == 0 and not done.failures() else 1)
"""


class Mutation(NamedTuple):
    """One broken line.

    Attributes:
        text: what is replaced, in each place of the package where it stands.
        put: what stands there instead.
        tests: pytest's arguments; after "gloo 2:" or "torchrun 2:", a case file on real ranks.
    """

    text: str
    put: str
    tests: str


def mutations() -> Iterator[Mutation]:
    """Those of mutate.txt: a line with @ and the tests, then lines with - and with +."""
    given: dict[str, str] = {}
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines():
        given[line[0]] = line[2:]
        if line[0] == "+":
            yield Mutation(given["-"], given["+"], given["@"])


def main() -> None:
    """Print a line for each mutation, and how many were caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baseline", action="store_true", help="first run the tests as they are")
    parser.add_argument("--only", default="", help="mutations with this word in them")
    asked = parser.parse_args()
    chosen = [each for each in mutations() if asked.only in "".join(each)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build"))
        if asked.baseline:
            for tests in dict.fromkeys(each.tests for each in chosen):
                code, ends = noticed(copy, tests)
                print(f"{'passes' if code == 0 else 'FAILS':8} {tests}: {ends}")
        found = [tried(copy, each) for each in chosen]
    print(f"{found.count('caught')} of {len(found)} caught", flush=True)


def tried(copy: Path, mutation: Mutation) -> str:
    """Break a line of the copy, run its tests, and repair it; print and return what happened."""
    every = {path: path.read_text() for path in copy.glob("horovod_topk/**/*.py")}
    broken = {path: text for path, text in every.items() if mutation.text in text}
    for path, text in broken.items():
        path.write_text(text.replace(mutation.text, mutation.put))
    code, ends = noticed(copy, mutation.tests) if broken else (-1, "")
    for path, text in broken.items():
        path.write_text(text)
    word = {0: "MISSED", FAILED: "caught", None: "caught", -1: "gone"}.get(code, f"rc {code}")
    where = ", ".join(str(path.relative_to(copy / "horovod_topk")) for path in broken)
    print(f"{word:8} {where}: {mutation.text} -> {mutation.put} | {ends}")
    sys.stdout.flush()
    return word


def noticed(copy: Path, tests: str) -> tuple[int | None, str]:
    """Run tests of the copy; return the exit code, None after `LIMIT`, and the first failure."""
    launch, _, cases = tests.rpartition(":")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *cases.split()]
    if launch:
        command = [sys.executable, "-c", LAUNCH, *launch.split(), *cases.split()]
    folders = copy, copy / "tests" / "distributed"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return None, "time limit"
    lines = (done.stdout + done.stderr).splitlines()
    marked = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (marked or lines or [""])[0 if marked else -1][:160]


if __name__ == "__main__":
    main()
