"""docs/wire.md, from the results on disk and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from study.markdown import table
from wire.card import HEADERS
from wire.figures import Figures, figures, reductions
from wire.goals import ByHosts, verdicts
from wire.ways import ways

Job = dict[str, Any]

PAGE = """\
# Bytes at the network card

<!-- Written by `make bench-wire` from docs/results/wire.json. Change scripts/wire/ instead. -->

What leaves a host's network card in a step, for a ResNet-50's gradients (161 tensors, 25,557,032
float32): {hosts} hosts, one rank each, Horovod on Gloo. The hosts are network namespaces of one
machine, on links of 1 Gbit/s (`scripts/netlab`). Means over the hosts of {steps} steps; the
kernel's packet scheduler counts, between two barriers.

- *on the card*: bytes of all packets with their Ethernet, IP and TCP headers, {headers} a packet,
  acknowledgements included. On a cable each packet is 24 bytes longer.
- *idle*: what the same job sends when it does nothing for as long as its steps took. Horovod's
  ranks talk once a cycle, whatever they exchange: by default every millisecond. At a cycle of
  {quiet} ms (`HOROVOD_CYCLE_TIME`) little of that is left; the last tables are at the default.
- *fewer*: how many times fewer bytes than Horovod's dense allreduce, headers included and idle
  taken off, of both.
- *stats()*: the bytes that `TopKEF.of(optimizer).stats()` says a rank sends; *card / stats()*: what
  the packets carry (without headers, idle taken off) against that.

## Goals

{goals}

## How many times fewer bytes than dense

At a cycle of {quiet} ms.

{reduced}

## Bytes on the card

{details}

Machine: {cpu}, {cores} cores that other work shared, Linux {kernel}, congestion control
{congestion}, Python {python}, PyTorch {torch}, Horovod {horovod}. Date: {date}. Command:
`make bench-wire`. The authors' bias: they want few bytes for TopKEF.
"""


def page(jobs: list[Job]) -> str:
    """All of it."""
    quiet = max(job["cycle"] for job in jobs)
    found: ByHosts = {job["ranks"]: figures(job) for job in jobs if job["cycle"] == quiet}
    machine = jobs[-1]["machine"]
    return PAGE.format(
        hosts=f"{min(found)} to {max(found)}",
        steps=jobs[-1]["steps"],
        headers=HEADERS,
        quiet=quiet,
        goals=_goals(found),
        reduced=_reduced(found),
        details="\n\n".join(_detail(job) for job in jobs),
        congestion=machine["congestion control"],
        **{key: machine[key] for key in ("cpu", "cores", "kernel", "python", "torch")},
        horovod=machine["horovod"],
        date=machine["date"],
    )


def _goals(found: ByHosts) -> str:
    rows = ((v.goal, v.measured, "yes" if v.met else "**no**") for v in verdicts(found))
    return table(("goal", "measured", "met"), rows)


def _reduced(found: ByHosts) -> str:
    each = {hosts: reductions(ways_) for hosts, ways_ in found.items()}
    rows = ((way.name, *(f"{each[h][way.name]:,.1f}" for h in sorted(each))) for way in ways())
    return table(("hosts", *map(str, sorted(each))), rows)


def _detail(job: Job) -> str:
    found = figures(job)
    head = "", "seconds", "on the card", "idle", "fewer", "fewer, idle included", "stats()"
    title = f"### {job['ranks']} hosts, a cycle of {job['cycle']} ms"
    return f"{title}\n\n{table((*head, 'card / stats()'), _rows(found))}"


def _rows(found: dict[str, Figures]) -> Iterator[tuple[str, ...]]:
    dense = next(iter(found.values())).card
    reduced = reductions(found)
    for name, each in found.items():
        yield (
            name,
            f"{each.seconds:.2f}",
            f"{each.card:,.0f}",
            f"{each.idle:,.0f}",
            f"{reduced[name]:,.1f}x",
            f"{dense / each.card:,.1f}x",
            "" if each.stats is None else f"{each.stats:,.0f}",
            "" if each.stats is None else f"{1 + each.disagreement:.3f}",
        )
