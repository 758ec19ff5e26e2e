"""The time of a training step: backward, the kernels of the exchange, and the collectives.

One thread computes; Horovod's background thread runs one collective after another. A piece can be
sent once backward has computed all of its gradients. Collectives that run while backward goes on
take no extra time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horovod_topk.cost.machine import Machine
from horovod_topk.cost.strategies import Piece, Strategy, Work

FUSION_BYTES = 128 << 20  # HOROVOD_FUSION_THRESHOLD by default: the buffer of one collective
# During backward, Horovod fuses all tensors that are ready when its thread is free. That depends on
# all times at once; the fastest of these limits is taken, which is optimistic.
FUSED_BYTES = (0, 1 << 20, 5 << 20, 25 << 20, FUSION_BYTES)
OUTER = 4.0  # triads per element of an outer step: d = x - w, x -= lr d, w = x
FORWARD = 1 / 3  # share of the model's time: backward has twice forward's multiplications


@dataclass(frozen=True)
class Training:
    """The time of the model without any exchange."""

    compute: float  # s per step: forward, backward, and the optimizer
    forward: float = FORWARD  # share of it before the first gradient is computed
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.compute < float("inf"):
            raise ValueError(f"compute={self.compute!r} s: give seconds above 0")
        if not 0 <= self.forward <= 1:
            raise ValueError(f"forward={self.forward!r}: give a share from 0 to 1")


@dataclass(frozen=True)
class Step:
    """The predicted time of a step, in seconds."""

    compute: float  # time of the model
    kernels: float  # time of computation beside the model
    exchange: float  # time of all collectives, hidden or not
    seconds: float  # total time

    @property
    def efficiency(self) -> float:
        """Share of the step's time in which the model itself is computed."""
        return self.compute / self.seconds

    @property
    def hidden(self) -> float:
        """Share of the exchange that overlaps computation."""
        if not self.exchange:
            return 0.0
        exposed = self.seconds - self.compute - self.kernels
        return min(1.0, max(0.0, 1 - exposed / self.exchange))


def step(strategy: Strategy, machine: Machine, training: Training, *, overlap: bool) -> Step:
    """Predict the time of a step with this exchange.

    overlap: whether gradients are exchanged while backward computes others. Without overlap all
    gradients are computed, then all are sent, then all are decoded.
    """
    slowdown = machine.slowdown(training.ranks_per_node)
    before = [seconds(piece.before, machine) * slowdown for piece in strategy.pieces]
    after = [seconds(piece.after, machine) * slowdown for piece in strategy.pieces]
    computed = training.compute + sum(before)
    ready = _ready(strategy.pieces, before, training) if overlap else [computed] * len(before)

    def timed(limit: int) -> Step:
        """Predict a step in which at most `limit` bytes are fused."""
        exchange, sent_at, clock = 0.0, 0.0, ready[-1]
        for group, collective in strategy.collectives(limit):
            taken = collective.seconds(machine.network, slowdown)
            exchange += taken
            sent_at = max(sent_at, ready[group[-1]]) + taken
            if overlap:
                clock = max(clock, sent_at) + sum(after[group.start : group.stop])
        if not overlap:
            clock = sent_at + sum(after)
        return Step(training.compute, sum(before) + sum(after), exchange, clock)

    fused = [timed(limit) for limit in (FUSED_BYTES if overlap else [FUSION_BYTES])]
    return min(fused, key=lambda each: each.seconds)


def local_step(strategy: Strategy, machine: Machine, training: Training, every: int) -> Step:
    """Predict the mean time of a step where ranks exchange movements every so many steps.

    The movement is computed, the anchor moved, and the weights set, each in a pass. Nothing
    overlaps.
    """
    elements = sum(piece.elements for piece in strategy.pieces)
    passes = seconds(Work(triads=OUTER * elements), machine)
    alone = step(strategy, machine, training, overlap=False)
    kernels = (alone.kernels + passes * machine.slowdown(training.ranks_per_node)) / every
    exchange = alone.exchange / every
    return Step(training.compute, kernels, exchange, training.compute + kernels + exchange)


def seconds(work: Work, machine: Machine) -> float:
    """Return the time of some work on an idle machine, in seconds."""
    kernels = machine.kernels
    return (
        work.encoded * kernels.encode
        + work.cleared * kernels.clear
        + work.decoded * kernels.decode
        + work.multiplied * kernels.multiply
        + work.triads * kernels.triad
    )


def _ready(pieces: Sequence[Piece], before: Sequence[float], training: Training) -> list[float]:
    """When each piece can be sent: backward's time is divided by elements."""
    clock = training.forward * training.compute
    backward = training.compute - clock
    elements, ready = sum(piece.elements for piece in pieces), []
    for piece, computed in zip(pieces, before, strict=True):
        clock += backward * piece.elements / elements + computed
        ready.append(clock)
    return ready
