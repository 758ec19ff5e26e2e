"""docs/wire.md, from the results on disk and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from study.markdown import table
from wire.card import HEADERS
from wire.figures import Figures, figures, reductions
from wire.goals import ByHosts, verdicts

Job = dict[str, Any]

PAGE = """\
# Bytes at the network card

<!-- Written by `make bench-wire` from docs/results/wire.json. Change scripts/wire/ instead. -->

What leaves a host's network card in a step, for a ResNet-50's gradients (161 tensors, 25,557,032
float32): {hosts} hosts, one rank each unless it says otherwise, Horovod on Gloo. The hosts are
network namespaces of one machine, on links of 1 Gbit/s (`scripts/netlab`). Means over the hosts of
{steps} steps; the kernel's packet scheduler counts, between two barriers.

- *on the card*: bytes of all packets with their Ethernet, IP and TCP headers, {headers} a packet,
  acknowledgements and Horovod's negotiation included. On a cable each packet is 24 bytes longer.
- *cycles*: Horovod's ranks talk once a cycle, whatever they exchange: by default every
  millisecond. The first tables are at a cycle of {quiet} ms (`HOROVOD_CYCLE_TIME`), where less of
  that is left; the last at the default. A cycle that exchanges something lasts longer. The cycles
  of a step are counted in Horovod's timeline.
- *idle*: what the same job sends when it does nothing for as long as a step took; these steps took
  as long as a busy machine made them. *talk*: what it sends in as many cycles when it does nothing.
- *fewer*: how many times fewer bytes on the card than with Horovod's dense allreduce.
- *stats()*: the bytes that `TopKEF.of(optimizer).stats()` says leave a host; *carried / stats()*:
  what the packets carry, without headers and without talk, against that.

## Goals

At a cycle of {quiet} ms, one rank a host. The least of all numbers of hosts: with all that leaves
the card, and without talk, which is then taken off dense as well.

{goals}

## How many times fewer bytes than dense

At a cycle of {quiet} ms, with all that leaves the card.

{reduced}

### Two ranks a host

{shared}

## Bytes on the card

{details}

Machine: {cpu}, {cores} cores that other work shared, Linux {kernel}, congestion control
{congestion}, Python {python}, PyTorch {torch}, Horovod {horovod}. Date: {date}. Command:
`make bench-wire`. The authors' bias: they want few bytes for TopKEF.
"""


def page(jobs: list[Job]) -> str:
    """All of it."""
    quiet = max(job["cycle"] for job in jobs)
    found = _by_hosts(job for job in jobs if job["cycle"] == quiet and job["slots"] == 1)
    shared = _by_hosts(job for job in jobs if job["slots"] > 1)
    machine = jobs[-1]["machine"]
    return PAGE.format(
        hosts=f"{min(found)} to {max(found)}",
        steps=jobs[-1]["steps"],
        headers=HEADERS,
        quiet=quiet,
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


def _goals(found: ByHosts) -> str:
    rows = ((v.goal, v.measured, v.met) for v in verdicts(found))
    return table(("goal", "measured", "met"), rows)


def _reduced(found: ByHosts) -> str:
    each = {hosts: reductions(of) for hosts, of in sorted(found.items())}
    names = next(iter(each.values()))
    rows = ((name, *(f"{of[name]:,.1f}" for of in each.values())) for name in names)
    return table(("hosts", *map(str, each)), rows)


def _detail(job: Job) -> str:
    head = "", "seconds", "cycles", "on the card", "of it headers", "idle", "talk", "fewer"
    title = f"### {job['ranks'] // job['slots']} hosts, a cycle of {job['cycle']} ms"
    title += f", {job['slots']} ranks each" * (job["slots"] > 1)
    return f"{title}\n\n{table((*head, 'stats()', 'carried / stats()'), _rows(figures(job)))}"


def _rows(found: dict[str, Figures]) -> Iterator[tuple[str, ...]]:
    reduced = reductions(found)
    for name, each in found.items():
        sizes = each.card, each.card - each.payload, each.idle, each.talk
        yield (
            name,
            f"{each.seconds:.2f}",
            f"{each.cycles:.0f}",
            *(f"{size:,.0f}" for size in sizes),
            f"{reduced[name]:,.1f}x",
            *_against_stats(each),
        )


def _against_stats(each: Figures) -> tuple[str, str]:
    if each.stats is None:
        return "", ""
    return f"{each.stats:,.0f}", f"{1 + each.disagreement:.3f}"
