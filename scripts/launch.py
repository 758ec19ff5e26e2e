"""Runs an example on several ranks of this machine, within a time limit.

However a run ends, by itself, at its limit or by Ctrl-C, none of its processes is left behind.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from horovod_topk.cli.process import follow, unprefixed

ROOT = Path(__file__).resolve().parent.parent


class RunFailedError(Exception):
    """A run ended badly; the message has the command, why, and the end of its output."""


def python_path() -> str:
    """What a rank imports: this package, these scripts, and the examples' models and data."""
    return os.pathsep.join(str(ROOT / each) for each in ("", "scripts", "examples"))


def command_line(script: str, arguments: Sequence[str], ranks: int) -> str:
    """What a user would type, in the repository's root."""
    return " ".join(["horovodrun", "-np", str(ranks), "--gloo", "python", script, *arguments])


def run(
    script: str,
    arguments: Sequence[str],
    *,
    ranks: int = 2,
    limit_seconds: float,
    echo: bool = False,
) -> None:
    """Runs `script`, a path below the repository's root, under `horovodrun --gloo`.

    Args:
        script: the example.
        arguments: its own.
        ranks: how many processes, all on this machine.
        limit_seconds: the run is ended when it takes longer.
        echo: pass its output on to stdout while it runs.

    Raises:
        RunFailedError: its exit status is not 0, or it ran into the limit.
    """
    horovodrun = Path(sys.executable).with_name("horovodrun")
    command = [horovodrun, "-np", ranks, "--gloo", sys.executable, script, *arguments]

    def show(line: str) -> None:
        print(unprefixed(line), end="", flush=True)

    ended = follow(
        list(map(str, command)),
        limit_seconds=limit_seconds,
        on_line=show if echo else None,
        folder=ROOT,
        environment={"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    if why := ended.problem(limit_seconds):
        raise RunFailedError(f"{command_line(script, arguments, ranks)}: {why}\n{ended.tail}")
