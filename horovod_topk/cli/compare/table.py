"""The tables of a comparison, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from horovod_topk.cli.bench.table import aligned
from horovod_topk.cli.compare.records import DONE
from horovod_topk.cli.compare.result import Found, Row
from horovod_topk.cli.compare.uncertainty import ROUNDING, Difference

DASH = "-"


def table(found: Found) -> str:
    """The figures, the differences to dense, and the verdicts."""
    name = found.metric.name
    head = "better than dense by", "beside", f"{name}, same step", f"{name}, same time", "sooner"
    parts = [
        heading(found),
        "\n".join(aligned(_filled([_head(found), *map(_figures, found.rows)]))),
        "\n".join(aligned(_filled([head, *_differences(found)]))),
        *_verdicts(found),
        "\n".join(notes(found)),
    ]
    return "\n\n".join(part for part in parts if part)


def overview(every: Sequence[Found]) -> str:
    """A table with one row for each variant and compressor."""
    rows: list[Sequence[str]] = [("", "", "end", "better than dense by", "verdict")]
    for found in every:
        title = found.settings.title or found.settings.script.stem
        name = ", ".join([title, *(f"{key}={value}" for key, value in found.variant)])
        for row in found.rows:
            word, gain = "", ""
            if row.verdict:
                word = row.verdict.word
                gain = next((interval(b.steps) for b in row.verdict.beside.values()), DASH)
            rows.append((name, row.name, number(row.final), gain, word))
    return "\n".join(aligned(rows))


def _filled(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The columns that have a figure; the first row is the head."""
    columns = [c for c in zip(*rows, strict=True) if len(rows) == 1 or {*c[1:]} != {DASH}]
    return [list(row) for row in zip(*columns, strict=True)]


def heading(found: Found) -> str:
    """A line that describes the comparison."""
    settings = found.settings
    where = f"{settings.ranks} ranks on {settings.hosts or 'this host'}"
    if settings.network:
        where = f"{settings.ranks} ranks on emulated hosts, links of {settings.network}"
    if settings.simulated:
        where = f"{settings.ranks} simulated ranks"
    seeds = {seed for runs in found.runs.values() for seed in runs}
    variant = "".join(f", {name}={value}" for name, value in found.variant)
    better = "higher" if found.metric.higher_is_better else "lower"
    return (
        f"{settings.title or settings.script.name}{variant}: {where}, "
        f"{len(seeds)} of {len(settings.seeds)} seeds; {found.metric.name}, {better} is better"
    )


def _head(found: Found) -> tuple[str, ...]:
    at = DASH if found.budget is None else f"at {duration(found.budget)}"
    return (
        "",
        f"{found.metric.name}, end",
        at,
        "s a step",
        "waiting, s",
        "bytes a step",
        "to target",
        "bytes to it",
        "memory, MB",
    )


def _figures(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        number(row.final),
        number(row.at_time),
        number(row.seconds, 3),
        number(row.waited, 3),
        DASH if row.bytes is None else f"{row.bytes:,.0f}",
        DASH if row.to_target is None else duration(row.to_target),
        DASH if row.bytes_to_target is None else f"{row.bytes_to_target:.3g}",
        DASH if row.memory is None else f"{row.memory / 1e6:,.0f}",
    )


def _differences(found: Found) -> Iterator[tuple[str, ...]]:
    """Differences paired by seed; positive is better."""
    for row in found.rows:
        for baseline, beside in row.verdict.beside.items() if row.verdict else ():
            yield (
                row.name,
                baseline,
                interval(beside.steps),
                DASH if beside.time is None else interval(beside.time),
                factor(beside.sooner),
            )


def _verdicts(found: Found) -> Iterator[str]:
    lines = [
        f"{row.name}: {row.verdict.word} ({row.verdict.because})"
        for row in found.rows
        if row.verdict
    ]
    yield "\n".join([*lines, f"Verdict: {found.sentence}."] if found.sentence else lines)


def notes(found: Found) -> Iterator[str]:
    """Notes that explain the figures."""
    for row in found.rows:
        for seed, outcome in row.outcomes.items():
            if outcome != DONE:
                run = found.runs[row.name][seed]
                yield f"{row.name}, seed {seed}: {outcome} {run.problem.splitlines()[:1]}"
    runs = [run for runs in found.runs.values() for run in runs.values()]
    if any(run.status == DONE and not run.seeded for run in runs):
        yield (
            "The script never asked for its seed: runs are repeats, and may be more alike than "
            "seeds are. Call horovod_topk.seed(), or give --seed-argument"
        )
    if not found.settings.simulated and not any(run.waited for run in runs):
        yield "Waiting for gradients is measured in PyTorch alone; s a step is all of a step."


def interval(found: Difference) -> str:
    """Format a mean and its confidence interval."""
    if not found.values:
        return DASH
    mean = f"{0.0 if abs(found.mean) < ROUNDING else found.mean:+.4g}"
    if math.isinf(found.low) and math.isinf(found.high):
        return mean
    return f"{mean} [{found.low:+.3g}, {found.high:+.3g}]"


def factor(found: Difference) -> str:
    """Format a mean of logarithms as a factor, with its confidence interval."""
    if not found.values:
        return DASH
    mean = f"{math.exp(found.mean):.3g}x"
    if math.isinf(found.low):
        return mean
    return f"{mean} [{math.exp(found.low):.3g}, {_exp(found.high):.3g}]"


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def number(value: float | None, digits: int = 4) -> str:
    """Format a figure, or a dash for None."""
    return DASH if value is None else f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """Format a time in a suitable unit."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
