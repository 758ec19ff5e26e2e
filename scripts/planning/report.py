"""docs/plan-grid.md and its picture, from the results on disk and from nothing else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from horovod_topk.cli.canvas import canvas
from horovod_topk.cost.machine import Machine, Network
from horovod_topk.cost.quantities import milliseconds
from planning import agreement
from planning.grid import CELLS, FITTED, LEAST, MOST, SETTLED
from planning.guesses import Job, Row, machine_of, rows
from planning.ways import WAYS
from study.markdown import table

MEDIAN, TENTH = 0.15, 0.30  # errors that are wanted: the median, and the 90th percentile
PICTURE = "results/plan-grid.png"  # beside the page

PAGE = """\
# The plan against measured steps

<!-- Written by `make plan-grid` from docs/results/plan-grid.json; see scripts/planning. -->

What `horovod-topk plan` says of a step ([plan.md](plan.md)), beside what a step took. The cells
were fixed beforehand: 2, 4 and 8 hosts of one rank each (`scripts/netlab`: namespaces of one
machine), on links of 100 and 300 Mbit/s and 1 Gbit/s, with the gradients of four models: dense, and
two of ours at ratio 0.01. The plan's constants are fitted on other cells, on collectives alone:
{fitted}. Its compute is a step without any exchange, measured
on the cell itself, as a user has to.

A step is the slowest rank's, from where all meet to the end of the optimizer's step; the median of
{least} to {most}, after {settled} others, of dense after one. The loss is linear, so that
backward is a pass over memory, a third to a half of a step without exchange, and all ranks share
the machine's cores, which carry the packets of its links as well: what is sent during backward
takes cores from it. So the plan is that without overlap (`--no-overlap`). This was decided when
19 cells had been measured; the last row of errors has the plan with overlap, which takes two
thirds of a step for backward, and has them free. What is tested is what an exchange takes, and
not how much of it a model hides.

Steps of dense are those of a first run. Ours, and the steps without exchange, were measured again
twice. In the first run they came after two steps, too few, since ranks, all on one machine, were
still touching memory for the first time (gpt2, sharded, eight hosts, 1 Gbit/s: 6.3 s the third
step, 2.6 the eighth); the 90th percentile of all errors was 31%. In the second, ranks that had
ended a step waited in Horovod's barrier, which takes a whole core, and so made the step longer for
those that had not: a step without exchange, which the plan starts from, seemed up to a third longer
than it is (bert-base, four hosts, 1 Gbit/s: 0.98 s, and 0.73 where they sleep); it was 29%. Now
they sleep.

{machine}

{errors}

![Planned against measured](results/plan-grid.png)

## Whether to compress

Dense's step over the fastest of ours that was measured, as planned and as measured: above 1 it
pays. Where repeats of dense and ours overlap, the measurement itself could say otherwise.

{verdicts}

## All cells

{cells}
"""


def write(jobs: Mapping[str, Job], page: Path) -> None:
    """The page and its picture."""
    found = rows(jobs)
    page.write_text(text(jobs, found))
    if found:
        draw(found, page.parent / PICTURE)


def text(jobs: Mapping[str, Job], found: Sequence[Row]) -> str:
    """The page."""
    machine = machine_of([jobs[cell.name] for cell in FITTED]) if found else None
    return PAGE.format(
        fitted=", ".join(f"{cell.hosts} hosts at {cell.rate}" for cell in FITTED),
        least=LEAST,
        most=MOST,
        settled=SETTLED,
        machine=_machine(jobs, machine),
        errors=errors(found) if found else "Not measured yet.",
        verdicts=agreement.section(found) if found else "Not measured yet.",
        cells=cells(found),
    )


def _machine(jobs: Mapping[str, Job], machine: Machine | None) -> str:
    each = [job["machine"] for job in jobs.values()]
    lines = [
        f"{one['cpu']}, {one['cores']} cores, Python {one['python']}, PyTorch {one['torch']}, "
        f"Horovod {one['horovod']} on Gloo."
        for one in each
    ]
    lines = list(dict.fromkeys(lines))
    days = sorted({one["date"] for one in each})
    lines.append(f"{len(jobs)} of {len(CELLS)} cells, {' to '.join(days[:1] + days[1:][-1:])}.")
    if machine is not None:
        lines.append(_constants(machine.network))
    return "\n".join(lines)


def _constants(network: Network) -> str:
    return (
        f"Constants: {network.goodput:.1%} of a link arrives, {milliseconds(network.latency)} ms a "
        f"message, {milliseconds(network.overhead)} ms a collective, {1e9 * network.copy:.3g} ns a "
        f"byte sent, {1e9 * network.add:.3g} ns a byte added."
    )


def errors(found: Sequence[Row]) -> str:
    """How far the plan is off, of each way and of all; and the noise floor."""
    groups = {way.name: [row for row in found if row.way == way.name] for way in WAYS[1:]}
    lines = [
        _errors(name, each, [row.planned for row in each])
        for name, each in (*groups.items(), ("all", found))
    ]
    overlapped = [row.overlapped for row in found]
    lines.append(_errors("all, if planned with overlap", found, overlapped))
    header = ["", "steps", f"median error ({MEDIAN:.0%} wanted)"]
    header += [f"90th percentile ({TENTH:.0%} wanted)", "largest", "planned / measured, median"]
    return f"{table(header, lines)}\n\n{agreement.noise(found)}"


def _errors(name: str, found: Sequence[Row], planned: Sequence[float]) -> list[str]:
    """planned: seconds, one a row."""
    pairs = list(zip(found, planned, strict=True))
    ascending = sorted(row.off(seconds) for row, seconds in pairs)
    median, tenth = statistics.median(ascending), percentile(ascending, 0.9)
    parts = statistics.median(seconds / row.measured for row, seconds in pairs)
    shares = [f"{share:.0%}" for share in (median, tenth, ascending[-1])]
    return [name, str(len(found)), *shares, f"{parts:.2f}"]


def percentile(ascending: Sequence[float], share: float) -> float:
    """By nearest rank: the least that so large a share of all does not exceed."""
    return ascending[math.ceil(share * len(ascending)) - 1]


def cells(found: Iterable[Row]) -> str:
    """Every step that was measured."""
    header = ["hosts", "link", "model", "exchange", "measured, s", "repeats spread over"]
    return table([*header, "planned, s", "error"], map(_line, found))


def _line(row: Row) -> list[str]:
    return [
        str(row.cell.hosts),
        row.cell.rate,
        row.cell.model or "",
        row.way,
        f"{row.measured:.3f}",
        f"{row.spread:.0%}",
        f"{row.planned:.3f}",
        f"{row.error:.0%}",
    ]


def draw(found: Sequence[Row], path: Path) -> None:
    """Planned against measured, all cells, a colour a way."""
    with canvas(path, width=6.5) as axes:
        for way in WAYS[1:]:
            mine = [row for row in found if row.way == way.name]
            axes.plot(
                [row.measured for row in mine],
                [row.planned for row in mine],
                "o",
                ms=4,
                alpha=0.7,
                label=way.name,
            )
        ends = [min(row.measured for row in found), max(row.measured for row in found)]
        axes.plot(ends, ends, color="#888888", linewidth=1, zorder=0)
        below, above = [(1 - TENTH) * end for end in ends], [(1 + TENTH) * end for end in ends]
        axes.fill_between(ends, below, above, color="#888888", alpha=0.15, linewidth=0)
        axes.set(xscale="log", yscale="log", xlabel="measured, seconds a step", ylabel="planned")
        axes.set_title(f"{len(found)} steps; the band is {TENTH:.0%} wide to either side")
        axes.legend(frameon=False, fontsize=8)
