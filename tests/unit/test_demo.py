"""`make demo`: its table has the time of a step with and without a link."""

from __future__ import annotations

import types
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("horovod.torch")

import demo
import paced

pytestmark = pytest.mark.tools

RUN: dict[str, Any] = {
    "history": {"accuracy": [0.5, 0.98]},
    "sent_bytes": 1_135_144,
    "dense_bytes": 1_135_144,
    "seconds_per_step": 0.024,
}


def test_without_horovod_the_table_adds_the_time_of_the_bytes() -> None:
    run = RUN | {"seconds_per_step": 0.0149}
    assert demo.row("dense", run, demo.DDP) == demo.row(
        "dense", RUN | {"seconds_per_step": 0.02398}
    )


def test_loopback_and_the_paced_link_are_two_columns() -> None:
    """1,135,144 bytes take 9.1 ms at 1 Gbit/s, for which ranks have waited."""
    assert demo.row("dense", RUN) == ("dense", "98.0%", "1,135,144", "1.0x", "14.9", "24.0")
    assert demo.COLUMNS[-2:] == ("ms a step, loopback", "ms a step, 1 Gbit/s")
    assert "Loopback is no network" in demo.NOTE


class Sleeps:
    """An optimizer as Horovod's, whose state is none of this package's."""

    def __init__(self) -> None:
        parameter = types.SimpleNamespace(requires_grad=True, numel=lambda: 1000)
        self.param_groups, self._compression = [{"params": [parameter]}], None

    def step(self) -> str:
        return "stepped"


@pytest.mark.parametrize(("variable", "octets"), [("none", 4000), ("fp16", 2000)])
def test_a_rank_waits_for_the_bytes_that_it_sends(
    variable: str, octets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(paced.time, "sleep", slept.append)
    monkeypatch.setattr(paced.hvd, "size", lambda: 2)
    monkeypatch.setenv(paced.VARIABLE, variable)
    optimizer = paced.paced(Sleeps, rate=1e6)()
    assert optimizer.step() == "stepped"
    assert slept == [pytest.approx(8 * octets / 1e6)]
