"""`PayloadCodec` turns a bucket of gradients into a payload, and payloads into gradients.

    compensate   a  = e + g
    encode       p  = encode(a), by the bucket's method
    update       e' = a - decode(p), a candidate until the step commits; 0 without error feedback
    decode       g' = scale * the sum over ranks, in rank order, of decode(p_r)

`core.exchange.announcing` encodes for methods whose ranks exchange a few numbers first.

This is the definition, in the verbs of `horovod_topk.ops`. A method may offer a kernel that does
all of it for a bucket at once, with bitwise the same result.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar, cast

from horovod_topk.core.codec.measures import MeasureStore, Rows
from horovod_topk.core.codec.momentum import NO_MOMENTS, OptimizerMoments, correct
from horovod_topk.core.codec.withheld import Opened, Withholding
from horovod_topk.core.plan import facts
from horovod_topk.core.plan import payload as wire
from horovod_topk.core.plan.buckets import BucketPlan
from horovod_topk.core.plan.payload import FACTS_AT, HEADER_BYTES
from horovod_topk.core.state.residual import Arenas, NarrowArenas, Squares
from horovod_topk.errors import PayloadError
from horovod_topk.methods.keys import Key
from horovod_topk.methods.protocol import (
    Announced,
    AnnouncingCodec,
    Codec,
    Context,
    Read,
    Seeded,
    Sent,
    numbers_of,
)
from horovod_topk.ops import Fused, Ops, SupportsOnePass, Velocities
from horovod_topk.ops.philox import Stream
from horovod_topk.ops.protocol import Arrived, DecodesTogether, EncodesTogether

Array = TypeVar("Array")
AT_ONCE = 1 << 25  # elements that wait to be decoded at once, at most: a ResNet-50 has fewer


class PayloadCodec(Generic[Array]):
    """Encodes and decodes buckets, each by its own method.

    `encode` writes only the candidate arena and the payload, `decode` only gradients.

    Attributes:
        measures: what ranks tell each other with their payloads.
        withholding: limits of what payloads hold.
        waiting: a list, to which `decode` adds payloads that kernels can decode at once, up to
            `AT_ONCE` elements. The flags that it returns are then an empty list, which
            `decode_waiting` fills. None: it decodes each of them by itself.
    """

    def __init__(self, ops: Ops[Array], arrived: dict[int, Rows] | None = None) -> None:
        self.ops = ops
        self._encoders: dict[bytes, Fused[Array] | None] = {}  # by the bucket's fingerprint
        self._decoders: dict[bytes, Fused[Array] | None] = {}  # the same
        self.measures, self.withholding = MeasureStore(ops, arrived), Withholding(ops)
        self.waiting: list[tuple[BucketPlan, list[bool], Arrived[Array]]] | None = None
        self._committed: Callable[[], Any] = lambda: 0
        self._rank: Callable[[], int] = lambda: 0

    def draw_from(self, committed: Callable[[], Any], rank: Callable[[], int]) -> None:
        """Set the step and rank from which methods derive their random numbers.

        committed: returns the number of committed steps before this one; a tensor in a graph.
        """
        self._committed, self._rank = committed, rank

    def key(self, bucket: BucketPlan, position: int, ago: int = 0) -> Key | None:
        """Key of a piece's random numbers; None: the method draws none.

        ago: steps committed since the payload was written.
        """
        method: object = bucket.config
        if not isinstance(method, Seeded):
            return None
        known = method.seed, bucket.identity_of(position), self._committed() - ago
        return Key(*known, self._rank)

    def new_payload(self, bucket: BucketPlan) -> Array:
        """Allocate a payload that has the bucket's header and is zero otherwise."""
        payload = self.ops.zeros(bucket.layout.payload_bytes, "uint8", bucket.device)
        self.open_payload(bucket, payload)
        return payload

    def open_payload(self, bucket: BucketPlan, payload: Array) -> None:
        """Write the bucket's header into a zeroed buffer."""
        self.ops.store_bytes(payload, 0, bucket.header)

    def flag_all(self, bucket: BucketPlan, payload: Array) -> None:
        """Flag every tensor of a payload as non-finite, so that all ranks roll back."""
        layout, flags = bucket.layout, (1 << len(bucket.gradients)) - 1
        data = flags.to_bytes(layout.flags_bytes, "little")
        self.ops.store_bytes(payload, layout.flags_at, data)
        if bucket.ordinal in self.measures.facts:
            self.measures.write_facts(bucket, payload)

    def encode(
        self,
        arenas: Arenas[Array],
        gradients: Sequence[Array],
        payload: Array,
        moments: OptimizerMoments[Array] = NO_MOMENTS,
    ) -> None:
        """Fill a payload, and write the new residual to the candidate arena.

        moments: of the optimizer; the new velocities are written to it.
        """
        self.encode_shards([arenas], gradients, [payload], moments)

    def encode_shards(
        self,
        arenas: Sequence[Arenas[Array]],
        gradients: Sequence[Array],
        payloads: Sequence[Array],
        moments: OptimizerMoments[Array] = NO_MOMENTS,
    ) -> None:
        """Fill a payload for each shard; in one pass over the gradients if the kernel can."""
        limits, made = self.withholding.limits, self._encoders
        opened = [
            self.withholding.open(each, gradients)
            if limits or isinstance(each, NarrowArenas)
            else Opened(each, each)
            for each in arenas
        ]
        plans = [each.plan for each in arenas]
        kernels: list[Any] = [made.get(p.fingerprint) or self._encoder(p) for p in plans]
        first: object = kernels[0]
        velocities, squares = moments.velocities, moments.squares
        streams = self._streams(plans) if isinstance(plans[0].config, Seeded) else ()
        if squares and all(each is None for each in squares):
            squares = ()
        if isinstance(first, SupportsOnePass) and not arenas[0].plan.config.measured:
            pairs = (each.arenas.unscaled() for each in opened)
            residuals, candidates, factors = zip(*pairs, strict=True)
            memory = residuals, candidates, gradients, payloads
            first.encode_shards(kernels, *memory, factors, velocities, streams, squares)
        else:
            gradients = correct(gradients, velocities, self.ops)
            together = None not in kernels and not arenas[0].plan.config.measured
            if together and isinstance(first, EncodesTogether):
                own = [each.arenas for each in opened]
                pair = [e.residual for e in own], [e.candidate for e in own]
                first.encode_all(kernels, *pair, gradients, payloads, streams, squares)
            else:
                for each, payload in zip(opened, payloads, strict=True):
                    self._encode_alone(each.arenas, gradients, payload, squares)
            if velocities is not None:
                for each, payload in zip(opened, payloads, strict=True):
                    self.mask(each.own, payload, velocities)
        self.seal(opened, payloads)

    def seal(self, opened: Sequence[Opened[Array]], payloads: Sequence[Array]) -> None:
        """End the encoding of a bucket, or of its shards: keep rests, and write measures."""
        for each in opened:
            if each.rests:
                each.keep(self.ops)
        for each, payload in zip(opened, payloads, strict=True):
            bucket = each.own.plan
            if bucket.ordinal in self.measures.facts:
                self.measures.write_facts(bucket, payload)
            own = self.measures.own.get(bucket.ordinal)
            if own is not None and bucket.measures and bucket.fingerprint not in own.written:
                self.measures.write(bucket, own, payload)
        for each in opened:
            if isinstance(each.own, NarrowArenas):
                each.own.narrow()

    def _encode_alone(
        self,
        arenas: Arenas[Array],
        gradients: Sequence[Array],
        payload: Array,
        squares: Sequence[Array | None],
    ) -> None:
        """Fill a payload, by the method's kernel if there is one."""
        bucket = arenas.plan
        kernel = self._encoder(bucket)
        if kernel is not None:
            if bucket.config.measured:
                for position in range(len(bucket.tensors)):
                    self._measure(bucket, position, self.compensate(arenas, gradients, position)[0])
            pair = arenas.residual, arenas.candidate
            kernel.encode(*pair, gradients, payload, self._streams([bucket]), squares)
            return
        sent = []
        for position, piece in enumerate(bucket.tensors):
            values, checked = self.compensate(arenas, gradients, position)
            self._measure(bucket, position, values)
            square = squares[piece.gradient] if squares else None
            one = self.encode_piece(bucket, position, values, square)
            sent.append(replace(one, checked=checked) if one.index is None else one)
        self.write(arenas, payload, sent)

    def _decoder(self, bucket: BucketPlan) -> Fused[Array] | None:
        """The kernel that decodes a bucket; None: there is none."""
        key = bucket.fingerprint
        if key not in self._decoders:
            self._decoders[key] = codec_of(bucket).kernel(self.ops, bucket)
        return self._decoders[key]

    def _encoder(self, bucket: BucketPlan) -> Fused[Array] | None:
        """The kernel that encodes a bucket; None: there is none, or the method announces."""
        announces = isinstance(bucket.config, AnnouncingCodec)
        kernel = None if announces else self._decoder(bucket)
        return self._encoders.setdefault(bucket.fingerprint, kernel)

    def _measure(self, bucket: BucketPlan, position: int, values: Array) -> None:
        """Compute the method's own measures of one piece of e + g, except in an owner's bucket."""
        piece = bucket.tensors[position]
        if piece.numel and bucket.direction != "gather":
            found = codec_of(bucket).measure(self.ops, bucket, piece, values)
            self.measures.add(bucket, found)

    def write(self, arenas: Arenas[Array], payload: Array, sent: Sequence[Sent[Array]]) -> None:
        """Write encoded pieces to a payload, and subtract them from the candidate arena.

        The candidate arena has e + g before, and the new residual after.
        """
        bucket = arenas.plan
        checked = [each.checked for each in sent]
        self.ops.store_nonfinite(payload, bucket.layout.flags_at, checked)
        for piece, each in zip(bucket.tensors, sent, strict=True):
            for at, data in each.parts:
                self.ops.store(payload, at, data)
            candidate = self._slice(arenas.candidate, piece)
            if codec_of(bucket).error_feedback:
                self.ops.subtract_at(candidate, each.index, each.values)
            else:
                self.ops.subtract_at(candidate, None, candidate)

    def check_length(self, bucket: BucketPlan, gathered: Array, count: int) -> int | None:
        """Refuse bytes that are not `count` payloads; return their number, None in a graph."""
        size = bucket.layout.payload_bytes // bucket.writers
        received = cast("int | None", self.ops.numel(gathered))
        if received not in (None, size * count):
            raise wire.wrong_length(self.ops.to_host(gathered), size, count, bucket.ordinal)
        return received

    def rows(
        self, bucket: BucketPlan, gathered: Array
    ) -> tuple[list[Array | None], Sequence[bool]]:
        """Values of each tensor in each payload, [P, n], None without elements; and the flags."""
        read = self._read(bucket, gathered)
        flags = self._validate(bucket, gathered, read)
        pieces = range(len(bucket.tensors))
        return [read[at].values if at in read else None for at in pieces], flags

    def decode(
        self,
        bucket: BucketPlan,
        gathered: Array,
        scale: float,
        gradients: Sequence[Array],
    ) -> Sequence[bool]:
        """Replace gradients by the scaled sum over ranks, in their order; return the flags."""
        if bucket.tensor_measures:
            self.measures.read_tensor_numbers(bucket, gathered)
        kernel = self._decoders.get(bucket.fingerprint) or self._decoder(bucket)
        if kernel is not None:
            if self.waiting is not None and isinstance(kernel, DecodesTogether):
                return self._postpone(bucket, Arrived(kernel, gathered, scale, gradients))
            flags = self._validate(bucket, gathered, {})
            each = [flags[t.gradient] for t in bucket.tensors] if bucket.writers > 1 else flags
            wrong = kernel.decode(gathered, scale, each, gradients)
            if wrong is not None:
                raise self._damaged(bucket, wrong[1], wrong[0])
            return flags
        read = self._read(bucket, gathered)
        flags = self._validate(bucket, gathered, read)
        totals = [self.ops.accumulator(gradient, bucket.residual_dtype) for gradient in gradients]
        for position, of_piece in read.items():
            piece = bucket.tensors[position]
            index = self._rows_in_gradient(bucket, piece, of_piece.index, gathered)
            self.ops.accumulate(totals[piece.gradient], index, of_piece.values)
        self._write_totals(bucket, gathered, totals, scale, gradients, flags)
        return flags

    def _postpone(self, bucket: BucketPlan, arrived: Arrived[Array]) -> list[bool]:
        assert self.waiting is not None
        every = [*(each for *_, each in self.waiting), arrived]
        if sum(self.ops.numel(g) for each in every for g in each.gradients) > AT_ONCE:
            self.decode_waiting()
        flags = list[bool]()
        self.waiting.append((bucket, flags, arrived))
        return flags

    def decode_waiting(self) -> None:
        """Check and decode, at once, the payloads that wait for this; waits for the device once."""
        if not self.waiting:
            return
        buckets, flags, arrived = zip(*self.waiting, strict=True)
        self.waiting.clear()
        kernel = cast("DecodesTogether[Array]", arrived[0].kernel)
        widths = [bucket.layout.payload_bytes // bucket.writers for bucket in buckets]
        heads = kernel.heads(arrived, widths, [bucket.layout.body_at for bucket in buckets])
        for bucket, own, head in zip(buckets, flags, heads, strict=True):
            facts = self.measures.facts.get(bucket.ordinal)
            own += self._check(self.measures.arrived, bucket, (), facts, self._rank, head, [])
        kernel.decode_all(arrived)

    def _write_totals(
        self,
        bucket: BucketPlan,
        gathered: Array,
        totals: Sequence[Array],
        scale: float,
        gradients: Sequence[Array],
        flags: Sequence[bool],
    ) -> None:
        """Write sums over ranks, or what the method makes of them, times `scale` to gradients."""
        ops, method = self.ops, codec_of(bucket)
        whole = {piece.gradient for piece in bucket.tensors if piece.whole}
        for position, (total, gradient) in enumerate(zip(totals, gradients, strict=True)):
            settled = None if position in whole else method.settle(ops, total)
            if settled is None:
                ops.write_scaled(total, scale, gradient, flags[position])
            else:
                ranks = ops.rows(gathered, bucket.layout.payload_bytes)
                ops.write_scaled(settled, scale * ranks, gradient, flags[position])

    def _validate(
        self, bucket: BucketPlan, gathered: Array, read: dict[int, Read[Array]]
    ) -> Sequence[bool]:
        """Refuse foreign and damaged payloads; return which tensors any rank flagged."""
        width = bucket.layout.payload_bytes // bucket.writers
        sound = list[tuple[int, Array]]()
        for position, of_piece in read.items():  # by loops, as kernels read nothing here
            sound += [(position, each) for each in of_piece.sound]
        own = self.measures.facts.get(bucket.ordinal)
        positions, facts = zip(*sound, strict=True) if sound else ((), ())
        check = partial(self._check, self.measures.arrived, bucket, positions, own, self._rank)
        count = len(bucket.gradients)
        return self.ops.validate(gathered, width, bucket.layout.body_at, facts, check, count)

    def mask(self, arenas: Arenas[Array], payload: Array, own: Velocities[Array]) -> None:
        """Set the velocities of sent elements to 0; see `core.codec.momentum`."""
        ops, bucket = self.ops, arenas.plan
        for position, each in self._read(bucket, payload).items():
            if each.index is not None:
                piece = bucket.tensors[position]
                at = self._in_gradient(bucket, piece, ops.row(each.index, 0))
                velocity = own.after[piece.gradient]
                ops.subtract_at(velocity, at, ops.take(velocity, at))

    def squares(self, arenas: Arenas[Array], payload: Array, *, committed: bool) -> Squares:
        """Sums of squares of a payload's g, a = e + g and new residual e' = a - decode(p).

        committed: whether the step was committed, so that e' is the residual now.
        """
        ops, bucket = self.ops, arenas.plan
        before, after = arenas.residual, arenas.candidate
        if committed:
            before, after = after, before
        whole = ops.clone(after)
        if not self._add_by_kernel(whole, bucket, payload):
            read = self._read(bucket, payload, int(committed))
            for position, each in read.items():
                piece = bucket.tensors[position]
                ops.accumulate(self._slice(whole, piece), each.index, each.values)
        compensated = ops.norm(whole) ** 2
        ops.subtract_at(whole, None, before)
        return Squares(ops.norm(whole) ** 2, compensated, ops.norm(after) ** 2)

    def _add_by_kernel(self, out: Array, bucket: BucketPlan, payload: Array) -> bool:
        """Have a kernel add a payload's values to an arena; return False if no kernel can.

        In a graph a kernel takes far fewer operations than decoding piece by piece.
        """
        ops, dtype = self.ops, bucket.residual_dtype
        if bucket.parts > 1 or any(tensor.spec.dtype != dtype for tensor in bucket.tensors):
            return False
        kernel = self._decoder(bucket)
        if kernel is None:
            return False
        sent = ops.clone(out)  # the kernel replaces every element
        flags, each = [False] * len(bucket.tensors), [self._slice(sent, t) for t in bucket.tensors]
        if kernel.decode(payload, 1.0, flags, each) is not None:
            return False
        ops.compensate(out, sent, out)
        return True

    def regained(self, arenas: Arenas[Array], payload: Array) -> list[Array]:
        """Sum of squares of a = e' + decode(p) less that of e', for each piece: [1] float32.

        The step must not be committed yet. It reads only the elements that were sent, and waits for
        no device.
        """
        ops, differences, candidate = self.ops, list[Array](), arenas.candidate
        for position, each in self._read(arenas.plan, payload).items():
            left = self._slice(candidate, arenas.plan.tensors[position])
            if each.index is not None:
                left = ops.take(left, ops.row(each.index, 0))
            whole: Any = left + ops.row(each.values, 0)  # type: ignore[operator]
            before: Any = ops.square(left)
            differences.append(ops.square(whole) - before)
        return differences

    def compensate(
        self, arenas: Arenas[Array], gradients: Sequence[Array], position: int
    ) -> tuple[Array, Array]:
        """Write e + g of one piece to the candidate arena.

        Returns:
            e + g, and an array that has a NaN or an infinity if and only if e + g has one.
        """
        ops, bucket = self.ops, arenas.plan
        piece = bucket.tensors[position]
        gradient = gradients[piece.gradient]
        if bucket.parts > 1:
            gradient = ops.shard(gradient, bucket.parts, piece.first)
        candidate = self._slice(arenas.candidate, piece)
        checked = ops.compensate(self._slice(arenas.residual, piece), gradient, candidate)
        return candidate, checked

    def numbers(self, bucket: BucketPlan, position: int, values: Array) -> Array:
        """Numbers that this rank announces for one piece's e + g: float32, possibly empty."""
        method: object = bucket.config
        piece = bucket.tensors[position]
        if isinstance(method, AnnouncingCodec) and numbers_of(method, piece):
            return method.announce(self.ops, piece, values)
        return self.ops.zeros(0, "float32", bucket.device)

    def encode_piece(
        self,
        bucket: BucketPlan,
        position: int,
        values: Array,
        square: Array | None = None,
        announced: Announced[Array] | None = None,
    ) -> Sent[Array]:
        """Encode one piece's e + g.

        square: Adam's mean squares of the gradient, to select by.
        announced: all ranks' numbers, for an `AnnouncingCodec`; None: only this rank sends the
            piece.
        """
        ops, piece, method = self.ops, bucket.tensors[position], codec_of(bucket)
        if not piece.numel:
            return Sent([], values, None, values)
        if announced is None and isinstance(method, AnnouncingCodec):
            own, count = self.numbers(bucket, position, values), numbers_of(method, piece)
            announced = Announced(own, ops.load(own, count, 0, count) if count else own)
        if square is not None and bucket.parts > 1:
            square = ops.shard(square, bucket.parts, piece.first)
        context = Context(self.key(bucket, position), square, announced)
        return method.encode(ops, bucket, piece, values, context)

    def _read(self, bucket: BucketPlan, gathered: Array, ago: int = 0) -> dict[int, Read[Array]]:
        """Decode each non-empty piece of gathered payloads, by its position; see `key`."""
        ops, method, read = self.ops, codec_of(bucket), {}
        for position, piece in enumerate(bucket.tensors):
            if piece.numel:
                context = Context[Array](self.key(bucket, position, ago))
                read[position] = method.decode(ops, bucket, piece, gathered, context)
        return read

    @staticmethod
    def _check(
        arrived: dict[int, Rows],
        bucket: BucketPlan,
        positions: Sequence[int],
        own: Any,
        rank: Callable[[], int],
        heads: list[bytes],
        answers: list[list[bool]],
    ) -> list[bool]:
        """Refuse foreign and damaged payloads; return which tensors any rank flagged.

        Args:
            arrived: gets the bucket's measures.
            positions: positions of the pieces that `answers` are about.
            own: this rank's facts; not bytes: another bucket states them, or a graph does.
            heads: header and flags of each payload.
            answers: whether each rank's data of a piece is valid.
        """
        headers, layout = bucket.headers, bucket.layout
        begin, end, bits = layout.flags_at, layout.flags_at + layout.flags_bytes, 0
        stated = {head[FACTS_AT:HEADER_BYTES] for head in heads}
        stated |= {own} if isinstance(own, bytes) else set()
        if len(stated) > 1 and all(map(wire.is_payload, heads)):
            known = isinstance(own, bytes)
            of_ranks = {rank(): int.from_bytes(own, "little")} if known else {}
            of_ranks |= {bucket.sender(p): wire.facts_of(heads[p]) for p in range(len(heads))}
            raise facts.mismatch(of_ranks)
        for position, head in enumerate(heads):
            header = headers[position % len(headers)]
            if head[:FACTS_AT] != header[:FACTS_AT]:
                raise wire.foreign(head, header, bucket.sender(position), bucket.ordinal)
            bits |= int.from_bytes(head[begin:end], "little")
        flags = [bool(bits >> position & 1) for position in range(len(bucket.gradients))]
        for position, answer in zip(positions, answers, strict=True):
            if not all(answer) and not flags[bucket.tensors[position].gradient]:
                raise PayloadCodec._damaged(bucket, position, answer.index(False))
        if count := len(bucket.measures) - bucket.tensor_measures:
            places = range(len(heads))
            ranks = sorted(places, key=bucket.sender) if bucket.senders else places
            measures = [
                struct.unpack_from(f"<{count}f", heads[rank], HEADER_BYTES) for rank in ranks
            ]
            arrived[bucket.ordinal] = measures
        return flags

    @staticmethod
    def _damaged(bucket: BucketPlan, position: int, row: int) -> PayloadError:
        """The error for a damaged piece in a row of payloads."""
        rank = bucket.sender(row * bucket.writers + position // len(bucket.gradients))
        name = bucket.tensors[position].spec.name
        return wire.damaged(bucket.ordinal, rank, name)

    def _in_gradient(self, bucket: BucketPlan, piece: Any, index: Array) -> Array:
        """Convert indices into a piece to indices into the whole gradient."""
        if bucket.parts == 1:
            return index
        return self.ops.global_index(index, bucket.parts, piece.first)

    def _rows_in_gradient(
        self, bucket: BucketPlan, piece: Any, index: Array | None, gathered: Array
    ) -> Array | None:
        """Convert rows of indices as `_in_gradient`; None stands for all indices in each row."""
        if bucket.parts == 1:
            return index
        if index is None:
            rows = self.ops.numel(gathered) // bucket.layout.payload_bytes
            own = self.ops.arange(piece.numel, bucket.device)
            index = self.ops.load(self.ops.joined([own] * rows), piece.numel, 0, piece.numel)
        return self._in_gradient(bucket, piece, index)

    def _streams(self, plans: Sequence[BucketPlan]) -> list[Stream]:
        """Streams of kernels' random numbers, one a piece; empty if the method draws none."""
        keys = (self.key(plan, at) for plan in plans for at in range(len(plan.tensors)))
        return [key.own for key in keys if key is not None]

    def _slice(self, arena: Array, piece: Any) -> Array:
        return self.ops.view(arena, piece.start, piece.stop)


def codec_of(bucket: BucketPlan) -> Codec:
    """The method of a bucket whose payloads are decoded."""
    method: object = bucket.config
    assert isinstance(method, Codec)
    return method
