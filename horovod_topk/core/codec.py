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
from horovod_topk.ops import Ops

Array = TypeVar("Array")

PROBE = 16  # entries a tensor looked at again before its gradient is replaced


@dataclass(frozen=True)
class Entries(Generic[Array]):
    """What one tensor sends."""

    index: Array | None  # ascending int64 [k]; None: all elements
    values: Array  # [k], residual dtype
    sent: Array  # [k], value dtype: what the receiver will read


@dataclass(frozen=True)
class Probe(Generic[Array]):
    """The first entries of each tensor, kept to notice a gradient that changed since."""

    index: tuple[Array, ...]  # int64, at most PROBE each
    sent: Array  # value dtype, tensor after tensor


class Codec(Protocol[Array]):
    """encode writes `arenas.candidate` and `payload`, decode writes `gradients`; nothing else."""

    def new_payload(self, bucket: BucketPlan) -> Array:
        """A buffer for a bucket's payloads, with what is the same in all of them."""
        ...

    def encode(
        self, arenas: Arenas[Array], gradients: Sequence[Array], payload: Array
    ) -> Probe[Array]:
        """Fill a payload; leave in the candidate arena what was not sent."""
        ...

    def unchanged(
        self, arenas: Arenas[Array], gradients: Sequence[Array], probe: Probe[Array]
    ) -> bool:
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
    """The k largest magnitudes of each tensor (id `wire.TOPK` in the payload's header)."""

    def __init__(self, ops: Ops[Array]) -> None:
        self._ops = ops

    def new_payload(self, bucket: BucketPlan) -> Array:
        """A zeroed buffer that opens with the bucket's header."""
        payload = self._ops.zeros(bucket.layout.payload_bytes, "uint8", bucket.device)
        self._ops.store_bytes(payload, 0, bucket.header)
        return payload

    def encode(
        self, arenas: Arenas[Array], gradients: Sequence[Array], payload: Array
    ) -> Probe[Array]:
        """Fill a payload; leave in the candidate arena what was not sent."""
        bucket = arenas.plan
        entries = [
            self._compress(bucket, tensor, arenas, gradient)
            for tensor, gradient in zip(bucket.tensors, gradients, strict=True)
        ]
        self._write(bucket, entries, payload)
        probe = self._probe(bucket, entries)
        for tensor, entry in zip(bucket.tensors, entries, strict=True):
            self._ops.deduct(self._slice(arenas.candidate, tensor), entry.index, entry.sent)
        return probe

    def unchanged(
        self, arenas: Arenas[Array], gradients: Sequence[Array], probe: Probe[Array]
    ) -> bool:
        """Whether the gradients still encode to what was sent, judged by the probed entries."""
        ops, bucket = self._ops, arenas.plan
        again, at = self._probe_array(bucket, bucket.residual_dtype), 0
        for tensor, gradient, index in zip(bucket.tensors, gradients, probe.index, strict=True):
            stop = at + min(PROBE, tensor.k)
            residual = ops.take(self._slice(arenas.residual, tensor), index)
            ops.compensate(residual, ops.take(gradient, index), ops.view(again, at, stop))
            at = stop
        return ops.same(ops.quantise(again, bucket.value_dtype), probe.sent)

    def decode(
        self,
        bucket: BucketPlan,
        gathered: Array,
        scale: float,
        gradients: Sequence[Array],
    ) -> Sequence[bool]:
        """Replace gradients by the scaled sum over ranks, added in rank order."""
        flags = self._read_headers(bucket, gathered)
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
        index = ops.select(candidate, tensor.k) if tensor.index else None
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

    def _probe(self, bucket: BucketPlan, entries: Sequence[Entries[Array]]) -> Probe[Array]:
        ops = self._ops
        everything = ops.arange(PROBE, bucket.device)
        sent, index, at = self._probe_array(bucket, bucket.value_dtype), [], 0
        for tensor, entry in zip(bucket.tensors, entries, strict=True):
            count = min(PROBE, tensor.k)
            source = everything if entry.index is None else entry.index
            index.append(ops.view(source, 0, count))
            ops.assign(ops.view(sent, at, at + count), ops.view(entry.sent, 0, count))
            at += count
        return Probe(tuple(index), sent)

    def _probe_array(self, bucket: BucketPlan, dtype: str) -> Array:
        count = sum(min(PROBE, tensor.k) for tensor in bucket.tensors)
        return self._ops.zeros(count, dtype, bucket.device)

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

    def _slice(self, arena: Array, tensor: TensorPlan) -> Array:
        return self._ops.view(arena, tensor.start, tensor.stop)
