"""Codecs turn a bucket of gradients into a payload and payloads back into gradients.

`TopK` is error-feedback sparsification: Stich et al. 2018 (Sparsified SGD with Memory),
Karimireddy et al. 2019 (Error Feedback Fixes SignSGD), Lin et al. 2018 (Deep Gradient
Compression).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from horovod_topk.core import payload as wire
from horovod_topk.core.plan import BucketPlan, TensorPlan
from horovod_topk.core.residual import Arenas, as_row
from horovod_topk.errors import PayloadError
from horovod_topk.ops import Clears, Fused, Ops, Together
from horovod_topk.ops.coding import index_bytes, value_bytes

Array = TypeVar("Array")


@dataclass(frozen=True)
class Entries(Generic[Array]):
    """What one tensor sends."""

    index: Array | None  # ascending int64 [k]; None: all elements
    values: Array  # [k], residual dtype
    data: Array  # uint8: the values as they travel
    sent: Array  # [k], residual dtype: what the receiver will read


class Codec(Protocol[Array]):
    """encode writes `arenas.candidate` and `payload`, decode writes `gradients`; nothing else."""

    def new_payload(self, bucket: BucketPlan) -> Array:
        """A buffer for a bucket's payloads, with what is the same in all of them."""
        ...

    def open_payload(self, bucket: BucketPlan, payload: Array) -> None:
        """Write what is the same in all of a bucket's payloads into a zeroed buffer."""
        ...

    def encode(self, arenas: Arenas[Array], gradients: Sequence[Array], payload: Array) -> None:
        """Fill a payload; leave in the candidate arena what was not sent."""
        ...

    def encode_shards(
        self,
        arenas: Sequence[Arenas[Array]],
        gradients: Sequence[Array],
        payloads: Sequence[Array],
    ) -> None:
        """As `encode`, for all shards of a bucket."""
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

    def clear(self, bucket: BucketPlan, payload: Array, arrays: Sequence[Array]) -> None:
        """Write zeros where a payload of this process's own has entries.

        arrays: flat, one for each gradient; those that were sent whole stay as they are.
        """
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
        self._kernels: dict[bytes, Fused[Array] | None] = {}

    def new_payload(self, bucket: BucketPlan) -> Array:
        """A zeroed buffer that opens with the bucket's header."""
        payload = self._ops.zeros(bucket.layout.payload_bytes, "uint8", bucket.device)
        self.open_payload(bucket, payload)
        return payload

    def open_payload(self, bucket: BucketPlan, payload: Array) -> None:
        """Write the bucket's header into a zeroed buffer."""
        self._ops.store_bytes(payload, 0, bucket.header)

    def encode(self, arenas: Arenas[Array], gradients: Sequence[Array], payload: Array) -> None:
        """Fill a payload; leave in the candidate arena what was not sent."""
        bucket = arenas.plan
        kernel = self._kernel(bucket)
        if kernel is not None:
            kernel.encode(arenas.residual, arenas.candidate, gradients, payload)
            return
        entries = [self._compress(bucket, tensor, arenas, gradients) for tensor in bucket.tensors]
        self._write(bucket, entries, payload)
        for tensor, entry in zip(bucket.tensors, entries, strict=True):
            self._ops.deduct(self._slice(arenas.candidate, tensor), entry.index, entry.sent)

    def encode_shards(
        self,
        arenas: Sequence[Arenas[Array]],
        gradients: Sequence[Array],
        payloads: Sequence[Array],
    ) -> None:
        """Fill a payload for each shard; in one pass over the gradients where a kernel can."""
        kernels: list[Any] = [self._kernel(each.plan) for each in arenas]
        first: object = kernels[0]
        if isinstance(first, Together):
            residuals = [each.residual for each in arenas]
            candidates = [each.candidate for each in arenas]
            first.encode_shards(kernels, residuals, candidates, gradients, payloads)
            return
        for each, payload in zip(arenas, payloads, strict=True):
            self.encode(each, gradients, payload)

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
        kernel = self._kernel(bucket)
        if kernel is not None:
            flags = self._examine(bucket, gathered, {})
            each = flags if bucket.writers == 1 else [flags[t.gradient] for t in bucket.tensors]
            wrong = kernel.decode(gathered, scale, each, gradients)
            if wrong is not None:
                raise self._wrong_indices(bucket, wrong[1], wrong[0])
            return flags
        index, sound = self._read_indices(bucket, gathered)
        flags = self._examine(bucket, gathered, sound)
        totals = [self._ops.accumulator(gradient, bucket.residual_dtype) for gradient in gradients]
        for position, tensor in enumerate(bucket.tensors):
            if tensor.k == 0:
                continue
            values = self._read_values(bucket, tensor, gathered)
            at = self._naturally(bucket, tensor, index.get(position), gathered)
            self._ops.accumulate(totals[tensor.gradient], at, values)
        for position, (total, gradient) in enumerate(zip(totals, gradients, strict=True)):
            self._ops.deliver(total, scale, gradient, flags[position])
        return flags

    def clear(self, bucket: BucketPlan, payload: Array, arrays: Sequence[Array]) -> None:
        """Write zeros where a payload of this process's own has entries."""
        kernel: object = self._kernel(bucket)
        if isinstance(kernel, Clears):
            kernel.clear(payload, arrays)
            return
        index, _ = self._read_indices(bucket, payload)
        for position, rows in index.items():
            tensor = bucket.tensors[position]
            natural = self._natural(bucket, tensor, self._ops.row(rows, 0))
            array = arrays[tensor.gradient]
            self._ops.deduct(array, natural, self._ops.take(array, natural))

    def gradient_norm(
        self, bucket: BucketPlan, before: Array, after: Array, payload: Array
    ) -> float:
        """Norm of g = e_new - e_old + decode(p): the law of conservation, solved for g."""
        ops = self._ops
        gradient = ops.clone(after)
        ops.deduct(gradient, None, before)
        index, _ = self._read_indices(bucket, payload)
        for position, tensor in enumerate(bucket.tensors):
            values = self._read_values(bucket, tensor, payload)
            ops.accumulate(self._slice(gradient, tensor), index.get(position), values)
        return ops.norm(gradient)

    def _compress(
        self,
        bucket: BucketPlan,
        tensor: TensorPlan,
        arenas: Arenas[Array],
        gradients: Sequence[Array],
    ) -> Entries[Array]:
        """Compensate and select; the candidate is e + g afterwards."""
        ops, gradient = self._ops, gradients[tensor.gradient]
        if bucket.parts > 1:
            own = ops.arange(tensor.numel, bucket.device)
            gradient = ops.take(gradient, self._natural(bucket, tensor, own))
        candidate = self._slice(arenas.candidate, tensor)
        ops.compensate(self._slice(arenas.residual, tensor), gradient, candidate)
        select = ops.sample if bucket.sampled else ops.select
        index = select(candidate, tensor.k) if tensor.index else None
        values = candidate if index is None else ops.take(candidate, index)
        if tensor.k == 0:  # a tensor without elements
            return Entries(index, values, ops.zeros(0, "uint8", bucket.device), values)
        data = ops.pack_values(values, bucket.values)
        return Entries(index, values, data, self._sent(bucket, data, tensor.k))

    def _write(self, bucket: BucketPlan, entries: Sequence[Entries[Array]], payload: Array) -> None:
        ops, layout = self._ops, bucket.layout
        ops.store_nonfinite(payload, layout.flags_at, [entry.values for entry in entries])
        for tensor, entry in zip(bucket.tensors, entries, strict=True):
            ops.store(payload, tensor.value_at, entry.data)
            if tensor.index and entry.index is not None:
                data = ops.pack_index(entry.index, tensor.numel, tensor.index)
                ops.store(payload, tensor.index_at, data)

    def _examine(
        self, bucket: BucketPlan, gathered: Array, sound: Mapping[int, Array]
    ) -> Sequence[bool]:
        """Refuse foreign and damaged payloads; return which tensors any rank flagged.

        sound: by position of the tensor, whether each rank's indices were.
        """
        layout, headers, positions = bucket.layout, bucket.headers, list(sound)

        def check(heads: list[bytes], answers: list[list[bool]]) -> list[bool]:
            flagged = set[int]()
            for position, head in enumerate(heads):
                header, rank = headers[position % len(headers)], bucket.sender(position)
                wire.check_header(head, header, rank, bucket.ordinal)
                flags = head[layout.flags_at : layout.flags_at + layout.flags_bytes]
                flagged.update(wire.flagged(flags, len(bucket.gradients)))
            for position, answer in zip(positions, answers, strict=True):
                if not all(answer) and bucket.tensors[position].gradient not in flagged:
                    raise self._wrong_indices(bucket, position, answer.index(False))
            return [position in flagged for position in range(len(bucket.gradients))]

        facts, width = list(sound.values()), layout.payload_bytes // bucket.writers
        return self._ops.examine(gathered, width, layout.values_at, facts, check)

    @staticmethod
    def _wrong_indices(bucket: BucketPlan, position: int, row: int) -> PayloadError:
        """The error for a tensor's indices in a row of payloads."""
        rank = bucket.sender(row * bucket.writers + position // len(bucket.gradients))
        name = bucket.tensors[position].spec.name
        return wire.wrong_indices(bucket.ordinal, rank, name)

    def _natural(self, bucket: BucketPlan, tensor: TensorPlan, index: Array) -> Array:
        """Indices into the gradient, of indices into a tensor of the bucket."""
        if bucket.parts == 1:
            return index
        return self._ops.spot(index, bucket.parts, tensor.first)

    def _naturally(
        self, bucket: BucketPlan, tensor: TensorPlan, index: Array | None, gathered: Array
    ) -> Array | None:
        """The same of rows of indices, or of all of them in each row."""
        if bucket.parts == 1:
            return index
        if index is None:
            rows = self._ops.numel(gathered) // bucket.layout.payload_bytes
            index = self._everything(tensor.numel, rows, bucket.device)
        return self._natural(bucket, tensor, index)

    def _everything(self, numel: int, rows: int, device: str) -> Array:
        """[rows, n] indices, 0 to n - 1 in each row."""
        ops = self._ops
        index, own = ops.zeros(rows * numel, "int64", device), ops.arange(numel, device)
        for at in range(0, rows * numel, numel):
            ops.assign(ops.view(index, at, at + numel), own)
        return ops.load(index, numel, 0, numel)

    def _read_indices(
        self, bucket: BucketPlan, gathered: Array
    ) -> tuple[dict[int, Array], dict[int, Array]]:
        """Indices, a row a rank, and whether they are sound, by position of the tensor."""
        index, sound = dict[int, Array](), dict[int, Array]()
        for position, tensor in enumerate(bucket.tensors):
            if tensor.index is not None:
                read = self._read_index(bucket, tensor, tensor.index, gathered)
                index[position], sound[position] = read
        return index, sound

    def _read_index(
        self, bucket: BucketPlan, tensor: TensorPlan, kind: str, gathered: Array
    ) -> tuple[Array, Array]:
        """One tensor's indices, a row a rank, and whether they are sound."""
        ops, size, count = self._ops, bucket.layout.payload_bytes, tensor.k
        data_bytes = index_bytes(kind, tensor.numel, count)
        rows = ops.load(gathered, size, tensor.index_at, data_bytes)
        return ops.unpack_index(rows, count, tensor.numel, kind)

    def _read_values(self, bucket: BucketPlan, tensor: TensorPlan, gathered: Array) -> Array:
        """A tensor's values, a row a rank."""
        size, count = bucket.layout.payload_bytes, value_bytes(bucket.values, tensor.k)
        rows = self._ops.load(gathered, size, tensor.value_at, count)
        return self._ops.unpack_values(rows, tensor.k, bucket.values, bucket.residual_dtype)

    def _sent(self, bucket: BucketPlan, data: Array, count: int) -> Array:
        """What a reader makes of values."""
        ops = self._ops
        return ops.row(
            ops.unpack_values(as_row(ops, data), count, bucket.values, bucket.residual_dtype), 0
        )

    def _kernel(self, bucket: BucketPlan) -> Fused[Array] | None:
        key = bucket.fingerprint
        if key not in self._kernels:
            self._kernels[key] = self._ops.fused(bucket.recipe, bucket.device)
        return self._kernels[key]

    def _slice(self, arena: Array, tensor: TensorPlan) -> Array:
        return self._ops.view(arena, tensor.start, tensor.stop)
