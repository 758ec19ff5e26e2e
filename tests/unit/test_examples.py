"""What the examples make of their arguments."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.tools

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


def momentum_of(harness: Any, args: Any) -> float:
    """The optimizer's own, in either framework."""
    if harness.__name__ == "torch_harness":
        torch = importlib.import_module("torch")
        (group,) = harness.optimizer(args, torch.nn.Linear(2, 2)).param_groups
        return float(group["betas"][0] if args.optimizer == "adamw" else group["momentum"])
    built = harness.optimizer(args, importlib.import_module("keras"))
    return float(built.beta_1 if args.optimizer == "adamw" else built.momentum)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_momentum_is_applied_once(harness: Any, name: str) -> None:
    """By the optimizer, or by TopKEF in its place."""
    optimizer = ("--optimizer", name)
    assert momentum_of(harness, arguments(harness, *optimizer)) == 0.9
    corrected = arguments(harness, *optimizer, "--momentum", "0.9")
    assert momentum_of(harness, corrected) == 0
    assert harness.compression(corrected).config.momentum == 0.9
    corrected.compression = "none"
    assert momentum_of(harness, corrected) == 0.9


def parsed(harness: Any, monkeypatch: pytest.MonkeyPatch, *given: str) -> Any:
    parser = harness.harness.arguments(None, steps=1, batch_size=1, lr=0.1)
    monkeypatch.setattr("sys.argv", ["train.py", *given])
    return harness.harness.parse(parser)


def test_topk_is_the_default(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = parsed(harness, monkeypatch, "--compression", "topk")
    found = harness.compression(args)
    assert found.config == type(found)().config
    assert found.deferred == type(found)().deferred
    assert momentum_of(harness, args) == 0.9


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--steps", "0"], "--steps: '0': give a whole number above 0"),
        (["--batch-size", "-3"], "--batch-size: '-3': give a whole number above 0"),
        (["--compression", "topk", "--ratio", "0"], "ratio=0.0 lies outside (0, 1]"),
        (["--compression", "topk", "--values", "int5"], "values='int5' is not one of the choices"),
        (["--compression", "topk", "--ratios", "fc"], "--ratios fc: write PATTERN=RATIO"),
        (
            ["--compression", "topk", "--momentum", "0.9", "--exchange", "hierarchical"],
            "exchange='hierarchical'",
        ),
    ],
)
def test_what_an_example_refuses(
    harness: Any,
    given: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parsed(harness, monkeypatch, *given)
    assert message in capsys.readouterr().err


def test_an_exchange_over_nodes_has_its_process_sets(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = "--compression", "topk", "--exchange"
    args = parsed(harness, monkeypatch, *given, "hierarchical")
    assert harness.harness.process_sets(args) == "dynamic"
    assert harness.harness.process_sets(parsed(harness, monkeypatch, *given, "sharded")) is None
