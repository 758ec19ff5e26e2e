"""Tests on several hosts; each leaves the machine as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster import missing
from remains import traces


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    if reason := missing(lossy=True):
        pytest.skip(reason)
    before = traces()
    yield
    assert not traces() - before
