"""Tests on several hosts; each leaves the machine as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from remains import traces
from skipping import skip_without


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    skip_without()
    before = traces()
    yield
    assert not traces() - before
