"""Figures of docs/network.md, from the stored results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.network import FAST, HOSTS, RATES, RUNS
from horovod_topk.cli.bench.figures import Figures, figures
from horovod_topk.cli.bench.methods import KINDS, NONE
from horovod_topk.cli.bench.picture import draw
from horovod_topk.cli.bench.table import heading, rows_of, times
from horovod_topk.cost import quantities
from pages import RESULTS, Values
from pages.markdown import table

DENSE, WAITING, DDP, PEER = "dense", "dense-waiting", "ddp", "powersgd"
BASELINES = (WAITING, DDP, "ddp-fp16", DENSE, PEER)  # the fairest comparison first
TOPK, OVER_DDP = "topk", "ddp+topk"  # TopKEF's default with Horovod and with DDP

Result = dict[str, Any]
Results = dict[str, Result]  # key of RUNS -> what `horovod-topk bench --json` wrote

HEAD = ("", "step", "exchange", "least", "most", "CPU")
BYTES = ("card", "fewer bytes than dense")
SHOWN = {
    WAITING: "Horovod dense, sleeping",
    DDP: "DDP dense",
    "ddp-fp16": "DDP fp16",
    DENSE: "Horovod dense",
    "fp16": "Horovod fp16",
    PEER: "DDP PowerSGD rank 4",
    TOPK: "TopKEF with Horovod",
    OVER_DDP: "TopKEF with DDP",
}

BUSY = """\
PowerSGD's time is nearly all CPU time here: {busy} of {exchange} s. Neither PowerSGD nor TopKEF was
measured with a core for each rank."""
LARGE = (DENSE, WAITING, DDP)  # methods whose time the link should explain


def values(results: Results) -> Values:
    """The page's figures by name."""
    machine = next(reversed(results.values()))["machine"]
    dates = sorted({result["machine"]["date"] for result in results.values()})
    return machine | {
        "hosts": HOSTS,
        "loads": ", ".join(
            f"{each['machine']['load']:.0f} ({key})" for key, each in results.items()
        ),
        "kinds": table(("name", "what"), KINDS.items()),
        "cycle": f"{machine['cycle']} ms" if machine["cycle"] else "1 ms by default",
        "summary": _summary(results),
        "goals": table(("goal", "setting", "measured", "met"), _verdicts(results)),
        **_time(results[FAST]),
        "picture": partial(picture, results, RESULTS / "network.png"),
        "tables": "\n\n".join(_section(key, result) for key, result in results.items()),
        "date": ", ".join(dates),
        "cpu": _processors(results),
    }


def picture(results: Results, path: Path) -> str:
    """Draw the exchange times, and return a link to the picture."""
    draw(path, [results[rate] for rate in RATES if rate in results])
    return "![Exchange time a step against the bandwidth of a host's link](results/network.png)"


def _processors(results: Results) -> str:
    """Processors of the measured machines; those of few runs are followed by these runs."""
    runs: dict[str, list[str]] = {}
    for key, result in results.items():
        runs.setdefault(result["machine"]["cpu"], []).append(key)
    usual, *others = sorted(runs, key=lambda cpu: -len(runs[cpu]))
    return "; ".join([usual, *(f"{cpu} ({', '.join(runs[cpu])})" for cpu in others)])


def _summary(results: Results) -> str:
    """Table of the exchange times of default TopKEF and of the baselines, a row for each link."""
    header = ["link", *(f"{words} (`{name}`)" for name, words in SHOWN.items())]
    header += [f"TopKEF: times less than `{name}`" for name in BASELINES]
    found = {rate: figures(results[rate]) for rate in RATES if rate in results}
    lines = (
        [
            quantities.rate(results[rate]["rate"]),
            *(f"{methods[name].exchange:.2f}" for name in SHOWN),
            *(times(methods[TOPK].faster(methods[name])) for name in BASELINES),
        ]
        for rate, methods in found.items()
    )
    return table(header, lines)


def _time(result: Result) -> Values:
    """Figures of CPU time and link time at the fastest rate."""
    found, cores = figures(result), result["machine"]["cores"]
    shown = [each for name, each in found.items() if name != NONE]
    busy = {each.name: result["ranks"] * (each.cpu or 0) / cores for each in shown}
    rows = (
        [
            each.name,
            f"{each.exchange:.2f}",
            f"{busy[each.name]:.2f}",
            f"{8 * (each.bytes or 0) / result['rate']:.2f}",
        ]
        for each in shown
    )
    peer, of_peer = found[PEER], busy[PEER]
    words = BUSY.format(busy=f"{of_peer:.2f}", exchange=f"{peer.exchange:.2f}")
    return {
        "fast": quantities.rate(result["rate"]),
        "ranks": result["ranks"],
        "rows": table(("", "exchange, s", "cores busy, s", "bytes on the link, s"), rows),
        "peer": words if of_peer > 0.8 * peer.exchange else "",
    }


def _verdicts(results: Results) -> Iterator[tuple[str, ...]]:
    return verdicts({key: figures(result) for key, result in results.items()})


def _section(key: str, result: Result) -> str:
    """Section of the page for one run: its heading, settings and table."""
    rounds = len(result["methods"][0]["seconds"])
    told = f"{heading(result)}; {rounds} rounds. {_delivered(result)}"
    against = _baselines(figures(result))
    header = (*HEAD, *(f"times less than `{name}`" for name in against), *BYTES)
    return f"### {RUNS[key].title}\n\n{told}\n\n{table(header, _rows(result))}"


def _delivered(result: Result) -> str:
    """Sentence on the measured rate of the links, which a busy machine can lower."""
    if result["compute"]:  # bytes sent during backward add no time
        return "Bytes that are sent during backward add no time here."
    found = figures(result)
    sent = [found[name] for name in LARGE if name in found and found[name].exchange > 0]
    most = max((8 * (each.bytes or 0) / each.exchange for each in sent), default=0)
    return f"The links carried at most {most / 1e6:,.0f} Mbit/s."


def _baselines(found: dict[str, Figures]) -> list[str]:
    return [name for name in BASELINES if name in found]


def _rows(result: Result) -> Iterator[tuple[str, ...]]:
    found = figures(result)
    against = _baselines(found)
    for (*cells, _, card, fewer), each in zip(rows_of(result), found.values(), strict=True):
        factors = ["" if each.name == NONE else times(each.faster(found[n])) for n in against]
        yield *cells, *factors, card, fewer


@dataclass(frozen=True)
class Goal:
    """Least quotient of a baseline's exchange time and TopKEF's, in the same run."""

    run: str  # a key of RUNS
    ours: str  # a setting of TopKEF
    other: str
    least: float
    words: str


GOALS = (
    Goal("1gbit", TOPK, WAITING, 9, "1 Gbit/s: 9 times less than dense"),
    Goal("1gbit", TOPK, PEER, 2, "1 Gbit/s: 2 times less than PowerSGD rank 4"),
    Goal("1gbit", OVER_DDP, PEER, 2, "1 Gbit/s, DDP: 2 times less than PowerSGD rank 4"),
    Goal("1gbit", OVER_DDP, TOPK, 1, "1 Gbit/s, DDP: no more than with Horovod"),
    Goal("100mbit", TOPK, WAITING, 50, "100 Mbit/s: 50 times less than dense"),
    Goal("100mbit", TOPK, PEER, 5, "100 Mbit/s: 5 times less than PowerSGD rank 4"),
    Goal("100mbit", OVER_DDP, PEER, 5, "100 Mbit/s, DDP: 5 times less than PowerSGD rank 4"),
    Goal("100mbit", OVER_DDP, TOPK, 1, "100 Mbit/s, DDP: no more than with Horovod"),
    Goal(
        "100mbit",
        "topk-plain-float32-0.01",
        WAITING,
        20,
        "100 Mbit/s, plain indices and float32: 20 times less than dense",
    ),
)


def verdicts(found: dict[str, dict[str, Figures]]) -> Iterator[tuple[str, str, str, str]]:
    """Yield for each goal with results: goal, setting, measured quotient, and whether it is met.

    Args:
        found: key of RUNS -> name of a method -> its figures.
    """
    for goal in GOALS:
        if goal.run in found:
            yield _verdict(goal, found[goal.run])


def _verdict(goal: Goal, methods: dict[str, Figures]) -> tuple[str, str, str, str]:
    factor = methods[goal.ours].faster(methods[goal.other])
    if factor is None:
        return goal.words, goal.ours, "nothing measurable", "**no**"
    met = "yes" if factor >= goal.least else "**no**"
    measured = f"{factor:.1f} times less than `{goal.other}`{_beside(goal, methods)}"
    return goal.words, goal.ours, measured, met


def _beside(goal: Goal, methods: dict[str, Figures]) -> str:
    """Quotients for the other dense baselines, as text, if the goal is about a dense one."""
    if goal.other != WAITING:
        return ""
    factors = {name: methods[goal.ours].faster(methods.get(name)) for name in (DDP, DENSE)}
    known = {name: factor for name, factor in factors.items() if factor is not None}
    return "".join(f"; {factor:.1f} than `{name}`" for name, factor in known.items())
