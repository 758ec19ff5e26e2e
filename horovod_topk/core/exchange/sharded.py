"""The sharded exchange: entries go to the owner of their elements, owners' sums to all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TypeVar

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.codec.momentum import NO_MOMENTS, OptimizerMoments
from horovod_topk.core.exchange.announcing import Encoder, announced_bytes
from horovod_topk.core.exchange.protocol import (
    BucketExchange,
    Collective,
    Exchange,
    Pending,
    Storage,
    Traffic,
    check_split,
    wait_for_dropped,
)
from horovod_topk.core.plan.buckets import WIDTH, BucketPlan, Plan
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.core.plan.shards import ShardedPlan, shard
from horovod_topk.core.state.residual import Arenas
from horovod_topk.errors import TopKError

Array = TypeVar("Array")


class ShardedExchange(Exchange[Array]):
    """Entries go to the owner of their elements, and the owners' sums to all ranks.

    About (P - 1) / P of a payload is sent in each direction: more if shards are so small that
    rounding up and headers matter.
    """

    kind = "sharded"

    def __init__(
        self, collective: Collective[Array], nodes: Nodes | None = None, because: str = ""
    ) -> None:
        super().__init__(collective, nodes, because)
        # By their bucket's digest and the number of ranks, which may change in an elastic job.
        self._plans: dict[tuple[bytes, int], ShardedPlan] = {}

    def sharded(self, bucket: BucketPlan) -> ShardedPlan:
        """The plan of a bucket that is split among owners."""
        key = bucket.digest, self.ranks
        if key not in self._plans:
            split = self._shard(bucket)
            check_split(bucket, split.scatter[0].layout.payload_bytes, "bytes")
            self._plans[key] = split
        return self._plans[key]

    def _shard(self, bucket: BucketPlan) -> ShardedPlan:
        return shard(bucket, self.ranks)

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """One plan for each owner."""
        return self.sharded(bucket).scatter

    @property
    def parts(self) -> int:
        """Owners: as many as ranks."""
        return self.ranks

    @property
    def part(self) -> int:
        """This rank."""
        return self.rank

    def owned(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """The plan of the means of this rank's shards."""
        return (self.sharded(bucket).gather[self.rank],)

    def of(
        self, bucket: BucketPlan, own: Storage[Array], codec: PayloadCodec[Array]
    ) -> BucketExchange[Array]:
        """The exchange of a bucket: an alltoall and an allgather, after an announcement if any."""
        (mine,) = own.owned
        return ShardedBucket(self.sharded(bucket), own.residuals, mine, codec, self.collective)

    def buffer_bytes(self, plan: Plan) -> int:
        """`Exchange.buffer_bytes`."""
        total, ranks = 0, self.ranks
        for split in map(self.sharded, plan.buckets):
            owned = split.gather[self.rank]
            total += 2 * ranks * split.scatter_bytes + (1 + ranks) * split.gather_bytes
            total += owned.numel * WIDTH[owned.residual_dtype]
        return total

    def _count(self, plan: Plan) -> Traffic:
        """Bytes of a step: to each owner directly, and back in a ring from rank to rank.

        Announcements are sent in a ring too.
        """
        others, split = self.ranks - 1, [self.sharded(bucket) for bucket in plan.buckets]
        there = sum(each.scatter_bytes for each in split)
        back = sum(each.gather_bytes + announced_bytes(each.scatter) for each in split)
        mine = [plan for each in split for plan in (*each.scatter, each.back[self.rank])]
        entries = sum(each.entries for each in mine)

        def between(rank: int) -> int:
            assert self.nodes is not None
            away = self.ranks - len(self.nodes.of(rank))
            return away * there + self._in_a_ring(others * back, rank)

        payload_bytes, sent_bytes = self.ranks * there + back, others * (there + back)
        return self._traffic(plan, entries, payload_bytes, sent_bytes, between)


class ShardedBucket(BucketExchange[Array]):
    """`BucketExchange` of one bucket: an alltoall of entries, then an allgather of sums or means.

    What an owner does not send back stays in its residual, in units of the applied gradient: of the
    mean if gradients are averaged.
    """

    def __init__(
        self,
        plan: ShardedPlan,
        arenas: Sequence[Arenas[Array]],
        owned: Arenas[Array],
        codec: PayloadCodec[Array],
        collective: Collective[Array],
    ) -> None:
        super().__init__([*arenas, owned], codec)
        self._plan, self._arenas, self._owned = plan, arenas, owned
        self._collective, ops = collective, codec.ops
        size, device = plan.scatter_bytes, plan.bucket.device
        self._out = ops.zeros(size * len(plan.scatter), "uint8", device)
        self._parts = [
            ops.view(self._out, p * size, (p + 1) * size) for p in range(len(plan.scatter))
        ]
        for part, scatter in zip(self._parts, plan.scatter, strict=True):
            codec.open_payload(scatter, part)
        self._back = codec.new_payload(owned.plan)
        total = ops.zeros(owned.plan.numel, owned.plan.residual_dtype, device)
        self._totals = [ops.view(total, t.start, t.stop) for t in owned.plan.tensors]
        self._encoder = Encoder(arenas, self._parts, codec, collective)
        self.stages = 1 + self._encoder.stages
        self._scattered: Pending[Array] | None = None
        self._aborted = False  # whether flags were also sent to owners in that step
        self._squares: Sequence[Array | None] = ()  # Adam's mean squares, until sums are encoded

    def send(
        self, gradients: Sequence[Array], name: str, moments: OptimizerMoments[Array] = NO_MOMENTS
    ) -> None:
        """`BucketExchange.send`."""
        if self._aborted:
            self._wait_for_dropped()
        self._name, self._squares = name, moments.squares
        self._encoder.begin(gradients, name, moments)
        if not self._encoder.waits:
            self._scattered = self._scatter()

    def advance(self) -> None:
        """`BucketExchange.advance`: send entries to owners, or owners' sums to all ranks."""
        if self._encoder.waits:
            self._complete()
            return
        if self._scattered is None:
            return
        scattered, self._scattered = self._scattered, None
        arrived, arrive = scattered.wait(), self._plan.arrive[self._collective.rank]
        self._wait_for_dropped()
        try:
            ranks = self._collective.size
            self._codec.check_length(arrive, arrived, ranks)
            scale = 1 / ranks if arrive.reduction == "average" else 1.0
            flags = self._codec.decode(arrive, arrived, scale, self._totals)
        except TopKError:  # other ranks wait for this rank: send flags
            self._codec.flag_all(self._owned.plan, self._back)
            self._pending = self._gather()
            raise
        own = OptimizerMoments(squares=self._own_squares())
        self._codec.encode(self._owned, self._totals, self._back, own)
        if not isinstance(flags, list):  # a graph cannot raise: pass the flags on to all ranks
            self._ops.store_flags(self._back, self._owned.plan.layout.flags_at, flags)
        self._pending = self._gather()

    def _own_squares(self) -> Sequence[Array | None]:
        """Return Adam's mean squares of this owner's shards, and free those of the gradients."""
        squares, self._squares = self._squares, ()
        back = self._plan.back[self._collective.rank]
        pairs = [(squares[piece.gradient], piece.first) for piece in back.tensors if squares]
        known = [(v, first) for v, first in pairs if v is not None]
        arrays, firsts = [v for v, _ in known], [first for _, first in known]
        shards = iter(self._ops.shards(arrays, back.parts, firsts))
        return [None if v is None else next(shards) for v, _ in pairs]

    def drain(self) -> None:
        """`BucketExchange.drain`. Sends flags to ranks that go on, which roll the step back.

        These collectives are not waited for, as ranks may drain buckets in different orders. Where
        a rank is lost nobody waits for flags.
        """
        super().drain()
        scattered, self._scattered = self._scattered, None
        with contextlib.suppress(RuntimeError):
            if self._encoder.waits and self._encoder.drain():
                self.abort(self._name)
            if scattered is not None:
                scattered.wait()
                self._wait_for_dropped()  # does not block: all ranks started these earlier
                self._codec.flag_all(self._owned.plan, self._back)
                self._unwanted.append(self._gather())

    def abort(self, name: str) -> None:
        """`BucketExchange.abort`."""
        self._wait_for_dropped()
        self._name, self._aborted = name, True
        for part, scatter in zip(self._parts, self._plan.scatter, strict=True):
            self._codec.flag_all(scatter, part)
        self._unwanted.append(self._scatter())
        self._codec.flag_all(self._owned.plan, self._back)
        self._unwanted.append(self._gather())

    def receive(self, targets: Sequence[Array], gain: float = 1.0) -> Sequence[bool]:
        """`BucketExchange.receive`."""
        for _ in range(self.stages):
            self.advance()
        gathered = self._result()
        self._codec.check_length(self._plan.gather[0], gathered, self._collective.size)
        return self._codec.decode(self._plan.result, gathered, gain, targets)

    def encoded(self) -> Sequence[tuple[Arenas[Array], Array]]:
        """`BucketExchange.encoded`: a payload for each owner."""
        return list(zip(self._arenas, self._parts, strict=True))

    def _complete(self) -> None:
        """Encode with the announcements, and send entries to owners."""
        try:
            self._encoder.complete()
        except TopKError:  # other ranks wait for this rank: send flags
            self.abort(self._name)
            raise
        self._scattered = self._scatter()

    def _scatter(self) -> Pending[Array]:
        return self._collective.alltoall(self._out, f"{self._name}.scatter")

    def _gather(self) -> Pending[Array]:
        return self._collective.allgather(self._back, f"{self._name}.gather")

    def _wait_for_dropped(self) -> None:
        """Wait for collectives that read memory which is about to be written."""
        wait_for_dropped(self._unwanted)
        self._aborted = False
