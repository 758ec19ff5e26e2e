"""The verdict: whether compression pays, and at which bandwidths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horovod_topk.cost.crossover import Span, faster, written
from horovod_topk.cost.machine import Machine
from horovod_topk.cost.quantities import milliseconds
from horovod_topk.cost.step import Step, Training, local_step, step
from horovod_topk.cost.strategies import Strategy

# With signs training diverged, or lost 12% with one seed (docs/methods.md); with int2 a small
# transformer lost 2% (docs/settings.md).
TOO_COARSE = ("int2", "sign")
SECOND = " In this exchange owners select a second time, which costs accuracy: docs/methods.md."
DENSE = "allreduce"  # exchange of dense float32 and float16
AS_FAST = 1.01  # factor to the fastest step: the plan is not more precise
UNCHECKED = " (by formulas that no measurement has confirmed)"


@dataclass(frozen=True)
class Row:
    """The predicted times of one strategy."""

    strategy: Strategy
    alone: Step  # without overlap
    overlapped: Step
    faster: tuple[Span, ...] | None  # bandwidths where it beats dense; None: there is one node

    def step(self, *, overlap: bool) -> Step:
        """Return the step with overlap or without."""
        return self.overlapped if overlap else self.alone


@dataclass(frozen=True)
class Verdict:
    """Whether to compress, and why."""

    compress: bool
    text: str


def rows(
    strategies: Sequence[Strategy], machine: Machine, training: Training, *, overlap: bool
) -> list[Row]:
    """Return the predicted times of every strategy; the first one is dense float32.

    Ours are compared with dense float32 and float16, and float16 with float32.
    """
    between = strategies[0].node_bytes > 0
    dense = [each for each in strategies if each.exchange == DENSE]

    def beside(strategy: Strategy) -> list[Strategy]:
        return dense[:1] if strategy in dense else dense

    return [
        Row(
            strategy,
            step(strategy, machine, training, overlap=False),
            step(strategy, machine, training, overlap=True),
            faster(beside(strategy), strategy, machine, training, overlap=overlap)
            if between
            else None,
        )
        for strategy in strategies
    ]


def judge(
    table: Sequence[Row],
    *,
    overlap: bool,
    setting: str = "",
    caveat: str = "",
    default: str | None = None,
) -> Verdict:
    """Compare the faster of dense float32 and float16 with the exchanges of ours in `rows`.

    Those of `TOO_COARSE` are left out. The verdict is on the default if it pays, and otherwise on
    the fastest of ours; of those that are about as fast, on the one that sends least. The text says
    what else is faster.

    Args:
        setting: the optimizer that is planned for, as a part of a sentence; may be empty.
        caveat: why the verdict is rough.
        default: name of the strategy that `TopKEF()` without arguments is, if it is in the table.
    """

    def taken(row: Row) -> Step:
        return row.step(overlap=overlap)

    def order(row: Row) -> tuple[bool, bool, int]:
        is_slow = taken(row).seconds > AS_FAST * least
        return is_slow, row.strategy.name != default, row.strategy.node_bytes

    dense = _dense(table, overlap=overlap)
    ours = _ours(table)
    least = min(taken(row).seconds for row in ours)
    best = min(ours, key=order)
    bare = next((row for row in ours if row.strategy.name == default), best)
    slow = taken(dense)
    first = bare if taken(bare).seconds < slow.seconds else best
    pays = taken(first).seconds < slow.seconds
    how = setting + (", with overlap" if overlap else ", without overlap")
    names = _call(first, default), f"dense {dense.strategy.values}"
    text = (_pays if pays else _does_not_pay)(first, names, slow, taken(first), how)
    if bare is not first:
        text += _itself(bare, slow, taken(bare))
    elif best is not first:
        text += f" {_call(best)} takes {milliseconds(taken(best).seconds)} ms.{_second(best)}"
    others = {
        row.strategy.name: taken(row)
        for row in table
        if not row.strategy.ours and row.strategy.exchange != DENSE
    }
    rough = f" Rough: {caveat}." if caveat else ""
    return Verdict(pays, text + _besides(others, min(slow.seconds, taken(best).seconds)) + rough)


def locally(
    strategies: Sequence[Strategy],
    machine: Machine,
    training: Training,
    every: int,
    table: Sequence[Row],
    *,
    overlap: bool,
) -> str:
    """Say how long a step takes on average with local steps, beside dense and the table's fastest.

    strategies: of movements, which no optimizer's step is adapted to.
    """
    usable = [each for each in strategies if each.ours and each.values not in TOO_COARSE]
    found = [(local_step(each, machine, training, every), each) for each in usable]
    took, best = min(found, key=lambda pair: pair[0].seconds)
    dense, *ours = (
        row.step(overlap=overlap).seconds for row in [_dense(table, overlap=overlap), *_ours(table)]
    )
    return (
        f"local steps: LocalSteps(every={every}) with exchange={best.exchange!r}, "
        f"values={best.values!r} takes {milliseconds(took.seconds)} ms a step on average "
        f"({took.efficiency:.1%} compute), {dense / took.seconds:.2f} times faster than dense and "
        f"{min(ours) / took.seconds:.2f} times than the fastest of ours in every step. It needs "
        "more steps to the same loss: docs/local-steps.md"
    )


def _dense(table: Sequence[Row], *, overlap: bool) -> Row:
    """The faster of dense float32 and float16."""
    dense = (row for row in table if row.strategy.exchange == DENSE)
    return min(dense, key=lambda row: row.step(overlap=overlap).seconds)


def _ours(table: Sequence[Row]) -> list[Row]:
    return [row for row in table if row.strategy.ours and row.strategy.values not in TOO_COARSE]


def _call(row: Row, default: str | None = None) -> str:
    if row.strategy.name == default:
        return "TopKEF()"
    return f"exchange={row.strategy.exchange!r}, values={row.strategy.values!r}"


def _second(row: Row) -> str:
    return SECOND if row.strategy.exchange == "sharded" else ""


def _pays(row: Row, names: tuple[str, str], slow: Step, fast: Step, how: str) -> str:
    where = "" if row.faster is None else f", and pays {written(row.faster)}"
    return (
        f"compress: {names[0]} makes a step {slow.seconds / fast.seconds:.2f} times faster than "
        f"{names[1]} ({milliseconds(slow.seconds)} to {milliseconds(fast.seconds)} ms){how}"
        f"{where}.{_within(row)}{_second(row)}"
    )


def _itself(bare: Row, slow: Step, fast: Step) -> str:
    """A sentence about the default, which does not pay."""
    return (
        f" TopKEF() itself ({bare.strategy.name}) takes {milliseconds(fast.seconds)} ms: "
        f"{fast.seconds / slow.seconds:.2f} times slower than dense."
    )


def _within(best: Row) -> str:
    return "" if best.faster is not None else " On one node nothing crosses a network card."


def _besides(others: Mapping[str, Step], least: float) -> str:
    """One sentence for each other compressor that takes less than `least` seconds."""
    return "".join(
        f" {name} is faster still: {milliseconds(other.seconds)} ms{UNCHECKED}."
        for name, other in others.items()
        if other.seconds < least
    )


def _does_not_pay(best: Row, names: tuple[str, str], slow: Step, fast: Step, how: str) -> str:
    saved, spent = slow.exchange - fast.exchange, fast.kernels - slow.kernels
    if saved <= 0:
        reason = (
            f"its collectives take at least as long as dense's {milliseconds(slow.exchange)} ms"
        )
    elif slow.hidden == 1.0:
        reason = "backward hides all of dense's exchange"
    else:
        reason = (
            f"its exchange takes {milliseconds(fast.exchange)} ms and dense's "
            f"{milliseconds(slow.exchange)} ms, but its kernels take {milliseconds(spent)} ms more"
        )
    where = f" It would pay {written(best.faster)}." if best.faster else ""
    return (
        f"do not compress: {names[1]} takes {milliseconds(slow.seconds)} ms a step, the fastest "
        f"of ours ({names[0]}) {milliseconds(fast.seconds)} ms{how}: {reason}."
        f"{where}{_within(best)}"
    )
