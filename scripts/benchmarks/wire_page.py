"""Figures of docs/wire.md, from the stored results."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.wire import DENSE, EXCHANGES, VALUES, name_of
from horovod_topk.cli.bench.nic import HEADERS
from pages import Values
from pages.markdown import table

Job = dict[str, Any]
ByHosts = dict[int, dict[str, "Figures"]]  # number of hosts -> way -> figures

INT8 = name_of("sharded", "int8", 0.01)
INT4 = name_of("sharded", "int4", 0.01)


EXAMPLES = (((8, 50), "sharded, int8, 0.01"), ((2, 1), "allgather, int8, 0.01"))


def values(results: Mapping[str, Job]) -> Values:
    """The page's figures by name."""
    jobs = list(results.values())
    quiet = max(job["cycle"] for job in jobs)
    found = _by_hosts(job for job in jobs if job["cycle"] == quiet and job["slots"] == 1)
    shared = _by_hosts(job for job in jobs if job["slots"] > 1)
    machine = jobs[-1]["machine"]
    return dict(
        hosts=f"{min(found)} to {max(found)}",
        steps=jobs[-1]["steps"],
        headers=HEADERS,
        quiet=quiet,
        more=_more(jobs),
        overhead=_overhead(jobs),
        goals=_goals(found),
        reduced=_reduced(found),
        shared=_reduced(shared) if shared else "Not measured.",
        details="\n\n".join(_detail(job) for job in jobs),
        congestion=machine["congestion control"],
        **machine,
    )


def _by_hosts(jobs: Iterable[Job]) -> ByHosts:
    return {job["ranks"] // job["slots"]: figures(job) for job in jobs}


def _alone(jobs: list[Job]) -> dict[tuple[int, int], dict[str, Figures]]:
    """Figures by hosts and cycle, of jobs with one rank a host."""
    return {(job["ranks"], job["cycle"]): figures(job) for job in jobs if job["slots"] == 1}


def _above(found: dict[str, Figures]) -> dict[str, float]:
    """Bytes on the card for each byte of `stats()`."""
    return {name: each.card / each.stats for name, each in found.items() if each.stats}


def _more(jobs: list[Job]) -> str:
    """Two cases in words, and the worst of all."""
    cases = {
        (setting, name): share
        for setting, found in _alone(jobs).items()
        for name, share in _above(found).items()
    }
    examples = [
        f"{(cases[setting, name] - 1):.0%} more with {setting[0]} hosts and a cycle of "
        f"{setting[1]} ms ({name})"
        for setting, name in EXAMPLES
        if (setting, name) in cases
    ]
    if not examples:
        return ""
    (hosts, cycle), worst = max(cases, key=lambda case: cases[case])
    return textwrap.fill(
        f"For int8 values the card sent {' and '.join(examples)}. The smallest payloads suffer "
        f"most: up to {cases[(hosts, cycle), worst]:.1f} times `stats()` ({worst}, {hosts} hosts, "
        f"a cycle of {cycle} ms).",
        width=100,
        break_on_hyphens=False,
    )


def _overhead(jobs: list[Job]) -> str:
    """A line a TopKEF setting, a column a job."""
    each = {setting: _above(found) for setting, found in _alone(jobs).items()}
    names = next(iter(each.values()))
    header = ["", *(f"{hosts} hosts, {cycle} ms" for hosts, cycle in each)]
    return table(header, ([name, *(f"{of[name]:.2f}" for of in each.values())] for name in names))


def _goals(found: ByHosts) -> str:
    rows = ((v.goal, v.measured, v.met) for v in verdicts(found))
    return table(("goal", "measured", "met"), rows)


def _reduced(found: ByHosts) -> str:
    each = {hosts: reductions(of) for hosts, of in sorted(found.items())}
    names = next(iter(each.values()))
    rows = ((name, *(f"{of[name]:,.1f}" for of in each.values())) for name in names)
    return table(("hosts", *map(str, each)), rows)


def _detail(job: Job) -> str:
    head = "", "seconds", "on the card", "of it headers", "idle", "fewer"
    counted = "cycles", "exchanged", "stats()", "carried / stats()"
    title = f"### {job['ranks'] // job['slots']} hosts, a cycle of {job['cycle']} ms"
    title += f", {job['slots']} ranks each" * (job["slots"] > 1)
    return f"{title}\n\n{table((*head, *counted), _rows(figures(job)))}"


def _rows(found: dict[str, Figures]) -> Iterator[tuple[str, ...]]:
    reduced = reductions(found)
    for name, each in found.items():
        yield (
            name,
            f"{each.seconds:.2f}",
            *map(_whole, (each.card, each.card - each.payload, each.idle)),
            f"{reduced[name]:,.1f}x",
            *map(_whole, (each.cycles, each.exchanged, each.stats)),
            f"{each.carried / each.stats:.3f}" if each.carried and each.stats else "",
        )


def _whole(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}"


@dataclass(frozen=True)
class Figures:
    """Of one method in one job, in bytes a step and host."""

    seconds: float  # a step, on a busy machine
    card: float  # left the card, with all headers
    payload: float  # the same without headers
    idle: float  # leave an idle job in the same time, with all headers
    stats: float | None  # bytes that leave a host, by `TopKEF.stats()`
    cycles: float | None  # Horovod's negotiation cycles; None: not counted
    exchanged: float | None  # on the card without negotiation, with headers
    carried: float | None  # the same without headers


def figures(job: Job) -> dict[str, Figures]:
    """By the methods' names."""
    return {way["way"]: _mean(way["hosts"]) for way in job["ways"]}


def reductions(found: dict[str, Figures]) -> dict[str, float]:
    """How many times fewer bytes leave the card than with Horovod's dense allreduce."""
    return {name: found[DENSE].card / each.card for name, each in found.items()}


def reductions_of_exchanges(found: dict[str, Figures]) -> dict[str, float]:
    """The same without negotiation, where cycles were counted."""
    each = {name: figures.exchanged for name, figures in found.items()}
    dense = each[DENSE]
    return {name: dense / bytes_ for name, bytes_ in each.items() if dense and bytes_}


def _mean(hosts: list[dict[str, Any]]) -> Figures:
    def mean(key: str) -> float | None:
        each = [host.get(key) for host in hosts]
        return None if None in each else statistics.fmean(each)  # type: ignore[arg-type]

    names = "bytes", "payload", "idle_bytes", "stats", "cycles", "exchanged_bytes"
    seconds = max(host["seconds"] for host in hosts)
    return Figures(seconds, *map(mean, (*names, "exchanged_payload")))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Verdict:
    """A goal and what was measured."""

    goal: str
    measured: str
    met: str


YES, NO, WITHOUT = "yes", "**no**", "without negotiation"


def verdicts(found: ByHosts) -> Iterator[Verdict]:
    """Each goal, over all numbers of hosts with results."""
    yield _reduction(found, INT8, 165)
    yield _reduction(found, INT4, 220)
    if len(found) > 1:
        for values in VALUES:
            yield _growth(found, name_of("sharded", values, 0.01), 2.0)
    for values in ("int8", "int4"):
        yield _reduction(found, name_of("sharded", values, 0.001, 0), 1000)
    if _are_counted(found):
        yield _agreement(found, 0.05)


def _are_counted(found: ByHosts) -> bool:
    """Whether cycles were counted, so that negotiation can be subtracted."""
    return all(way.exchanged is not None for ways in found.values() for way in ways.values())


def _reduction(found: ByHosts, way: str, least: float) -> Verdict:
    counted, at = _least({hosts: reductions(ways)[way] for hosts, ways in found.items()})
    goal = f"{way}: at least {least:,.0f}x fewer bytes than dense, for every number of hosts"
    measured = f"{counted:,.0f}x ({at} hosts)"
    if not _are_counted(found):
        return Verdict(goal, measured, YES if counted >= least else NO)
    each = {hosts: reductions_of_exchanges(ways)[way] for hosts, ways in found.items()}
    exchanged, where = _least(each)
    measured += f", without negotiation {exchanged:,.0f}x ({where} hosts)"
    met = YES if counted >= least else WITHOUT if exchanged >= least else NO
    return Verdict(goal, measured, met)


def _least(by_hosts: dict[int, float]) -> tuple[float, int]:
    """The least value, and its number of hosts."""
    hosts = min(by_hosts, key=lambda count: by_hosts[count])
    return by_hosts[hosts], hosts


def _growth(found: ByHosts, way: str, most: float) -> Verdict:
    few, many = min(found), max(found)
    grown = found[many][way].card / found[few][way].card
    goal = f"{way}: at {many} hosts at most {most:g} times the bytes at {few}"
    return Verdict(goal, f"{grown:.2f} times", YES if grown <= most else NO)


def _agreement(found: ByHosts, most: float) -> Verdict:
    """Bytes carried for each byte of `stats()`, and the constant bytes of a step."""
    each = [
        (_line([way for name, way in ways.items() if name.startswith(exchange)]), exchange, hosts)
        for hosts, ways in found.items()
        for exchange in EXCHANGES
    ]
    (slope, _), *where = max(each, key=lambda one: abs(one[0][0] - 1))
    (_, framing), *largest = max(each, key=lambda one: one[0][1])
    goal = f"the slope of bytes carried against `stats()` is within {most:.0%} of 1"
    worst = f"at worst {slope - 1:+.1%} ({where[0]}, {where[1]} hosts)"
    most_framing = f"plus at most {framing:,.0f} bytes a step ({largest[0]}, {largest[1]} hosts)"
    return Verdict(goal, f"{worst} {most_framing}", YES if abs(slope - 1) <= most else NO)


def _line(ways: list[Figures]) -> tuple[float, float]:
    """Slope and intercept of the bytes carried against the bytes of `stats()`."""
    points = [(way.stats, way.carried) for way in ways if way.stats and way.carried]
    fitted = statistics.linear_regression(*zip(*points, strict=True))
    return fitted.slope, fitted.intercept
