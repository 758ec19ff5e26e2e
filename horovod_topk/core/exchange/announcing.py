"""Encodes buckets for exchanges; some methods first exchange a few numbers of each tensor.

Most methods encode as soon as gradients are ready. With an `AnnouncingCodec`,

    begin      writes a = e + g to the candidate arenas, and sends a few float32 numbers of each
               piece to all ranks that send the same piece: the announcement
    complete   waits for the announcements, and encodes with all of them, in rank order

so that each bucket takes one exchange stage more. An announcement is a payload like any other: it
has a header, the plan's digest and non-finite flags, and its size follows from the plan.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.codec.momentum import NO_MOMENTS, OptimizerMoments, correct
from horovod_topk.core.exchange.protocol import Collective, Pending, plan_of_arrays
from horovod_topk.core.plan.buckets import BucketPlan
from horovod_topk.core.state.residual import Arenas
from horovod_topk.methods.protocol import (
    Announced,
    AnnouncingCodec,
    numbers_of,
)

Array = TypeVar("Array")


def announcement(plans: Sequence[BucketPlan]) -> BucketPlan | None:
    """The plan of the numbers that ranks announce for a bucket; None if there are none.

    plans: the bucket, or all of its shards that are encoded together.
    """
    first, *_ = plans
    if not isinstance(first.config, AnnouncingCodec):
        return None
    counts = [
        sum(numbers_of(plan.config, plan.tensors[position]) for plan in plans)
        for position in range(len(first.tensors))
    ]
    if not any(counts):
        return None
    identity = ["announcement", *(plan.digest.hex() for plan in plans)]
    return plan_of_arrays(first, counts, identity, "float32")


def announced_bytes(plans: Sequence[BucketPlan]) -> int:
    """Bytes of one rank's announcement; 0 if there is none."""
    plan = announcement(plans)
    return 0 if plan is None else plan.payload_bytes


class Encoder(Generic[Array]):
    """Fills the payloads of a bucket, or of its shards, step after step.

    Args:
        arenas, payloads: one for each shard, or one.
        collective: the ranks that send the same pieces. None: only this rank sends them.

    Attributes:
        stages: exchange stages that a bucket takes before it is encoded.
    """

    def __init__(
        self,
        arenas: Sequence[Arenas[Array]],
        payloads: Sequence[Array],
        codec: PayloadCodec[Array],
        collective: Collective[Array] | None,
    ) -> None:
        self._arenas, self._payloads, self._codec = arenas, payloads, codec
        self._ops = ops = codec.ops
        self._collective = collective
        self._plan = None if collective is None else announcement([each.plan for each in arenas])
        self.stages = int(self._plan is not None)
        self._pending: Pending[Array] | None = None
        if self._plan is not None:
            size = self._plan.numel, self._plan.residual_dtype, self._plan.device
            self._numbers = Arenas(self._plan, ops.zeros(*size), ops.zeros(*size))
            self._announcement = codec.new_payload(self._plan)

    @property
    def waits(self) -> bool:
        """Whether announcements are sent, and the payloads are not filled yet."""
        return self._pending is not None

    def begin(
        self, gradients: Sequence[Array], name: str, moments: OptimizerMoments[Array] = NO_MOMENTS
    ) -> None:
        """Fill the payloads, or start to send the announcements that this needs.

        moments: as in `BucketExchange.send`.
        """
        codec = self._codec
        if self._plan is None or self._collective is None:
            codec.encode_shards(self._arenas, gradients, self._payloads, moments)
            return
        self._moments = moments
        gradients = correct(gradients, moments.velocities, self._ops)
        pieces = range(len(self._plan.tensors))
        self._own, self._checked = list[list[Array]](), list[list[Array]]()
        self._opened = [codec.withholding.open(each, gradients) for each in self._arenas]
        for each in self._opened:
            summed = [codec.compensate(each.arenas, gradients, p) for p in pieces]
            self._checked.append([checked for _, checked in summed])
            self._own.append([codec.numbers(each.own.plan, p, summed[p][0]) for p in pieces])
        of_tensors = [self._ops.joined(shards) for shards in zip(*self._own, strict=True)]
        codec.encode(self._numbers, of_tensors, self._announcement)
        self._pending = self._collective.allgather(self._announcement, f"{name}.announce")

    def complete(self) -> None:
        """Wait for the announcements, and fill the payloads."""
        codec, ops, moments = self._codec, self._ops, self._moments
        announced, flags = self._wait()
        for shard, (each, payload) in enumerate(zip(self._arenas, self._payloads, strict=True)):
            sent = []
            for position, piece in enumerate(each.plan.tensors):
                values = ops.view(each.candidate, piece.start, piece.stop)
                square = moments.squares[piece.gradient] if moments.squares else None
                numbers = announced[shard][position]
                one = codec.encode_piece(each.plan, position, values, square, numbers)
                sent.append(replace(one, checked=self._checked[shard][position]))
            codec.write(each, payload, sent)
            if not isinstance(flags, list):  # a graph cannot raise: pass the flags on to all ranks
                ops.store_flags(payload, each.plan.layout.flags_at, flags)
            if moments.velocities is not None:
                codec.mask(each, payload, moments.velocities)
        codec.seal(self._opened, self._payloads)

    def drain(self) -> bool:
        """Wait for announcements that were sent, and drop them.

        Returns:
            Whether they have arrived: then other ranks go on, and wait for this rank's payloads.
            They have not if a rank of an elastic job is lost.
        """
        assert self._pending is not None
        pending, self._pending = self._pending, None
        with contextlib.suppress(RuntimeError):
            pending.wait()
            return True
        return False

    def abort(self, name: str) -> list[Pending[Array]]:
        """Announce that all tensors are flagged, in a step that this rank does not go on with."""
        if self._plan is None or self._collective is None:
            return []
        self._codec.flag_all(self._plan, self._announcement)
        return [self._collective.allgather(self._announcement, f"{name}.announce")]

    def _wait(self) -> tuple[list[list[Announced[Array]]], Sequence[bool]]:
        """Announcements for each shard and piece, and which tensors any rank flagged."""
        assert self._pending is not None
        assert self._plan is not None
        assert self._collective is not None
        pending, self._pending = self._pending, None
        gathered, ranks = pending.wait(), self._collective.size
        self._codec.check_length(self._plan, gathered, ranks)
        rows, flags = self._codec.rows(self._plan, gathered)
        announced: list[list[Announced[Array]]] = [[] for _ in self._arenas]
        for position, row in enumerate(rows):
            counts = [self._ops.numel(own[position]) for own in self._own]
            ends = list(itertools.accumulate(counts))
            for shard, (end, count) in enumerate(zip(ends, counts, strict=True)):
                own = self._own[shard][position]
                of_all = own if row is None else self._ops.columns(row, end - count, end)
                announced[shard].append(Announced(own, of_all))
        return announced, flags
