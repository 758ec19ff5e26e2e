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
  acknowledgements and Horovod's negotiation included. On a cable each packet is 24 bytes longer.
- *idle*: what the same job sends when it does nothing for as long as a step took. Horovod's ranks
  talk once a cycle, whatever they exchange: by default every millisecond. The first tables are at a
  cycle of {quiet} ms (`HOROVOD_CYCLE_TIME`), where less of that is left; the last at the default.
  The longer a step takes, the more of it: these steps took as long as a busy machine made them.
- *fewer*: how many times fewer bytes on the card than with Horovod's dense allreduce.
- *stats()*: the bytes that `TopKEF.of(optimizer).stats()` says a rank sends; *carried / stats()*:
  what the packets carry, without headers, against that: with idle talk taken off, and all of it.
  Ranks that exchange talk less than idle ones, so that the truth lies between; where idle talk
  could be half of it, only the most is given.

## Goals

At a cycle of {quiet} ms. The least of all numbers of hosts: with all that leaves the card, and
without idle talk, which is then taken off dense as well (a little too much, so that the truth lies
between).

{goals}

## How many times fewer bytes than dense

At a cycle of {quiet} ms, with all that leaves the card.

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
    rows = ((v.goal, v.measured, v.met) for v in verdicts(found))
    return table(("goal", "measured", "met"), rows)


def _reduced(found: ByHosts) -> str:
    each = {hosts: reductions(ways_) for hosts, ways_ in found.items()}
    rows = ((way.name, *(f"{each[h][way.name]:,.1f}" for h in sorted(each))) for way in ways())
    return table(("hosts", *map(str, sorted(each))), rows)


def _detail(job: Job) -> str:
    head = "", "seconds", "on the card", "of it headers", "idle", "fewer", "stats()"
    title = f"### {job['ranks']} hosts, a cycle of {job['cycle']} ms"
    return f"{title}\n\n{table((*head, 'carried / stats()'), _rows(figures(job)))}"


def _rows(found: dict[str, Figures]) -> Iterator[tuple[str, ...]]:
    reduced = reductions(found)
    for name, each in found.items():
        yield (
            name,
            f"{each.seconds:.2f}",
            f"{each.card:,.0f}",
            f"{each.card - each.payload:,.0f}",
            f"{each.idle:,.0f}",
            f"{reduced[name]:,.1f}x",
            *_against_stats(each),
        )


def _against_stats(each: Figures) -> tuple[str, str]:
    if each.stats is None:
        return "", ""
    least, most = each.carried
    told = f"{least:.2f} to {most:.2f}" if least > 0.5 else f"at most {most:.2f}"
    return f"{each.stats:,.0f}", told
