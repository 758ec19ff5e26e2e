"""Shared by every test. Also puts this folder on `sys.path`, so tests import from `oracle`."""

from __future__ import annotations

import contextlib

from hypothesis import settings

# PyTorch's optimizers load it, and its LLVM ends a process that has loaded TensorFlow's before.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=12, database=None
)
settings.load_profile("repeatable")
