"""The allgather exchange: every rank sends its payload to all others and decodes all payloads."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar, cast

from horovod_topk.core.codec.payload_codec import PayloadCodec
from horovod_topk.core.exchange.announcing import Encoder, announced_bytes
from horovod_topk.core.exchange.protocol import (
    BucketExchange,
    Collective,
    Over,
    Pending,
    Traffic,
    wait_for_dropped,
)
from horovod_topk.core.plan.buckets import BucketPlan, Plan
from horovod_topk.core.state.residual import Arenas, Squares
from horovod_topk.errors import TopKError
from horovod_topk.ops import Ops, Velocities

Array = TypeVar("Array")


class Allgather(Over[Array]):
    """Every rank sends its payload to all others; bytes grow with the number of ranks."""

    kind, keeps, parts, part = "allgather", True, 0, None

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """The bucket itself."""
        return (bucket,)

    def owned(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """No plan: there are no owners."""
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
        """The exchange of a bucket: an allgather, after an announcement with some methods."""
        (arenas,) = residuals
        return AllgatherBucket(bucket, arenas, ops, codec, self._collective)

    def buffer_bytes(self, plan: Plan) -> int:
        """`Exchange.buffer_bytes`: this rank's payload, and those of all ranks."""
        return (1 + self.ranks) * sum(bucket.layout.payload_bytes for bucket in plan.buckets)

    def _count(self, plan: Plan) -> Traffic:
        """Bytes of a step, sent in a ring from rank to rank."""
        payload_bytes = sum(b.layout.payload_bytes + announced_bytes([b]) for b in plan.buckets)
        entries = sum(bucket.entries for bucket in plan.buckets)
        sent_bytes = (self.ranks - 1) * payload_bytes

        def between(rank: int) -> int:
            return sent_bytes if self._is_at_an_edge(rank) else 0

        return self._traffic(plan, entries, payload_bytes, sent_bytes, between)


class AllgatherBucket(Generic[Array]):
    """`BucketExchange` of one allgather: every rank decodes every other rank's payload."""

    def __init__(
        self,
        bucket: BucketPlan,
        arenas: Arenas[Array],
        ops: Ops[Array],
        codec: PayloadCodec[Array],
        collective: Collective[Array],
    ) -> None:
        self._bucket, self._arenas = bucket, arenas
        self._ops, self._codec, self._collective = ops, codec, collective
        self._payload = codec.new_payload(bucket)
        self._encoder = Encoder([arenas], [self._payload], ops, codec, collective)
        self.stages = self._encoder.stages
        self._pending: Pending[Array] | None = None
        self._unwanted: list[Pending[Array]] = []  # collectives of a step that was dropped

    def send(
        self,
        gradients: Sequence[Array],
        name: str,
        velocities: Velocities[Array] | None = None,
        squares: Sequence[Array | None] = (),
    ) -> None:
        """`BucketExchange.send`."""
        if self._unwanted:
            wait_for_dropped(self._unwanted)
        self._name = name
        if self.stages:
            self._encoder.begin(gradients, name, velocities, squares)
            return
        self._codec.encode(self._arenas, gradients, self._payload, velocities, squares)
        self._pending = self._collective.allgather(self._payload, name)

    def advance(self) -> None:
        """`BucketExchange.advance`: send the payload once the announcements have arrived."""
        if not self._encoder.waits:
            return
        try:
            self._encoder.complete()
        except TopKError:  # other ranks wait for this rank: send flags
            self._codec.flag_all(self._bucket, self._payload)
            self._pending = self._gather()
            raise
        self._pending = self._gather()

    def drain(self) -> None:
        """`BucketExchange.drain`; ignores a failed collective, as where a rank is lost."""
        if self._pending is not None:
            with contextlib.suppress(RuntimeError):
                self._pending.wait()
        self._pending = None
        if self._encoder.waits and self._encoder.drain():
            self.abort(self._name)

    def abort(self, name: str) -> None:
        """Send flags for all tensors in a step that this rank does not go on with.

        Does not wait for the collective.
        """
        wait_for_dropped(self._unwanted)
        self._name = name
        self._codec.flag_all(self._bucket, self._payload)
        self._unwanted.append(self._gather())

    def _gather(self) -> Pending[Array]:
        return self._collective.allgather(self._payload, self._name)

    def receive(self, targets: Sequence[Array], gain: float = 1.0) -> Sequence[bool]:
        """`BucketExchange.receive`."""
        bucket = self._bucket
        if self.stages:
            self.advance()
        assert self._pending is not None
        pending, self._pending = self._pending, None
        gathered = pending.wait()
        received = cast("int | None", self._ops.numel(gathered))
        ranks = self._collective.size
        if received is None:  # in a graph of an elastic job, whose number of ranks may change
            ranks = self._ops.rows(gathered, bucket.layout.payload_bytes)
        elif received != bucket.layout.payload_bytes * ranks:
            raise self._codec.wrong_length(bucket, gathered, ranks)
        if bucket.reduction == "average":
            gain = gain * (1 / ranks)
        return self._codec.decode(bucket, gathered, gain, targets)

    def swap(self) -> None:
        """`BucketExchange.swap`."""
        self._arenas.swap()

    def encoded(self) -> Sequence[tuple[Arenas[Array], Array]]:
        """`BucketExchange.encoded`."""
        return [(self._arenas, self._payload)]

    def squares(self, *, committed: bool) -> Squares:
        """`BucketExchange.squares`."""
        return self._codec.squares(self._arenas, self._payload, committed=committed)
