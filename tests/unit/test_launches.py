"""Every case of TensorFlow on real ranks is in a launch, at every number of ranks it is for."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

DISTRIBUTED = Path(__file__).parents[1] / "distributed"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with the launches of TensorFlow, whose cases it lists by hand."""
    monkeypatch.syspath_prepend(str(DISTRIBUTED))
    return importlib.import_module("test_tensorflow")


def sizes_for(case: Path) -> set[int]:
    """The numbers of ranks that a case file has tests for; one without a mark is for two."""
    marked = re.findall(r"world_size\(([\d, ]+)\)", case.read_text())
    return {int(size) for sizes in marked for size in sizes.split(",")} or {2}


def test_every_case_of_tensorflow_is_launched(launches: Any) -> None:
    listed = {(name, size) for _, size, names in launches.RUNS for name in names} | {("alone", 1)}
    cases = DISTRIBUTED / "tensorflow_ranks"
    wanted = {(f.stem[len("case_") :], n) for f in cases.glob("case_*.py") for n in sizes_for(f)}
    assert wanted <= listed
    assert {name for name, _ in listed} == {name for name, _ in wanted}
