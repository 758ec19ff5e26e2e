"""The allreduce exchange: arrays are summed by Horovod's own allreduce.

For users who want Horovod's speed, or NCCL: with dense gradients, and with methods of rounds. It
guarantees less than the sharded exchange: the order of addition is Horovod's. Gloo gives all ranks
equal bits, but above two ranks not the same bits in every run; MPI only recommends equal bits.

A bucket is one array: its gradients one after another in the residual's dtype, and five lanes. Four
have the digest of its plan, 16 bits each; in PyTorch the facts that ranks share
(`core.plan.facts`) change two of them. If all P ranks have the same plan and facts, their
sums are P times a rank's own. The fifth is 1 on a rank that has left the step, and else 0: all
ranks then take every tensor as flagged. With measures the array ends in P lanes for each of them,
one for each rank; all other ranks write zero there. A tensor whose sum is not finite becomes NaN,
on every rank.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.codec.momentum import NO_MOMENTS, OptimizerMoments, correct
from horovod_topk.core.exchange.protocol import (
    BucketExchange,
    Collective,
    Exchange,
    Pending,
    Storage,
    Traffic,
    ring_allreduce_bytes,
    wait_for_dropped,
)
from horovod_topk.core.plan.buckets import WIDTH, BucketPlan, Plan
from horovod_topk.core.state.residual import as_row
from horovod_topk.errors import PlanMismatchError
from horovod_topk.ops.coding import value_bytes

Array = TypeVar("Array")

PARTS = 4  # lanes of the digest, with 16 bits each: float32 holds sums over 256 ranks exactly
LANES = PARTS + 1  # before the measures


class AllreduceExchange(Exchange[Array]):
    """Dense gradients, or the arrays of a round, are summed by Horovod's own allreduce."""

    kind = "allreduce"

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """No plan: there are no residuals."""
        return ()

    def of(
        self, bucket: BucketPlan, own: Storage[Array], codec: PayloadCodec[Array]
    ) -> BucketExchange[Array]:
        """The exchange of a bucket: one allreduce."""
        return AllreduceBucket(bucket, codec, self.collective)

    def buffer_bytes(self, plan: Plan) -> int:
        """`Exchange.buffer_bytes`: one array for each bucket."""
        return self.traffic(plan).payload_bytes

    def _count(self, plan: Plan) -> Traffic:
        """Bytes of a step, sent in a ring from rank to rank."""
        size = sum(
            (b.numel + LANES + self.ranks * len(b.measures)) * WIDTH[b.residual_dtype]
            for b in plan.buckets
        )
        entries = sum(bucket.entries for bucket in plan.buckets)
        sent_bytes = ring_allreduce_bytes(size, self.ranks)
        between = partial(self._in_a_ring, sent_bytes)
        return self._traffic(plan, entries, size, sent_bytes, between)


class AllreduceBucket(BucketExchange[Array]):
    """`BucketExchange` of one bucket, without residuals."""

    def __init__(
        self, bucket: BucketPlan, codec: PayloadCodec[Array], collective: Collective[Array]
    ) -> None:
        super().__init__((), codec)
        self._bucket, self._collective, ops = bucket, collective, codec.ops
        self._digest: Sequence[int] = ()  # of the step under way
        self._lanes = LANES + collective.size * len(bucket.measures)
        size = bucket.numel + self._lanes
        self._array = ops.zeros(size, bucket.residual_dtype, bucket.device)

    def send(
        self, gradients: Sequence[Array], name: str, moments: OptimizerMoments[Array] = NO_MOMENTS
    ) -> None:
        """`BucketExchange.send`."""
        ops, bucket = self._ops, self._bucket
        wait_for_dropped(self._unwanted)
        gradients = correct(gradients, moments.velocities, ops)
        for piece, gradient in zip(bucket.tensors, gradients, strict=True):
            if piece.numel:
                ops.split_shards(gradient, [0], [ops.view(self._array, piece.start, piece.stop)])
        measures = self._codec.measures.data(bucket) if bucket.measures else None
        self._pending = self._reduce(name, measures)

    def abort(self, name: str) -> None:
        """`BucketExchange.abort`."""
        wait_for_dropped(self._unwanted)
        self._unwanted.append(self._reduce(name, has_left=True))

    def receive(self, targets: Sequence[Array], gain: float = 1.0) -> Sequence[bool]:
        """`BucketExchange.receive`."""
        ops, bucket, ranks = self._ops, self._bucket, self._collective.size
        self._sum = self._result()
        sums = [ops.view(self._sum, piece.start, piece.stop) for piece in bucket.tensors]
        flags = self._examine(sums)
        scale = 1.0 / ranks if bucket.reduction == "average" else 1.0
        for position, (total, target) in enumerate(zip(sums, targets, strict=True)):
            ops.write_scaled(total, gain * scale, target, flags[position])
        return flags

    def _reduce(
        self, name: str, measures: Array | None = None, *, has_left: bool = False
    ) -> Pending[Array]:
        """Write the lanes, and start the allreduce."""
        ops, bucket = self._ops, self._bucket
        self._digest = struct.unpack(f"<{PARTS}H", bucket.digest)
        facts = self._codec.measures.facts.get(bucket.ordinal)
        if isinstance(facts, bytes):  # a graph does not know them
            changes = *struct.unpack("<2H", facts), 0, 0
            self._digest = [a ^ b for a, b in zip(self._digest, changes, strict=True)]
        data = ops.zeros(4 * self._lanes, "uint8", bucket.device)
        ops.store_bytes(data, 0, struct.pack(f"<{LANES}f", *self._digest, has_left))
        if measures is not None:
            at = LANES + self._collective.rank * len(bucket.measures)
            ops.store(data, 4 * at, measures)
        lanes = ops.unpack_values(as_row(ops, data), self._lanes, "float32", bucket.residual_dtype)
        ops.assign(ops.view(self._array, bucket.numel, ops.numel(self._array)), ops.row(lanes, 0))
        return self._collective.allreduce(self._array, name)

    def _examine(self, sums: Sequence[Array]) -> Sequence[bool]:
        """Compare the digest lanes; return which sums are not finite."""
        ops, bucket = self._ops, self._bucket
        lanes = ops.view(self._sum, bucket.numel, bucket.numel + self._lanes)
        lane_bytes, count = value_bytes("float32", self._lanes), len(bucket.tensors)
        arrived, width = self._codec.measures.arrived, len(bucket.measures)
        size = lane_bytes + -(-count // 8)
        row = ops.zeros(size, "uint8", bucket.device)
        ops.store(row, 0, ops.pack_values(lanes, "float32"))
        ops.store_nonfinite(row, lane_bytes, sums)

        def check(heads: list[bytes], answers: list[list[bool]]) -> list[bool]:
            (head,) = heads
            expected = [self._collective.size * part for part in self._digest]
            *digest, left = struct.unpack_from(f"<{LANES}f", head)
            if digest != expected:
                raise PlanMismatchError(
                    f"bucket {bucket.ordinal}: ranks added up gradients of different plans or "
                    f"states; this rank's digest is {bucket.digest.hex()}",
                    cure="Start all ranks with the same model, settings and groups, and load a "
                    "state on every rank or on none",
                )
            if width:
                numbers = struct.unpack_from(f"<{self._lanes - LANES}f", head, 4 * LANES)
                arrived[bucket.ordinal] = [
                    numbers[at : at + width] for at in range(0, len(numbers), width)
                ]
            bits = int.from_bytes(head[lane_bytes:], "little") if not left else (1 << count) - 1
            return [bool(bits >> position & 1) for position in range(count)]

        return ops.validate(row, size, size, [], check, count)
