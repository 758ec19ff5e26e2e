"""docs/network.md, from the results on disk and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from horovod_topk.cli.bench.figures import figures
from horovod_topk.cli.bench.methods import KINDS, NONE
from horovod_topk.cli.bench.table import heading, rows_of, times
from horovod_topk.cost import quantities
from network.goals import ANY, PEER, verdicts
from network.runs import FAST, HOSTS, RATES
from study.markdown import table

Result = dict[str, Any]
Results = dict[str, Result]  # key of RUNS -> what `horovod-topk bench --json` wrote

HEAD = ("", "step", "exchange", "least", "most", "CPU", "less", "than PowerSGD", "card", "fewer")

PAGE = """\
# Time a step against bandwidth

<!-- Written by `make bench-network` from docs/results/network.json; change scripts/network/ -->

What exchanging a ResNet-50's gradients (161 tensors, 25,557,032 float32) adds to a step: {hosts}
hosts, one rank each, Horovod and torch DDP on Gloo. The hosts are network namespaces of one machine
(`scripts/netlab`) and share its {cores} cores, of which other work had its part: when the runs
ended, so many processes had wanted a core in the last minute, these ranks among them: {loads}.
Seconds are therefore those of a busy machine; what counts is how ways compare within a run, where
they take turns, step by step. Even that is not free of it: where cores are short, ways that compute
(TopKEF, and PowerSGD more so) and ways that spin take longer, and a cable does not. The links are
emulated by the same cores, and can then carry less than their rate: each table says what they did.

- *step*: the median over rounds of the seconds of one step, of the slowest rank, all beginning
  together. Ranks that have ended it sleep until all have: in Horovod's own barrier they would take
  cores from the others. *exchange*: the median of what it took beyond the step without any exchange
  in the same round; *least* and *most* of the rounds.
- *CPU*: seconds of a core that a rank's exchange took, all threads, waiting by spinning included
  (`-`: not measured in that run).
- *less*: how many times less exchange time than Horovod's dense allreduce; then, than PowerSGD.
- *card*: bytes that leave a host's network card in a step, by the kernel's packet scheduler, with
  headers, acknowledgements and Horovod's idle talk (the row `none` shows it for its time).

Gradients are log-normal mixtures of normal ones, of random sign and a norm that varies by a third;
they cost one pass over memory, and appear in backward order.

{kinds}

`topk` and what follows: ratio 0.01; `plain` indices as they are, otherwise packed; values float32
if nothing else is said. Horovod's own waiting (`dense`, `fp16`) takes a whole core with
`sched_yield`, where there are more ranks than cores from those that have work to do; TopKEF
sleeps between its looks, and so does `dense-waiting`, which is otherwise Horovod's dense. Horovod's
idle ranks talk once a cycle ({cycle}), also during DDP's steps: that slows DDP here a little.

## Goals

The best of the ways that a goal is about, against another in the same run.

{goals}

{missing}

## Against bandwidth

{picture}

{tables}

Machine: {cpu}, {cores} cores, Linux {kernel}, Python {python}, PyTorch {torch}, Horovod {horovod}.
Date: {date}. Command: `make bench-network`. The authors' bias: they want TopKEF to win.
"""
MISSING = """\
What is left at {rate}, of {name}: an exchange took {exchange} s, of which {ranks} ranks kept
{cores} cores busy for {busy} s and its bytes a link for {cable} s. The rest went by while other
work had the cores, or all waited for a message."""
LARGE = ("dense", "dense-waiting", "ddp")  # whose time is the cable's, if it is anything's
PICTURE = "![Exchange time a step against the bandwidth of a host's link](results/network.png)"


def page(results: Results) -> str:
    """All of it."""
    machine = next(reversed(results.values()))["machine"]
    dates = sorted({result["machine"]["date"] for result in results.values()})
    return PAGE.format(
        hosts=HOSTS,
        loads=", ".join(f"{each['machine']['load']:.0f} ({key})" for key, each in results.items()),
        kinds=table(("name", "what"), KINDS.items()),
        cycle=f"{machine['cycle']} ms" if machine["cycle"] else "1 ms by default",
        goals=table(("goal", "measured", "met"), _verdicts(results)),
        missing=_missing(results),
        picture=PICTURE,
        tables="\n\n".join(_section(key, result) for key, result in results.items()),
        date=", ".join(dates),
        **{key: machine[key] for key in ("cpu", "cores", "kernel", "python", "torch", "horovod")},
    )


def _missing(results: Results) -> str:
    """Where the time of the best of ours goes at the fastest rate; empty without that run."""
    result = results.get(FAST)
    if result is None:
        return ""
    found, cores = figures(result), result["machine"]["cores"]
    best = min((found[name] for name in ANY), key=lambda each: each.exchange)
    if best.cpu is None or best.bytes is None:
        return ""
    return MISSING.format(
        rate=quantities.rate(result["rate"]),
        ranks=result["ranks"],
        cores=cores,
        name=best.name,
        exchange=f"{best.exchange:.3f}",
        busy=f"{result['ranks'] * best.cpu / cores:.3f}",
        cable=f"{8 * best.bytes / result['rate']:.3f}",
    )


def _verdicts(results: Results) -> Iterator[tuple[str, str, str]]:
    return verdicts({key: figures(result) for key, result in results.items()})


TITLES = {
    "sleep": "Backward that leaves the cores alone",
    "cpu": "Backward that needs the cores",
    "idle": "Parameters that never fire",
}


def _section(key: str, result: Result) -> str:
    """One run."""
    title = TITLES.get(key) or f"{heading(result).rsplit(', ', 1)[-1]}"
    assert key in TITLES or key in RATES
    rounds = len(result["methods"][0]["seconds"])
    told = f"{heading(result)}; {rounds} rounds. {_delivered(result)}"
    return f"### {title}\n\n{told}\n\n{table(HEAD, _rows(result))}"


def _delivered(result: Result) -> str:
    """What the links carried, which on a busy machine can be less than their rate."""
    if result["compute"]:  # what is sent during backward takes no time of its own
        return "What is sent while backward goes on costs no time."
    found = figures(result)
    sent = [found[name] for name in LARGE if name in found and found[name].exchange > 0]
    most = max((8 * (each.bytes or 0) / each.exchange for each in sent), default=0)
    return f"The dense ways moved at most {most / 1e6:,.0f} Mbit/s beyond the step."


def _rows(result: Result) -> Iterator[tuple[str, ...]]:
    found = figures(result)
    peer = found.get(PEER)
    for (*cells, less, card, fewer), each in zip(rows_of(result), found.values(), strict=True):
        against = "" if each.name == NONE else times(each.faster(peer))
        yield *cells, less, against, card, fewer
