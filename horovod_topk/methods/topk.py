"""Top-K: a rank sends the largest elements of each tensor, and error feedback keeps the rest.

Of a tensor with n elements the k = ceil(ratio * n) largest magnitudes of e + g are sent, with their
indices; values may be rounded, and the residual keeps the rounding error. The operator contracts:
||x - topk(x)||^2 <= (1 - k / n) ||x||^2 (Stich et al. 2018, Sparsified SGD with Memory; Karimireddy
et al. 2019, Error Feedback Fixes SignSGD; Lin et al. 2018, Deep Gradient Compression).

The body of a payload, after its flags:

    values      of each tensor in turn, of one kind: float32, float16, bfloat16, int8, int4, int3,
                int2 or sign
    int32       indices of tensors that have unsigned 32-bit ones
    int16       indices of tensors that have unsigned 16-bit ones
    packed      indices of tensors that have packed ones

Sections begin at multiples of 8; the bytes between MUST be 0. A tensor without an index sends all
its elements in row-major order. Any other sends k entries; its indices count row-major elements
from 0 and MUST ascend strictly, entry i of the values belonging to entry i of the indices. A
tensor's values begin at a byte boundary.

    float32, float64        IEEE 754 binary32 or binary64
    float16, bfloat16       binary16, or the upper half of a binary32; a value MUST saturate at the
                            largest finite magnitude (65504, 2**128 - 2**120)
    int8, int4              c bfloat16 scales, one for each block of 128 entries, c = ceil(k / 128);
                            then for each entry an integer j, and the value is j times the scale of
                            its block, exactly. int8: two's complement. int4: four bits of two's
                            complement, entry 2i in the lower half of byte i, entry 2i + 1 in the
                            upper. A writer MUST NOT write j = -128 or j = -8
    int3, int2, sign        s = 4, 2 or 1 bfloat16 scales for each block of 1024 entries, block
                            after block; then b = 3, 2 or 1 bits for each entry, without gaps, the
                            first in the lowest bits of the first byte. The lower b - 1 bits of an
                            entry are the number of a scale of its block, 0 to s - 1; the value is
                            this scale, or minus it if the highest bit is set

Bits after a tensor's last value MUST be 0. A scale MUST be a finite number that is not negative; a
reader MUST refuse others. A writer MAY choose any scales and multiples
(`horovod_topk.ops.protocol.Ops.pack_values` defines ours): the residual keeps the error.

Packed indices i_0 < i_1 < ... < i_(k-1) of a tensor with n elements begin at a byte boundary. With
x_j = i_j - j, which lies in 0 ... n - k and never descends, and the l in 0 ... 31 that makes
k * l + floor((n - k) / 2**l) least (the lower of equals):

    ceil(k * l / 8) bytes   the lower l bits of x_0, x_1, ..., the lowest bit first, without gaps
    ceil(m / 8) bytes       a map of m = k + floor((n - k) / 2**l) bits; bit j % 8 of byte j / 8 is
                            bit j. Bit floor(x_j / 2**l) + j is set for each j, no other

Bits after either MUST be 0 (Elias 1974, Fano 1971). A reader MUST refuse indices that do not
ascend, lie outside their tensor, or are fewer or more than k. Values and indices of a flagged
tensor MUST be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from horovod_topk.config import AUTO, DEFERRED, check_choice
from horovod_topk.errors import ConfigError, TensorTooLargeError
from horovod_topk.methods.protocol import (
    ADAPTIVE,
    RESIDUAL_DTYPE,
    SECTION,
    UNIFORM,
    Allocation,
    Bucket,
    Codec,
    Context,
    Piece,
    Read,
    Sent,
    bucket_recipe,
    entries,
)
from horovod_topk.ops import Fused, Ops, coding
from horovod_topk.ratios import checked_ratio

Array = TypeVar("Array")

VALUES = ("float32", "float16", "bfloat16", "int8", "int4", "int3", "int2", "sign")  # and "auto"
INDICES = ("auto", "packed", "plain")
SELECTIONS = ("exact", "sampled")
ALLOCATIONS = (UNIFORM, ADAPTIVE)
EARLY_STEPS, EARLY, MOST_EARLY = 60, 10, 0.25  # warmup="auto": steps, times `ratio`, at most
KINDS = (None, "int32", "int16", "packed")  # kinds of indices, in the order of their sections

# Codes in a recipe; see `horovod_topk.ops.protocol.Fused`.
INDEX_CODE = {None: 0, "packed": 1, "int16": 2, "int32": 4}


@dataclass(frozen=True)
class Entries(Piece):
    """A tensor or shard of which k elements are sent."""

    k: int = 0
    index: str | None = None  # int16, int32 or packed; None: all elements are sent, in order
    index_at: int = 0  # byte of its first index in the payload

    @property
    def entries(self) -> int:
        """Number of values that it sends in a step."""
        return self.k

    @property
    def sends_all(self) -> bool:
        """Whether every element is sent."""
        return self.index is None

    @property
    def recipe(self) -> tuple[int, ...]:
        return self._recipe(self.k, INDEX_CODE[self.index], self.index_at)

    def moved(self, by: int) -> Self:
        """The same piece, `by` bytes further back in a payload."""
        return replace(self, at=self.at + by, index_at=self.index_at + by)


@dataclass(frozen=True)
class TopK(Codec):
    """Top-K gradient compression with error feedback.

    In each step a rank sends the largest elements of each gradient tensor. The rest stays on the
    rank, as a residual, and is added to the next gradient.

    Args:
        ratio: share of each tensor's elements that a rank sends in a step, in (0, 1]. "auto": 0.02;
            0.1 for Lion, 0.25 for Muon and their kin, and 0.25 where an optimizer's first beta is
            at most 0.5 (docs/optimizers.md). With the exchange "sharded", a pair: what a rank
            sends, and the share of a shard's elements that its owner sends back. A mapping gives
            some tensors another ratio, such as {"head.*": "dense", "*": 0.01}. Its keys are
            patterns of tensor names as in `fnmatch`, or functions of a tensor's name and shape that
            return a bool; its values are ratios or "dense". The first key that matches a tensor is
            used, and "*" for tensors that no other key matches. A pattern that matches no tensor is
            an error. Tensors below `min_numel` are sent whole in any case.
        values: format in which values are sent: "float32" (float64 for float64 gradients),
            "float16", "bfloat16", "int8", "int4", "int3", "int2" or "sign". The rounding error
            stays in the residual. With "sign" it is so large that training may diverge
            (docs/methods.md).
            "auto": "int4", and "float32" at ratio 1. A pair, such as ("int8", "plain"), also has
            the format of indices: "packed" (compressed, as "auto" is), or "plain" (16 or 32 bits
            each).
        selection: how the largest elements are found: "exact", or "sampled", which estimates a
            threshold from a sample and is faster.
        allocation: "uniform": each tensor has the same ratio. "adaptive": tensors have ratios from
            `ratio` / 4 to 4 `ratio`, larger ones where gradients are large, at the same bytes in
            all. They change after 60 committed steps, 120, 240 and so on
            (`core.control.allocation`).

    Source: Stich et al. 2018 (Sparsified SGD with Memory); Karimireddy et al. 2019 (Error
    Feedback Fixes SignSGD); Lin et al. 2018 (Deep Gradient Compression) for `clip_norm`,
    `warmup` and `momentum`; Zheng et al. 2019 (Blockwise Momentum SGD with Error-Feedback) for
    `follow_lr`.
    """

    id: ClassVar[int] = 1

    for_training: ClassVar[Mapping[str, str]] = dict.fromkeys(DEFERRED, AUTO)

    ratio: float = 0.02  # share of each tensor's elements that a rank sends a step, in (0, 1]
    values: str = AUTO  # format of values; the rounding error stays in the residual
    indices: str = "auto"  # format of indices; "auto": packed
    gather_ratio: float | None = None  # share that owners send back; None: same as `ratio`
    selection: str = "exact"  # how the largest elements are found
    # Which share of the elements each tensor sends; pairs: what training has decided.
    allocation: str | Allocation = field(default=UNIFORM, kw_only=True)  # type: ignore[misc]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", checked_ratio(self.ratio))
        if self.gather_ratio is not None:
            back = checked_ratio(self.gather_ratio, "ratio[1]")
            object.__setattr__(self, "gather_ratio", back)
        if self.warmup == AUTO:
            more = min(MOST_EARLY, EARLY * self.ratio)
            early = ((EARLY_STEPS, more),) if more > self.ratio else None
            object.__setattr__(self, "warmup", early)
        if self.values == AUTO:
            object.__setattr__(self, "values", "float32" if self.ratio == 1.0 else "int4")
        check_choice("values", self.values, VALUES)
        check_choice("values[1]", self.indices, INDICES)
        check_choice("selection", self.selection, SELECTIONS)
        if not isinstance(self.allocation, tuple):
            check_choice("allocation", self.allocation, ALLOCATIONS)
        super().__post_init__()
        _check_gather_ratio(self.ratio, self.gather_ratio, self.exchange)

    @property
    def ratio_back(self) -> float:
        """Share of a shard's elements that its owner sends to all ranks."""
        return self.ratio if self.gather_ratio is None else self.gather_ratio

    # Ratio levels.

    def at(self, ratio: float) -> Self:
        """`Method.at`; owners, and tensors with their own ratio, send at least that share."""
        if ratio == self.ratio:
            return self
        back = None if self.gather_ratio is None else max(self.gather_ratio, ratio)
        values = "float32" if ratio == 1.0 else self.values
        own = tuple((name, max(each, ratio)) for name, each in self.ratios or ())
        return replace(self, ratio=ratio, gather_ratio=back, values=values, ratios=own)

    def withheld(self) -> str:
        for name, own in self.own.items():
            if own < 1.0:
                return f"{name!r} sends {own} of its elements"
        if self.values != "float32":
            return f"values={self.values!r} are rounded"
        if self.ratio_back < 1.0:
            return f"owners send back {self.ratio_back} of the elements"
        return ""

    # Layout of payloads.

    def piece(self, part: Piece, direction: str) -> Entries:
        """`Codec.piece`: k entries and their indices, or all elements if these cost no more."""
        k, index = part.numel, None
        if part.numel:
            k, index = self._chosen(part, self._ratio_to(direction, part.spec.name))
        return Entries(part.spec, part.numel, part.gradient, part.first, k=k, index=index)

    def ratio_of(self, name: str) -> float:
        return self._ratio_to("direct", name)

    def _ratio_to(self, direction: str, name: str) -> float:
        ratio = self.ratio_back if direction == "gather" else self.ratio
        share = self._shares.get(name, 1.0) if ratio < 1.0 else 1.0
        return self.own.get(name, min(1.0, ratio * share))

    @cached_property
    def _shares(self) -> Mapping[str, float]:
        """Factors of the ratio by tensor name, for tensors with another one than 1."""
        decided = self.allocation if isinstance(self.allocation, tuple) else ()
        return {name: 2.0 ** (j / 4) for name, j in decided if j}

    def data_bytes(self, piece: Piece) -> int:
        assert isinstance(piece, Entries)
        indices = coding.index_bytes(piece.index, piece.numel, piece.k)
        return coding.value_bytes(self._kind_of(piece), piece.k) + indices

    def lay_out(self, pieces: Sequence[Any], at: int) -> tuple[list[Piece], int]:
        """`Codec.lay_out`: values of all tensors, then their indices by kind."""
        position, end = self._sections(pieces, at)
        placed: list[Piece] = []
        for piece in pieces:
            index_at = position[piece.index] if piece.index else 0
            placed.append(replace(piece, at=position[None], index_at=index_at))
            position[None] += coding.value_bytes(self._kind_of(piece), piece.k)
            position[piece.index] += coding.index_bytes(piece.index, piece.numel, piece.k)
        return placed, end

    def body_end(self, pieces: Sequence[Any], at: int) -> int:
        return self._sections(pieces, at)[1]

    def _sections(self, pieces: Sequence[Any], at: int) -> tuple[dict[str | None, int], int]:
        """Where the values and each kind of indices begin, and the end of the body."""
        sizes = dict.fromkeys(KINDS, 0)
        for piece in pieces:
            sizes[None] += coding.value_bytes(self._kind_of(piece), piece.k)
            sizes[piece.index] += coding.index_bytes(piece.index, piece.numel, piece.k)
        position, end = dict[str | None, int](), at
        for kind in KINDS:
            position[kind] = end
            end = -(-(end + sizes[kind]) // SECTION) * SECTION
        return position, end

    def why_whole(self, piece: Any) -> str | None:
        own = self.own.get(piece.spec.name)
        if piece.index is not None:
            return None
        if piece.spec.numel < self.min_numel:
            return super().why_whole(replace(piece, whole=True))
        if own is None:
            return f"at ratio={self.ratio} entries cost no less: sent dense"
        return f"at its ratio of {own} entries cost no less: sent dense"

    def _chosen(self, part: Piece, ratio: float) -> tuple[int, str | None]:
        """k and the kind of indices of a part that has elements; None if all cost no more."""
        k, values = entries(part.numel, ratio), self._kind_of(part)
        index = self._index_kind(part)
        cost = coding.value_bytes(values, k) + coding.index_bytes(index, part.numel, k)
        whole = coding.value_bytes(values, part.numel)
        if part.spec.numel < self.min_numel or cost >= whole:
            return part.numel, None
        if part.spec.numel > 2**32:
            raise TensorTooLargeError(
                f"{part.spec.numel} elements are more than the {2**32} an index can address",
                tensor=part.spec.name,
                cure="Split the parameter, or leave it out of the optimizer that is compressed",
            )
        return k, index

    def _index_kind(self, part: Piece) -> str:
        """The kind of indices."""
        if self.indices != "plain":
            return "packed"
        return "int16" if part.spec.numel <= 2**16 else "int32"

    def _kind_of(self, piece: Piece) -> str:
        """The format in which a piece's values are sent."""
        return self.value_kind(RESIDUAL_DTYPE[piece.spec.dtype])

    def value_kind(self, residual_dtype: str) -> str:
        """The format in which values of a bucket are sent, given the residuals' dtype."""
        return residual_dtype if self.values == "float32" else self.values

    # Encoding and decoding.

    def encode(
        self, ops: Ops[Array], bucket: Bucket, piece: Any, values: Array, context: Context[Array]
    ) -> Sent[Array]:
        """`Codec.encode`: selects by |a|, or by |a| v^(-1/4) with Adam's mean squares v."""
        kind, dtype = self.value_kind(bucket.residual_dtype), bucket.residual_dtype
        select = ops.sample if self.selection == "sampled" else ops.select
        keys, squares = values, context.squares
        if squares is not None and piece.index:
            keys = ops.weighted(values, squares)
        index = select(keys, piece.k) if piece.index else None
        chosen = values if index is None else ops.take(values, index)
        data = ops.pack_values(chosen, kind)
        rows = ops.load(data, ops.numel(data), 0, ops.numel(data))
        read = ops.row(ops.unpack_values(rows, piece.k, kind, dtype), 0)
        parts = [(piece.at, data)]
        if index is not None:
            parts.append((piece.index_at, ops.pack_index(index, piece.numel, piece.index)))
        return Sent(parts, read, index, chosen)  # NaN counts as the largest magnitude

    def decode(
        self, ops: Ops[Array], bucket: Bucket, piece: Any, gathered: Array, context: Context[Array]
    ) -> Read[Array]:
        kind, width = self.value_kind(bucket.residual_dtype), bucket.payload_bytes
        rows = ops.load(gathered, width, piece.at, coding.value_bytes(kind, piece.k))
        values = ops.unpack_values(rows, piece.k, kind, bucket.residual_dtype)
        sound, blocks = [], coding.scales(kind, piece.k)
        if blocks:
            rows = ops.load(gathered, width, piece.at, coding.SCALE_BYTES * blocks)
            scales = ops.unpack_values(rows, blocks, "bfloat16", bucket.residual_dtype)
            sound.append(ops.are_scales(scales))
        if piece.index is None:
            return Read(values, None, sound)
        size = coding.index_bytes(piece.index, piece.numel, piece.k)
        rows = ops.load(gathered, width, piece.index_at, size)
        index, ascends = ops.unpack_index(rows, piece.k, piece.numel, piece.index)
        return Read(values, index, [*sound, ascends])

    def kernel(self, ops: Ops[Array], bucket: Bucket) -> Fused[Array] | None:
        """`Codec.kernel`: the framework's kernel for this recipe, if it has one."""
        return ops.fused(self.recipe(bucket), bucket.device)

    def recipe(self, bucket: Bucket) -> tuple[int, ...]:
        """The recipe of a bucket; see `horovod_topk.ops.protocol.Fused`."""
        kind, sampled = self.value_kind(bucket.residual_dtype), self.selection == "sampled"
        return bucket_recipe(bucket, kind, sampled=sampled)


class Presets:
    """Class methods that every framework's `TopKEF` has beside its settings."""

    @classmethod
    def compact(cls, **settings: Any) -> NoReturn:
        """Refuse: older versions had this name for what is the default now.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{cls.__name__}.compact() does not exist any more",
            cure=f"Write {cls.__name__}() with the same settings, as its defaults are the same",
        )


def _check_gather_ratio(ratio: float, gather_ratio: float | None, exchange: str) -> None:
    if gather_ratio is not None and exchange not in ("sharded", "auto"):
        raise ConfigError(
            f"ratio={(ratio, gather_ratio)} was given with exchange={exchange!r}, in which no "
            "owner selects what it sends back",
            cure=f"Pass ratio={ratio} alone, or exchange='sharded' or 'auto'",
        )
