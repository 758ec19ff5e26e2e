"""What `make bench-wire` makes of what it has counted."""

from __future__ import annotations

from typing import Any

import pytest

from wire import report
from wire.cycles import starts_in
from wire.figures import figures, reductions
from wire.goals import INT8, NO, WITHOUT, YES, verdicts
from wire.nic import Sent
from wire.rank import beyond_negotiation
from wire.ways import DENSE, ways

DENSE_BYTES = 2_000_000.0


def job(ranks: int, times_fewer: float) -> dict[str, Any]:
    """Results in which every way but dense sends so many times fewer bytes."""
    return {
        "ranks": ranks,
        "slots": 1,
        "cycle": 50,
        "steps": 3,
        "ways": [way(each.name, times_fewer, 0.9 - 0.01 * n) for n, each in enumerate(ways())],
        "machine": dict.fromkeys(
            ("cpu", "cores", "kernel", "congestion control", "python", "torch", "horovod", "date"),
            "some",
        ),
    }


def way(name: str, times_fewer: float, carried: float) -> dict[str, Any]:
    """Of its bytes five percent are headers, a share is carried, and the rest is negotiation."""
    card = DENSE_BYTES if name == DENSE else DENSE_BYTES / times_fewer
    host = {
        "seconds": 1.0,
        "bytes": card,
        "idle_bytes": 0.2 * card,
        "payload": 0.95 * card,
        "cycles": 20,
        "exchanged_bytes": 0.9 * card,
        "exchanged_payload": carried * card,
        "stats": None if name == DENSE else carried * card,
    }
    return {"way": name, "hosts": [host, host]}


def test_headers_are_not_payload() -> None:
    assert (Sent(7, 2000) - Sent(2, 500)).payload == 1500 - 5 * 66


def test_all_that_leaves_the_card_counts() -> None:
    assert reductions(figures(job(2, 200)))[INT8] == pytest.approx(200)


def test_what_is_carried_is_all_without_headers_and_negotiation() -> None:
    found = figures(job(2, 200))[INT8]
    assert found.carried == pytest.approx(found.stats)


def test_goals_are_met_by_every_number_of_hosts_or_not_at_all() -> None:
    enough = {hosts: figures(job(hosts, 1500)) for hosts in (2, 8)}
    assert {verdict.met for verdict in verdicts(enough)} == {YES}
    short = verdicts(enough | {4: figures(job(4, 160))})
    (first,) = (verdict for verdict in short if verdict.goal.startswith(f"{INT8}: at least 165x"))
    assert first.met == NO
    assert first.measured == "160x (4 hosts), without negotiation 160x (4 hosts)"


def test_a_goal_met_without_negotiation_alone_is_called_that() -> None:
    chatty = job(2, 1500)
    for way in chatty["ways"]:
        if way["way"] == INT8:
            for host in way["hosts"]:
                host |= {"bytes": DENSE_BYTES / 150, "exchanged_bytes": 0.8 * DENSE_BYTES / 150}
    first = next(verdicts({2: figures(chatty)}))
    assert first.met == WITHOUT
    assert first.measured == "150x (2 hosts), without negotiation 169x (2 hosts)"


@pytest.mark.parametrize(("error", "met"), [(0.04, YES), (0.06, NO), (-0.06, NO)])
def test_a_card_that_contradicts_stats_is_reported(error: float, met: str) -> None:
    """However many bytes of framing there are."""
    off = job(2, 1500)
    for number, way in enumerate(off["ways"]):
        for host in way["hosts"]:
            host["stats"] = 1000.0 * (1 + number)
            host["exchanged_payload"] = 500 + (1 + error) * host["stats"]
    (last,) = [v for v in verdicts({2: figures(off)}) if "stats()" in v.goal]
    assert last.met == met
    assert last.measured.startswith(f"at worst {error:+.1%} (")
    assert "plus at most 500 bytes a step" in last.measured


def test_cycles_are_counted_in_a_timeline() -> None:
    """Horovod leaves the names of processes, and of tensors, between them."""
    timeline = """[
    {"name": "process_name", "ph": "M", "args": {"start_time_since_epoch_in_micros":5000000}},
    {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.x"}},
    {"ph": "i", "name": "CYCLE_START", "ts": 500000, "s": "g"},{"ph": "E", "ts": 600000, "pid": 1},
    {"ph": "i", "name": "CYCLE_START", "ts": 1000000, "s": "g"}]"""
    assert starts_in(timeline) == [5.5, 6.0]


def test_negotiation_is_that_of_as_many_idle_cycles() -> None:
    told = beyond_negotiation(Sent(100, 10_000), Sent(10, 1_000), cycles=(30, 20), steps=2)
    assert told["cycles"] == 15
    assert told["exchanged_bytes"] == (10_000 - 1.5 * 1_000) / 2
    assert told["exchanged_payload"] == told["exchanged_bytes"] - 66 * (100 - 1.5 * 10) / 2


def test_without_cycles_nothing_is_told_from_negotiation() -> None:
    """As at Horovod's default cycle."""
    plain = job(2, 200)
    for way in plain["ways"]:
        for host in way["hosts"]:
            for key in ("cycles", "exchanged_bytes", "exchanged_payload"):
                host.pop(key, None)
    assert figures(plain)[INT8].carried is None
    untold = next(
        line for line in report.page([plain]).splitlines() if line.startswith(f"| {INT8} | 1.00")
    )
    assert untold.endswith(" |  |")
    assert "x |  |  | " in untold


def test_nodes_are_exchanged_between_where_there_are_some() -> None:
    assert not [way for way in ways() if way.exchange == "hierarchical"]
    assert len([way for way in ways(slots=2) if way.exchange == "hierarchical"]) == 6


def test_the_page_has_goals_and_a_table_of_each_job() -> None:
    page = report.page([job(2, 200), job(8, 100)])
    assert "**no**" in page and "| yes |" in page
    assert page.count(" hosts, a cycle of 50 ms\n") == 2


def test_the_page_says_how_much_more_than_stats_the_card_sends() -> None:
    few = job(8, 200)
    for each in few["ways"]:
        for host in each["hosts"]:
            host.pop("exchanged_bytes", None)  # no goals about cycles
            host["stats"] = host["stats"] and host["bytes"] / 1.25
    page = report.page([few]).replace("\n", " ")
    assert "25% more with 8 hosts and a cycle of 50 ms (sharded, int8, 0.01)" in page
    assert f"| {INT8} | 1.25 |" in page
