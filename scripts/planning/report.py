"""Write docs/plan-grid.md and its picture from the stored results alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from horovod_topk.cli.canvas import canvas
from horovod_topk.cost.machine import Machine, Network
from horovod_topk.cost.quantities import milliseconds
from planning import agreement
from planning.grid import CELLS, FITTED, LEAST, MOST, SETTLED
from planning.guesses import Job, Row, machine_of, rows
from planning.strategies import STRATEGIES
from study.markdown import table

MEDIAN, TENTH = 0.15, 0.30  # wanted errors: the median, and the 90th percentile
PICTURE = "results/plan-grid.png"  # beside the page
PLANS: dict[str, Callable[[Row], float]] = {
    "without overlap": lambda row: row.planned,
    "with overlap": lambda row: row.overlapped,
}

PAGE = """\
# The plan against measured steps

<!-- Written by `make plan-grid` from docs/results/plan-grid.json; see scripts/planning. -->

This page compares the step times that `horovod-topk plan` predicts ([plan.md](plan.md)) with
measured step times.

- **Cells**: 2, 4 and 8 hosts with one rank each, links of 100 Mbit/s, 300 Mbit/s and 1 Gbit/s, and
  the gradient shapes of four models. All cells were fixed before anything was measured.
- **Exchanges**: dense (Horovod's allreduce), and TopKEF's allgather of float32 and sharded exchange
  of int8, both at ratio 0.01.
- **Network**: emulated, on Gloo. The hosts are network namespaces of one machine (`scripts/netlab`)
  and share its CPU cores. No GPU.
- **Constants**: fitted on collectives alone, on other cells:
  {fitted}.
  The compute time is a measured step without exchange on the same cell, as a user would measure it.

## Results

{errors}

Error: the distance between planned and measured time, as a share of the measured time.

**Which error applies to you?** `plan` assumes by default that backward overlaps with the exchange.
The rows *with overlap* are for this default. `plan --no-overlap` gives the other rows. In this
measurement hardly anything can overlap: the loss is linear, so backward is one pass over memory,
and all ranks share the cores that also carry the packets. So the plan without overlap is the one
that this page tests. (This was decided when 19 cells had been measured.) How much of an exchange a
real model hides was not tested.

{verdict}

![Planned against measured](results/plan-grid.png)

## Whether to compress

The dense step's time, divided by the step time of the fastest TopKEF exchange that was measured.
Above 1, compression pays. *Repeats tell*: all repeats of dense are slower than all repeats of that
exchange, or all are faster. Planned without overlap.

{verdicts}

## How it was measured

A step is timed on the slowest rank, from the moment when all ranks start together to the end of the
optimizer's step. The figure is the median of {least} to {most} repeats, after {settled} steps of
warm-up (dense: one).

Dense steps come from a first run. TopKEF's steps, and the steps without exchange, were measured
again twice, because the first two runs had faults:

- The first run had two steps of warm-up. That was too few, because ranks still touched memory for
  the first time (gpt2, sharded, eight hosts, 1 Gbit/s: 6.3 s in the third step, 2.6 s in the
  eighth). The 90th percentile of all errors was 31%.
- In the second run, ranks that had finished a step waited in Horovod's barrier. The barrier spins,
  which took cores from the other ranks (bert-base, four hosts, 1 Gbit/s: 0.98 s for a step without
  exchange, and 0.73 s where ranks sleep). The 90th percentile was 29%.

{machine}

## All cells

Planned without overlap.

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
        fitted="; ".join(f"{cell.hosts} hosts at {cell.rate}" for cell in FITTED),
        least=LEAST,
        most=MOST,
        settled=SETTLED,
        machine=_machine(jobs, machine),
        errors=errors(found) if found else "Not measured yet.",
        verdict=agreement.totals(found) if found else "",
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
        f"Fitted constants: goodput {network.goodput:.1%} of a link's rate, "
        f"{milliseconds(network.latency)} ms a message, {milliseconds(network.overhead)} ms a "
        f"collective, {1e9 * network.copy:.3g} ns a byte sent, {1e9 * network.add:.3g} ns a byte "
        "added."
    )


def errors(found: Sequence[Row]) -> str:
    """How far the plan is off, without and with overlap, and the noise floor."""
    groups = {
        strategy.name: [row for row in found if row.strategy == strategy.name]
        for strategy in STRATEGIES[1:]
    }
    lines = [
        _errors(plan, name, each, [seconds(row) for row in each])
        for plan, seconds in PLANS.items()
        for name, each in (*groups.items(), ("all", found))
    ]
    header = ["plan", "exchange", "steps", f"median error ({MEDIAN:.0%} wanted)"]
    header += [f"90th percentile ({TENTH:.0%} wanted)", "largest", "planned / measured, median"]
    return f"{table(header, lines)}\n\n{agreement.noise(found)}"


def _errors(plan: str, name: str, found: Sequence[Row], planned: Sequence[float]) -> list[str]:
    """planned: seconds, one a row."""
    pairs = list(zip(found, planned, strict=True))
    ascending = sorted(row.off(seconds) for row, seconds in pairs)
    median, tenth = statistics.median(ascending), percentile(ascending, 0.9)
    parts = statistics.median(seconds / row.measured for row, seconds in pairs)
    shares = [f"{share:.0%}" for share in (median, tenth, ascending[-1])]
    return [plan, name, str(len(found)), *shares, f"{parts:.2f}"]


def percentile(ascending: Sequence[float], share: float) -> float:
    """By nearest rank: the least value that this share of all values does not exceed."""
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
        row.strategy,
        f"{row.measured:.3f}",
        f"{row.spread:.0%}",
        f"{row.planned:.3f}",
        f"{row.error:.0%}",
    ]


def draw(found: Sequence[Row], path: Path) -> None:
    """Planned against measured steps of all cells, a colour for each exchange."""
    with canvas(path, width=6.5) as axes:
        for strategy in STRATEGIES[1:]:
            mine = [row for row in found if row.strategy == strategy.name]
            axes.plot(
                [row.measured for row in mine],
                [row.planned for row in mine],
                "o",
                ms=4,
                alpha=0.7,
                label=strategy.name,
            )
        ends = [min(row.measured for row in found), max(row.measured for row in found)]
        axes.plot(ends, ends, color="#888888", linewidth=1, zorder=0)
        below, above = [(1 - TENTH) * end for end in ends], [(1 + TENTH) * end for end in ends]
        axes.fill_between(ends, below, above, color="#888888", alpha=0.15, linewidth=0)
        axes.set(xscale="log", yscale="log", xlabel="measured, seconds a step", ylabel="planned")
        axes.set_title(f"{len(found)} steps; the band is {TENTH:.0%} wide to either side")
        axes.legend(frameon=False, fontsize=8)
