"""The output of `horovod-topk tune`: runs as they end, frontier, verdict, a line to paste."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

from horovod_topk.cli.bench.table import aligned
from horovod_topk.cli.compare.records import DONE, STOPPED, Record
from horovod_topk.cli.compare.table import DASH, number
from horovod_topk.cli.compare.uncertainty import BETTER, difference
from horovod_topk.cli.lines import hanging
from horovod_topk.cli.tune.search import DENSE, Search
from horovod_topk.cli.tune.space import DEFAULT, Cost, Setting
from horovod_topk.cost.quantities import milliseconds
from horovod_topk.cost.verdict import AS_FAST

MODULES = (  # what a script has, and the module whose compressors it takes
    (r"\bfully_shard\b", "fsdp"),
    (r"\bDistributedDataParallel\b", "ddp"),
    (r"\b(keras|tensorflow)\b", "tensorflow"),
    ("", "torch"),
)
ATTACHED = {
    "fsdp": '.attach(model, optimizer, between=mesh["replicate"])',
    "ddp": ".attach(model, optimizer)",
}


def progress(title: str, record: Record, lost: float | None) -> str:
    """Format a line about a run that has ended."""
    points, status = record.points, record.status
    how = f"{status} after {points[-1].step} steps" if points else status
    lose = DASH if lost is None else f"{lost:+.1%}"
    return f"{title:<37} seed {record.cell.seed:<4}{lose:>9} of quality lost, {how}"


def lines(search: Search, script: Path, wall: float) -> Iterator[str]:
    """Yield the frontier, its cost, the verdict, and the line to paste."""
    yield from aligned([_head(search), *_rows(search)])
    yield ""
    runs = search.runs
    stopped = sum(each.status == STOPPED for each in runs.records)
    chosen, sentence = verdict(search)
    yield hanging(
        f"cost: {len(runs.records)} runs, of which {stopped} were stopped early; "
        f"{runs.steps:,} steps, as of {runs.steps / search.steps:.1f} whole runs; "
        f"{runs.seconds:.0f} s of training. "
        f"{runs.made} of the runs were made now, in {wall:.0f} s.",
        indent=0,
    )
    yield hanging(f"verdict: {sentence}.", indent=0)
    if chosen is not None:
        yield from ("", *paste(chosen, script))


def frontier(search: Search) -> list[Setting]:
    """Return settings that no other beats in both cost and quality, of those with a whole run."""
    mean = {each: statistics.fmean(search.losses(each)) for each in search.whole}
    found = sorted(mean, key=lambda each: (search.cost(each), mean[each]))
    least, kept = math.inf, list[Setting]()
    for setting in found:
        if mean[setting] < least:
            least = mean[setting]
            kept.append(setting)
    return kept


def _head(search: Search) -> tuple[str, ...]:
    timed = ("step, ms",) if search.dense.seconds is not None else ()
    return ("frontier", "bytes", "fewer", *timed, search.metric.name, "lost, %", "")


def _rows(search: Search) -> Iterator[tuple[str, ...]]:
    dense = [each for each in search.runs.records if each.cell.compressor == DENSE]
    yield _row("dense float32", search, search.dense, dense, [], "")
    own = [each for each in (DEFAULT, search.best) if each in search.whole]
    for each in sorted({*frontier(search), *own}, key=search.cost, reverse=True):
        done = [r for r in search.tried[each].values() if r.outcome(search.metric.name) == DONE]
        marks = ["default"] * (each == DEFAULT) + ["best"] * (each == search.best)
        title, cost = each.title, search.costs[each]
        yield _row(title, search, cost, done, search.losses(each), ", ".join(marks))


def _row(
    title: str, search: Search, cost: Cost, runs: list[Record], losses: list[float], mark: str
) -> tuple[str, ...]:
    ends = [run.curve(search.metric.name)[-1][2] for run in runs]
    timed = () if cost.seconds is None else (milliseconds(cost.seconds),)
    found = difference([100 * each for each in losses])
    interval = "" if found.low == -math.inf else f" [{found.low:+.0f}, {found.high:+.0f}]"
    return (
        title,
        f"{cost.bytes:,.0f}",
        f"{search.dense.bytes / cost.bytes:.1f}x",
        *timed,
        number(statistics.fmean(ends)),
        f"{found.mean:+.1f}{interval}" if losses else DASH,
        mark,
    )


def verdict(search: Search) -> tuple[Setting | None, str]:
    """Return the setting to use, or None for dense, and a sentence that gives the reason."""
    best, limit = search.best, search.budget.lost
    if best is None:
        return None, f"no setting that was tried loses {limit or 0:.1%} at most. Do not compress"
    if best == DEFAULT:
        return DEFAULT, "the default was as good: nothing that was tried is better"
    default = search.costs[DEFAULT]
    if DEFAULT not in search.whole:
        over = f"sends {default.bytes:,.0f} bytes a step"
        if default.seconds is not None:
            over += f" and takes {milliseconds(default.seconds)} ms"
        return best, f"{best.title}; the default {over}, which the budget does not allow"
    if limit is not None:
        times = search.cost(DEFAULT) / search.cost(best)
        if not search.is_good(DEFAULT):
            return best, f"{best.title}; the default loses more than {limit:.1%}"
        if times <= AS_FAST:
            return DEFAULT, "the default was as good: it costs as little"
        unit = "bytes" if search.costs[best].seconds is None else "seconds"
        return best, f"{best.title}: {times:.2f} times fewer {unit} a step than the default"
    pairs = zip(search.losses(DEFAULT), search.losses(best), strict=False)
    gain = difference([theirs - ours for theirs, ours in pairs])
    if gain.word != BETTER:
        return DEFAULT, (
            f"the default was as good: {best.title} ends {gain.mean:+.1%} of dense better, "
            "within the noise of seeds. More --seeds may tell"
        )
    return best, f"{best.title}: ends {gain.mean:.1%} of dense better than the default"


def paste(setting: Setting, script: Path) -> tuple[str, str]:
    """Return the import and the line of code that use a setting in the script's framework."""
    text = script.read_text(errors="replace")
    module = next(name for pattern, name in MODULES if re.search(pattern, text))
    names, call = setting.method, setting.call.removesuffix("()")
    if setting.every > 1:
        names += ", LocalSteps"
        of = "trainable_variables" if module == "tensorflow" else "named_parameters()"
        line = f"LocalSteps(optimizer, model.{of}, every={setting.every},\n    compression={call})"
    elif module in ATTACHED:
        line = f"{setting.call}{ATTACHED[module]}"
    else:
        line = f"hvd.DistributedOptimizer(..., compression={call})"
    return f"from horovod_topk.{module} import {names}", line
