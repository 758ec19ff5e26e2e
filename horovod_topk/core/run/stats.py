"""`StepCounters` and `Stats`: counters and norms that users read, and the table that they print."""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from horovod_topk.core.exchange.protocol import Exchange
from horovod_topk.core.exchange.reduce import declared, state_plan
from horovod_topk.core.plan.buckets import Plan
from horovod_topk.core.state.named_state import NamedState
from horovod_topk.core.state.residual import Squares
from horovod_topk.ops.coding import value_bytes

# Of the table that a `Stats` prints.
COLUMNS = 100
FIRST = 14  # columns of the names
LISTED = 16  # tensors with ratios of their own
SHOWN = 200  # letters of each warning
LARGER = 1.05  # how much larger a step's mean bytes are if the table says so
WHOLE = ": sent dense"  # end of the reasons why a tensor is sent whole, inside a payload


@dataclass(frozen=True)
class StepCounters:
    """Counters of one step, which `on_step` passes to callbacks without waiting for a device."""

    step: int  # steps that have ended so far, this one included
    committed: bool  # False: rolled back, residuals are as they were before the step
    selected: int  # gradient elements that this rank sent
    payload_bytes: int  # bytes that this rank handed to collectives
    sent_bytes: int  # bytes that this rank sent for them
    dense_bytes: int  # bytes it would have sent in a ring allreduce of dense gradients
    between_bytes: int | None  # the part of `sent_bytes` sent to other nodes; None: not known
    node_bytes: int | None  # bytes that left the busiest node, from all its ranks; None: not known
    flagged: tuple[str, ...]  # names of tensors with a NaN or an infinity on some rank
    level: float = 1.0  # the step's ratio level
    compress_seconds: float = field(default=0.0, compare=False)  # see `core.timing.Seconds`
    exchange_seconds: float = field(default=0.0, compare=False)
    exposed_seconds: float = field(default=0.0, compare=False)
    decompress_seconds: float = field(default=0.0, compare=False)
    sent_share: float | None = None  # as in `Stats`, of the last step that was sampled
    residual_norm_ratio: float | None = None  # as in `Stats`
    probe_cosine: float | None = None  # of the last bucket that was probed; see `core.probe`
    probe_error: float | None = None
    memory_bytes: int = 0  # as in `Stats`
    fell_back: str = ""  # why compression ended with this step; empty: it did not
    optimizer: int = 0  # whose step it was: its position in the list that was attached


@dataclass(frozen=True)
class Stats:
    """Totals, sizes and norms of one rank's compression, as `stats()` returns them.

    Sizes "a step" are for one step at `ratio`. Norms are Euclidean, over all compressed tensors, in
    the units of the gradients.
    """

    active: bool = False  # False: nothing is compressed, and `skipped` says why
    ranks: int = 1  # number of ranks that exchange gradients
    exchange: str = "none"  # "allgather", "sharded", "hierarchical", "reduce" or "allreduce"
    because: str = ""  # why exchange="auto" chose that, or a note on the nodes; often empty
    nodes: tuple[int, ...] = ()  # number of ranks on each node, if the exchange uses nodes
    buckets: int = 0  # payloads a step
    steps: int = 0  # steps that were committed
    rolled_back: int = 0  # steps that were exchanged but not applied, such as after an overflow
    elements: int = 0  # gradient elements of all compressed tensors
    selected: int = 0  # elements that this rank sends a step
    payload_bytes: int = 0  # bytes that this rank hands to collectives a step
    sent_bytes: int = 0  # bytes that this rank sends a step, to ranks on its own node too
    dense_bytes: int = 0  # bytes that it would send a step in a ring allreduce of dense gradients
    between_bytes: int | None = None  # the part of `sent_bytes` sent to other nodes; None: unknown
    node_bytes: int | None = None  # bytes a step that leave the busiest node, from all its ranks
    momentum: float = 0.0  # momentum of momentum correction; 0: off
    residual_norm: float = 0.0  # norm of this rank's residuals, which it has not sent yet
    owned_norm: float = 0.0  # norm of the owner's residuals ("sharded" and "hierarchical")
    gradient_norm: float = 0.0  # norm of the gradients in the last step; TensorFlow: one in 16
    sent_share: float | None = None  # share of |gradient + residual|^2 that the last step sent
    residual_norm_ratio: float | None = None  # residual norm / gradient norm, in a sampled step
    probe_cosine: float | None = None  # after probe(): cosine of applied and dense gradient
    probe_error: float | None = None  # norm of their difference / norm of the dense gradient
    level: float = 1.0  # the ratio level of the last step
    step_factor: float = 1.0  # smallest factor of the follower's last step in any tensor
    compress_seconds: float = 0.0  # of all steps so far; see `core.timing.Seconds`
    exchange_seconds: float = 0.0  # from a step's first collective to its last, of all steps
    exposed_seconds: float = 0.0  # waiting in collectives, of all steps
    decompress_seconds: float = 0.0  # of all steps
    memory_bytes: int = 0  # residuals, velocities, the method's state and payloads
    element_bytes: Mapping[str, float] = field(default_factory=dict)  # part of it -> an element's
    fallbacks: Mapping[str, int] = field(default_factory=dict)  # reason -> how often it fell back
    ratios: Mapping[str, float] = field(default_factory=dict)  # tensor -> ratio of its own
    tensor_bytes: Mapping[str, int] = field(default_factory=dict)  # of those: bytes in a payload
    skipped: Mapping[str, str] = field(default_factory=dict)  # tensor or "*" -> why uncompressed
    lost_ranks: int = 0  # elastic jobs: number of ranks lost with their residuals
    lost_norm: float = 0.0  # elastic jobs: estimated norm of these residuals
    late: Mapping[str, int] = field(default_factory=dict)  # tensor -> steps it delayed its bucket
    warnings: tuple[str, ...] = ()  # warnings for this optimizer, as in the log
    total_sent_bytes: int = 0  # bytes that this rank has sent in all steps so far
    total_dense_bytes: int = 0  # bytes that it would have sent for them in a dense ring allreduce

    def __str__(self) -> str:
        """A table of about ten lines: what is sent, what waits, what it costs, and warnings."""
        return "\n".join(lines(self))

    @property
    def reduction(self) -> float:
        """How many times fewer bytes a rank sends than a dense ring allreduce would."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0


def in_all(each: Sequence[Stats]) -> Stats:
    """Add up the statistics of all optimizers of a model.

    Counts, bytes and seconds are sums, and norms are norms over all tensors. Of what is one number
    for each optimizer, this is the largest, of `step_factor` the smallest.
    """
    first, *others = each
    if not others:
        return first
    found: dict[str, Any] = {}
    for name, own in vars(first).items():
        values = [getattr(stats, name) for stats in each]
        known = [value for value in values if value is not None]
        if name in _NORMS:
            found[name] = math.hypot(*values)
        elif name in _LARGEST:
            found[name] = max(known, default=None)
        elif name in ("exchange", "because"):
            found[name] = "; ".join(dict.fromkeys(filter(None, values)))
        elif isinstance(own, Mapping):
            found[name] = {key: of[key] for of in values for key in of}
        elif name == "warnings":
            found[name] = tuple(dict.fromkeys(text for texts in values for text in texts))
        elif name not in _OF_THE_JOB:
            found[name] = sum(known) if len(known) == len(values) else None
    elements = max(found["elements"], 1)
    found["element_bytes"] = {
        key: sum(s.element_bytes.get(key, 0.0) * s.elements for s in each) / elements
        for key in found["element_bytes"]
    }
    found["fallbacks"] = dict(sum((Counter(stats.fallbacks) for stats in each), Counter[str]()))
    found["step_factor"] = min(stats.step_factor for stats in each)
    return replace(first, **found)


_NORMS = ("residual_norm", "owned_norm", "gradient_norm")
_LARGEST = ("level", "sent_share", "residual_norm_ratio", "probe_cosine", "probe_error")
_OF_THE_JOB = ("active", "ranks", "nodes", "momentum", "lost_ranks", "lost_norm")


@dataclass(frozen=True)
class NormSample:
    """Sent share and residual norm ratio of one sampled step."""

    sent_share: float | None = None  # see `Stats`
    residual_norm_ratio: float | None = None

    @classmethod
    def of(cls, squares: Squares) -> NormSample:
        """Compute both shares from sums of squares; None where a sum is zero or not finite."""
        gradient, compensated, left = squares.gradient, squares.compensated, squares.left
        if not all(map(math.isfinite, (gradient, compensated, left))):
            return cls()
        share = 1.0 - left / compensated if compensated > 0.0 else None
        return cls(share, math.sqrt(left / gradient) if gradient > 0.0 else None)


def stored_bytes(part: NamedState[Any]) -> int:
    """Bytes of one part of the state: most parts have two arrays."""
    stored = (
        _bytes(part.stored or part.specs[name].residual_dtype, piece.numel)
        for name, pieces in part.pieces.items()
        for piece in pieces
    )
    return (1 if part.spec is not None and part.spec.in_place else 2) * sum(stored)


def planned_bytes(plan: Plan, residuals: str) -> tuple[int, int]:
    """Bytes of memory for residuals of all elements in a format, and for other states."""
    kept, states = sum(value_bytes(residuals, tensor.numel) for tensor in plan.tensors()), 0
    for name, spec in declared(plan).items():
        laid_out = [state_plan(bucket, name) for bucket in plan.buckets]
        arrays = 1 if spec.in_place else 2
        states += arrays * sum(_bytes(each.residual_dtype, each.numel) for each in laid_out)
    return 2 * kept, states


def _bytes(kind: str, numel: int) -> int:
    return numel if kind == "uint8" else value_bytes(kind, numel)


def measured(squares: Squares) -> dict[str, Any]:
    """Fields of `Stats` on the last step, computed from its sums of squares."""
    known = squares.compensated > 0.0
    return {
        "gradient_norm": math.sqrt(squares.gradient),
        "sent_share": 1.0 - squares.left / squares.compensated if known else None,
    }


def describe(exchange: Exchange[Any]) -> str:
    """Describe an exchange in one line, for the log."""
    because = f", {exchange.because}" if exchange.because else ""
    on = f" on nodes of {', '.join(map(str, exchange.nodes.sizes))}" if exchange.nodes else ""
    return f"exchange {exchange.kind} among {exchange.ranks} ranks{on}{because}"


def planned(plan: Plan, exchange: Exchange[Any]) -> Stats:
    """Statistics of a step that follow from its plan and exchange alone."""
    own = plan.own_ratios()
    return Stats(
        active=True,
        ranks=exchange.ranks,
        exchange=exchange.kind,
        because=exchange.because,
        nodes=exchange.nodes.sizes if exchange.nodes is not None else (),
        buckets=len(plan.buckets),
        elements=sum(tensor.numel for tensor in plan.tensors()),
        momentum=plan.config.momentum,
        ratios=own,
        tensor_bytes=plan.bytes_of(own),
        **asdict(exchange.traffic(plan)),
    )


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
    more = total * stats.dense_bytes > LARGER * dense * stats.sent_bytes
    note = "; earlier steps sent more" if more else ""
    yield "bytes so far", f"{total:,} sent by this rank, {_fewer(total, dense)}{note}"
    whole = {name: why for name, why in stats.skipped.items() if why.endswith(WHOLE)}
    yield "sent whole", _reasons(whole) or "no tensor"
    if stats.ratios:
        yield "ratios", _ratios(stats)
    if rest := _reasons({k: why for k, why in stats.skipped.items() if k not in whole}):
        yield "by Horovod", rest
    yield "residual", _residual(stats)
    fallen = "".join(f"; fell back ({why}: {n})" for why, n in stats.fallbacks.items())
    ended = f"{stats.steps:,} committed, {stats.rolled_back:,} rolled back"
    yield "steps", f"{ended}; now at ratio {stats.level:g}{fallen}"
    if stats.exchange_seconds:
        yield "time a step", _times(stats, max(1, stats.steps + stats.rolled_back))
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
    left, gradient = stats.residual_norm, stats.gradient_norm
    owned = f"; owner's residual {stats.owned_norm:.3g}" if stats.owned_norm else ""
    shown = f"{left / gradient:.3g} times the gradient" if gradient else "no gradient yet"
    return f"{shown} in the last step (norms {left:.3g} and {gradient:.3g}){owned}"


def _times(stats: Stats, steps: int) -> str:
    """Means over all steps."""
    parts = (stats.compress_seconds, stats.exchange_seconds, stats.exposed_seconds)
    compress, exchange, exposed = (f"{1e3 * part / steps:.3g} ms" for part in parts)
    return (
        f"compress {compress}, exchange {exchange}, of which {exposed} of waiting, "
        f"decompress {1e3 * stats.decompress_seconds / steps:.3g} ms (means)"
    )


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


def _ratios(stats: Stats) -> str:
    """Tensors that have their own ratio, the largest first, with their bytes a step."""
    sizes = stats.tensor_bytes
    each = [
        f"{name} {ratio:.3g}" + (f" ({sizes[name]:,} bytes)" if name in sizes else "")
        for name, ratio in sorted(stats.ratios.items(), key=lambda pair: -pair[1])
    ]
    if len(each) > LISTED:
        each[LISTED // 2 : -(LISTED // 2)] = ["..."]
    return ", ".join(each)


def _late(late: Mapping[str, int]) -> str:
    name = max(late, key=lambda each: late[each])
    return f"{_count(len(late), 'tensor')} delayed a bucket, {name!r} in {late[name]:,} steps"


def _warnings(stats: Stats) -> str:
    return "; ".join(textwrap.shorten(each, SHOWN) for each in stats.warnings) or "none"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
