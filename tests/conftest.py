"""Shared by every test. Also puts this folder on `sys.path`, so tests import from `oracle`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# PyTorch's optimizers load it, and its LLVM ends a process that has loaded TensorFlow's before.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=12, database=None
)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def _orderly_end() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does, so that a launch under way is ended with its ranks."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, previous)
