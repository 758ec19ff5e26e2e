"""docs/wire.md, from the results on disk and from nothing else."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from study.markdown import table
from wire.figures import Figures, figures, reductions
from wire.goals import ByHosts, verdicts
from wire.nic import HEADERS

Job = dict[str, Any]

PAGE = """\
# Bytes at the network card

<!-- Written by `make bench-wire` from docs/results/wire.json. Change scripts/wire/ instead. -->

This page counts the bytes that leave a host's network card in one training step, and compares them
with the bytes that `TopKEF.of(optimizer).stats()` reports.

- **Gradients**: synthetic, in the shapes of a ResNet-50 (161 tensors, 25,557,032 float32).
- **Ranks**: {hosts} hosts, one rank each unless a heading says otherwise. Horovod on Gloo, CPUs.
- **Network**: emulated. The hosts are network namespaces of one machine (`scripts/netlab`) with
  links of 1 Gbit/s.
- **Count**: by the kernel's packet scheduler, between two barriers. Means over hosts and
  {steps} steps.
- **Indices are packed**, as on CPUs. GPUs use plain indices, so payloads are larger: with 8 ranks,
  float32 values and ratio 0.01, payloads are then 12 times smaller than dense and not 18.4 times
  (`horovod-topk bytes --ranks 8 --device cuda`). Nothing was measured on a GPU.

## The card sends more than `stats()` reports

`stats()` counts payload bytes alone. The card also sends:

- headers: {headers} bytes a packet (Ethernet, IP, TCP), and packets of TCP acknowledgements,
- Horovod's negotiation: its ranks exchange messages in every cycle, with gradients or without.

{more}

Bytes on the card, divided by the bytes of `stats()`, one rank a host:

{overhead}

Horovod's default cycle is 1 ms. A cycle of {quiet} ms (`HOROVOD_CYCLE_TIME={quiet}`) sends fewer
messages while ranks are idle. On a cable, each packet takes 24 bytes more than counted here.

## Goals

At a cycle of {quiet} ms, one rank a host. Each goal holds for every number of hosts or not at all;
the worst number of hosts is shown. "Without negotiation" subtracts the bytes of Horovod's idle
cycles, from dense as well. The last goal is about payload bytes alone: a byte more in `stats()` is
a byte more in the packets, but the packets have headers and each step has a constant part.

{goals}

## How many times fewer bytes than dense

At a cycle of {quiet} ms. All bytes on the card count, for dense as well.

{reduced}

### Two ranks a host

{shared}

## All measurements

- *seconds*: of a step. The machine was busy with other work.
- *on the card*: bytes of all packets in a step, with headers, acknowledgements and negotiation.
- *idle*: bytes that the same job sends in the same time when it exchanges nothing.
- *fewer*: bytes on the card with Horovod's dense allreduce, divided by this row's.
- *cycles*: Horovod's negotiation cycles in a step, from a second try with Horovod's timeline on.
  The timeline adds messages, so *on the card* comes from the first try.
- *exchanged*: bytes on the card in the second try, less the bytes of as many idle cycles. Headers
  are included.
- *carried / stats()*: *exchanged* without headers, divided by *stats()*. It is above 1 because of
  Horovod's requests and responses for each collective.
- Empty cells: cycles are counted at {quiet} ms only; with several ranks a host, `stats()` has the
  bytes of a host for hierarchical alone.

{details}

Machine: {cpu}, {cores} cores that other work shared, Linux {kernel}, congestion control
{congestion}, Python {python}, PyTorch {torch}, Horovod {horovod}. Date: {date}. Command:
`make bench-wire`. The authors' bias: they want few bytes for TopKEF.
"""
EXAMPLES = (((8, 50), "sharded, int8, 0.01"), ((2, 1), "allgather, int8, 0.01"))


def page(jobs: list[Job]) -> str:
    """The whole page."""
    quiet = max(job["cycle"] for job in jobs)
    found = _by_hosts(job for job in jobs if job["cycle"] == quiet and job["slots"] == 1)
    shared = _by_hosts(job for job in jobs if job["slots"] > 1)
    machine = jobs[-1]["machine"]
    return PAGE.format(
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
        **{key: machine[key] for key in ("cpu", "cores", "kernel", "python", "torch")},
        horovod=machine["horovod"],
        date=machine["date"],
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
