"""What the examples make of their arguments."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(params=["torch", "tensorflow"])
def harness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """That of one framework."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    pytest.importorskip(f"horovod.{request.param}")
    return importlib.import_module(f"{request.param}_harness")


def arguments(harness: Any, *given: str) -> Any:
    parser = harness.harness.arguments(None, steps=1, batch_size=1, lr=0.1)
    return parser.parse_args(["--compression", "topk", *given])


def test_ratios_of_some_tensors(harness: Any) -> None:
    found = harness.compression(arguments(harness, "--ratios", "head.*=dense", "*.weight=0.1"))
    assert found.config.ratios == (("head.*", 1.0), ("*.weight", 0.1))
    assert harness.compression(arguments(harness)).config.ratios is None
