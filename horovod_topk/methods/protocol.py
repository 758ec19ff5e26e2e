"""What a compression method is: one class in one file, which is its settings and its algorithm.

There are two kinds. A `Codec` encodes each tensor of a bucket into a payload of its own; payloads
are gathered, by any exchange, and every rank decodes them. `Rounds` fills arrays that are added up
over ranks, once or several times, each from what the one before gave.

A codec whose ranks have to agree on a few numbers before they encode, such as a common scale, is
an `AnnouncingCodec`.

A method imports `horovod_topk.ops`, `config` and `errors` and nothing else of this package: plans,
steps, exchanges, adapters and commands know methods through this module alone. Its methods are
given `ops`, the verbs of one framework (`horovod_topk.ops.protocol.Ops`), and run in each of them,
eagerly and in graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from horovod_topk.config import AUTO, Settings
from horovod_topk.errors import ConfigError
from horovod_topk.methods.keys import Key
from horovod_topk.ops import Fused, Ops
from horovod_topk.ops.coding import value_bytes

Array = TypeVar("Array")

SECTION = 8  # bytes; what payloads have of a tensor begins at a multiple of it

# Numbers of a recipe; see `horovod_topk.ops.protocol.Fused`.
WIDTH = {"float32": 4, "float64": 8}  # bytes of a residual
DTYPE_CODE = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
VALUE_CODE = {
    "float32": 0,
    "float64": 0,
    "float16": 1,
    "bfloat16": 2,
    "int8": 3,
    "int4": 4,
    "sign": 5,
    "minmax": 6,
    "means": 7,
    "dithered": 8,
    "dithered_l2": 9,
    "ternary": 10,
}
AS_IS = 3  # kind of indices

AS_SET = 0.5  # `ratio` of a method that has none, where it compresses as its settings say
EVERYTHING = 1 << 62  # as `min_numel`: every tensor is sent whole

RESIDUAL_DTYPE = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
}


@dataclass(frozen=True)
class TensorSpec:
    """A gradient as the framework knows it."""

    name: str  # unique within an optimizer, equal on all ranks
    shape: tuple[int, ...]
    dtype: str  # float16, bfloat16, float32 or float64
    device: str = field(default="cpu", compare=False)  # tensors of one bucket share it

    @cached_property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """A gradient, or the shard of one that an owner has, and where a payload carries it.

    Methods that have more to say about it than its bytes derive a class of their own.
    """

    spec: TensorSpec
    numel: int  # elements: those of the gradient, or of its shard
    gradient: int  # position in its bucket of the gradient that it is, or is a shard of
    first: int = 0  # first block of the shard; see `horovod_topk.core.shards`
    start: int = 0  # first element in the bucket's arenas
    at: int = 0  # first byte of its data in the payload
    whole: bool = False  # all elements travel as they are, in the residual's dtype

    @property
    def stop(self) -> int:
        """One past its last element in the bucket's arenas."""
        return self.start + self.numel

    @property
    def entries(self) -> int:
        """Values it sends a step."""
        return self.numel

    @property
    def sends_all(self) -> bool:
        """Whether every element is sent, so that momentum masking spares it."""
        return True

    @property
    def recipe(self) -> tuple[int, ...]:
        """What a kernel needs to know of it, but for its block; see `bucket_recipe`."""
        return self._recipe(self.numel, AS_IS if self.whole else 0, 0)

    def _recipe(self, k: int, index: int, index_at: int) -> tuple[int, ...]:
        """Return the recipe of a piece with k entries, a kind of indices, and their first byte."""
        dtype = DTYPE_CODE[self.spec.dtype]
        place = self.at, index_at, dtype, self.first, self.gradient
        return self.numel, k, self.start, index, *place

    def moved(self, by: int) -> Self:
        """The same, so many bytes further back in a payload."""
        return replace(self, at=self.at + by)


class Bucket(Protocol):
    """What a method may know of the bucket that its tensors are in."""

    @property
    def tensors(self) -> Sequence[Any]:
        """Its pieces, in order."""
        ...

    @property
    def residual_dtype(self) -> str:
        """float32 or float64."""
        ...

    @property
    def device(self) -> str:
        """Where its arrays live, as the framework names it."""
        ...

    @property
    def parts(self) -> int:
        """Owners that its gradients are split among, whose shards the pieces are; else 1."""
        ...

    @property
    def flags_at(self) -> int:
        """Byte of the non-finite flags in a payload."""
        ...

    @property
    def payload_bytes(self) -> int:
        """Bytes of one payload."""
        ...


@dataclass(frozen=True)
class Sent(Generic[Array]):
    """What one piece sends: parts of the payload, and what receivers will read in them."""

    parts: Sequence[tuple[int, Array]]  # (byte, uint8 data)
    values: Array  # [k], residual dtype: what receivers read; not used without error feedback
    index: Array | None  # ascending int64 [k]; None: all elements
    checked: Array  # has a NaN or an infinity if and only if the piece has one
    measured: Sequence[Array] = ()  # [1] float32 for each of `Method.measured`; pieces add up


@dataclass(frozen=True)
class Read(Generic[Array]):
    """What payloads have of one piece, a row a payload."""

    values: Array  # [P, k], residual dtype
    index: Array | None = None  # int64 [P, k]; None: all elements
    sound: Sequence[Array] = ()  # bool [P] each: whether a writer can have written it


@dataclass(frozen=True, kw_only=True)
class Method(Settings):
    """What both kinds have in common: settings (the fields), and a number in payloads."""

    id: ClassVar[int]  # in the payload's header: unique, and never given to another method
    for_training: ClassVar[Mapping[str, str]] = {"guard": AUTO}  # of compressors, not of fields
    measured: ClassVar[tuple[str, ...]] = ()  # names of what a codec measures: `Sent.measured`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_levels:
            return
        name = type(self).__name__
        if isinstance(self.warmup, int):
            raise ConfigError(
                f"warmup={self.warmup} was given to {name}, which has no ratios to go down through",
                cure=f"Pass warmup=[({self.warmup}, 1.0)] to send dense gradients for so long",
            )
        for _, ratio in (*self.stretches, *(self.ratios or ())):
            if ratio not in (1.0, self.ratio):
                raise ConfigError(
                    f"the ratio {ratio!r} was asked of {name}, which has none",
                    cure="Pass 'dense' in ratios= and 1.0 in warmup=, or use TopKEF or RandomK",
                )

    @property
    def measures(self) -> tuple[str, ...]:
        """Numbers that ranks tell each other: the schedule's, and the method's own."""
        return (*self.told, *self.measured)

    @property
    def has_levels(self) -> bool:
        """Whether the method has a `ratio` setting."""
        return any(each.name == "ratio" for each in fields(self))

    @property
    def ratio(self) -> float:
        """The ratio level. A method without ratios has two: `AS_SET`, and 1.0, which is dense."""
        return 1.0 if self.min_numel == EVERYTHING else AS_SET

    def at(self, ratio: float) -> Self:
        """Return the settings at a ratio level. At 1.0 every element is sent unrounded."""
        return self if ratio == self.ratio else replace(self, min_numel=EVERYTHING)

    def withheld(self) -> str:
        """What a step keeps back at these settings, in words; empty: nothing, at ratio 1.0."""
        return "" if self.ratio == 1.0 else f"{type(self).__name__} sends gradients in another form"

    def piece(self, part: Piece, leg: str) -> Piece:
        """How a tensor or shard travels; positions are set later.

        leg: "direct" (allgather), "scatter" (to owners), "gather" (back from owners) or "sums"
            (owners of local sums to each other).
        """
        small = part.spec.numel < self.min_numel
        return replace(part, whole=small or part.spec.name in self.own)

    def lay_out(self, pieces: Sequence[Piece], at: int) -> tuple[list[Piece], int]:
        """Pieces with their positions in a payload from byte `at` on, and the byte behind all."""
        return list(pieces), at

    def why_whole(self, piece: Piece) -> str | None:
        """Why a piece is sent whole, in one line; None: it is not."""
        if not piece.whole:
            return None
        if piece.spec.numel < self.min_numel:
            return f"{piece.spec.numel} elements, fewer than min_numel={self.min_numel}: sent dense"
        return "its ratio is 1.0: sent dense"


@dataclass(frozen=True, kw_only=True)
class Codec(Method):
    """A method whose payloads are gathered and decoded; any exchange carries it.

    The simplest one sends every element in another form and has `data_bytes`, `pack` and `unpack`
    alone. One that sends some elements, or has sections of its own, overrides `piece`, `lay_out`,
    `encode` and `decode`. A faster one offers a kernel for whole buckets besides; then these
    methods define what the kernel does, to the bit.
    """

    error_feedback: ClassVar[bool] = True  # what is not sent stays in residuals; a field may follow

    def data_bytes(self, piece: Piece) -> int:
        """Bytes of a piece that does not travel whole."""
        raise NotImplementedError(f"{type(self).__name__} has no data_bytes")

    def lay_out(self, pieces: Sequence[Piece], at: int) -> tuple[list[Piece], int]:
        """`Method.lay_out`: one behind the other."""
        placed = []
        for piece in pieces:
            at = -(-at // SECTION) * SECTION
            placed.append(replace(piece, at=at))
            at += whole_bytes(piece) if piece.whole else self.data_bytes(piece)
        return placed, at

    def pack(self, ops: Ops[Array], piece: Piece, values: Array) -> Array:
        """[data_bytes] uint8 for a piece's elements: [n], the residual's dtype."""
        raise NotImplementedError(f"{type(self).__name__} has no pack")

    def unpack(self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str) -> Array:
        """[P, n] values of `dtype` from [P, data_bytes] bytes: what receivers read."""
        raise NotImplementedError(f"{type(self).__name__} has no unpack")

    def sound(self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str) -> Sequence[Array]:
        """Checks that all bytes written by `pack` pass, bool [P] each; see `Read.sound`."""
        return ()

    def settle(self, ops: Ops[Array], total: Array) -> Array | None:
        """Return the value to apply as the mean, computed from the sum over ranks.

        None: apply the sum or the mean itself.
        """
        return None

    def encode(self, ops: Ops[Array], bucket: Bucket, piece: Any, values: Array) -> Sent[Array]:
        """What a piece sends of e + g: `values`, [n] of the residual's dtype, n > 0."""
        return _encoded(ops, bucket, piece, values, self, self.pack, self.unpack)

    def decode(self, ops: Ops[Array], bucket: Bucket, piece: Any, gathered: Array) -> Read[Array]:
        """What payloads behind each other have of a piece, n > 0."""
        return _decoded(ops, bucket, piece, gathered, self, self.unpack)

    def kernel(self, ops: Ops[Array], bucket: Bucket) -> Fused[Array] | None:
        """Encodes and decodes all of a bucket at once; None: `encode` and `decode` will do."""
        return None


@dataclass(frozen=True, kw_only=True)
class Seeded(Method):
    """A method of either kind that draws random numbers, of which all follow from a seed.

    A codec derives from `SeededCodec`. A method of rounds derives from `Rounds, Seeded`, in this
    order, and finds its key in `Work.key`.
    """

    seed: int = 0  # of the random numbers; equal on all ranks

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(
                f"seed={self.seed!r} is no whole number from 0 on",
                cure="Pass seed=0, or another whole number, on all ranks",
            )


@dataclass(frozen=True, kw_only=True)
class SeededCodec(Codec, Seeded):
    """A codec that draws random numbers: `Codec`, with a key in each call.

    Write to the key of `pack_keyed` as `key.own` (of this rank) or `key.shared`; a row of what
    arrives was drawn with `key.of_row(row)` or `key.shared`. A kernel is given `key.own`.
    """

    def pack_keyed(self, ops: Ops[Array], piece: Piece, values: Array, key: Key) -> Array:
        """`Codec.pack`."""
        raise NotImplementedError(f"{type(self).__name__} has no pack_keyed")

    def unpack_keyed(
        self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str, key: Key
    ) -> Array:
        """`Codec.unpack`; that itself where reading needs no random numbers."""
        return self.unpack(ops, piece, rows, dtype)

    def encode_keyed(
        self, ops: Ops[Array], bucket: Bucket, piece: Any, values: Array, key: Key
    ) -> Sent[Array]:
        """`Codec.encode`."""
        pack, unpack = partial(self.pack_keyed, key=key), partial(self.unpack_keyed, key=key)
        return _encoded(ops, bucket, piece, values, self, pack, unpack)

    def decode_keyed(
        self, ops: Ops[Array], bucket: Bucket, piece: Any, gathered: Array, key: Key
    ) -> Read[Array]:
        """`Codec.decode`."""
        unpack = partial(self.unpack_keyed, key=key)
        return _decoded(ops, bucket, piece, gathered, self, unpack)


@dataclass(frozen=True)
class Announced(Generic[Array]):
    """Numbers of one piece that ranks have told each other before they encode it."""

    own: Array  # [c] float32: what this rank has announced
    rows: Array  # [W, c] float32: what each rank that sends the piece has announced, in rank order


@dataclass(frozen=True, kw_only=True)
class AnnouncingCodec(Codec):
    """A codec whose ranks tell each other a few numbers of each piece before they encode it.

    The numbers are gathered ahead of the payloads, over any exchange, from the ranks that send the
    same piece: all ranks, or the owner of a shard alone where it sends its sum back. Readers are
    not told them: what a reader needs is in the payload. Numbers must be finite where values are
    not. A method that draws random numbers derives from `AnnouncingCodec, Seeded`.
    """

    def numbers(self, piece: Piece) -> int:
        """How many numbers ranks tell each other of a piece that does not travel whole; static."""
        raise NotImplementedError(f"{type(self).__name__} has no numbers")

    def announce(self, ops: Ops[Array], piece: Piece, values: Array) -> Array:
        """[numbers] float32 of a piece's elements, e + g: [n], the residual's dtype."""
        raise NotImplementedError(f"{type(self).__name__} has no announce")

    def pack_announced(
        self,
        ops: Ops[Array],
        piece: Piece,
        values: Array,
        announced: Announced[Array],
        key: Key | None,
    ) -> Array:
        """`Codec.pack`; the key is None unless the method is `Seeded`."""
        raise NotImplementedError(f"{type(self).__name__} has no pack_announced")

    def encode_announced(
        self,
        ops: Ops[Array],
        bucket: Bucket,
        piece: Any,
        values: Array,
        announced: Announced[Array],
        key: Key | None,
    ) -> Sent[Array]:
        """`Codec.encode`."""
        pack = partial(self.pack_announced, announced=announced, key=key)
        return _encoded(ops, bucket, piece, values, self, pack, self.unpack)


@dataclass(frozen=True)
class StateSpec:
    """An array that a method keeps for a tensor from step to step, beside the residual."""

    numel: int
    shared: bool = False  # equal on all ranks, as it follows from what all received


@dataclass(frozen=True)
class Product(Generic[Array]):
    """An array given as the product of two matrices: [m * k] times [k * n], with (m, k, n)."""

    left: Array
    right: Array
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class Placed(Generic[Array]):
    """A flat array that is 0 but for a few elements."""

    values: Array  # [k], the residual's dtype
    index: Array  # int64 [k], unique


@dataclass
class Work(Generic[Array]):
    """One tensor's step on one rank, as a method of rounds sees it. All arrays are flat.

    values: e + g, [n], the residual's dtype.
    checked: has a NaN or an infinity if and only if `values` has one.
    state: what `Rounds.state` names, as the last committed step left it.
    following: what it becomes if this step commits; what is left out stays as it is.
    reduced: what the rounds so far gave: sums or means over ranks, equal on all of them.
    sent: what this rank gave to each of them.
    key: of random numbers, for a method that is `Seeded`.
    notes: what the method computed in one call and needs in another one of the step.
    """

    values: Array
    checked: Array
    state: Mapping[str, Array]
    following: dict[str, Array] = field(default_factory=dict)
    reduced: list[Array] = field(default_factory=list)
    sent: list[Array] = field(default_factory=list)
    key: Key | None = None
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rounds(Method):
    """A method whose arrays are added up over ranks, in one round or in several that depend.

    Each round's sum is in rank order, at the elements' owners, in the residual's dtype, and every
    rank gets the same bits. Tensors take part whole. A tensor that any rank flags as non-finite
    becomes NaN on all; its rounds run on.
    """

    rounds: ClassVar[int]
    exchange: str = "reduce"

    @property
    def exchanges(self) -> tuple[str, ...]:
        """What `exchange` may be."""
        return ("reduce",)

    def state(self, piece: Piece) -> Mapping[str, StateSpec]:
        """What is kept for a tensor beside its residual, by name; zeros at first."""
        return {}

    def elements(self, piece: Piece, i: int) -> int:
        """How many numbers a tensor that is not whole has added up in round i; static."""
        raise NotImplementedError(f"{type(self).__name__} has no elements")

    def send(
        self, ops: Ops[Array], bucket: Bucket, piece: Piece, i: int, work: Work[Array]
    ) -> Array:
        """[elements] of the residual's dtype: what is added up in round i."""
        raise NotImplementedError(f"{type(self).__name__} has no send")

    def finish(
        self, ops: Ops[Array], bucket: Bucket, piece: Piece, work: Work[Array]
    ) -> tuple[Array | Placed[Array] | Product[Array], Array | Placed[Array] | Product[Array]]:
        """What all ranks apply, [n], the same on each; and what of `values` this rank has sent.

        The residual keeps the rest of `values`. What has few elements that are not 0 is `Placed`:
        then the others are not read or written. A `Product` is never written out.
        """
        raise NotImplementedError(f"{type(self).__name__} has no finish")


def _encoded(
    ops: Ops[Array],
    bucket: Bucket,
    piece: Any,
    values: Array,
    method: Codec,
    pack: Callable[[Ops[Array], Piece, Array], Array],
    unpack: Callable[[Ops[Array], Piece, Array, str], Array],
) -> Sent[Array]:
    """What a piece sends when all its elements travel, in another form unless it is whole."""
    dtype = bucket.residual_dtype
    if piece.whole:
        return Sent([(piece.at, ops.pack_values(values, dtype))], values, None, values)
    data = pack(ops, piece, values)
    if not method.error_feedback:
        return Sent([(piece.at, data)], values, None, values)
    rows = ops.load(data, ops.numel(data), 0, ops.numel(data))
    read = ops.row(unpack(ops, piece, rows, dtype), 0)
    return Sent([(piece.at, data)], read, None, values)


def _decoded(
    ops: Ops[Array],
    bucket: Bucket,
    piece: Any,
    gathered: Array,
    method: Codec,
    unpack: Callable[[Ops[Array], Piece, Array, str], Array],
) -> Read[Array]:
    """What payloads have of such a piece."""
    dtype, width = bucket.residual_dtype, bucket.payload_bytes
    if piece.whole:
        rows = ops.load(gathered, width, piece.at, whole_bytes(piece))
        return Read(ops.unpack_values(rows, piece.numel, dtype, dtype))
    rows = ops.load(gathered, width, piece.at, method.data_bytes(piece))
    sound = method.sound(ops, piece, rows, dtype)
    return Read(unpack(ops, piece, rows, dtype), None, sound)


def numbers_of(method: object, piece: Piece) -> int:
    """How many numbers ranks tell each other of a piece; 0 unless the method announces some."""
    if piece.whole or not piece.numel or not isinstance(method, AnnouncingCodec):
        return 0
    return method.numbers(piece)


def bucket_recipe(
    bucket: Bucket,
    kind: str,
    *,
    sampled: bool = False,
    keeps: bool = True,
    bits: int = 0,
    block: Callable[[Piece], int] = lambda piece: 0,
) -> tuple[int, ...]:
    """What a kernel needs to know of a bucket whose values are sent as `kind`.

    See `horovod_topk.ops.protocol.Fused`; `kind` is one of `VALUE_CODE`.
    """
    width, code = WIDTH[bucket.residual_dtype], VALUE_CODE[kind]
    place = bucket.flags_at, bucket.payload_bytes, int(sampled), bucket.parts
    numbers = [len(bucket.tensors), width, code, *place, int(keeps), bits]
    for piece in bucket.tensors:
        numbers += [*piece.recipe, block(piece)]
    return tuple(numbers)


def whole_bytes(piece: Piece) -> int:
    """Bytes of a piece that travels as it is."""
    return value_bytes(RESIDUAL_DTYPE[piece.spec.dtype], piece.numel)


def entries(numel: int, ratio: float) -> int:
    """k = ceil(ratio * numel), with the ratio read as the decimal number it was written as."""
    return math.ceil(Fraction(repr(ratio)) * numel)
