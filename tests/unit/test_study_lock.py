"""Two runs of one study would write each other's results down."""

from __future__ import annotations

from pathlib import Path

import pytest

import launch
from study import lock


def test_a_second_run_ends_with_a_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "ROOT", tmp_path)
    with lock.alone("accuracy"):
        with lock.alone("practice"):
            pass
        refused = pytest.raises(SystemExit, match="another run of accuracy is under way")
        with refused, lock.alone("accuracy"):
            pytest.fail("two at a time")
    with lock.alone("accuracy"):
        pass
