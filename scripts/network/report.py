"""Write docs/network.md from the stored results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from horovod_topk.cli.bench.figures import Figures, figures
from horovod_topk.cli.bench.methods import KINDS, NONE
from horovod_topk.cli.bench.table import heading, rows_of, times
from horovod_topk.cost import quantities
from network.goals import BASELINES, DDP, DENSE, OVER_DDP, PEER, TOPK, WAITING, verdicts
from network.runs import FAST, HOSTS, RATES, RUNS
from study.markdown import table

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

PAGE = """\
# Step time against bandwidth

<!-- Written by `make bench-network` from docs/results/network.json; change scripts/network/ -->

This page shows how many seconds one gradient exchange adds to a training step, with Horovod, torch
DDP and TopKEF, at three link speeds.

- **Gradients**: synthetic, in the shapes of a ResNet-50 (161 tensors, 25,557,032 float32).
- **Ranks**: {hosts} hosts with one rank each, on Gloo. No GPU.
- **Network**: emulated. The hosts are network namespaces of one machine (`scripts/netlab`). They
  share its {cores} CPU cores, which also carry the packets.
- **TopKEF**: bare `TopKEF()`, momentum included, unless the name says otherwise. These runs are
  of a version that corrected SGD's momentum at the ranks; what is sent has the same size now.

## Summary

Seconds that an exchange adds to a step, and how many times less TopKEF with Horovod takes:

{summary}

{picture}

- **Compare with `dense-waiting` or `ddp`.** Horovod's ranks spin while they wait (`dense`, `fp16`):
  each keeps a whole core busy. There are {hosts} ranks on {cores} cores here, so a rank that spins
  slows the others down. `dense-waiting` is Horovod's dense allreduce with ranks that sleep while
  they wait. TopKEF's ranks sleep too. Hosts with cores to spare were not measured.
- **PowerSGD is limited by the CPU here**, and so is TopKEF on the fastest link: see
  [where the time goes](#where-the-time-goes).
- **The machine was busy with other work.** Compare methods within one table, not with your own
  cluster: in a table, methods take turns step by step. Processes that wanted a core in the last
  minute of each run, these ranks included: {loads}.

## Methods

{kinds}

`topk` is bare `TopKEF()`; other rows have the settings in their names, such as int8 values at ratio
0.01. `plain` indices take 4 bytes each; all other rows pack indices. Rows with `ddp+` exchange
with DDP, the other TopKEF rows with Horovod. Idle Horovod ranks exchange messages once a cycle
({cycle}), also while DDP's steps are timed. This slows DDP a little.

## Goals

Each goal compares two methods of the same run.

{goals}

{missing}## All measurements

- *step*: seconds of a step on the slowest rank, median over rounds. All ranks start together. A
  rank that has finished sleeps until all have.
- *exchange*: what the method adds to a step without exchange in the same round. Median, *least* and
  *most* over rounds.
- *CPU*: CPU seconds that a rank's exchange took, all threads, spinning included.
- *times less than ...*: that method's *exchange*, divided by this row's.
- *card*: bytes that leave a host's network card in a step, counted by the kernel's packet
  scheduler, with headers, acknowledgements and Horovod's negotiation.

{tables}

Gradients are log-normal mixtures of normal values with random signs; their norm varies by a third
from step to step. They become ready in backward's order and cost one pass over memory.

Machine: {cpu}, {cores} cores, Linux {kernel}, Python {python}, PyTorch {torch}, Horovod {horovod}.
Date: {date}. Command: `make bench-network`. The authors' bias: they want TopKEF to win.
"""
MISSING = """\
## Where the time goes

At {rate}. *Cores busy*: CPU seconds of all {ranks} ranks, divided by {cores} cores. *Bytes on the
link*: the bytes that leave a host, divided by the link's rate. The two can overlap. What neither
explains is waiting, or other work on the cores.

{rows}

{peer}

"""
BUSY = """\
PowerSGD's time is nearly all CPU time here: {busy} of {exchange} s. Neither PowerSGD nor TopKEF was
measured with a core for each rank."""
LARGE = (DENSE, WAITING, DDP)  # methods whose time the link should explain
PICTURE = "![Exchange time a step against the bandwidth of a host's link](results/network.png)"


def page(results: Results) -> str:
    """Return the text of docs/network.md."""
    machine = next(reversed(results.values()))["machine"]
    dates = sorted({result["machine"]["date"] for result in results.values()})
    return PAGE.format(
        hosts=HOSTS,
        loads=", ".join(f"{each['machine']['load']:.0f} ({key})" for key, each in results.items()),
        kinds=table(("name", "what"), KINDS.items()),
        cycle=f"{machine['cycle']} ms" if machine["cycle"] else "1 ms by default",
        summary=_summary(results),
        goals=table(("goal", "setting", "measured", "met"), _verdicts(results)),
        missing=_missing(results),
        picture=PICTURE,
        tables="\n\n".join(_section(key, result) for key, result in results.items()),
        date=", ".join(dates),
        cpu=_processors(results),
        **{key: machine[key] for key in ("cores", "kernel", "python", "torch", "horovod")},
    )


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


def _missing(results: Results) -> str:
    """Section on CPU time and link time at the fastest rate; empty if that run is missing."""
    result = results.get(FAST)
    if result is None:
        return ""
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
    peer = found[PEER]
    is_busy = busy[PEER] > 0.8 * peer.exchange
    return MISSING.format(
        rate=quantities.rate(result["rate"]),
        ranks=result["ranks"],
        cores=cores,
        rows=table(("", "exchange, s", "cores busy, s", "bytes on the link, s"), rows),
        peer=BUSY.format(busy=f"{busy[PEER]:.2f}", exchange=f"{peer.exchange:.2f}")
        if is_busy
        else "",
    )


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
