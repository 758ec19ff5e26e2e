"""The loops of docs/practice.md (scripts/study/practice.py) on real ranks, cut short."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from horovod_topk.cli.compare.settings import Settings, of_file
from horovod_topk.core.run.substitute import VARIABLE
from study import practice

pytestmark = pytest.mark.world_size(2)
SETTINGS = of_file(Path(practice.__file__).with_suffix(".toml"))
STEPS = 8
LOOPS = [
    pytest.param(settings, call, id=name)
    for settings in SETTINGS
    for name, call in settings.compressors.items()
    if name.endswith(" @ 0.01")
]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(practice, "SPIKE_EVERY", 3)


def trained(settings: Settings, seed: int = 0, steps: int = STEPS) -> dict[str, float]:
    """As a run of a comparison, but shorter."""
    words = settings.cell((), next(iter(settings.compressors)), seed).arguments
    args = practice.parse([*words, "--steps", str(steps)])
    return practice.train(args, seed)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("settings", "call"), LOOPS)
def test_a_loop_ends_with_equal_ranks(
    settings: Settings, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train` fails where ranks end with different weights."""
    monkeypatch.setenv(VARIABLE, call.replace("warmup=100", "warmup=4"))
    assert math.isfinite(trained(settings)["accuracy"])


@pytest.mark.parametrize("ratio", [0.01, 0.001])
def test_a_restart_ends_where_the_run_that_went_on_does(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"TopKEF(ratio={ratio})")
    plain, restarted = SETTINGS[:2]
    assert restarted.options["restart"]
    ends = [trained(each, seed=1)["weights"] for each in (plain, restarted)]
    assert ends[0] == ends[1] != trained(plain, seed=2)["weights"]


@pytest.mark.slow
def test_the_loss_scale_grows_until_a_step_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(practice, "GROWTH_INTERVAL", 1)
    half = next(each for each in SETTINGS if each.options.get("precision") == "float16")
    assert trained(half, steps=40)["overflows"] > 0


@pytest.mark.parametrize("call", ["none", "fp16"])
def test_loops_run_dense(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, call)
    for settings in SETTINGS[:2]:
        assert math.isfinite(trained(settings)["accuracy"])
