"""Turns a bucket of gradients into a payload, and payloads into gradients, for any method.

    compensate   a  = e + g
    encode       p  = what the bucket's method sends of a
    update       e' = a - (what receivers read in p), a candidate until the step commits;
                 0 without error feedback
    decode       g' = scale * the sum over ranks, in rank order, of what they sent

This is the definition, in the verbs of `horovod_topk.ops`. A method may offer a kernel that does
all of it for a bucket at once, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from horovod_topk.core import payload as wire
from horovod_topk.core.momentum import correct
from horovod_topk.core.payload import HEADER_BYTES
from horovod_topk.core.plan import BucketPlan
from horovod_topk.core.residual import Arenas, Squares
from horovod_topk.errors import PayloadError
from horovod_topk.methods.keys import Key
from horovod_topk.methods.protocol import Codec, Read, Seeded, SeededCodec, Sent
from horovod_topk.ops import Fused, Ops, SupportsOnePass, Velocities
from horovod_topk.ops.philox import Stream

Array = TypeVar("Array")


class PayloadCodec(Generic[Array]):
    """Encodes and decodes buckets by the method that each of them has.

    `encode` writes the candidate arena and the payload, `decode` writes gradients; nothing else.
    """

    def __init__(self, ops: Ops[Array]) -> None:
        self._ops = ops
        self._kernels: dict[bytes, Fused[Array] | None] = {}
        self._committed: Callable[[], Any] = lambda: 0
        self._rank: Callable[[], int] = lambda: 0

    def draw_from(self, committed: Callable[[], Any], rank: Callable[[], int]) -> None:
        """Have methods draw their random numbers for a step of this rank.

        Args:
            committed: gives the steps that were committed before this one; a tensor in a graph.
            rank: gives this rank.
        """
        self._committed, self._rank = committed, rank

    def key(self, bucket: BucketPlan, position: int, rows: bool, ago: int = 0) -> Key | None:
        """What a piece's random numbers follow from, for a method that draws some.

        Args:
            bucket: with the piece.
            position: of the piece.
            rows: whether what is read was written by all ranks; else by this one.
            ago: steps committed since it was written.
        """
        method: object = bucket.config
        if not isinstance(method, Seeded):
            return None
        rank, written = self._rank(), position // len(bucket.gradients)

        def writer(row: int) -> int:
            return bucket.sender(row * bucket.writers + written) if rows else rank

        return Key(method.seed, bucket.place(position), self._committed() - ago, rank, writer)

    def new_payload(self, bucket: BucketPlan) -> Array:
        """A zeroed buffer that opens with the bucket's header."""
        payload = self._ops.zeros(bucket.layout.payload_bytes, "uint8", bucket.device)
        self.open_payload(bucket, payload)
        return payload

    def open_payload(self, bucket: BucketPlan, payload: Array) -> None:
        """Write the bucket's header into a zeroed buffer."""
        self._ops.store_bytes(payload, 0, bucket.header)

    def encode(
        self,
        arenas: Arenas[Array],
        gradients: Sequence[Array],
        payload: Array,
        velocities: Velocities[Array] | None = None,
    ) -> None:
        """Fill a payload; leave in the candidate arena what was not sent.

        velocities: corrects the gradients' momentum, and gets new velocities.
        """
        self.encode_shards([arenas], gradients, [payload], velocities)

    def _encode_alone(
        self, arenas: Arenas[Array], gradients: Sequence[Array], payload: Array
    ) -> None:
        """Fill a payload, by the method's kernel if there is one."""
        bucket = arenas.plan
        kernel = self._kernels.get(bucket.fingerprint) or self._kernel(bucket)
        if kernel is not None:
            streams = self._streams(bucket)
            kernel.encode(arenas.residual, arenas.candidate, gradients, payload, streams)
            return
        sent = [self._encode(arenas, gradients, at) for at in range(len(bucket.tensors))]
        checked = [each.checked for each in sent]
        self._ops.store_nonfinite(payload, bucket.layout.flags_at, checked)
        for piece, each in zip(bucket.tensors, sent, strict=True):
            for at, data in each.parts:
                self._ops.store(payload, at, data)
            candidate = self._slice(arenas.candidate, piece)
            if _method(bucket).error_feedback:
                self._ops.subtract_at(candidate, each.index, each.values)
            else:
                self._ops.subtract_at(candidate, None, self._ops.clone(candidate))

    def encode_shards(
        self,
        arenas: Sequence[Arenas[Array]],
        gradients: Sequence[Array],
        payloads: Sequence[Array],
        velocities: Velocities[Array] | None = None,
    ) -> None:
        """Fill a payload for each shard; in one pass over the gradients where a kernel can."""
        known = self._kernels
        kernels: list[Any] = [
            known.get(each.plan.fingerprint) or self._kernel(each.plan) for each in arenas
        ]
        first: object = kernels[0]
        if isinstance(first, SupportsOnePass):
            residuals, candidates, factors = zip(*(each.unscaled() for each in arenas), strict=True)
            streams = [stream for each in arenas for stream in self._streams(each.plan)]
            first.encode_shards(
                kernels, residuals, candidates, gradients, payloads, factors, velocities, streams
            )
            return
        gradients = correct(gradients, velocities, self._ops)
        for each, payload in zip(arenas, payloads, strict=True):
            self._encode_alone(each, gradients, payload)
            if velocities is not None:
                self._damp(each, payload, gradients, velocities)

    def decode(
        self,
        bucket: BucketPlan,
        gathered: Array,
        scale: float,
        gradients: Sequence[Array],
    ) -> Sequence[bool]:
        """Replace gradients by the scaled sum over ranks, added in rank order.

        Returns:
            Which gradients any rank flagged as non-finite; these are NaN now.

        Raises:
            PayloadError, PlanMismatchError: what a rank sent is no payload of this bucket.
        """
        writers, validate = bucket.writers, self._ops.validate
        width, tensors = bucket.layout.payload_bytes // writers, len(bucket.tensors) // writers
        kernel = self._kernels.get(bucket.fingerprint) or self._kernel(bucket)
        if kernel is not None:
            check = partial(self._check, bucket, ())
            flags = validate(gathered, width, bucket.layout.body_at, (), check, tensors)
            each = flags if writers == 1 else [flags[t.gradient] for t in bucket.tensors]
            wrong = kernel.decode(gathered, scale, each, gradients)
            if wrong is not None:
                raise self._damaged(bucket, wrong[1], wrong[0])
            return flags
        read, method = self._read(bucket, gathered), _method(bucket)
        whole = {piece.gradient for piece in bucket.tensors if piece.whole}
        sound = [(position, fact) for position, each in read.items() for fact in each.sound]
        check, facts = partial(self._check, bucket, sound), [fact for _, fact in sound]
        flags = validate(gathered, width, bucket.layout.body_at, facts, check, tensors)
        totals = [self._ops.accumulator(gradient, bucket.residual_dtype) for gradient in gradients]
        for position, of_piece in read.items():
            piece = bucket.tensors[position]
            index = self._rows_in_gradient(bucket, piece, of_piece.index, gathered)
            self._ops.accumulate(totals[piece.gradient], index, of_piece.values)
        for position, (total, gradient) in enumerate(zip(totals, gradients, strict=True)):
            settled = None if position in whole else method.settle(self._ops, total)
            if settled is None:
                self._ops.write_scaled(total, scale, gradient, flags[position])
            else:
                ranks = self._ops.rows(gathered, width) // writers
                self._ops.write_scaled(settled, scale * ranks, gradient, flags[position])
        return flags

    def _damp(
        self,
        arenas: Arenas[Array],
        payload: Array,
        corrected: Sequence[Array],
        own: Velocities[Array],
    ) -> None:
        """Damp the velocities of the elements that a payload sends; see `core.momentum`.

        corrected: what was added to residuals in place of the gradients.
        """
        ops, bucket = self._ops, arenas.plan
        if not own.graded and not any(own.losses):
            return
        for position, each in self._read(bucket, payload, rows=False).items():
            if each.index is None:
                continue
            piece, sums = bucket.tensors[position], None
            index = ops.row(each.index, 0)
            at = self._in_gradient(bucket, piece, index)
            if own.graded:
                waited = ops.take(self._slice(arenas.residual, piece), index)
                sums = ops.clone(waited)
                ops.compensate(waited, ops.take(corrected[piece.gradient], at), sums)
            ops.damp(own.after[piece.gradient], at, sums, own.losses[piece.gradient])

    def squares(self, arenas: Arenas[Array], payload: Array, *, committed: bool) -> Squares:
        """Of a = e' + (what receivers read), of g = a - e, and of e'.

        committed: whether e' has become the residual since.
        """
        ops, bucket = self._ops, arenas.plan
        before, after = arenas.residual, arenas.candidate
        if committed:
            before, after = after, before
        whole = ops.clone(after)
        read = self._read(bucket, payload, rows=False, ago=int(committed))
        for position, each in read.items():
            piece = bucket.tensors[position]
            ops.accumulate(self._slice(whole, piece), each.index, each.values)
        compensated = ops.norm(whole) ** 2
        ops.subtract_at(whole, None, before)
        return Squares(ops.norm(whole) ** 2, compensated, ops.norm(after) ** 2)

    def _encode(
        self, arenas: Arenas[Array], gradients: Sequence[Array], position: int
    ) -> Sent[Array]:
        """Compensate and encode one piece; the candidate is e + g afterwards."""
        ops, bucket = self._ops, arenas.plan
        piece = bucket.tensors[position]
        gradient = gradients[piece.gradient]
        if bucket.parts > 1:
            own = ops.arange(piece.numel, bucket.device)
            gradient = ops.take(gradient, self._in_gradient(bucket, piece, own))
        candidate = self._slice(arenas.candidate, piece)
        ops.compensate(self._slice(arenas.residual, piece), gradient, candidate)
        if not piece.numel:
            return Sent([], candidate, None, candidate)
        method, key = _method(bucket), self.key(bucket, position, rows=False)
        if key is not None and isinstance(method, SeededCodec):
            return method.encode_keyed(ops, bucket, piece, candidate, key)
        return method.encode(ops, bucket, piece, candidate)

    def _read(
        self, bucket: BucketPlan, gathered: Array, *, rows: bool = True, ago: int = 0
    ) -> dict[int, Read[Array]]:
        """What payloads have of each piece that has elements, by its position; see `key`."""
        ops, method, read = self._ops, _method(bucket), {}
        for position, piece in enumerate(bucket.tensors):
            if not piece.numel:
                continue
            key = self.key(bucket, position, rows, ago)
            if key is not None and isinstance(method, SeededCodec):
                read[position] = method.decode_keyed(ops, bucket, piece, gathered, key)
            else:
                read[position] = method.decode(ops, bucket, piece, gathered)
        return read

    @staticmethod
    def _check(
        bucket: BucketPlan,
        sound: Sequence[tuple[int, Array]],
        heads: list[bytes],
        answers: list[list[bool]],
    ) -> list[bool]:
        """Refuse foreign and damaged payloads; return which tensors any rank flagged.

        Args:
            bucket: whose payloads they are.
            sound: positions of pieces, and whether what each rank sent of them can be.
            heads: header and flags of each payload.
            answers: `sound`, on the host.
        """
        headers, layout = bucket.headers, bucket.layout
        begin, end, bits = layout.flags_at, layout.flags_at + layout.flags_bytes, 0
        for position, head in enumerate(heads):
            header = headers[position % len(headers)]
            if head[:HEADER_BYTES] != header:
                raise wire.foreign(head, header, bucket.sender(position), bucket.ordinal)
            bits |= int.from_bytes(head[begin:end], "little")
        flags = [bool(bits >> position & 1) for position in range(len(bucket.gradients))]
        for (position, _), answer in zip(sound, answers, strict=True):
            if not all(answer) and not flags[bucket.tensors[position].gradient]:
                raise PayloadCodec._damaged(bucket, position, answer.index(False))
        return flags

    @staticmethod
    def _damaged(bucket: BucketPlan, position: int, row: int) -> PayloadError:
        """The error for what a row of payloads has of one piece."""
        rank = bucket.sender(row * bucket.writers + position // len(bucket.gradients))
        name = bucket.tensors[position].spec.name
        return wire.damaged(bucket.ordinal, rank, name)

    def _in_gradient(self, bucket: BucketPlan, piece: Any, index: Array) -> Array:
        """Indices into the gradient, of indices into a piece of it."""
        if bucket.parts == 1:
            return index
        return self._ops.global_index(index, bucket.parts, piece.first)

    def _rows_in_gradient(
        self, bucket: BucketPlan, piece: Any, index: Array | None, gathered: Array
    ) -> Array | None:
        """The same of rows of indices, or of all of them in each row."""
        if bucket.parts == 1:
            return index
        if index is None:
            rows = self._ops.numel(gathered) // bucket.layout.payload_bytes
            index = self._everything(piece.numel, rows, bucket.device)
        return self._in_gradient(bucket, piece, index)

    def _everything(self, numel: int, rows: int, device: str) -> Array:
        """[rows, n] indices, 0 to n - 1 in each row."""
        ops = self._ops
        index, own = ops.zeros(rows * numel, "int64", device), ops.arange(numel, device)
        for at in range(0, rows * numel, numel):
            ops.assign(ops.view(index, at, at + numel), own)
        return ops.load(index, numel, 0, numel)

    def _kernel(self, bucket: BucketPlan) -> Fused[Array] | None:
        key = bucket.fingerprint
        if key not in self._kernels:
            self._kernels[key] = _method(bucket).kernel(self._ops, bucket)
        return self._kernels[key]

    def _streams(self, bucket: BucketPlan) -> list[Stream]:
        """What a kernel's random numbers follow from, one a piece; none for other methods."""
        keys = (self.key(bucket, position, rows=False) for position in range(len(bucket.tensors)))
        return [key.own for key in keys if key is not None]

    def _slice(self, arena: Array, piece: Any) -> Array:
        return self._ops.view(arena, piece.start, piece.stop)


def _method(bucket: BucketPlan) -> Codec:
    method: object = bucket.config
    assert isinstance(method, Codec)
    return method
