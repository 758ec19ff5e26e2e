"""The study of quality against bytes: its loopback network, its points, its shards, its records."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from study.frontier import agenda, measured, page, patience, records
from study.frontier.agenda import Point
from study.frontier.cells import Cell, dense
from study.frontier.loopback import Collective, Loopback
from study.frontier.measured import Group, Measured
from study.frontier.training import train
from study.frontier.workloads import SHARDS, WORKLOADS, batches

CELL = Cell("digits", "sgd", "equal", "sharded", "int4", 0.01, lr=0.1, steps=5, seed=0, ranks=2)


def ranks(size: int) -> list[Collective]:
    wire = Loopback(size)
    return [Collective(wire, rank) for rank in range(size)]


def test_allgather_brings_every_payload_in_rank_order() -> None:
    pending = [each.allgather(torch.tensor([each.rank] * 2), "a") for each in ranks(3)]
    assert [each.wait().tolist() for each in pending] == [[0, 0, 1, 1, 2, 2]] * 3


def test_alltoall_brings_each_rank_its_stretch_of_all() -> None:
    everyone = ranks(3)
    handed = [torch.tensor([10, 11, 12]) + 100 * each.rank for each in everyone]
    pending = [each.alltoall(mine, "a") for each, mine in zip(everyone, handed, strict=True)]
    assert [each.wait().tolist() for each in pending] == [
        [10, 110, 210],
        [11, 111, 211],
        [12, 112, 212],
    ]


def test_ranks_of_a_group_add_up_among_themselves() -> None:
    everyone = ranks(4)
    groups = [(0, 1), (2, 3)]
    team = [next(filter(None, each.split(groups))) for each in everyone]
    handed = [torch.tensor([1.0, 2.0, 3.0]) * 10**each.rank for each in everyone]
    pending = [
        each.reduce_scatter(mine, [1, 2], "a") for each, mine in zip(team, handed, strict=True)
    ]
    assert [each.wait().tolist() for each in pending] == [
        [11.0],
        [22.0, 33.0],
        [1100.0],
        [2200.0, 3300.0],
    ]


def test_a_collective_that_a_rank_never_started_is_an_error() -> None:
    first, _ = ranks(2)
    pending = first.allgather(torch.zeros(1), "a")
    with pytest.raises(RuntimeError, match="1 of 2"):
        pending.wait()


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_the_largest_ratio_is_the_last_that_sends_so_few_bytes(exchange: str) -> None:
    found = agenda.largest_ratio("digits", exchange, "int8", 165.0)
    assert found is not None
    position = agenda.FINE_RATIOS.index(found.ratio)
    one_more = dataclasses.replace(found, ratio=agenda.FINE_RATIOS[position + 1])
    assert agenda.reduction("digits", one_more) < 165 <= agenda.reduction("digits", found)


def test_a_reduction_out_of_reach_has_no_ratio() -> None:
    assert agenda.largest_ratio("digits", "allgather", "float32", 1e6) is None


def test_the_reduction_is_that_of_a_run() -> None:
    run = train(CELL)
    point = Point(CELL.exchange, CELL.values, CELL.ratio)
    assert run["dense_bytes"] / run["sent_bytes"] == agenda.reduction("digits", point, ranks=2)


def test_a_run_is_scored_at_even_distances_and_repeats_to_the_bit() -> None:
    first, again = train(CELL), train(CELL)
    assert first["history"]["step"] == [1, 2, 3, 4, 5]
    assert first["history"] == again["history"]


@pytest.mark.parametrize("exchange", ["allgather", "sharded", "hierarchical"])
def test_an_exchange_of_everything_trains_as_dense_does(exchange: str) -> None:
    common = ("digits", "sgd", "equal")
    whole = Cell(*common, exchange, "float32", 1.0, lr=0.1, steps=10, seed=0)
    plainly = dense(*common, 0.1, 10, 0)
    assert train(whole)["history"] == train(plainly)["history"]


def test_a_run_that_diverges_ends_without_a_score() -> None:
    history = train(dataclasses.replace(CELL, lr=1e30))["history"]
    assert history["accuracy"][-1] is None
    assert history["step"][-1] < CELL.steps


def test_skewed_shards_give_each_rank_few_labels_and_lose_no_row() -> None:
    workload = WORKLOADS["digits"]
    seen = {}
    for shards in SHARDS:
        sources = batches(workload, shards, ranks=4, seed=0)
        seen[shards] = [
            set(torch.cat([next(source)[1] for _ in range(10)]).tolist()) for source in sources
        ]
    assert all(len(labels) == 10 for labels in seen["equal"])
    assert all(len(labels) <= 4 for labels in seen["skewed"])
    assert set().union(*seen["skewed"]) == set(range(10))


def point(reduction: float, *costs: float) -> Measured:
    where = Point("allgather", "int8", 1 / reduction)
    return Measured(where, 1, reduction, dict(enumerate(costs)), costs)


def test_the_frontier_leaves_out_what_another_point_beats() -> None:
    cheap, beaten, best = point(100, 3.0), point(50, 4.0), point(20, 1.0)
    assert measured.frontier([beaten, best, cheap]) == [best, cheap]
    assert measured.frontier([best, point(200, 0.1, math.inf)]) == [best]


def test_two_seeds_are_two_values_without_an_error() -> None:
    series = dataclasses.replace(agenda.BYTELM, seeds=(0, 1, 2))
    group = Group(series, "equal", {}, (), 0)
    assert page.difference(group, point(20, 0.25, -0.5)) == "+0.25%, -0.50%"
    assert page.difference(group, point(20, 1.0, 2.0, 3.0)) == "+2.00 ± 0.58%"
    assert page.difference(group, point(20, 1.0, math.inf)) == "1 of 2 diverged"
    assert page.cell(group, point(20, 1.0)) == "+1.00% (1 seed)"
    assert point(20, 0.25, -0.5).error is None
    assert point(20, 1.0, 2.0).reach == (0.5, 0.5)


def test_the_furthest_point_within_a_tolerance() -> None:
    points = [point(20, 0.1), point(50, 0.3, 0.5), point(100, 0.3, math.inf)]
    assert measured.within(points, 0.5) == points[1]
    assert measured.within(points, 0.0) is None


def test_a_finished_run_is_not_repeated(monkeypatch: Any, tmp_path: Path) -> None:
    trained = []

    def stand_in(cell: Cell) -> dict[str, Any]:
        trained.append(cell)
        return {"history": {"accuracy": [0.5, 0.75]}}

    monkeypatch.setattr(records, "FOLDER", tmp_path)
    monkeypatch.setattr(records, "train", stand_in)
    one, other = CELL, dense("digits", "sgd", "skewed", 0.1, 5, 1)
    records.finish([one, one], "first")
    records.finish([one, other], "second")
    assert trained == [one, other]
    assert records.score(records.finished()[other]) == 0.75


def test_steps_to_a_score_lie_between_the_lengths_measured() -> None:
    ends = {1000: 3.0, 2000: 2.0, 4000: 1.5}
    assert patience.needed(ends, 3.5) == 1000
    assert patience.needed(ends, 2.5) == pytest.approx(1000 * 2**0.5)
    assert patience.needed(ends, 2.0) == pytest.approx(2000)
    assert patience.needed(ends, 1.0) == math.inf


def test_owners_send_back_a_share_of_what_they_get_at_the_bytes_asked_for() -> None:
    point = agenda.uneven("bytelm", 165.0, 0.5)
    assert point.gather_ratio == pytest.approx(0.5 * point.ratio)
    assert agenda.reduction("bytelm", point) >= 165
    even = dataclasses.replace(point, gather_ratio=None)
    assert agenda.reduction("bytelm", even) < agenda.reduction("bytelm", point)
