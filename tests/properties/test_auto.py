"""`exchange="auto"`: fewest bytes out of the busiest node, decided alike on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracle.backends import NUMPY
from oracle.loopback import Loopback, LoopbackCollective, on_every_rank
from oracle.world import nodes_of_sizes

from horovod_topk.config import EXCHANGES
from horovod_topk.core.exchange.membership import check_elastic
from horovod_topk.core.exchange.protocol import Exchange
from horovod_topk.core.exchange.selection import (
    SECOND_SELECTION,
    choose,
    exchange_of,
    make_exchange,
)
from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.core.plan.nodes import Location
from horovod_topk.errors import ConfigError
from horovod_topk.methods import Dense, Method, PowerSGD, RandomK
from horovod_topk.methods.topk import TopK

Array = NDArray[Any]


def name(method: Method) -> str:
    return type(method).__name__


def plan_of(numel: int = 10**6, kind: str = "auto", **settings: Any) -> Plan:
    config = TopK(exchange=kind, values="int8", **settings)
    return make_plan([TensorSpec("w", (numel,), "float32")], config)


def chosen(plan: Plan, sizes: tuple[int, ...], can_split: bool = True) -> tuple[str, str]:
    """What every rank chooses, once it is sure that all choose alike."""
    network, nodes = Loopback(sum(sizes), NUMPY.ops), nodes_of_sizes(sizes)
    answers = {
        choose(plan, network.collective(rank), nodes, can_split=can_split)
        for rank in range(sum(sizes))
    }
    (answer,) = answers
    return answer


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((4,), "allgather"),  # nothing travels between nodes
        ((1, 1), "allgather"),  # sharded saves nothing at two ranks
        ((1,) * 8, "sharded"),
        ((8, 8), "hierarchical"),
        ((4, 4), "hierarchical"),
        ((2, 1), "hierarchical"),
        ((2,) * 16, "sharded"),  # every node would send to fifteen others
    ],
    ids=str,
)
def test_fewest_bytes_out_of_the_busiest_node(sizes: tuple[int, ...], expected: str) -> None:
    kind, because = chosen(plan_of(), sizes)
    assert kind == expected
    assert "\n" not in because
    if len(sizes) > 1:
        assert f"{expected} {node_bytes(expected, sizes):,}" in because


def node_bytes(kind: str, sizes: tuple[int, ...]) -> int:
    """As the exchange itself says."""
    collective = Loopback(sum(sizes), NUMPY.ops).collective(0)
    exchange: Exchange[Array] = make_exchange(kind, collective, nodes_of_sizes(sizes))
    found = exchange.traffic(plan_of()).node_bytes
    assert found is not None
    return found


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (3, 1), (4, 4), (1, 1, 1), (2, 3, 3)], ids=str)
@pytest.mark.parametrize("numel", [100, 5000, 10**6])
@pytest.mark.parametrize("ratio", [0.001, 0.1, 1.0])
def test_no_other_would_save_a_tenth(sizes: tuple[int, ...], numel: int, ratio: float) -> None:
    plan = plan_of(numel, ratio=ratio)
    kind, _ = chosen(plan, sizes)
    collective = Loopback(sum(sizes), NUMPY.ops).collective(0)
    kinds = ["allgather", "sharded", "hierarchical"][: 3 if max(sizes) > 1 else 2]
    cost = {}
    for each in kinds:
        exchange: Exchange[Array] = make_exchange(each, collective, nodes_of_sizes(sizes))
        cost[each] = exchange.traffic(plan).node_bytes or 0
    assert all(10 * cost[later] >= 9 * cost[kind] for later in kinds[kinds.index(kind) :])
    assert all(cost[kind] < 0.9 * cost[simpler] for simpler in kinds[: kinds.index(kind)])


def test_without_process_sets_it_does_without_nodes() -> None:
    kind, because = chosen(plan_of(), (4, 4), can_split=False)
    assert kind == "sharded"
    cure = "(hierarchical needs hvd.init(process_sets='dynamic'))"
    assert because.endswith(cure + SECOND_SELECTION)


@pytest.mark.parametrize(("sizes", "expected"), [((4, 4), "sharded"), ((1, 1), "allgather")])
def test_momentum_correction_leaves_two_to_choose_from(
    sizes: tuple[int, ...], expected: str
) -> None:
    kind, because = chosen(plan_of(momentum=0.9), sizes)
    assert kind == expected
    assert "hierarchical" not in because


def built(
    kind: str, locations: list[Location], monkeypatch: pytest.MonkeyPatch, unable: int | None = None
) -> list[Any]:
    """The exchange, or the error, that each rank constructs among all."""
    network: Loopback[Array] = Loopback(len(locations), NUMPY.ops, locations=locations)
    monkeypatch.setattr(
        LoopbackCollective, "can_split", lambda collective, groups: collective.rank != unable
    )

    def construct(collective: LoopbackCollective[Array]) -> Exchange[Array]:
        return exchange_of(plan_of(kind=kind), NUMPY.ops, collective)

    futures = on_every_rank(network, construct)
    return [future.exception() or future.result() for future in futures]


PAIRS = [Location("host", rank % 2, rank // 2 * 2) for rank in range(4)]


def test_ranks_find_out_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    found = built("auto", PAIRS, monkeypatch)
    assert [each.kind for each in found] == ["hierarchical"] * 4
    assert {each.nodes.sizes for each in found} == {(2, 2)}
    assert len({each.because for each in found}) == 1


def test_one_rank_that_cannot_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for it in Horovod."""
    found = built("auto", PAIRS, monkeypatch, unable=2)
    assert [each.kind for each in found] == ["sharded"] * 4
    errors = built("hierarchical", PAIRS, monkeypatch, unable=2)
    assert all(isinstance(error, ConfigError) for error in errors)
    assert all("rank 2 cannot add one" in str(error) for error in errors)
    assert all("init(process_sets='dynamic')" in error.cure for error in errors)


def test_an_elastic_job_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone: ranks that join late have nobody to ask."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    collective = Loopback(4, NUMPY.ops, patience=0.1).collective(0)
    exchange = exchange_of(plan_of(), NUMPY.ops, collective)
    assert (exchange.kind, exchange.nodes) == ("allgather", None)
    assert "elastic" in exchange.because


def test_the_choice_is_a_whole_exchange() -> None:
    """What was chosen is what is built, traffic and all."""
    network: Loopback[Array] = Loopback(4, NUMPY.ops, locations=PAIRS)
    futures = on_every_rank(network, lambda each: exchange_of(plan_of(), NUMPY.ops, each))
    traffic = [future.result().traffic(plan_of()) for future in futures]
    assert len({each.node_bytes for each in traffic}) == 1
    assert np.sum([each.between_bytes for each in traffic[:2]]) == traffic[0].node_bytes


@pytest.mark.parametrize("kind", EXCHANGES)
def test_owners_are_refused_where_ranks_come_and_go(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TopK(exchange=kind)
    check_elastic(config)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    if kind in ("allgather", "auto"):
        check_elastic(config)
        return
    with pytest.raises(ConfigError, match=f"exchange='{kind}' splits residuals among"):
        check_elastic(config)


@pytest.mark.parametrize("method", [RandomK(), PowerSGD(), Dense(exchange="allreduce")], ids=name)
def test_only_graphs_keep_the_number_of_ranks(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_elastic(method, in_graphs=True)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    check_elastic(method)
    check_elastic(replace(method, exchange="allgather"), in_graphs=True)
    with pytest.raises(ConfigError, match=r"would build the number of ranks into .* Pass exchange"):
        check_elastic(method, in_graphs=True)
