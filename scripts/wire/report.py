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
- *idle*: what the same job sends when it does nothing for as long as a step took; these steps took
  as long as a busy machine made them. Horovod's ranks talk once a cycle, whatever they exchange: by
  default every millisecond. The first tables are at a cycle of {quiet} ms (`HOROVOD_CYCLE_TIME`),
  where less of that is left; the last at the default.
- *fewer*: how many times fewer bytes on the card than with Horovod's dense allreduce.
- *cycles*: a cycle that exchanges something lasts longer than an idle one, so that *idle* is more
  than what was said meanwhile. Steps and idleness are tried once more while Horovod's timeline
  counts cycles (which makes them say more, so that this is no measure of *on the card*). What an
  idle cycle says, times the cycles of a step, is *talk*; *exchanged* is what is left of the bytes
  on the card then, headers included.
- *stats()*: the bytes that `TopKEF.of(optimizer).stats()` says leave a host; *carried / stats()*:
  what is exchanged, without headers, against that. Beyond a byte a byte there is a step's framing,
  whatever is sent: Horovod's requests and responses for its collectives. A line through an
  exchange's formats and ratios tells the two apart.

## Goals

At a cycle of {quiet} ms, one rank a host. The least of all numbers of hosts: with all that leaves
the card, and of what is exchanged, without talk, which is then taken off dense as well.

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
