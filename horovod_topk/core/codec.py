"""Codecs turn a bucket of gradients into a payload and payloads back into gradients.

`TopK` is error-feedback sparsification: Stich et al. 2018 (Sparsified SGD with Memory),
Karimireddy et al. 2019 (Error Feedback Fixes SignSGD), Lin et al. 2018 (Deep Gradient
Compression).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from horovod_topk.core import payload as wire
from horovod_topk.core.plan import BucketPlan, TensorPlan
from horovod_topk.core.residual import Arenas
from horovod_topk.ops import Fused, Ops

Array = TypeVar("Array")

PROBE = 16  # entries a tensor looked at again before its gradient is replaced


@dataclass(frozen=True)
class Entries(Generic[Array]):
    """What one tensor sends."""

    index: Array | None  # ascending int64 [k]; None: all elements
    values: Array  # [k], residual dtype
    sent: Array  # [k], value dtype: what the receiver will read


class Codec(Protocol[Array]):
    """encode writes `arenas.candidate` and `payload`, decode writes `gradients`; nothing else."""

    def new_payload(self, bucket: BucketPlan) -> Array:
        """A buffer for a bucket's payloads, with what is the same in all of them."""
        ...

    def encode(self, arenas: Arenas[Array], gradients: Sequence[Array], payload: Array) -> None:
        """Fill a payload; leave in the candidate arena what was not sent."""
        ...

    def unchanged(self, arenas: Arenas[Array], gradients: Sequence[Array], payload: Array) -> bool:
        """Whether the gradients still encode to what was sent."""
        ...

    def decode(
        self,
        bucket: BucketPlan,
        gathered: Array,
        scale: float,
        gradients: Sequence[Array],
    ) -> Sequence[bool]:
        """Replace gradients by the scaled sum over ranks; return which tensors any rank flagged."""
        ...

    def gradient_norm(
        self, bucket: BucketPlan, before: Array, after: Array, payload: Array
    ) -> float:
        """Norm of the gradient that took the residual from `before` to `after`."""
        ...


class TopK(Generic[Array]):
    """The k largest magnitudes of each tensor (id `wire.TOPK` in the payload's header).

    A bucket is encoded and decoded by the kernel that `ops` has for it, or else by its verbs: they
    are the definition of what a kernel does.
    """

    def __init__(self, ops: Ops[Array]) -> None:
        self._ops = ops
        self._kernels: dict[tuple[bytes, str], Fused[Array] | None] = {}

    def new_payload(self, bucket: BucketPlan) -> Array:
        """A zeroed buffer that opens with the bucket's header."""
        payload = self._ops.zeros(bucket.layout.payload_bytes, "uint8", bucket.device)
        self._ops.store_bytes(payload, 0, bucket.header)
        return payload

    def encode(self, arenas: Arenas[Array], gradients: Sequence[Array], payload: Array) -> None:
        """Fill a payload; leave in the candidate arena what was not sent."""
        bucket = arenas.plan
        kernel = self._kernel(bucket)
        if kernel is not None:
            kernel.encode(arenas.residual, arenas.candidate, gradients, payload)
            return
        entries = [
            self._compress(bucket, tensor, arenas, gradient)
            for tensor, gradient in zip(bucket.tensors, gradients, strict=True)
        ]
        self._write(bucket, entries, payload)
        for tensor, entry in zip(bucket.tensors, entries, strict=True):
            self._ops.deduct(self._slice(arenas.candidate, tensor), entry.index, entry.sent)

    def unchanged(self, arenas: Arenas[Array], gradients: Sequence[Array], payload: Array) -> bool:
        """Whether the gradients still encode to what was sent, judged by each tensor's first."""
        ops, bucket = self._ops, arenas.plan
        kernel = self._kernel(bucket)
        if kernel is not None:
            return kernel.unchanged(arenas.residual, gradients, payload)
        count = sum(min(PROBE, tensor.k) for tensor in bucket.tensors)
        now = ops.zeros(count, bucket.residual_dtype, bucket.device)
        sent, at = ops.zeros(count, bucket.value_dtype, bucket.device), 0
        for tensor, gradient in zip(bucket.tensors, gradients, strict=True):
            index, values = self._read_first(bucket, tensor, payload)
            stop = at + ops.numel(index)
            residual = ops.take(self._slice(arenas.residual, tensor), index)
            ops.compensate(residual, ops.take(gradient, index), ops.view(now, at, stop))
            ops.assign(ops.view(sent, at, stop), values)
            at = stop
        return ops.same(ops.quantise(now, bucket.value_dtype), sent)

    def decode(
        self,
        bucket: BucketPlan,
        gathered: Array,
        scale: float,
        gradients: Sequence[Array],
    ) -> Sequence[bool]:
        """Replace gradients by the scaled sum over ranks, added in rank order.

        Raises:
            PayloadError, PlanMismatchError: what a rank sent is no payload of this bucket.
        """
        flags = self._read_headers(bucket, gathered)
        kernel = self._kernel(bucket)
        if kernel is not None:
            wrong = kernel.decode(gathered, scale, flags, gradients)
            if wrong is not None:
                raise wire.wrong_indices(
                    bucket.ordinal, wrong[0], bucket.tensors[wrong[1]].spec.name
                )
            return flags
        for position, (tensor, gradient) in enumerate(zip(bucket.tensors, gradients, strict=True)):
            total = self._ops.accumulator(gradient, bucket.residual_dtype)
            self._ops.accumulate(total, *self._read(bucket, tensor, gathered))
            self._ops.deliver(total, scale, gradient, flags[position])
        return flags

    def gradient_norm(
        self, bucket: BucketPlan, before: Array, after: Array, payload: Array
    ) -> float:
        """Norm of g = e_new - e_old + decode(p): the law of conservation, solved for g."""
        ops = self._ops
        gradient = ops.clone(after)
        ops.deduct(gradient, None, before)
        for tensor in bucket.tensors:
            ops.accumulate(self._slice(gradient, tensor), *self._read(bucket, tensor, payload))
        return ops.norm(gradient)

    def _compress(
        self, bucket: BucketPlan, tensor: TensorPlan, arenas: Arenas[Array], gradient: Array
    ) -> Entries[Array]:
        """Compensate and select; the candidate is e + g afterwards."""
        ops = self._ops
        candidate = self._slice(arenas.candidate, tensor)
        ops.compensate(self._slice(arenas.residual, tensor), gradient, candidate)
        select = ops.sample if bucket.sampled else ops.select
        index = select(candidate, tensor.k) if tensor.index else None
        values = candidate if index is None else ops.take(candidate, index)
        return Entries(index, values, ops.quantise(values, bucket.value_dtype))

    def _write(self, bucket: BucketPlan, entries: Sequence[Entries[Array]], payload: Array) -> None:
        ops, layout = self._ops, bucket.layout
        ops.store_nonfinite(payload, layout.flags_at, [entry.values for entry in entries])
        ops.store(payload, layout.values_at, [e.sent for e in entries], bucket.value_dtype)
        for width, at in (("int32", layout.index32_at), ("int16", layout.index16_at)):
            parts = [
                entry.index
                for tensor, entry in zip(bucket.tensors, entries, strict=True)
                if tensor.index == width and entry.index is not None
            ]
            ops.store(payload, at, parts, width)

    def _read_headers(self, bucket: BucketPlan, gathered: Array) -> Sequence[bool]:
        """Refuse foreign payloads; return which tensors any rank flagged."""
        layout = bucket.layout

        def check(heads: list[bytes]) -> list[bool]:
            flagged = set[int]()
            for rank, head in enumerate(heads):
                wire.check_header(head, bucket.header, rank, bucket.ordinal)
                flags = head[layout.flags_at : layout.flags_at + layout.flags_bytes]
                flagged.update(wire.flagged(flags, len(bucket.tensors)))
            return [position in flagged for position in range(len(bucket.tensors))]

        return self._ops.examine(gathered, layout.payload_bytes, layout.values_at, check)

    def _read(
        self, bucket: BucketPlan, tensor: TensorPlan, gathered: Array
    ) -> tuple[Array | None, Array]:
        """A tensor's indices and values, a row a rank."""
        size = bucket.layout.payload_bytes
        values = self._ops.load(gathered, size, tensor.value_at, tensor.k, bucket.value_dtype)
        if tensor.index is None:
            return None, values
        return self._ops.load(gathered, size, tensor.index_at, tensor.k, tensor.index), values

    def _read_first(
        self, bucket: BucketPlan, tensor: TensorPlan, payload: Array
    ) -> tuple[Array, Array]:
        """Indices and values of a tensor's first entries in one payload."""
        ops, size, count = self._ops, bucket.layout.payload_bytes, min(PROBE, tensor.k)
        values = ops.load(payload, size, tensor.value_at, count, bucket.value_dtype)
        if tensor.index is None:
            return ops.arange(count, bucket.device), ops.row(values, 0)
        index = ops.load(payload, size, tensor.index_at, count, tensor.index)
        return ops.row(index, 0), ops.row(values, 0)

    def _kernel(self, bucket: BucketPlan) -> Fused[Array] | None:
        key = bucket.digest, bucket.device
        if key not in self._kernels:
            self._kernels[key] = self._ops.fused(bucket.recipe, bucket.device)
        return self._kernels[key]

    def _slice(self, arena: Array, tensor: TensorPlan) -> Array:
        return self._ops.view(arena, tensor.start, tensor.stop)
