"""What `make bench-network` makes of what `horovod-topk bench` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bench_network
from horovod_topk.cli.bench.methods import parse_methods
from horovod_topk.cost.quantities import bits_per_second
from network import report
from network.goals import GOALS
from network.runs import FAST, METHODS, RATES, RUNS

SOME = ("cpu", "cores", "kernel", "python", "torch", "horovod", "date")
NONE = 0.1  # seconds of the step without exchange
DENSE, PEER = 10.0, 1.0  # seconds of exchange


def result(key: str, ours: float) -> dict[str, Any]:
    """Of a run in which all of ours take so many seconds."""
    names = RUNS[key].methods
    dense = (name for name in names if name.startswith(("dense", "fp16", "ddp-")))
    seconds = {"none": 0.0, **dict.fromkeys(names, ours), "powersgd": PEER, "ddp": DENSE}
    seconds |= dict.fromkeys(dense, DENSE)
    methods = [
        {"name": name, "what": "", "settings": {}, "bytes": 1e6}
        | dict.fromkeys(("seconds", "cpu"), [NONE + each] * 3)
        for name, each in seconds.items()
    ]
    return {
        "model": "resnet50",
        "elements": 25_557_032,
        "tensors": 161,
        "ranks": 4,
        "hosts": 4,
        "rate": bits_per_second(RUNS[key].rate),
        "compute": RUNS[key].compute,
        "idle parameters": RUNS[key].idle,
        "counter": "packet scheduler",
        "methods": methods,
        "machine": {**dict.fromkeys(SOME, "some"), "load": 2.5, "cores": 2, "cycle": None},
    }


def test_every_method_can_be_had() -> None:
    for run in RUNS.values():
        assert [each.name for each in parse_methods(",".join(run.methods))] == list(run.methods)


def test_goals_are_about_runs_and_methods_that_there_are() -> None:
    assert {goal.run for goal in GOALS} <= set(RATES)
    assert {name for goal in GOALS for name in (goal.ours, goal.other)} <= set(METHODS)


@pytest.mark.parametrize(("ours", "met"), [(0.15, 9), (0.3, 6), (0.9, 3), (2.0, 2)])
def test_goals_are_met_or_not(ours: float, met: int) -> None:
    page = report.page({key: result(key, ours) for key in RATES})
    goals = page.partition("## Goals")[2].partition("## Against")[0]
    assert goals.count("| yes |") == met
    assert goals.count("| **no** |") == len(GOALS) - met


def test_the_page_has_a_table_of_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_network, "PAGE", tmp_path / "network.md")
    monkeypatch.setattr(bench_network, "PICTURE", tmp_path / "network.png")
    page = bench_network.publish({key: result(key, 0.2) for key in RUNS})
    assert (tmp_path / "network.md").read_text() == page
    assert (tmp_path / "network.png").stat().st_size > 10_000
    assert page.count("### ") == len(RUNS)
    assert "| topk-sharded | 0.20 | 0.40 | 0.01 |" in page
    timed = "| topk | 0.300 | 0.200 | 0.200 | 0.200 | 0.200 |"
    assert f"{timed} 50.0x | 50.0x | 50.0x | 50.0x | 5.0x | 1,000,000 | 1.0x |" in page
    assert f"{timed} 50.0x | 50.0x | 5.0x | 1,000,000 | 1.0x |" in page  # no dense-waiting


def test_the_summary_compares_one_setting_with_every_baseline() -> None:
    page = report.page({key: result(key, 0.2) for key in RATES})
    line = "10.00 | 10.00 | 10.00 | 10.00 | 10.00 | 1.00 | 0.20 | 0.20 | 50.0x | 50.0x | 50.0x |"
    assert page.count(line) == len(RATES)


def test_a_goal_is_about_the_baseline_that_sleeps() -> None:
    slow = result("1gbit", 0.2)
    for method in slow["methods"]:
        if method["name"] == "dense":
            method["seconds"] = [NONE + 20.0] * 3
    goals = report.page({"1gbit": slow}).partition("## Goals")[2]
    assert "50.0 times less than `dense-waiting`; 50.0 than `ddp`; 100.0 than `dense`" in goals


def test_a_run_takes_the_place_of_the_one_it_repeats() -> None:
    old = {FAST: {"old": 1}, "idle": {"old": 2}}
    new = bench_network.KEPT.merged(old, RATES[0], {"new": 0})
    assert list(new) == [RATES[0], FAST, "idle"]
    assert bench_network.KEPT.merged(new, FAST, {"new": 1})[FAST] == {"new": 1}
