"""`print(stats)`: the table that a `Stats` prints."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horovod_topk.core.run.stats import Stats

COLUMNS = 100
FIRST = 14  # columns of the names
SHOWN = 200  # letters of each warning
WHOLE = ": sent dense"  # end of the reasons why a tensor is sent whole, inside a payload


def lines(stats: Stats) -> list[str]:
    """The lines of the table; none is longer than 100 columns."""
    found = list[str]()
    for name, text in _rows(stats):
        found += textwrap.wrap(
            text,
            COLUMNS,
            initial_indent=f"{name:<{FIRST}}",
            subsequent_indent=" " * FIRST,
            break_on_hyphens=False,
        )
    return found


def _rows(stats: Stats) -> Iterator[tuple[str, str]]:
    if not stats.active:
        yield "compression", f"off: {'; '.join(stats.skipped.values()) or 'nothing is exchanged'}"
        yield "warnings", _warnings(stats)
        return
    because = f" ({stats.because})" if stats.because else ""
    size = f"{stats.elements:,} elements in {_count(stats.buckets, 'bucket')}"
    yield "exchange", f"{stats.exchange}{because} among {stats.ranks} ranks, {size}"
    yield (
        "bytes a step",
        f"{stats.sent_bytes:,} sent by this rank, {_fewer(stats.sent_bytes, stats.dense_bytes)}",
    )
    total, dense = stats.total_sent_bytes, stats.total_dense_bytes
    yield "bytes so far", f"{total:,} sent by this rank, {_fewer(total, dense)}"
    whole = {name: why for name, why in stats.skipped.items() if why.endswith(WHOLE)}
    own = _count(len(stats.ratios), "tensor") + " of another ratio" if stats.ratios else ""
    yield "sent whole", "; ".join(filter(None, [_reasons(whole) or "no tensor", own]))
    if rest := _reasons({k: why for k, why in stats.skipped.items() if k not in whole}):
        yield "by Horovod", rest
    yield "residual", _residual(stats)
    fallen = "".join(f"; fell back ({why}: {n})" for why, n in stats.fallbacks.items())
    ended = f"{stats.steps:,} committed, {stats.rolled_back:,} rolled back"
    yield "steps", f"{ended}; now at ratio {stats.level:g}{fallen}"
    each = [f"{part} {size:.3g}" for part, size in stats.element_bytes.items() if size >= 0.01]
    parts = f" ({', '.join(each)} an element)" if each else ""
    yield "memory", f"{stats.memory_bytes:,} bytes of residuals, method's state and payloads{parts}"
    if stats.late:
        yield "late", _late(stats.late)
    if stats.lost_ranks:
        yield "lost", f"{_count(stats.lost_ranks, 'rank')}, residual norm {stats.lost_norm:.3g}"
    yield "warnings", _warnings(stats)


def _fewer(sent: int, dense: int) -> str:
    times = f": {dense / sent:,.1f} times fewer" if sent else ""
    return f"{dense:,} in a dense allreduce{times}"


def _residual(stats: Stats) -> str:
    ratio = stats.residual_norm_ratio
    if ratio is None and stats.gradient_norm:
        ratio = stats.residual_norm / stats.gradient_norm
    norms = f"of the last step: norms {stats.residual_norm:.3g} and {stats.gradient_norm:.3g}"
    owned = f"; owner's residual {stats.owned_norm:.3g}" if stats.owned_norm else ""
    when = "" if stats.residual_norm_ratio is None else " in the last sampled step"
    shown = "no gradient yet" if ratio is None else f"{ratio:.3g} times the gradient{when}"
    return f"{shown} ({norms}){owned}"


def _reasons(tensors: Mapping[str, str]) -> str:
    """Group tensors by the reason why they are sent whole; name one tensor of each group."""
    by_reason: dict[str, list[str]] = {}
    for name, why in tensors.items():
        reason = re.sub(r"^\d+ elements, ", "", why.removesuffix(WHOLE))
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(
        f"{_count(len(names), 'tensor')} such as {names[0]!r}: {reason}"
        if len(names) > 1
        else f"{names[0]!r}: {reason}"
        for reason, names in by_reason.items()
    )


def _late(late: Mapping[str, int]) -> str:
    name = max(late, key=lambda each: late[each])
    return f"{_count(len(late), 'tensor')} delayed a bucket, {name!r} in {late[name]:,} steps"


def _warnings(stats: Stats) -> str:
    return "; ".join(textwrap.shorten(each, SHOWN) for each in stats.warnings) or "none"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
