"""What `make bench-wire` makes of what it has counted."""

from __future__ import annotations

from typing import Any

import pytest

from wire import report
from wire.card import Sent
from wire.figures import figures, reductions
from wire.goals import INT8, NO, UNTOLD, WITHOUT, YES, verdicts
from wire.ways import DENSE, ways

DENSE_BYTES = 2_000_000.0


def job(ranks: int, times_fewer: float, stats_error: float = 0.0) -> dict[str, Any]:
    """Results in which every way but dense sends so many times fewer bytes."""
    return {
        "ranks": ranks,
        "cycle": 50,
        "steps": 3,
        "ways": [way(each.name, times_fewer, stats_error) for each in ways()],
        "machine": dict.fromkeys(
            ("cpu", "cores", "kernel", "congestion control", "python", "torch", "horovod", "date"),
            "some",
        ),
    }


def way(name: str, times_fewer: float, stats_error: float) -> dict[str, Any]:
    """Of its bytes a tenth is headers, and some more may be idle talk."""
    card = DENSE_BYTES if name == DENSE else DENSE_BYTES / times_fewer
    host = {
        "seconds": 1.0,
        "bytes": card,
        "idle_bytes": 0.1 * card,
        "payload": 0.9 * card,
        "idle_payload": 0.06 * card,
        "stats": None if name == DENSE else 0.87 * card / (1 + stats_error),
    }
    return {"way": name, "hosts": [host, host]}


def test_headers_are_not_payload() -> None:
    assert (Sent(7, 2000) - Sent(2, 500)).payload == 1500 - 5 * 66


def test_all_that_leaves_the_card_counts() -> None:
    assert reductions(figures(job(2, 200)))[INT8] == pytest.approx(200)


def test_what_is_carried_lies_between_all_and_all_less_idle_talk() -> None:
    found = figures(job(2, 200))[INT8]
    assert found.carried == pytest.approx((0.84 / 0.87, 0.9 / 0.87))
    assert found.disagreement == 0
    assert figures(job(2, 200, 0.2))[INT8].disagreement == pytest.approx(1.2 * 0.84 / 0.87 - 1)
    assert figures(job(2, 200, -0.2))[INT8].disagreement == pytest.approx(0.8 * 0.9 / 0.87 - 1)


def test_goals_are_met_by_every_number_of_hosts_or_not_at_all() -> None:
    enough = {hosts: figures(job(hosts, 1500)) for hosts in (2, 8)}
    assert {verdict.met for verdict in verdicts(enough)} == {YES}
    short = verdicts(enough | {4: figures(job(4, 160))})
    (first,) = (verdict for verdict in short if verdict.goal.startswith(f"{INT8}: at least 165x"))
    assert first.met == NO
    assert first.measured == "160x (4 hosts), without idle talk 160x (4 hosts)"


def test_a_goal_met_without_idle_talk_alone_is_called_that() -> None:
    talkative = job(2, 1500)
    for way in talkative["ways"]:
        if way["way"] == INT8:
            for host in way["hosts"]:
                host |= {"bytes": DENSE_BYTES / 150, "idle_bytes": 0.2 * DENSE_BYTES / 150}
    first = next(verdicts({2: figures(talkative)}))
    assert first.met == WITHOUT
    assert first.measured == "150x (2 hosts), without idle talk 169x (2 hosts)"


def test_a_card_that_contradicts_stats_is_reported() -> None:
    (last,) = [v for v in verdicts({2: figures(job(2, 1500, 0.2))}) if "stats()" in v.goal]
    assert last.met == NO
    assert last.measured.startswith("at least +15.9%, at most +24.1%: ")


def test_an_interval_that_reaches_beyond_the_goal_tells_nothing() -> None:
    """Its near end alone is within 5%."""
    (last,) = [v for v in verdicts({2: figures(job(2, 1500, 0.05))}) if "stats()" in v.goal]
    assert last.met == UNTOLD
    assert last.measured.startswith("at least +1.4%, at most +8.6%: ")


def test_the_page_has_goals_and_a_table_of_each_job() -> None:
    page = report.page([job(2, 200), job(8, 100)])
    assert "**no**" in page and "| yes |" in page
    assert page.count("### ") == 2
