"""Skips tests that need more of the kernel, or more programs, than this machine has."""

from __future__ import annotations

import pytest

from cluster import missing


def skip_without(*parts: str) -> None:
    """Skip the test where no cluster with these can be made: "lossy", "delayed"."""
    if reason := missing(**dict.fromkeys(parts, True)):
        pytest.skip(reason)
