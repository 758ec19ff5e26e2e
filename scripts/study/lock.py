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
        BlockingIOError: one is under way.
    """
    path = launch.ROOT / "build" / f"{name}.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go when the file is closed
        yield
