"""The allgather exchange: every rank sends its payload to all others and decodes all payloads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.codec.momentum import NO_MOMENTS, OptimizerMoments
from horovod_topk.core.exchange.announcing import Encoder, announced_bytes
from horovod_topk.core.exchange.protocol import (
    BucketExchange,
    Collective,
    Exchange,
    Storage,
    Traffic,
    wait_for_dropped,
)
from horovod_topk.core.plan.buckets import BucketPlan, Plan
from horovod_topk.core.state.residual import Arenas
from horovod_topk.errors import TopKError

Array = TypeVar("Array")


class Allgather(Exchange[Array]):
    """Every rank sends its payload to all others; bytes grow with the number of ranks."""

    kind = "allgather"

    def of(
        self, bucket: BucketPlan, own: Storage[Array], codec: PayloadCodec[Array]
    ) -> BucketExchange[Array]:
        """`Exchange.of`: an allgather, after an announcement with some methods."""
        (arenas,) = own.residuals
        return AllgatherBucket(bucket, arenas, codec, self.collective)

    def buffer_bytes(self, plan: Plan) -> int:
        """`Exchange.buffer_bytes`: this rank's payload, and those of all ranks."""
        return (1 + self.ranks) * sum(bucket.layout.payload_bytes for bucket in plan.buckets)

    def _count(self, plan: Plan) -> Traffic:
        """Bytes of a step, sent in a ring from rank to rank."""
        payload_bytes = sum(b.layout.payload_bytes + announced_bytes([b]) for b in plan.buckets)
        entries = sum(bucket.entries for bucket in plan.buckets)
        sent_bytes = (self.ranks - 1) * payload_bytes
        between = partial(self._in_a_ring, sent_bytes)
        return self._traffic(plan, entries, payload_bytes, sent_bytes, between)


class AllgatherBucket(BucketExchange[Array]):
    """`BucketExchange` of one allgather: every rank decodes every other rank's payload."""

    def __init__(
        self,
        bucket: BucketPlan,
        arenas: Arenas[Array],
        codec: PayloadCodec[Array],
        collective: Collective[Array],
    ) -> None:
        super().__init__([arenas], codec)
        self._bucket, self._arenas, self._collective = bucket, arenas, collective
        self._payload = codec.new_payload(bucket)
        self._encoder = Encoder([arenas], [self._payload], codec, collective)
        self.stages = self._encoder.stages

    def send(
        self, gradients: Sequence[Array], name: str, moments: OptimizerMoments[Array] = NO_MOMENTS
    ) -> None:
        """`BucketExchange.send`."""
        if self._unwanted:
            wait_for_dropped(self._unwanted)
        self._name = name
        if self.stages:
            self._encoder.begin(gradients, name, moments)
            return
        self._codec.encode_shards([self._arenas], gradients, [self._payload], moments)
        self._pending = self._collective.allgather(self._payload, name)

    def advance(self) -> None:
        """`BucketExchange.advance`: send the payload once the announcements have arrived."""
        if not self._encoder.waits:
            return
        try:
            self._encoder.complete()
        except TopKError:  # other ranks wait for this rank: send flags
            self._codec.flag_all(self._bucket, self._payload)
            self._pending = self._collective.allgather(self._payload, self._name)
            raise
        self._pending = self._collective.allgather(self._payload, self._name)

    def drain(self) -> None:
        """`BucketExchange.drain`."""
        super().drain()
        if self._encoder.waits and self._encoder.drain():
            self.abort(self._name)

    def abort(self, name: str) -> None:
        """`BucketExchange.abort`."""
        wait_for_dropped(self._unwanted)
        self._codec.flag_all(self._bucket, self._payload)
        self._unwanted.append(self._collective.allgather(self._payload, name))

    def receive(self, targets: Sequence[Array], gain: float = 1.0) -> Sequence[bool]:
        """`BucketExchange.receive`."""
        if self.stages:
            self.advance()
        bucket, ranks = self._bucket, self._collective.size
        gathered = self._result()
        if self._codec.check_length(bucket, gathered, ranks) is None:
            # In a graph of an elastic job, whose number of ranks may change.
            ranks = self._ops.rows(gathered, bucket.layout.payload_bytes)
        if bucket.reduction == "average":
            gain = gain * (1 / ranks)
        return self._codec.decode(bucket, gathered, gain, targets)

    def encoded(self) -> Sequence[tuple[Arenas[Array], Array]]:
        """`BucketExchange.encoded`."""
        return [(self._arenas, self._payload)]
