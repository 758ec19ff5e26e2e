"""A run's results as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from horovod_topk.cli.bench.figures import Figures, Result, dense_of, figures
from horovod_topk.cli.bench.methods import FSDP_NONE, KINDS, NONE, TOPK
from horovod_topk.cli.lines import WIDTH
from horovod_topk.cli.options import with_optimizer
from horovod_topk.cost.quantities import count, rate

SCRIPT = "script"  # value of "optimizer" in results of a script
HEAD = ("", "step, s", "exchange, s", "from", "to", "CPU, s", "faster", "card, bytes", "fewer")


def table(result: Result) -> str:
    """The table, with a line about the run above it and notes below it."""
    rows = [HEAD, *rows_of(result)]
    return "\n".join([heading(result), *aligned(rows), *notes(result), verdict(result)])


def heading(result: Result) -> str:
    """A line that describes the run."""
    tensors = count(result["tensors"], "tensor")
    parts = [
        f"{result['model']}: {result['elements']:,} float32 in {tensors}",
        f"{count(result['ranks'], 'rank')} on {count(result['hosts'], 'host')}",
    ]
    if result["rate"]:
        parts.append(f"{rate(result['rate'])} a host")
    if result["compute"]:
        parts.append(f"backward {result['compute']} s")
    optimizer = result.get("optimizer", SCRIPT)
    if optimizer != SCRIPT:
        parts.append(with_optimizer(optimizer))
    if result["idle parameters"]:
        parts.append(f"{result['idle parameters']} idle parameters")
    return ", ".join(parts)


def verdict(result: Result) -> str:
    """A sentence about the first compressor of this package beside dense."""
    found = figures(result)
    kinds = {*KINDS} - {TOPK}
    ours = next((each for each in found if each not in kinds), None)
    factor = None if ours is None else found[ours].faster(dense_of(found, ours))
    if result["hosts"] == 1:
        claim = "verdict: none. All ranks share one host, and loopback is no network"
        if factor is not None:
            claim += f": {times(factor)} says nothing about hosts"
        return f"{claim}. Time it on several hosts, or ask `horovod-topk plan`."
    if factor is None:
        return "verdict: none, as dense and a compressor were not both timed."
    beside = "faster" if factor > 1 else "slower"
    return f"verdict: {ours} exchanges {times(max(factor, 1 / factor))} {beside} than dense."


def rows_of(result: Result) -> Iterator[tuple[str, ...]]:
    """The rows of all methods, the step without exchange first."""
    found = figures(result)
    for each in found.values():
        dense = dense_of(found, each.name)
        yield each.name, f"{each.step:.3f}", *_exchange(each), *_bytes(each, dense)


def _exchange(each: Figures) -> tuple[str, ...]:
    if each.name == NONE:
        return "", "", "", ""
    found = each.exchange, each.least, each.most, each.cpu
    return tuple("-" if seconds is None else f"{seconds:.3f}" for seconds in found)


def _bytes(each: Figures, dense: Figures | None) -> tuple[str, str, str]:
    counted = "-" if each.bytes is None else f"{each.bytes:,.0f}"
    if each.name == NONE:
        return "", counted, ""
    return times(each.faster(dense)), counted, times(each.fewer(dense))


def times(factor: float | None) -> str:
    """Format a factor, or a dash for None."""
    return "-" if factor is None else f"{factor:,.1f}x"


def notes(result: Result) -> Iterator[str]:
    """Notes that explain the columns."""
    rounds = len(result["methods"][0]["seconds"])
    yield (
        f"Medians of {rounds} rounds, of the slowest rank; exchange: beyond the step without one "
        "in the same round; CPU: a rank's seconds of a core beyond it."
    )
    if any(method["name"] == FSDP_NONE for method in result["methods"]):
        nodes = "the two halves of the ranks" if result["hosts"] == 1 else "each host"
        yield (
            f"FSDP2 shards within {nodes}. Its rows are beyond {FSDP_NONE}, which sends nothing "
            "between them, and faster and fewer than fsdp."
        )
    if result["hosts"] == 1:
        yield "No bytes: ranks share one host, so that nothing leaves a card."
    elif result["counter"] is None:
        yield "No bytes: nobody has named the network card: pass it as --interface eth0."
    else:
        yield (
            f"Bytes a host and step by the {result['counter']}, with headers and Horovod's idle "
            "talk, which the first row shows for its time."
        )


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table with aligned columns; the first column is text.

    Columns that do not fit the terminal follow below, beside the first column once more.
    """
    columns = list(zip(*rows, strict=True))
    longest = max(map(len, columns[0]))
    names = [f"{cell:<{longest}}" for cell in columns[0]]
    shown, width = [names], len(names[0])
    for column in columns[1:]:
        widest = max(map(len, column))
        if len(shown) > 1 and width + 2 + widest > WIDTH:
            yield from _joined(shown)
            yield ""
            shown, width = [names], len(names[0])
        shown.append([f"{cell:>{widest}}" for cell in column])
        width += 2 + widest
    yield from _joined(shown)


def _joined(columns: Sequence[Sequence[str]]) -> Iterator[str]:
    for cells in zip(*columns, strict=True):
        yield "  ".join(cells).rstrip()
