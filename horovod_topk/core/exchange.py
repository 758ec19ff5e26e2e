"""How payloads cross the network, over one small protocol.

Each exchange knows who keeps residuals for what, how many bytes travel, and how one bucket is sent
(`horovod_topk.core.route`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from horovod_topk.core.codec import Codec
from horovod_topk.core.plan import BucketPlan, Plan
from horovod_topk.core.residual import ResidualRegistry
from horovod_topk.core.route import Collective, Direct, Pending, Route, Sharded
from horovod_topk.core.shards import ShardedPlan, shard
from horovod_topk.ops import Ops

Array = TypeVar("Array")

__all__ = [
    "Allgather",
    "Collective",
    "Exchange",
    "Pending",
    "ShardedExchange",
    "Traffic",
    "exchange_of",
    "ring_allreduce_bytes",
]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank and step."""

    selected: int  # values handed to collectives
    payload_bytes: int  # their bytes, and all that travels with them
    sent_bytes: int  # sent for them
    dense_bytes: int  # sent by a ring allreduce of the dense gradients instead


class Exchange(Protocol[Array]):
    """What the compressor asks of an exchange."""

    @property
    def ranks(self) -> int:
        """How many ranks exchange."""
        ...

    @property
    def rank(self) -> int:
        """This one among them."""
        ...

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """Plans whose arenas together hold this rank's residuals of a bucket."""
        ...

    def owned(self, plan: Plan, ops: Ops[Array]) -> ResidualRegistry[Array] | None:
        """New residuals of what this rank owns for all ranks, if the exchange has owners."""
        ...

    def route(
        self,
        bucket: BucketPlan,
        registry: ResidualRegistry[Array],
        owned: ResidualRegistry[Array] | None,
        ops: Ops[Array],
        codec: Codec[Array],
    ) -> Route[Array]:
        """A bucket's way."""
        ...

    def traffic(self, plan: Plan) -> Traffic:
        """Bytes of a step."""
        ...


class _Over(Generic[Array]):
    """What exchanges over a collective have in common."""

    def __init__(self, collective: Collective[Array]) -> None:
        self._collective = collective

    @property
    def ranks(self) -> int:
        """How many ranks exchange."""
        return self._collective.size

    @property
    def rank(self) -> int:
        """This one among them."""
        return self._collective.rank

    def _traffic(self, plan: Plan, selected: int, payload_bytes: int, sent_bytes: int) -> Traffic:
        dense = sum(bucket.dense_bytes for bucket in plan.buckets)
        dense_bytes = ring_allreduce_bytes(dense, self.ranks)
        return Traffic(selected, payload_bytes, sent_bytes, dense_bytes)


class Allgather(_Over[Array]):
    """Every rank sends its payload to every other; bytes grow with the number of ranks."""

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """The bucket itself."""
        return (bucket,)

    def owned(self, plan: Plan, ops: Ops[Array]) -> None:
        """Nobody owns anything."""

    def route(
        self,
        bucket: BucketPlan,
        registry: ResidualRegistry[Array],
        owned: ResidualRegistry[Array] | None,
        ops: Ops[Array],
        codec: Codec[Array],
    ) -> Route[Array]:
        """One allgather."""
        return Direct(bucket, registry.arenas(bucket.ordinal), ops, codec, self._collective)

    def traffic(self, plan: Plan) -> Traffic:
        """Bytes of a step, sent in a ring from rank to rank."""
        payload_bytes = sum(bucket.layout.payload_bytes for bucket in plan.buckets)
        entries = sum(bucket.entries for bucket in plan.buckets)
        return self._traffic(plan, entries, payload_bytes, (self.ranks - 1) * payload_bytes)


class ShardedExchange(_Over[Array]):
    """Entries go to the owner of their elements, and the owners' sums back to all.

    About (P - 1) / P of a payload goes in each direction: more where shards become so small that
    rounding up and headers count.
    """

    def __init__(self, collective: Collective[Array]) -> None:
        super().__init__(collective)
        self._plans: dict[bytes, ShardedPlan] = {}  # by their bucket's digest

    def dealt(self, bucket: BucketPlan) -> ShardedPlan:
        """A bucket as it is dealt out."""
        if bucket.digest not in self._plans:
            self._plans[bucket.digest] = shard(bucket, self.ranks)
        return self._plans[bucket.digest]

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """A plan for each owner."""
        return self.dealt(bucket).scatter

    def owned(self, plan: Plan, ops: Ops[Array]) -> ResidualRegistry[Array]:
        """Residuals of the means of this rank's shards."""
        return ResidualRegistry(plan, ops, lambda bucket: (self.dealt(bucket).gather[self.rank],))

    def route(
        self,
        bucket: BucketPlan,
        registry: ResidualRegistry[Array],
        owned: ResidualRegistry[Array] | None,
        ops: Ops[Array],
        codec: Codec[Array],
    ) -> Route[Array]:
        """One alltoall and one allgather."""
        assert owned is not None  # as `owned` made it
        return Sharded(
            self.dealt(bucket),
            registry.shards(bucket.ordinal),
            owned.arenas(bucket.ordinal),
            ops,
            codec,
            self._collective,
        )

    def traffic(self, plan: Plan) -> Traffic:
        """Bytes of a step: to each owner directly, and back in a ring from rank to rank."""
        others, dealt = self.ranks - 1, [self.dealt(bucket) for bucket in plan.buckets]
        there = sum(each.scatter_bytes for each in dealt)
        back = sum(each.gather_bytes for each in dealt)
        mine = [leg for each in dealt for leg in (*each.scatter, each.gather[self.rank])]
        entries = sum(each.entries for each in mine)
        return self._traffic(plan, entries, self.ranks * there + back, others * (there + back))


def ring_allreduce_bytes(dense_bytes: int, ranks: int) -> int:
    """Bytes a rank sends in a ring allreduce: 2 (P - 1) / P of the data (Patarasuk, Yuan 2009)."""
    return 2 * (ranks - 1) * dense_bytes // ranks


def exchange_of(kind: str, collective: Collective[Array]) -> Exchange[Array]:
    """The exchange that a setting names."""
    return ShardedExchange(collective) if kind == "sharded" else Allgather(collective)
