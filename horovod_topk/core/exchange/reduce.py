"""The exchange of methods of rounds; `core.exchange.rounds` runs the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from horovod_topk.core.codec.payload_codec import PayloadCodec
from horovod_topk.core.exchange.protocol import (
    BucketExchange,
    Collective,
    Exchange,
    Over,
    Traffic,
    ring_allreduce_bytes,
)
from horovod_topk.core.exchange.rounds import ReducedBucket, round_plans
from horovod_topk.core.plan.buckets import WIDTH, BucketPlan, Plan
from horovod_topk.core.state.residual import Arenas
from horovod_topk.ops import Ops

Array = TypeVar("Array")


class ReduceExchange(Over[Array]):
    """Arrays of a method of rounds are summed by another exchange, round after round.

    Args:
        by: the exchange that carries the arrays of each round, which are sent whole: sharded, an
            allgather or Horovod's allreduce.
        collective: all ranks.
    """

    keeps, parts, part = True, 0, None

    def __init__(self, by: Exchange[Array], collective: Collective[Array]) -> None:
        super().__init__(collective, by.nodes, by.because)
        self._by = by

    @property
    def kind(self) -> str:
        """`Exchange.kind`: "reduce" if owners add up, else that of the exchange of a round."""
        return "reduce" if self._by.parts else self._by.kind

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """The bucket itself."""
        return (bucket,)

    def owned(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """No plan: owners keep no residuals."""
        return ()

    def of(
        self,
        bucket: BucketPlan,
        residuals: Sequence[Arenas[Array]],
        owned: Sequence[Arenas[Array]],
        states: Mapping[str, Arenas[Array]],
        ops: Ops[Array],
        codec: PayloadCodec[Array],
    ) -> BucketExchange[Array]:
        """The exchange of a bucket: the rounds of its method."""
        (arenas,) = residuals
        return ReducedBucket(bucket, arenas, states, ops, codec, self._by)

    def buffer_bytes(self, plan: Plan) -> int:
        """`Exchange.buffer_bytes`: payloads and sums of every round, and arenas that stay zero."""
        rounds = _rounds(plan)
        arenas = [
            arena
            for each in rounds.buckets
            for arena in (*self._by.holders(each), *self._by.owned(each))
        ]
        unused = sum(2 * WIDTH[arena.residual_dtype] * arena.numel for arena in arenas)
        return self._by.buffer_bytes(rounds) + unused

    def _count(self, plan: Plan) -> Traffic:
        """Bytes of a step: those of all rounds."""
        dense_bytes = sum(bucket.dense_bytes for bucket in plan.buckets)
        dense_bytes = ring_allreduce_bytes(dense_bytes, self.ranks)
        return replace(self._by.traffic(_rounds(plan)), dense_bytes=dense_bytes)


def _rounds(plan: Plan) -> Plan:
    """A plan whose buckets are the rounds of all buckets."""
    rounds = [each for bucket in plan.buckets for each in round_plans(bucket)]
    return replace(plan, buckets=tuple(rounds))
