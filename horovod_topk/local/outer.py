"""The outer step: its formulas, and what is kept and sent for it beside residuals.

The anchor x and the outer momentum v are named states that are equal on all ranks, as a method's
own are: statistics, checkpoints, restarts with another number of ranks and elastic jobs have them
without a line about local steps.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.plan.buckets import BucketPlan
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.core.run.follower import FollowerArenas
from horovod_topk.core.state.named_state import as_row
from horovod_topk.errors import ConfigError
from horovod_topk.local.settings import LocalConfig, Outer
from horovod_topk.methods.protocol import Piece, StateSpec
from horovod_topk.ops import Ops

Array = TypeVar("Array")

ANCHOR, MOMENTUM = "anchor", "outer_momentum"
NUMBERS = struct.Struct("<2f")  # inner steps, and the norm of the movement


def momentum_after(v: Any, d: Any, outer: Outer) -> Any:
    """v = mu v + d; averaged: v = mu v + (1 - mu) d."""
    return v * outer.momentum + (d * (1.0 - outer.momentum) if outer.form == "averaged" else d)


def direction(v: Any, d: Any, outer: Outer) -> Any:
    """Return what the anchor moves by, over -lr: v, or d + mu v in Nesterov's form.

    v: the momentum after `momentum_after`.
    """
    return d + v * outer.momentum if outer.form == "nesterov" else v


# The number that a 1 is rounded to; for each tensor the first byte and the data of its values.
Ones = tuple[float, Sequence[tuple[int, Array]]]


class SenderCodec(PayloadCodec[Array]):
    """`PayloadCodec` whose `decode` averages each element over the ranks that have sent it.

    Its senders are counted by decoding the same payloads with ones in place of their values. A node
    counts by its ranks, and with `by_steps` a rank by its inner steps.

    Args:
        nodes: the nodes, if a payload holds the sum over a node; None: it is of one rank.
        by_steps: whether movements count by their inner steps.
    """

    def __init__(self, ops: Ops[Array], nodes: Nodes | None, *, by_steps: bool) -> None:
        super().__init__(ops)
        self._nodes, self._by_steps = nodes, by_steps
        self._ones: dict[bytes, Ones[Array]] = {}  # by fingerprint

    def decode(
        self, bucket: BucketPlan, gathered: Array, scale: float, gradients: Sequence[Array]
    ) -> Sequence[bool]:
        """As `PayloadCodec.decode`, times the number of ranks over the number of senders.

        Payloads that owners send back hold means over senders: they are decoded as they are.
        """
        self.waiting = None  # decode now
        flags = super().decode(bucket, gathered, scale, gradients)
        partial = {t.gradient for t in bucket.tensors if not t.sends_all}
        if partial and bucket.direction != "gather":
            weights, ops = self._weights(bucket, gathered), self.ops
            counts = self._counts(bucket, gathered, gradients, weights)
            for at in partial:
                mean = ops.divided(gradients[at], counts[at])
                ops.write_scaled(mean, sum(weights), gradients[at], flags[at])
        return flags

    def _weights(self, bucket: BucketPlan, gathered: Array) -> list[float]:
        """Return the weight of each payload in a mean."""
        payloads = range(self.ops.rows(gathered, bucket.layout.payload_bytes))
        if self._nodes is not None:
            ranks = [bucket.sender(row * bucket.writers) for row in payloads]
            return [float(len(self._nodes.of(rank))) for rank in ranks]
        if self._by_steps:
            arrived = self.measures.tensor_numbers[bucket.ordinal]
            return [steps for steps, _ in read(self.ops, arrived)]
        return [1.0 for _ in payloads]

    def _counts(
        self,
        bucket: BucketPlan,
        gathered: Array,
        gradients: Sequence[Array],
        weights: Sequence[float],
    ) -> Sequence[Array]:
        """Return for each element the sum of the weights of the payloads that hold it."""
        ops, width, measures = self.ops, bucket.layout.payload_bytes, self.measures
        unit, ones = self._ones.get(bucket.fingerprint) or self._encoded_ones(bucket)
        data = ops.clone(gathered)
        for row in range(len(weights)):
            for at, part in ones:
                ops.store(data, row * width + at, part)
        whole = len({*weights}) == 1
        size = width * len(weights) if whole else width
        counts = list[Any]()
        arrived, numbers = dict(measures.arrived), dict(measures.tensor_numbers)
        dtype, device = bucket.residual_dtype, bucket.device
        for row, weight in enumerate(weights[:1] if whole else weights):
            found = [ops.zeros(ops.numel(gradient), dtype, device) for gradient in gradients]
            some = ops.view(data, row * size, (row + 1) * size)
            super().decode(bucket, some, weight / unit, found)
            counts = [a + b for a, b in zip(counts, found, strict=True)] if counts else found
        measures.arrived.update(arrived)  # of all payloads
        measures.tensor_numbers.update(numbers)
        return counts

    def _encoded_ones(self, bucket: BucketPlan) -> Ones[Array]:
        """Encode a bucket whose elements are all 1. Formats of few bits round the 1."""
        ops, found, unit = self.ops, list[tuple[int, Array]](), 1.0
        pieces = [p for p, piece in enumerate(bucket.tensors) if piece.numel]
        for position in sorted(pieces, key=lambda p: bucket.tensors[p].whole):
            piece = bucket.tensors[position]
            zeros: Any = ops.zeros(piece.numel, bucket.residual_dtype, bucket.device)
            sent = self.encode_piece(bucket, position, zeros + (unit if piece.whole else 1.0))
            if not piece.whole:
                unit = ops.norm(ops.view(sent.values, 0, 1))
            found.append(sent.parts[0])
        return self._ones.setdefault(bucket.fingerprint, (unit, found))


@dataclass(frozen=True)
class Rule:
    """`horovod_topk.methods.protocol.UpdateRule` of outer steps.

    It is part of what ranks agree on: one with other settings is named in an error.
    """

    config: LocalConfig
    fragment: int

    is_linear = True  # `UpdateRule.is_linear`
    is_needed_dense = True  # `UpdateRule.is_needed_dense`: the anchor has to move in any case

    @property
    def name(self) -> str:
        """`UpdateRule.name`."""
        return f"fragment {self.fragment} of {self.config}"

    @property
    def tells(self) -> bool:
        """Whether ranks tell each other their inner steps and norms."""
        return bool(self.config.seconds) or self.config.clip is not None

    def states(self, piece: Piece) -> Mapping[str, StateSpec]:
        """`UpdateRule.states`."""
        kept = StateSpec(piece.numel, shared=True, in_place=True)
        return {ANCHOR: kept, MOMENTUM: kept} if self.config.outer.momentum else {ANCHOR: kept}

    def numbers(self, piece: Piece) -> tuple[str, ...]:
        """`UpdateRule.numbers`: once for each bucket."""
        return ("steps", "norm") if self.tells and piece.gradient == 0 else ()

    def adopted(self, name: str, array: Any, ops: Ops[Any]) -> Any:
        """`UpdateRule.adopted`."""
        return array


def check_tells(rule: Rule, exchange: str) -> None:
    """Refuse settings that need numbers of every rank over an exchange that adds ranks up."""
    if rule.tells and exchange in ("hierarchical", "allreduce"):
        raise ConfigError(
            f"{'every=' if rule.config.seconds else 'clip='} needs numbers of every rank, which "
            f"exchange={exchange!r} does not carry",
            cure="Pass exchange='allgather' or exchange='sharded' to the compressor",
        )
    if rule.config.seconds and rule.config.outer.mean == "senders" and exchange == "sharded":
        raise ConfigError(
            "every= in seconds with mean='senders' needs the steps of every rank, which owners of "
            "exchange='sharded' do not have when they average",
            cure="Pass exchange='allgather' to the compressor, or outer=Outer(mean='ranks')",
        )


@dataclass
class Told(Generic[Array]):
    """`core.run.follower.Followers`: what ranks tell each other about a round."""

    ops: Ops[Array]
    own: tuple[float, float] = (0.0, 0.0)
    heard: Sequence[tuple[float, float]] = field(default_factory=list)

    def begin_step(self) -> None:
        """`Followers.begin_step`."""
        self.heard = []

    def follower(self, bucket: Any, memory: FollowerArenas) -> Listener[Array]:
        """`Followers.follower`."""
        return Listener(self, bucket)


@dataclass(frozen=True)
class Listener(Generic[Array]):
    """`core.run.follower.Follower` of one bucket."""

    told: Told[Array]
    bucket: Any

    def begin(self, gradients: Sequence[Array]) -> None:
        """`Follower.begin`."""

    def squares(self) -> Sequence[Array | None]:
        """`Follower.squares`: the largest movements are sent."""
        return ()

    def message(self) -> Array:
        """`Follower.message`."""
        ops = self.told.ops
        data = ops.zeros(NUMBERS.size, "uint8", self.bucket.device)
        ops.store_bytes(data, 0, NUMBERS.pack(*self.told.own))
        return ops.row(ops.unpack_values(as_row(ops, data), 2, "float32", "float32"), 0)

    def finish(self, exchanged: Sequence[Array], gain: float, ranks: int, message: Any) -> None:
        """`Follower.finish`: note what the ranks have told. Waits for the device."""
        if message is not None:
            self.told.heard = read(self.told.ops, message)


def read(ops: Ops[Array], message: Array) -> list[tuple[float, float]]:
    """Return each rank's number of inner steps, and the norm of its movement."""
    rows = (ops.row(message, i) for i in range(ops.rows(message, NUMBERS.size)))
    return [NUMBERS.unpack(ops.to_host(row)) for row in rows]
