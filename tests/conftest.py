"""Shared by every test. Also puts this folder on `sys.path`, so tests import from `oracle`."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=12, database=None
)
settings.load_profile("repeatable")
