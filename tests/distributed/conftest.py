"""Cases in ranks/ and tensorflow_ranks/ run on real ranks; pytest's own run skips them."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

collect_ignore = ["ranks", "tensorflow_ranks", "mixed"]


@pytest.fixture(scope="session", autouse=True)
def _orderly_end() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does, so that a launch under way is ended with its ranks."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, previous)
