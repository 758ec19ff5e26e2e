"""The protocol of a compression method: one class in one file, both settings and algorithm.

There are two kinds. A `Codec` encodes the tensors of a bucket into a payload; payloads are
gathered, by any exchange, and every rank decodes them. `Rounds` fills arrays that are added up over
ranks, in one round or in several, each round from the result of the one before.

A codec whose ranks exchange a few numbers before they encode, such as a common scale, is an
`AnnouncingCodec`.

A method imports `horovod_topk.ops` and the settings (`config`, `ratios`, `schedules`, `errors`).
Plans, steps, exchanges, adapters and commands know methods through this module alone. Its functions
take `ops`, the array operations of one framework (`horovod_topk.ops.protocol.Ops`), and run in
every framework, eagerly and in graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from horovod_topk.config import AUTO, Settings
from horovod_topk.errors import ConfigError
from horovod_topk.methods.keys import Key
from horovod_topk.ops import Fused, Ops
from horovod_topk.ops.coding import value_bytes

Array = TypeVar("Array")

SECTION = 8  # bytes; a tensor's data in a payload begins at a multiple of it

# Numbers and codes in a recipe; see `horovod_topk.ops.protocol.Fused`.
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
    "int2": 6,
    "int3": 7,
    "minmax": 8,
    "means": 9,
    "dithered": 10,
    "dithered_l2": 11,
    "ternary": 12,
}
AS_IS = 3  # kind of indices: none, values are not encoded

AS_SET = 0.5  # ratio level of a method without `ratio` that compresses by its settings
UNIFORM, ADAPTIVE = "uniform", "adaptive"  # values of `allocation`
SHARES = range(-8, 9)  # j: a tensor's share of the elements is the ratio times 2^(j/4)
Allocation = tuple[tuple[str, int], ...]  # tensor names, each with its j
EVERYTHING = 1 << 62  # value of `min_numel` with which every tensor is sent whole

RESIDUAL_DTYPE = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
}


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape, dtype and device of a gradient."""

    name: str  # unique within an optimizer, equal on all ranks
    shape: tuple[int, ...]
    dtype: str  # float16, bfloat16, float32 or float64
    device: str = field(default="cpu", compare=False)  # tensors of one bucket share it

    @property
    def residual_dtype(self) -> str:
        """The dtype of what is kept for it from step to step."""
        return RESIDUAL_DTYPE.get(self.dtype, self.dtype)

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """A gradient or an owner's shard of it, and where it is in arenas and payload.

    Methods that need more fields derive their own class.
    """

    spec: TensorSpec
    numel: int  # elements: those of the gradient, or of its shard
    gradient: int  # position in its bucket of the gradient that it is, or is a shard of
    first: int = 0  # first block of the shard; see `core.plan.shards`
    start: int = 0  # first element in the bucket's arenas
    at: int = 0  # first byte of its data in the payload
    whole: bool = False  # all elements are sent without compression, in the residual's dtype

    @property
    def stop(self) -> int:
        """One past its last element in the bucket's arenas."""
        return self.start + self.numel

    @property
    def entries(self) -> int:
        """Number of values that it sends in a step."""
        return self.numel

    @property
    def sends_all(self) -> bool:
        """Whether every element is sent, so that momentum masking does not apply."""
        return True

    @property
    def recipe(self) -> tuple[int, ...]:
        """The numbers about it that a kernel needs, without its block; see `bucket_recipe`."""
        return self._recipe(self.numel, AS_IS if self.whole else 0, 0)

    def _recipe(self, k: int, index: int, index_at: int) -> tuple[int, ...]:
        """Return the recipe of a piece with k entries, a kind of indices, and their first byte."""
        dtype = DTYPE_CODE[self.spec.dtype]
        place = self.at, index_at, dtype, self.first, self.gradient
        return self.numel, k, self.start, index, *place

    def moved(self, by: int) -> Self:
        """The same piece, `by` bytes further back in a payload."""
        return replace(self, at=self.at + by)


class Bucket(Protocol):
    """The facts about a tensor's bucket that a method may use."""

    @property
    def tensors(self) -> Sequence[Any]:
        """The pieces of the bucket, in order."""

    @property
    def residual_dtype(self) -> str:
        """The dtype of residuals: float32 or float64."""

    @property
    def device(self) -> str:
        """The device of the bucket's arrays, as the framework names it."""

    @property
    def parts(self) -> int:
        """Number of owners that gradients are split among, if pieces are shards; else 1."""

    @property
    def flags_at(self) -> int:
        """Byte of the non-finite flags in a payload."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of one payload."""


@dataclass(frozen=True)
class Sent(Generic[Array]):
    """The parts of a payload that one piece sends, and the values that receivers read."""

    parts: Sequence[tuple[int, Array]]  # (first byte in the payload, uint8 data)
    values: Array  # [k], residual dtype: values that receivers read, for error feedback
    index: Array | None  # ascending int64 [k]; None: all elements
    checked: Array  # has a NaN or an infinity if and only if the piece has one


@dataclass(frozen=True)
class Read(Generic[Array]):
    """The values and indices of one piece, read from payloads: one row for each payload."""

    values: Array  # [P, k], residual dtype
    index: Array | None = None  # int64 [P, k]; None: all elements
    sound: Sequence[Array] = ()  # bool [P] each: whether the data is valid


@dataclass(frozen=True)
class Announced(Generic[Array]):
    """Numbers of one piece that ranks have announced before they encode it."""

    own: Array  # [c] float32: announced by this rank
    rows: Array  # [W, c] float32: announced by each rank that sends the piece, in rank order


@dataclass(frozen=True)
class Context(Generic[Array]):
    """Inputs of a codec beside the values of a piece. Most codecs use none of them."""

    key: Key | None = None  # key of random numbers, for a method that is `Seeded`
    squares: Array | None = None  # Adam's mean square of each element, [n], to select by
    announced: Announced[Array] | None = None  # all ranks' numbers, for an `AnnouncingCodec`


@dataclass(frozen=True, kw_only=True)
class Method(Settings):
    """Base class of both kinds of methods: its fields are the settings."""

    id: ClassVar[int]  # in the payload's header: unique, and never reused by another method
    # Defaults of compressor classes, not of fields.
    for_training: ClassVar[Mapping[str, str]] = {"guard": AUTO}
    in_rounds: ClassVar[bool] = False  # whether it is of the kind `Rounds`
    error_feedback: ClassVar[bool] = True  # whether residuals are kept; may be a field instead
    defers: ClassVar[bool] = True  # whether much of a gradient may arrive in later steps
    measured: ClassVar[tuple[str, ...]] = ()  # names of a codec's own measures: `Codec.measure`
    may_send_nothing: ClassVar[bool] = False  # of a tensor that is not 0
    # Whether bytes are allocated to tensors in training; may be a field instead.
    allocation: ClassVar[str | Allocation] = UNIFORM

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
            if ratio != 1.0:
                raise ConfigError(
                    f"the ratio {ratio!r} was asked of {name}, which has none",
                    cure="Pass 'dense' in ratio= and 1.0 in warmup=, or use TopKEF or RandomK",
                )

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the numbers that ranks send with payloads: the schedule's and the method's."""
        return (*self.needed_measures, *self.measured)

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

    def ratio_of(self, name: str) -> float:
        """Share of a tensor's elements that a rank sends in a step."""
        return self.own.get(name, self.ratio)

    def withheld(self) -> str:
        """Describe what is not sent in a step at these settings; empty: all of it, at ratio 1.0."""
        return "" if self.ratio == 1.0 else f"{type(self).__name__} sends gradients in another form"

    def piece(self, part: Piece, direction: str) -> Piece:
        """How a tensor or shard is sent; positions are set later.

        direction: "direct" (allgather), "scatter" (to owners), "gather" (back from owners) or
            "sums" (owners of local sums to each other).
        """
        small = part.spec.numel < self.min_numel
        return replace(part, whole=small or part.spec.name in self.own)

    def lay_out(self, pieces: Sequence[Piece], at: int) -> tuple[list[Piece], int]:
        """Set the pieces' positions in a payload from byte `at` on; also return the end."""
        return list(pieces), at

    def body_end(self, pieces: Sequence[Any], at: int) -> int:
        """The byte at which the body of `lay_out` ends."""
        return self.lay_out(pieces, at)[1]

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

    A simple codec sends every element in another format and defines `data_bytes`, `pack` and
    `unpack`. A codec that sends some elements, or has its own sections, overrides `piece`,
    `lay_out`, `encode` and `decode`. A codec may also offer a kernel for whole buckets, which
    computes the same bits as these functions.
    """

    def data_bytes(self, piece: Piece) -> int:
        """Bytes in the payload of a piece that is not sent whole."""
        raise NotImplementedError(f"{type(self).__name__} has no data_bytes")

    def lay_out(self, pieces: Sequence[Piece], at: int) -> tuple[list[Piece], int]:
        """`Method.lay_out`: one piece after another."""
        placed = []
        for piece in pieces:
            at = -(-at // SECTION) * SECTION
            placed.append(replace(piece, at=at))
            at += whole_bytes(piece) if piece.whole else self.data_bytes(piece)
        return placed, at

    def pack(self, ops: Ops[Array], piece: Piece, values: Array, context: Context[Array]) -> Array:
        """Encode a piece's elements, [n] of the residual's dtype, to [data_bytes] uint8.

        Random numbers are drawn from `context.key.own` (this rank's) or `context.key.shared`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no pack")

    def unpack(
        self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str, context: Context[Array]
    ) -> Array:
        """Decode [P, data_bytes] bytes to [P, n] values of `dtype`."""
        raise NotImplementedError(f"{type(self).__name__} has no unpack")

    def sound(self, ops: Ops[Array], piece: Piece, rows: Array, dtype: str) -> Sequence[Array]:
        """Validity checks of a row's bytes, bool [P] each; all bytes written by `pack` pass."""
        return ()

    def settle(self, ops: Ops[Array], total: Array) -> Array | None:
        """Return the value to apply as the mean, computed from the sum over ranks.

        None: apply the sum or the mean itself.
        """
        return None

    def encode(
        self, ops: Ops[Array], bucket: Bucket, piece: Any, values: Array, context: Context[Array]
    ) -> Sent[Array]:
        """Encode a piece of e + g: `values`, [n] of the residual's dtype, n > 0."""
        dtype = bucket.residual_dtype
        if piece.whole:
            return Sent([(piece.at, ops.pack_values(values, dtype))], values, None, values)
        data = self.pack(ops, piece, values, context)
        if not self.error_feedback:
            return Sent([(piece.at, data)], values, None, values)
        rows = ops.load(data, ops.numel(data), 0, ops.numel(data))
        read = ops.row(self.unpack(ops, piece, rows, dtype, context), 0)
        return Sent([(piece.at, data)], read, None, values)

    def decode(
        self, ops: Ops[Array], bucket: Bucket, piece: Any, gathered: Array, context: Context[Array]
    ) -> Read[Array]:
        """Decode one piece, n > 0, from payloads one after another; `context` has only a key."""
        dtype, width = bucket.residual_dtype, bucket.payload_bytes
        if piece.whole:
            rows = ops.load(gathered, width, piece.at, whole_bytes(piece))
            return Read(ops.unpack_values(rows, piece.numel, dtype, dtype))
        rows = ops.load(gathered, width, piece.at, self.data_bytes(piece))
        sound = self.sound(ops, piece, rows, dtype)
        return Read(self.unpack(ops, piece, rows, dtype, context), None, sound)

    def measure(
        self, ops: Ops[Array], bucket: Bucket, piece: Any, values: Array
    ) -> Sequence[Array]:
        """Measure a piece of e + g before it is encoded: [1] float32 for each of `measured`.

        Other ranks get the sums over all pieces. Empty: the piece counts for nothing.
        """
        return ()

    def kernel(self, ops: Ops[Array], bucket: Bucket) -> Fused[Array] | None:
        """A kernel that encodes and decodes a whole bucket; None: use `encode` and `decode`."""
        return None


@dataclass(frozen=True, kw_only=True)
class Seeded(Method):
    """A method of either kind that draws random numbers from a seed.

    It derives from `Codec, Seeded` or `Rounds, Seeded`, in this order. The key is `Context.key` or
    `Work.key`; a kernel draws from `Key.own`.
    """

    seed: int = 0  # seed of the random numbers; equal on all ranks

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(
                f"seed={self.seed!r} is no whole number from 0 on",
                cure="Pass seed=0, or another whole number, on all ranks",
            )


@dataclass(frozen=True, kw_only=True)
class AnnouncingCodec(Codec):
    """A codec whose ranks exchange a few numbers of each piece before they encode it.

    The numbers are gathered before the payloads, over any exchange, from the ranks that send the
    same piece: all ranks, or only the owner of a shard when it sends its sum back. Readers do not
    get them: all that a reader needs is in the payload. Numbers must be finite even if values are
    not.
    """

    def numbers(self, piece: Piece) -> int:
        """How many numbers ranks announce of a piece that is not sent whole; static."""
        raise NotImplementedError(f"{type(self).__name__} has no numbers")

    def announce(self, ops: Ops[Array], piece: Piece, values: Array) -> Array:
        """Compute [numbers] float32 from a piece of e + g: [n] of the residual's dtype."""
        raise NotImplementedError(f"{type(self).__name__} has no announce")


@dataclass(frozen=True)
class StateSpec:
    """An array that a method keeps for a tensor from step to step, beside the residual."""

    numel: int
    shared: bool = False  # equal on all ranks, as it follows from exchanged arrays
    dtype: str = ""  # empty: the residual's
    in_place: bool = False  # written by the optimizer's update: steps have no candidate for it
    in_units: bool = False  # in units of gradients, as residuals: stays and grows as these do
    optional: bool = False  # starts at zero where a saved one does not fit
    is_damping: bool = False  # multiplies gradients in the step: `stats()` has the smallest
    range: tuple[float, float] = (-math.inf, math.inf)  # of its values, as floats


class UpdateRule(Protocol):
    """What a follower keeps and sends for each tensor; see `core.run.follower`.

    It is equal on all ranks, and part of the plan's digest.
    """

    @property
    def name(self) -> str:
        """Name of the rule."""

    @property
    def is_linear(self) -> bool:
        """Whether weights move in proportion to gradients."""

    @property
    def is_needed_dense(self) -> bool:
        """Whether it goes on once the guard has ended compression."""

    def states(self, piece: Piece) -> Mapping[str, StateSpec]:
        """The arrays that the follower keeps for a tensor, beside the residual, by name."""

    def numbers(self, piece: Piece) -> tuple[str, ...]:
        """Names of the float32 numbers that a rank sends about a tensor in each step."""

    def adopted(self, name: str, array: Any, ops: Ops[Any]) -> Any:
        """A state's array as an earlier version has saved it, as it is kept now."""


@dataclass(frozen=True)
class Product(Generic[Array]):
    """An array given as the product of two matrices: [m * k] times [k * n], with (m, k, n)."""

    left: Array
    right: Array
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class Placed(Generic[Array]):
    """A flat array that is 0 except at a few indices."""

    values: Array  # [k], the residual's dtype
    index: Array  # int64 [k], unique


@dataclass
class Work(Generic[Array]):
    """One tensor's arrays in a step of a method of rounds, on one rank. All arrays are flat.

    values: e + g, [n], the residual's dtype.
    checked: has a NaN or an infinity if and only if `values` has one.
    state: the arrays of `Rounds.state`, as the last committed step left them.
    following: their new values if this step commits; arrays left out stay the same.
    reduced: results of the rounds so far: sums or means over ranks, equal on all ranks.
    sent: the array that this rank sent in each of these rounds.
    key: key of random numbers, for a method that is `Seeded`.
    notes: values that the method computes in one call and needs in a later call of the step.
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
    """A method whose arrays are added up over ranks, in one round or several dependent ones.

    Arrays are added up in the residual's dtype: with "reduce", the default, by the owner of each
    element in rank order; with "allgather" by every rank in rank order, to the same bits and with
    P / 2 times the bytes at P ranks; with "allreduce" by Horovod's own allreduce, in an order that
    is not fixed: Gloo gives all ranks equal bits, but above two ranks not the same bits in every
    run, and MPI only recommends equal bits. Tensors are not sharded between rounds. A tensor that
    any rank flags as non-finite becomes NaN on all ranks; its rounds go on.
    """

    rounds: ClassVar[int]
    in_rounds: ClassVar[bool] = True
    exchange: str = "reduce"

    @property
    def exchanges(self) -> tuple[str, ...]:
        """The exchanges that the setting `exchange` may name."""
        return ("reduce", "allgather", "allreduce")

    def state(self, piece: Piece) -> Mapping[str, StateSpec]:
        """Arrays that are kept for a tensor beside its residual, by name; zeros at first."""
        return {}

    def elements(self, piece: Piece, i: int) -> int:
        """How many numbers of a tensor that is not whole are added up in round i; static."""
        raise NotImplementedError(f"{type(self).__name__} has no elements")

    def send(
        self, ops: Ops[Array], bucket: Bucket, piece: Piece, i: int, work: Work[Array]
    ) -> Array:
        """The array that is added up in round i: [elements] of the residual's dtype."""
        raise NotImplementedError(f"{type(self).__name__} has no send")

    def finish(
        self, ops: Ops[Array], bucket: Bucket, piece: Piece, work: Work[Array]
    ) -> tuple[Array | Placed[Array] | Product[Array], Array | Placed[Array] | Product[Array]]:
        """The array that all ranks apply, [n], and the part of `values` that this rank has sent.

        The applied array is equal on all ranks; the residual keeps the rest of `values`. Return an
        array with few non-zero elements as `Placed`: then the other elements are not read or
        written. A `Product` is never written out.
        """
        raise NotImplementedError(f"{type(self).__name__} has no finish")


def numbers_of(method: object, piece: Piece) -> int:
    """How many numbers ranks announce of a piece; 0 for most methods."""
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
    """The recipe of a bucket whose values are sent as `kind`, for a kernel.

    See `horovod_topk.ops.protocol.Fused`; `kind` is one of `VALUE_CODE`.
    """
    width, code = WIDTH[bucket.residual_dtype], VALUE_CODE[kind]
    place = bucket.flags_at, bucket.payload_bytes, int(sampled), bucket.parts
    numbers = [len(bucket.tensors), width, code, *place, int(keeps), bits]
    for piece in bucket.tensors:
        numbers += [*piece.recipe, block(piece)]
    return tuple(numbers)


def whole_bytes(piece: Piece) -> int:
    """Bytes of a piece that is sent whole."""
    return value_bytes(RESIDUAL_DTYPE[piece.spec.dtype], piece.numel)


def entries(numel: int, ratio: float) -> int:
    """k = ceil(ratio * numel), with the ratio taken as the decimal number in the settings."""
    return math.ceil(Fraction(repr(ratio)) * numel)
