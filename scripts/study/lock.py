"""One study at a time in a checkout."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

import launch


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Keeps a second study of this name out of the checkout.

    Raises:
        SystemExit: one is under way; it says so, and the exit status is 1.
    """
    path = launch.ROOT / "build" / f"{name}.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go when the file is closed
        except BlockingIOError:
            raise SystemExit(f"another run of {name} is under way here: wait or end it") from None
        yield
