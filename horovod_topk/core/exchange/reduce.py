"""The reduce exchange, for methods of rounds; `horovod_topk.core.rounds` runs the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from horovod_topk.core.codec import PayloadCodec
from horovod_topk.core.exchange.protocol import BucketExchange, Over, Traffic
from horovod_topk.core.exchange.sharded import held_bytes
from horovod_topk.core.plan import WIDTH, BucketPlan, Plan
from horovod_topk.core.residual import Arenas
from horovod_topk.core.rounds import ReducedBucket, round_plans
from horovod_topk.core.shards import shard
from horovod_topk.ops import Ops

Array = TypeVar("Array")


class ReduceExchange(Over[Array]):
    """Arrays of a method of rounds are summed by their elements' owners, round after round."""

    kind, keeps, parts, part = "reduce", True, 0, None

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
        return ReducedBucket(bucket, arenas, states, ops, codec, self._collective)

    def buffer_bytes(self, plan: Plan) -> int:
        """`Exchange.buffer_bytes`: payloads and sums of every round, and arenas that stay zero."""
        total = 0
        for each in (each for bucket in plan.buckets for each in round_plans(bucket)):
            split = shard(each, self.ranks)
            arenas = (*split.scatter, split.gather[self.rank])
            total += held_bytes(split, self.rank)
            total += sum(2 * WIDTH[arena.residual_dtype] * arena.numel for arena in arenas)
        return total

    def _count(self, plan: Plan) -> Traffic:
        """Bytes of a step: in each round to each owner directly, and back in a ring."""
        entries = payload_bytes = sent_bytes = there = back = 0
        others = self.ranks - 1
        for bucket in plan.buckets:
            for each in round_plans(bucket):
                split = shard(each, self.ranks)
                there, back = there + split.scatter_bytes, back + split.gather_bytes
                entries += each.entries + split.gather[self.rank].entries
        payload_bytes, sent_bytes = self.ranks * there + back, others * (there + back)

        def between(rank: int) -> int:
            assert self.nodes is not None
            away = self.ranks - len(self.nodes.of(rank))
            return away * there + self._is_at_an_edge(rank) * others * back

        return self._traffic(plan, entries, payload_bytes, sent_bytes, between)
