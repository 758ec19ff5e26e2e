"""What `make bench-wire` makes of what it has counted."""

from __future__ import annotations

from typing import Any

import pytest

from wire import report
from wire.card import Sent
from wire.figures import figures, reductions
from wire.goals import INT8, verdicts
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
    exchanged = DENSE_BYTES if name == DENSE else DENSE_BYTES / times_fewer
    host = {
        "seconds": 1.0,
        "bytes": exchanged + 500,
        "idle_bytes": 500,
        "payload": 0.9 * exchanged + 50,
        "idle_payload": 50,
        "stats": None if name == DENSE else 0.9 * exchanged / (1 + stats_error),
    }
    return {"way": name, "hosts": [host, host]}


def test_headers_are_not_payload() -> None:
    assert (Sent(7, 2000) - Sent(2, 500)).payload == 1500 - 5 * 66


def test_idle_traffic_is_taken_off_both() -> None:
    found = figures(job(2, 200))
    assert reductions(found)[INT8] == pytest.approx(200)
    assert found[INT8].disagreement == pytest.approx(0)


def test_goals_are_met_by_every_number_of_hosts_or_not_at_all() -> None:
    enough = {hosts: figures(job(hosts, 1500)) for hosts in (2, 8)}
    assert all(verdict.met for verdict in verdicts(enough))
    short = enough | {4: figures(job(4, 164))}
    missed = [verdict for verdict in verdicts(short) if not verdict.met]
    assert missed[0].goal.startswith(INT8)
    assert missed[0].measured.startswith("164x at 4 hosts")
    assert "".join(v.goal for v in missed if "stats()" in v.goal) == ""


def test_a_card_that_contradicts_stats_is_reported() -> None:
    (last,) = [v for v in verdicts({2: figures(job(2, 1500, 0.07))}) if "stats()" in v.goal]
    assert not last.met
    assert last.measured.startswith("+7.0%")


def test_the_page_has_goals_and_a_table_of_each_job() -> None:
    page = report.page([job(2, 200), job(8, 100)])
    assert "**no**" in page and "| yes |" in page
    assert page.count("### ") == 2
