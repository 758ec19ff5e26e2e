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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from horovod_topk.core.codec.measures import Rows, total_of
from horovod_topk.core.codec.momentum import correct
from horovod_topk.core.plan import facts
from horovod_topk.core.plan import payload as wire
from horovod_topk.core.plan.buckets import BucketPlan
from horovod_topk.core.plan.payload import FACTS_AT, HEADER_BYTES
from horovod_topk.core.state.residual import Arenas, Squares
from horovod_topk.errors import PayloadError, TopKError
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

Array = TypeVar("Array")


@dataclass(frozen=True)
class Withheld(Generic[Array]):
    """The part of a bucket's residuals that a step does not send, as float16 cannot hold it."""

    arenas: Arenas[Array]
    residual: Array  # what the bucket is encoded with in place of its residual
    rests: Sequence[tuple[int, Array]]  # position of a piece, and what it withholds of e + g

    @property
    def lent(self) -> Arenas[Array]:
        """The bucket's arenas, with the residual that may be sent in this step."""
        return Arenas(self.arenas.plan, self.residual, self.arenas.candidate)


class PayloadCodec(Generic[Array]):
    """Encodes and decodes buckets, each by its own method.

    `encode` writes only the candidate arena and the payload, `decode` only gradients.

    Args:
        ops: operations on the arrays.
        arrived: dictionary for received measures; None: a new one.

    Attributes:
        arrived: the measures of all ranks that arrived last with each bucket, by its ordinal.
        told: the numbers of `tell` that arrived last, by the bucket's ordinal: bytes of float32, a
            row a rank.
    """

    def __init__(self, ops: Ops[Array], arrived: dict[int, Rows] | None = None) -> None:
        self._ops = ops
        self.arrived: dict[int, Rows] = {} if arrived is None else arrived
        self.told: dict[int, Array] = {}
        self._given: dict[int, Sequence[Any]] = {}  # measures to send, by the bucket's ordinal
        self._sealed: dict[bytes, Sequence[Any]] = {}  # measures in payloads, by fingerprint
        self._measured: dict[int, list[Sequence[Array]]] = {}  # the method's, for each piece
        self._of_tensors: dict[int, Callable[[], Array]] = {}  # see `tell`; by the bucket's ordinal
        # See `limit`, by ordinal and method: the arrays of rounds have another method.
        self._most: dict[tuple[int, int], Mapping[str, tuple[float, float]]] = {}
        self._halves: dict[tuple[int, int], set[int]] = {}  # positions of float16 gradients
        self._squares: dict[int, Sequence[Array | None]] = {}  # see `weigh`
        self._shares: dict[int, Sequence[Array | None]] = {}  # see `weigh_sums`
        self._kernels: dict[bytes, Fused[Array] | None] = {}  # by the bucket's fingerprint
        self._encoders: dict[bytes, Fused[Array] | None] = {}  # kernels that encode, too
        self._committed: Callable[[], Any] = lambda: 0
        self._rank: Callable[[], int] = lambda: 0
        # Facts that a bucket states, and what writes them, by the bucket's ordinal.
        self._facts: dict[int, tuple[Callable[..., None], bytes | Array]] = {}
        # The same facts by this rank's number, by the bucket's ordinal; a graph does not know them.
        self._own_facts: dict[int, dict[int, bytes]] = {}

    def state_facts(self, ordinal: int, facts: bytes | Array) -> None:
        """Set the facts that this rank states with a bucket in the step that begins.

        Args:
            ordinal: the plan's first bucket.
            facts: the number of `core.plan.facts` as 4 bytes, in a graph a uint8 array.
        """
        if isinstance(facts, bytes):
            self._facts = {ordinal: (self._ops.store_bytes, facts)}
            self._own_facts = {ordinal: {self._rank(): facts}}
        else:
            self._facts = {ordinal: (self._ops.store, facts)}

    def facts_for(self, bucket: BucketPlan) -> bytes | Array | None:
        """The facts that this rank states with a bucket; None: another bucket states them."""
        return self._facts[bucket.ordinal][1] if bucket.ordinal in self._facts else None

    def draw_from(self, committed: Callable[[], Any], rank: Callable[[], int]) -> None:
        """Set the step and rank from which methods derive their random numbers.

        Args:
            committed: returns the number of committed steps before this one; a tensor in a graph.
            rank: returns this rank.
        """
        self._committed, self._rank = committed, rank

    def key(self, bucket: BucketPlan, position: int, rows: bool, ago: int = 0) -> Key | None:
        """Key of a piece's random numbers; None: the method draws none.

        Args:
            bucket: the piece's bucket.
            position: position of the piece in the bucket.
            rows: whether the payloads to read are those of all ranks; else this rank's own.
            ago: steps committed since the payload was written.
        """
        method: object = bucket.config
        if not isinstance(method, Seeded):
            return None
        written = position // len(bucket.gradients)

        def writer(row: int) -> int:
            return bucket.sender(row * bucket.writers + written) if rows else self._rank()

        known = method.seed, bucket.place(position), self._committed() - ago
        return Key(*known, self._rank, writer)

    def set_measures(self, bucket: BucketPlan, numbers: Sequence[Any]) -> None:
        """Set the measures that this rank sends with a bucket, in this step and later ones.

        numbers: one for each of the settings' `needed_measures`.
        """
        self._given[bucket.ordinal], self._measured[bucket.ordinal] = numbers, []

    def tell(self, bucket: BucketPlan, numbers: Callable[[], Array]) -> None:
        """Set the numbers that this rank sends about a bucket's tensors in the step that begins.

        numbers: returns them, flat; called once the bucket is encoded.
        """
        own = self._given.get(bucket.ordinal, [0.0] * _own(bucket))
        self._of_tensors[bucket.ordinal] = numbers
        self._given[bucket.ordinal] = [*own]  # another object: the payload lacks these numbers

    def weigh(self, bucket: BucketPlan, squares: Sequence[Array | None]) -> None:
        """Set Adam's mean squares for the step that begins; Top-K selects by them.

        squares: one array for each gradient, of its shape and the residual's dtype, or None.
            Empty: there are none; call it so after the step, to free their memory.
        """
        self._squares[bucket.ordinal] = squares
        self._shares.pop(bucket.ordinal, None)

    def weigh_sums(self, back: BucketPlan) -> None:
        """Split the mean squares as this rank, an owner, needs them to select from its sums.

        back: the plan of its shards, with their places in the gradients.
        """
        squares, parts = self._squares.get(back.ordinal), back.parts
        if squares:
            pairs = [(squares[piece.gradient], piece.first) for piece in back.tensors]
            self._shares[back.ordinal] = [
                None if v is None else self._ops.shard(v, parts, first) for v, first in pairs
            ]

    def limit(self, bucket: BucketPlan, most: Mapping[str, tuple[float, float]]) -> None:
        """Set the largest magnitudes that float16 gradients are encoded with; the rest waits.

        Residuals are float32, so that what has waited may be more than float16 can hold.

        most: where something has waited, and elsewhere; by leg, see `Method.piece`. Other legs have
            no limit.
        """
        self._most[_known(bucket)] = most
        halves = {t.gradient for t in bucket.tensors if t.spec.dtype == "float16"}
        self._halves[_known(bucket)] = halves

    def withhold(self, arenas: Arenas[Array], gradients: Sequence[Array]) -> Withheld[Array] | None:
        """Split e + g into what may be sent in a step and the rest; None: all of it may be sent."""
        bucket, ops = arenas.plan, self._ops
        most = self._most.get(_known(bucket), {}).get(bucket.leg)
        if most is None:
            return None
        rests = list[tuple[int, Array]]()
        residual: Array | None = None
        for position, piece in enumerate(bucket.tensors):
            if piece.gradient not in self._halves[_known(bucket)] or not piece.numel:
                continue
            gradient = gradients[piece.gradient]
            if bucket.parts > 1:
                gradient = ops.shard(gradient, bucket.parts, piece.first)
            split = ops.withheld(self._slice(arenas.residual, piece), gradient, *most)
            if split is not None:
                residual = ops.clone(arenas.residual) if residual is None else residual
                ops.assign(self._slice(residual, piece), split[0])
                rests.append((position, split[1]))
        return None if residual is None else Withheld(arenas, residual, rests)

    def keep(self, withheld: Withheld[Array]) -> None:
        """Add what was withheld to the candidate, once the bucket is encoded."""
        arenas = withheld.arenas
        for position, rest in withheld.rests:
            candidate = self._slice(arenas.candidate, arenas.plan.tensors[position])
            self._ops.compensate(candidate, rest, candidate)

    def measures(self, bucket: BucketPlan) -> Array:
        """This rank's measures of an encoded bucket, as the uint8 bytes of a payload."""
        data = self._ops.zeros(wire.MEASURE * len(bucket.measures), "uint8", bucket.device)
        self._store_measures(bucket, data, 0)
        return data

    def _store_measures(self, bucket: BucketPlan, data: Array, at: int) -> None:
        """Write this rank's measures of an encoded bucket to uint8 bytes, from `at` on."""
        ops, given = self._ops, [*self._given.get(bucket.ordinal, [0.0] * _own(bucket))]
        own = self._measured.get(bucket.ordinal, [])
        given += [total_of(each) for each in zip(*own, strict=True)]
        numbers = [each if isinstance(each, float) else 0.0 for each in given]
        if numbers:
            ops.store_bytes(data, at, struct.pack(f"<{len(given)}f", *numbers))
        for i, each in enumerate(given):
            if not isinstance(each, float):
                ops.store(data, at + wire.MEASURE * i, ops.pack_values(each, "float32"))
        if bucket.tensor_measures and bucket.ordinal in self._of_tensors:
            last = ops.pack_values(self._of_tensors[bucket.ordinal](), "float32")
            ops.store(data, at + wire.MEASURE * len(given), last)

    def new_payload(self, bucket: BucketPlan) -> Array:
        """Allocate a payload that has the bucket's header and is zero otherwise."""
        payload = self._ops.zeros(bucket.layout.payload_bytes, "uint8", bucket.device)
        self.open_payload(bucket, payload)
        return payload

    def open_payload(self, bucket: BucketPlan, payload: Array) -> None:
        """Write the bucket's header into a zeroed buffer."""
        self._ops.store_bytes(payload, 0, bucket.header)

    def flag_all(self, bucket: BucketPlan, payload: Array) -> None:
        """Flag every tensor of a payload as non-finite, so that all ranks roll back."""
        layout, flags = bucket.layout, (1 << len(bucket.gradients)) - 1
        data = flags.to_bytes(layout.flags_bytes, "little")
        self._ops.store_bytes(payload, layout.flags_at, data)
        self._write_facts(bucket, payload)

    def encode(
        self,
        arenas: Arenas[Array],
        gradients: Sequence[Array],
        payload: Array,
        velocities: Velocities[Array] | None = None,
    ) -> None:
        """Fill a payload, and write the new residual to the candidate arena.

        velocities: for momentum correction; they are updated.
        """
        self.encode_shards([arenas], gradients, [payload], velocities)

    def _encode_alone(
        self, arenas: Arenas[Array], gradients: Sequence[Array], payload: Array
    ) -> None:
        """Fill a payload, by the method's kernel if there is one."""
        bucket = arenas.plan
        kernel = self._encoders.get(bucket.fingerprint) or self._encoder(bucket)
        if kernel is not None:
            if bucket.config.measured:
                for position in range(len(bucket.tensors)):
                    self._measure(bucket, position, self.compensate(arenas, gradients, position)[0])
            streams = self._streams(bucket)
            pair = arenas.residual, arenas.candidate
            kernel.encode(*pair, gradients, payload, streams, self._squares_for(bucket))
            return
        sent = []
        for position in range(len(bucket.tensors)):
            values, checked = self.compensate(arenas, gradients, position)
            self._measure(bucket, position, values)
            one = self.encode_piece(bucket, position, values)
            sent.append(replace(one, checked=checked) if one.index is None else one)
        self.write(arenas, payload, sent)

    def _measure(self, bucket: BucketPlan, position: int, values: Array) -> None:
        """Compute the method's own measures of one piece of e + g, except in an owner's bucket."""
        piece = bucket.tensors[position]
        if piece.numel and bucket.leg != "gather" and bucket.ordinal in self._measured:
            found = _method(bucket).measure(self._ops, bucket, piece, values)
            self._measured[bucket.ordinal] += [found] if found else []

    def write(self, arenas: Arenas[Array], payload: Array, sent: Sequence[Sent[Array]]) -> None:
        """Write encoded pieces to a payload, and subtract them from the candidate arena.

        The candidate arena has e + g before, and the new residual after.
        """
        bucket = arenas.plan
        checked = [each.checked for each in sent]
        self._ops.store_nonfinite(payload, bucket.layout.flags_at, checked)
        for piece, each in zip(bucket.tensors, sent, strict=True):
            for at, data in each.parts:
                self._ops.store(payload, at, data)
            candidate = self._slice(arenas.candidate, piece)
            if _method(bucket).error_feedback:
                self._ops.subtract_at(candidate, each.index, each.values)
            else:
                self._ops.subtract_at(candidate, None, candidate)

    def encode_shards(
        self,
        arenas: Sequence[Arenas[Array]],
        gradients: Sequence[Array],
        payloads: Sequence[Array],
        velocities: Velocities[Array] | None = None,
    ) -> None:
        """Fill a payload for each shard; in one pass over the gradients if the kernel can."""
        stored = [each for each in arenas if each.is_narrow]
        for each in stored:
            each.widen()
        held = [self.withhold(each, gradients) for each in arenas] if self._most else []
        if held:
            pairs = zip(arenas, held, strict=True)
            arenas = [own if each is None else each.lent for own, each in pairs]
        known = self._encoders
        kernels: list[Any] = [
            known.get(each.plan.fingerprint) or self._encoder(each.plan) for each in arenas
        ]
        first: object = kernels[0]
        if isinstance(first, SupportsOnePass) and not arenas[0].plan.config.measured:
            residuals, candidates, factors = zip(*(each.unscaled() for each in arenas), strict=True)
            seeded = [each.plan for each in arenas if isinstance(each.plan.config, Seeded)]
            streams = [stream for plan in seeded for stream in self._streams(plan)]
            squares = self._squares_for(arenas[0].plan) if self._squares else ()
            memory = residuals, candidates, gradients, payloads
            first.encode_shards(kernels, *memory, factors, velocities, streams, squares)
        else:
            gradients = correct(gradients, velocities, self._ops)
            for each, payload in zip(arenas, payloads, strict=True):
                self._encode_alone(each, gradients, payload)
                if velocities is not None:
                    self.mask(each, payload, velocities)
        for withheld in filter(None, held):
            self.keep(withheld)
        plan = arenas[0].plan
        is_sealed = self._given.get(plan.ordinal) is self._sealed.get(plan.fingerprint)
        if not is_sealed:
            self.seal([each.plan for each in arenas], payloads)
        elif plan.ordinal in self._facts:
            write, stated = self._facts[plan.ordinal]
            for payload in payloads:
                write(payload, FACTS_AT, stated)
        for each in stored:
            each.narrow()

    def seal(self, buckets: Sequence[BucketPlan], payloads: Sequence[Array]) -> None:
        """Write this rank's facts and measures into the payloads that it has encoded."""
        for bucket, payload in zip(buckets, payloads, strict=True):
            self._write_facts(bucket, payload)
            if bucket.measures and bucket.ordinal in self._given:
                self._store_measures(bucket, payload, HEADER_BYTES)
                self._sealed[bucket.fingerprint] = self._given[bucket.ordinal]

    def _write_facts(self, bucket: BucketPlan, payload: Array) -> None:
        if bucket.ordinal in self._facts:
            write, stated = self._facts[bucket.ordinal]
            write(payload, FACTS_AT, stated)

    def wrong_length(self, bucket: BucketPlan, gathered: Array, ranks: int) -> TopKError:
        """The error for gathered bytes that are not one payload of a bucket from each rank.

        It is a PlanMismatchError if ranks are at different ratio levels, and else a PayloadError.
        """
        size = bucket.layout.payload_bytes // bucket.writers
        return wire.wrong_length(self._ops.to_host(gathered), size, ranks, bucket.ordinal)

    def rows(
        self, bucket: BucketPlan, gathered: Array
    ) -> tuple[list[Array | None], Sequence[bool]]:
        """Values of every tensor in each payload, [P, n], of a bucket that is sent whole.

        Returns:
            The rows, None for a tensor without elements; and which tensors any rank flagged.

        Raises:
            PayloadError, PlanMismatchError: a rank sent no payload of this bucket.
        """
        width, body_at = bucket.layout.payload_bytes, bucket.layout.body_at
        own = self._own_facts.get(bucket.ordinal, {})
        read = self._read(bucket, gathered)
        check = partial(self._check, self.arrived, bucket, (), own)
        flags = self._ops.validate(gathered, width, body_at, (), check, len(bucket.tensors))
        pieces = range(len(bucket.tensors))
        return [read[at].values if at in read else None for at in pieces], flags

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
            PayloadError, PlanMismatchError: a rank sent no payload of this bucket.
        """
        writers, validate = bucket.writers, self._ops.validate
        own = self._own_facts.get(bucket.ordinal, {})
        if bucket.tensor_measures:
            self._read_told(bucket, gathered)
        width, tensors = bucket.layout.payload_bytes // writers, len(bucket.tensors) // writers
        kernel = self._kernels.get(bucket.fingerprint) or self._kernel(bucket)
        if kernel is not None:
            check = partial(self._check, self.arrived, bucket, (), own)
            flags = validate(gathered, width, bucket.layout.body_at, (), check, tensors)
            each = flags if writers == 1 else [flags[t.gradient] for t in bucket.tensors]
            wrong = kernel.decode(gathered, scale, each, gradients)
            if wrong is not None:
                raise self._damaged(bucket, wrong[1], wrong[0])
            return flags
        read, method = self._read(bucket, gathered), _method(bucket)
        whole = {piece.gradient for piece in bucket.tensors if piece.whole}
        sound = [(position, fact) for position, each in read.items() for fact in each.sound]
        check = partial(self._check, self.arrived, bucket, sound, own)
        facts = [fact for _, fact in sound]
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

    def _read_told(self, bucket: BucketPlan, gathered: Array) -> None:
        """Read the numbers that a bucket's payloads carry for each tensor."""
        count = bucket.tensor_measures
        width = bucket.layout.payload_bytes // bucket.writers
        at = HEADER_BYTES + wire.MEASURE * (len(bucket.measures) - count)
        self.told[bucket.ordinal] = self._ops.load(gathered, width, at, wire.MEASURE * count)

    def mask(self, arenas: Arenas[Array], payload: Array, own: Velocities[Array]) -> None:
        """Set the velocities of the elements that a payload sends to 0; see `core.momentum`."""
        ops, bucket = self._ops, arenas.plan
        for position, each in self._read(bucket, payload, rows=False).items():
            if each.index is not None:
                piece = bucket.tensors[position]
                at = self._in_gradient(bucket, piece, ops.row(each.index, 0))
                velocity = own.after[piece.gradient]
                ops.subtract_at(velocity, at, ops.take(velocity, at))

    def squares(self, arenas: Arenas[Array], payload: Array, *, committed: bool) -> Squares:
        """Sums of squares of a payload's g, a = e + g and new residual e' = a - decode(p).

        committed: whether the step was committed, so that e' is the residual now.
        """
        ops, bucket = self._ops, arenas.plan
        before, after = arenas.residual, arenas.candidate
        if committed:
            before, after = after, before
        whole = ops.clone(after)
        if not self._add_by_kernel(whole, bucket, payload):
            read = self._read(bucket, payload, rows=False, ago=int(committed))
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
        ops, dtype = self._ops, bucket.residual_dtype
        if bucket.parts > 1 or any(tensor.spec.dtype != dtype for tensor in bucket.tensors):
            return False
        kernel = self._kernel(bucket)
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
        ops, differences, candidate = self._ops, list[Array](), arenas.candidate
        for position, each in self._read(arenas.plan, payload, rows=False).items():
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
        ops, bucket = self._ops, arenas.plan
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
            return method.announce(self._ops, piece, values)
        return self._ops.zeros(0, "float32", bucket.device)

    def encode_piece(
        self,
        bucket: BucketPlan,
        position: int,
        values: Array,
        announced: Announced[Array] | None = None,
    ) -> Sent[Array]:
        """Encode one piece's e + g.

        announced: all ranks' numbers, for an `AnnouncingCodec`; None: only this rank sends the
            piece.
        """
        ops, piece, method = self._ops, bucket.tensors[position], _method(bucket)
        if not piece.numel:
            return Sent([], values, None, values)
        if announced is None and isinstance(method, AnnouncingCodec):
            own, count = self.numbers(bucket, position, values), numbers_of(method, piece)
            announced = Announced(own, ops.load(own, count, 0, count) if count else own)
        squares = self._squares_for(bucket)
        square = squares[piece.gradient] if squares else None
        if square is not None and bucket.parts > 1:
            square = ops.shard(square, bucket.parts, piece.first)
        context = Context(self.key(bucket, position, rows=False), square, announced)
        return method.encode(ops, bucket, piece, values, context)

    def _squares_for(self, bucket: BucketPlan) -> Sequence[Array | None]:
        """Adam's mean squares for a bucket's selection."""
        known = self._shares if bucket.leg == "gather" else self._squares
        squares = known.get(bucket.ordinal, ())
        return squares if any(each is not None for each in squares) else ()

    def _read(
        self, bucket: BucketPlan, gathered: Array, *, rows: bool = True, ago: int = 0
    ) -> dict[int, Read[Array]]:
        """Decode each non-empty piece of gathered payloads, by its position; see `key`."""
        ops, method, read = self._ops, _method(bucket), {}
        for position, piece in enumerate(bucket.tensors):
            if piece.numel:
                context = Context[Array](self.key(bucket, position, rows, ago))
                read[position] = method.decode(ops, bucket, piece, gathered, context)
        return read

    @staticmethod
    def _check(
        arrived: dict[int, Rows],
        bucket: BucketPlan,
        sound: Sequence[tuple[int, Array]],
        own: dict[int, bytes],
        heads: list[bytes],
        answers: list[list[bool]],
    ) -> list[bool]:
        """Refuse foreign and damaged payloads; return which tensors any rank flagged.

        Args:
            arrived: gets the bucket's measures.
            bucket: the bucket of the payloads.
            sound: positions of pieces, and whether each rank's data of the piece is valid.
            own: this rank's facts, by its number; empty: a graph does not know them.
            heads: header and flags of each payload.
            answers: values of `sound`, on the host.
        """
        headers, layout = bucket.headers, bucket.layout
        begin, end, bits = layout.flags_at, layout.flags_at + layout.flags_bytes, 0
        stated = {*own.values(), *(head[FACTS_AT:HEADER_BYTES] for head in heads)}
        if len(stated) > 1 and all(map(wire.is_payload, heads)):
            of_ranks = {rank: int.from_bytes(each, "little") for rank, each in own.items()}
            of_ranks |= {bucket.sender(p): wire.facts_of(heads[p]) for p in range(len(heads))}
            raise facts.mismatch(of_ranks)
        for position, head in enumerate(heads):
            header = headers[position % len(headers)]
            if head[:FACTS_AT] != header[:FACTS_AT]:
                raise wire.foreign(head, header, bucket.sender(position), bucket.ordinal)
            bits |= int.from_bytes(head[begin:end], "little")
        flags = [bool(bits >> position & 1) for position in range(len(bucket.gradients))]
        for (position, _), answer in zip(sound, answers, strict=True):
            if not all(answer) and not flags[bucket.tensors[position].gradient]:
                raise PayloadCodec._damaged(bucket, position, answer.index(False))
        if count := len(bucket.measures) - bucket.tensor_measures:
            stop = HEADER_BYTES + wire.MEASURE * count
            if not any(any(head[HEADER_BYTES:stop]) for head in heads):  # the usual case
                arrived[bucket.ordinal] = [(0.0,) * count] * len(heads)
                return flags
            ranks = sorted(range(len(heads)), key=bucket.sender)
            arrived[bucket.ordinal] = [wire.measures_of(heads[rank], count) for rank in ranks]
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
        return self._ops.global_index(index, bucket.parts, piece.first)

    def _rows_in_gradient(
        self, bucket: BucketPlan, piece: Any, index: Array | None, gathered: Array
    ) -> Array | None:
        """Convert rows of indices as `_in_gradient`; None stands for all indices in each row."""
        if bucket.parts == 1:
            return index
        if index is None:
            rows = self._ops.numel(gathered) // bucket.layout.payload_bytes
            index = self._everything(piece.numel, rows, bucket.device)
        return self._in_gradient(bucket, piece, index)

    def _everything(self, numel: int, rows: int, device: str) -> Array:
        """Indices 0 to n - 1 in each row: [rows, n]."""
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

    def _encoder(self, bucket: BucketPlan) -> Fused[Array] | None:
        """The method's kernel for encoding; None if there is none, or the method announces."""
        announces = isinstance(_method(bucket), AnnouncingCodec)
        kernel = self._encoders[bucket.fingerprint] = None if announces else self._kernel(bucket)
        return kernel

    def _streams(self, bucket: BucketPlan) -> list[Stream]:
        """Streams of a kernel's random numbers, one a piece; empty if the method draws none."""
        keys = (self.key(bucket, position, rows=False) for position in range(len(bucket.tensors)))
        return [key.own for key in keys if key is not None]

    def _slice(self, arena: Array, piece: Any) -> Array:
        return self._ops.view(arena, piece.start, piece.stop)


def _known(bucket: BucketPlan) -> tuple[int, int]:
    return bucket.ordinal, bucket.config.id


def _own(bucket: BucketPlan) -> int:
    """Count the measures that the schedule and the guard need; they come first in a payload."""
    return len(bucket.measures) - bucket.tensor_measures - len(bucket.config.measured)


def _method(bucket: BucketPlan) -> Codec:
    method: object = bucket.config
    assert isinstance(method, Codec)
    return method
