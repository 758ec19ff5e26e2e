"""What happens to an elastic job of tests, and what its ranks note down.

Two hosts of one rank each start. Another is added (h3), the second is taken out after a warning,
and then the rank of h3 kills itself in mid-step. The job ends a few steps later.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["HOROVOD_TOPK_TEST_FOLDER"])
HOST = os.environ.get("HOROVOD_HOSTNAME", "")
STRETCH = 4  # steps of each chapter, at least
PAUSE = 0.05  # seconds a step, as discovery looks once a second
COMMIT_EVERY = 2


def hosts(*names: str) -> None:
    """Which there are from now on."""
    draft = FOLDER / f"hosts-{os.getpid()}"
    draft.write_text("".join(f"{name}:1\n" for name in names))
    draft.replace(FOLDER / "hosts")


def note(event: str, **facts: Any) -> None:
    """One line in this process's file."""
    line = {"time": time.time(), "event": event, "host": HOST, **facts}
    with (FOLDER / f"notes-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def live(
    state: Any,
    step: Callable[[Callable[[], None]], None],
    place: Callable[[], tuple[int, int]],
    facts: Callable[[], dict[str, Any]],
) -> None:
    """Train until the story is over.

    Args:
        state: Horovod's, with attributes `step`, `chapter` (what has happened) and `since` (steps
            in it), which are equal on all ranks.
        step: one of training; it is given what to call in its middle.
        place: rank and size.
        facts: what to note down: a collective.
    """
    note("enter", step=state.step, size=place()[1], **facts())
    while state.chapter < 3 or state.since < STRETCH:
        rank, size = place()
        ready = state.since >= STRETCH
        if state.chapter == 0 and ready and size == 3:
            state.chapter, state.since = 1, 0
        elif state.chapter == 1 and ready and size == 2:
            state.chapter, state.since = 2, 0
        elif state.chapter == 2 and size == 1:
            state.chapter, state.since = 3, 0
        if rank == 0 and ready and state.chapter == 0:
            hosts("h1", "h2", "h3")
        if rank == 0 and ready and state.chapter == 1:
            hosts("h1", "h3")
        dies = HOST == "h3" and ready and state.chapter == 2 and state.step % COMMIT_EVERY
        step(_die if dies else _go_on)
        state.step, state.since = state.step + 1, state.since + 1
        time.sleep(PAUSE)
        if state.step % COMMIT_EVERY == 0:
            note("commit", step=state.step, size=size, **facts())
            state.commit()
    note("end", step=state.step, size=place()[1], **facts())


def _go_on() -> None:
    pass


def _die() -> None:
    note("killed")
    os.kill(os.getpid(), signal.SIGKILL)
