"""NumPy implementation of `Ops`: the reference that tests compare the others with.

Written for clarity, not speed. Selection is a stable sort by magnitude.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_topk.ops import coding
from horovod_topk.ops.coding import FLOAT_BITS
from horovod_topk.ops.philox import Stream, words
from horovod_topk.ops.protocol import Pick
from horovod_topk.ops.verbs import IndexedVerbs

Array = NDArray[Any]

_LARGEST_BFLOAT16 = float.fromhex("0x1.fep127")
_UNSIGNED = {"int16": "uint16", "int32": "uint32"}


class NumpyOps(IndexedVerbs):
    """`horovod_topk.ops.Ops` for numpy.ndarray (float16, float32 and float64 gradients)."""

    def zeros(self, numel: int, dtype: str, device: str = "cpu") -> Array:
        return np.zeros(numel, dtype)

    def numbers(self, numbers: Sequence[float], dtype: str, device: str = "cpu") -> Array:
        return np.array(numbers, np.float32).astype(dtype)

    def arange(self, count: int, device: str = "cpu") -> Array:
        return np.arange(count)

    def random_bits(self, stream: Stream, count: int, bits: int, device: str = "") -> Array:
        blocks = np.arange(-(-count // 4), dtype=np.int64)
        drawn: Array = np.stack(words(stream, blocks, operator.rshift), 1) >> (32 - bits)
        return drawn.reshape(-1)[:count]

    def random_index(self, stream: Stream, numel: int, k: int, device: str = "cpu") -> Array:
        found: Array = coding.random_index(self.random_bits(stream, k, 31), np.arange(k + 1), numel)
        return found

    def numel(self, array: Array) -> int:
        return array.size

    def dtype(self, array: Array) -> str:
        return array.dtype.name

    def device(self, array: Array) -> str:
        return "cpu"

    def joined(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)

    def clone(self, array: Array) -> Array:
        return array.copy()

    def assign(self, out: Array, source: Array) -> None:
        out[...] = source

    def compensate(self, residual: Array, gradient: Array, out: Array) -> Array:
        np.add(residual, gradient.reshape(-1).astype(residual.dtype), out=out)
        return out

    def withheld(
        self, residual: Array, gradient: Array, most: float, alone: float
    ) -> tuple[Array, Array] | None:
        g = gradient.reshape(-1).astype(residual.dtype)
        total = residual + g
        waited = np.minimum(np.maximum(np.abs(g), most), alone)
        limit = np.where(residual == 0, alone, waited).astype(residual.dtype)
        edge, exceeds = np.copysign(limit, total), np.abs(total) > limit
        with np.errstate(invalid="ignore"):  # infinities
            kept = np.where(exceeds, edge - g, residual)
            return kept, np.where(exceeds, total - edge, residual.dtype.type(-0.0))

    def update_velocity(self, velocity: Array, factor: float, gradient: Array, out: Array) -> None:
        np.add(velocity * velocity.dtype.type(factor), gradient.reshape(-1), out=out)

    def weighted(self, values: Array, squares: Array) -> Array:
        flat = squares.reshape(-1).astype(values.dtype, copy=False)
        mantissa, one = FLOAT_BITS[values.dtype.name]
        kind = f"int{8 * values.itemsize}"
        stride = max(flat.size // 64, 16) | 1
        sample = flat[: flat.size // stride * stride].reshape(-1, stride)[:, :16]
        mean = np.abs(values.dtype.type(sample.mean(dtype="float64") if sample.size else 0.0))
        least = max((int(mean.view(kind)) >> mantissa) - 7, 0) << mantissa
        least = least if mean != 0 else int(values.dtype.type(np.inf).view(kind))
        bits = np.maximum(np.abs(flat).view(kind), np.array(least, kind))
        weights: Array = (one // 4 * 5 - bits // 4).view(values.dtype)
        return values * weights

    def select(self, candidate: Array, k: int) -> Array:
        magnitude = np.abs(candidate)
        magnitude[np.isnan(magnitude)] = np.inf
        return np.sort(np.argsort(-magnitude, kind="stable")[:k])

    def sample(self, candidate: Array, k: int) -> Array:
        n = candidate.size
        magnitude = np.abs(candidate)
        magnitude[np.isnan(magnitude)] = np.inf
        stride, rank = coding.sample_rank(n, k)
        if not rank:
            return self.select(candidate, k)
        sample = magnitude[: n // stride * stride].reshape(-1, stride)[:, :16].ravel()
        chosen = magnitude >= np.sort(sample)[-rank]
        missing = k - np.count_nonzero(chosen)
        if not 0 <= missing <= k / 2:
            return self.select(candidate, k)
        chosen[np.flatnonzero(~chosen)[:missing]] = True
        return np.flatnonzero(chosen)

    def take(self, array: Array, index: Array) -> Array:
        return array.reshape(-1)[index]

    def place(self, values: Array, index: Array, numel: int) -> Array:
        out = np.zeros(numel, values.dtype)
        out[index] = values
        return out

    def cast(self, array: Array, dtype: str) -> Array:
        return array.astype(dtype)

    def pack_values(self, values: Array, kind: str) -> Array:
        if kind.startswith(("float", "bfloat")):
            return _narrowed(values, kind)
        limited = self.finite(values)
        blocks = np.split(limited, range(coding.BLOCK[kind], values.size, coding.BLOCK[kind]))
        coded = [_coded(block, kind) for block in blocks]
        scale = np.concatenate([bits for bits, _ in coded]).astype(np.uint16).view(np.uint8)
        codes = np.concatenate([code for _, code in coded])
        return np.concatenate([scale, self.pack_bits(codes, coding.VALUE_BITS[kind])])

    def unpack_values(self, rows: Array, count: int, kind: str, dtype: str) -> Array:
        if kind.startswith(("float", "bfloat")):
            values = [_floats(row, kind) for row in rows]
            return np.array(values).astype(dtype)
        at, bits = coding.SCALE_BYTES * coding.scales(kind, count), coding.VALUE_BITS[kind]
        scales = [_floats(row, "bfloat16") for row in rows[:, :at]]
        codes = self.unpack_bits(rows[:, at:], count, bits)
        pairs = zip(codes, scales, strict=True)
        return np.array([_decoded(*pair, kind) for pair in pairs], np.float32).astype(dtype)

    def are_scales(self, rows: Array) -> Array:
        sound: Array = np.asarray((np.isfinite(rows) & (rows >= 0)).all(1))
        return sound

    def pack_bits(self, codes: Array, bits: int) -> Array:
        return np.packbits(codes[:, None] >> np.arange(bits) & 1, bitorder="little")

    def unpack_bits(self, rows: Array, count: int, bits: int) -> Array:
        single = np.unpackbits(rows, 1, count * bits, "little").reshape(-1, count, bits)
        codes: Array = single @ (1 << np.arange(bits))
        return codes

    def pack_digits(self, codes: Array, base: int) -> Array:
        weights = coding.weights(base)
        padded = np.pad(codes, (0, -codes.size % len(weights))).reshape(-1, len(weights))
        return (padded @ weights).astype(np.uint8)

    def unpack_digits(self, rows: Array, count: int, base: int) -> Array:
        weights = coding.weights(base)
        several = rows[:, :, None].astype(np.int64) // weights
        several[..., :-1] %= base
        codes: Array = several.reshape(len(rows), -1)[:, :count]
        return codes

    def pack_index(self, index: Array, numel: int, kind: str) -> Array:
        if kind in _UNSIGNED:
            return index.astype(_UNSIGNED[kind]).view(np.uint8)
        k, low = index.size, coding.low_bits(numel, index.size)
        x = index - np.arange(k)
        lower = x[:, None] >> np.arange(low) & 1
        upper = np.zeros(coding.high_bits(numel, k), np.uint8)
        upper[(x >> low) + np.arange(k)] = 1
        return np.concatenate([np.packbits(bits, bitorder="little") for bits in (lower, upper)])

    def unpack_index(self, rows: Array, count: int, numel: int, kind: str) -> tuple[Array, Array]:
        found = [_indices(row, count, numel, kind) for row in rows]
        sound = [
            each.size == count and bool((np.diff(each) > 0).all()) and each[-1] < numel
            for each in found
        ]
        kept = [
            each if is_sound else np.zeros(count, np.int64)
            for each, is_sound in zip(found, sound, strict=True)
        ]
        return np.array(kept), np.array(sound)

    def subtract_at(self, candidate: Array, index: Array | None, sent: Array) -> None:
        candidate[slice(None) if index is None else index] -= sent.astype(candidate.dtype)

    def divided(self, array: Array, by: Array) -> Array:
        out: Array = np.divide(array, by, out=np.zeros_like(array), where=by != 0)
        return out

    def limit(self, arrays: Sequence[Array], factors: Array) -> None:
        for array, factor in zip(arrays, factors.tolist(), strict=True):
            if factor < 1.0:
                array *= array.dtype.type(factor)

    def root(self, array: Array) -> Array:
        return np.sqrt(array)

    def finite(self, values: Array) -> Array:
        finite = np.where(np.isfinite(values), values, 0)
        return np.clip(finite, -coding.LIMIT, coding.LIMIT).astype(np.float32)

    def above(self, array: Array) -> Array:
        return ((array.view(np.uint32) + np.uint32(0xFFFF)) >> 16 << 16).view(np.float32)

    def largest(self, array: Array, size: int) -> Array:
        return np.maximum.reduceat(array, range(0, array.size, size))

    def column_largest(self, rows: Array) -> Array:
        largest: Array = rows.max(0)
        return largest

    def sums(self, array: Array, size: int) -> Array:
        if array.dtype == np.int64:
            return np.add.reduceat(array, range(0, array.size, size))
        blocks, (count, tile) = -(-array.size // size), coding.tiles(size)
        padded = np.zeros((blocks, count * tile))
        for block, at in zip(padded, range(0, array.size, size), strict=True):
            block[: array[at : at + size].size] = array[at : at + size]
        sums: Array = coding.added_up(padded.reshape(blocks, count, tile))
        return sums

    def count_above(self, array: Array, limit: Array) -> Array:
        return np.array([np.count_nonzero(abs(array) > limit)], np.float32)

    def spread(self, array: Array, size: int, count: int) -> Array:
        return np.repeat(array, size, -1)[..., :count]

    def shard(self, gradient: Array, parts: int, first: int) -> Array:
        flat = gradient.reshape(-1)
        places = self.global_index(np.arange(flat.size), parts, first)
        shard: Array = flat[places[places < flat.size]]
        return shard

    def blocks(self, tensors: Sequence[Array], picks: Sequence[Pick], dtype: str) -> Array:
        pairs = zip(tensors, picks, strict=True)
        found = [self.shard(self.shard(t, *pick[:2]), pick[2], 0) for t, pick in pairs]
        return np.concatenate(found).astype(dtype)

    def segment_sums(self, array: Array, sizes: Sequence[int]) -> Array:
        stretches = np.split(array, np.cumsum(sizes)[:-1])
        return np.array([np.sum(each) for each in stretches], array.dtype)

    def store_bytes(self, payload: Array, at: int, data: bytes) -> None:
        payload[at : at + len(data)] = np.frombuffer(data, np.uint8)

    def store_nonfinite(self, payload: Array, at: int, parts: Sequence[Array]) -> None:
        bits = np.packbits([not np.isfinite(part).all() for part in parts], bitorder="little")
        payload[at : at + bits.size] = bits

    def poison(self, array: Array, checked: Array) -> None:
        if not np.isfinite(checked).all():
            array[...] = np.nan

    def store_flags(self, payload: Array, at: int, flags: Sequence[bool]) -> None:
        bits = np.packbits(flags, bitorder="little")
        payload[at : at + bits.size] |= bits

    def to_host(self, payload: Array) -> bytes:
        return payload.tobytes()

    def validate(
        self,
        gathered: Array,
        width: int,
        count: int,
        sound: Sequence[Array],
        check: Callable[[list[bytes], list[list[bool]]], list[bool]],
        tensors: int,
    ) -> list[bool]:
        heads = [head.tobytes() for head in gathered.reshape(-1, width)[:, :count]]
        return check(heads, [each.tolist() for each in sound])

    def accumulator(self, gradient: Array, dtype: str) -> Array:
        return np.zeros(gradient.size, dtype)

    def accumulate(self, out: Array, index: Array | None, values: Array) -> None:
        for rank, row in enumerate(values.astype(out.dtype)):
            out[slice(None) if index is None else index[rank]] += row

    def write_scaled(self, total: Array, scale: float, gradient: Array, poisoned: bool) -> None:
        scaled = (total * total.dtype.type(scale)).reshape(gradient.shape)
        gradient[...] = np.nan if poisoned else scaled

    def norm(self, array: Array) -> float:
        return float(np.linalg.norm(array.astype(np.float64)))

    def square(self, array: Array) -> Array:
        with np.errstate(over="ignore"):
            return np.array([np.sum(np.square(array, dtype=np.float64))], np.float32)


def _narrowed(values: Array, kind: str) -> Array:
    """Round floats to another format, and return their bytes."""
    if kind in ("float32", "float64"):
        return values.astype(kind).view(np.uint8)
    if kind == "float16":
        limited = np.clip(values, -65504, 65504).astype(np.float32)
        return limited.astype(np.float16).view(np.uint8)
    limited = np.clip(values, -_LARGEST_BFLOAT16, _LARGEST_BFLOAT16)
    bits = _nearest(limited.astype(np.float32))
    bits[np.isnan(values)] = 0x7FC0
    return bits.astype(np.uint16).view(np.uint8)


def _nearest(values: Array) -> Array:
    """Bits of the nearest bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.int64)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _above(value: Any) -> int:
    """Bits of the smallest bfloat16 that is not below a value."""
    return int(np.array(value, np.float32).view(np.uint32)) + 0xFFFF >> 16


def _scale(bits: Any) -> Any:
    """The bfloat16 with these bits, as float32."""
    return (np.array(bits, np.uint32) << np.uint32(16)).view(np.float32)


def _coded(block: Array, kind: str) -> tuple[list[int], Array]:
    """Bits of a block's scales, and the codes of its values."""
    largest, width = np.abs(block).max(initial=np.float32(0)), coding.VALUE_BITS[kind]
    if kind in coding.MAGNITUDES:
        return _magnitudes(block, float(_scale(_above(largest))), width)
    most = coding.LARGEST[kind]
    bits = _above(largest / np.float32(coding.DIVISOR[kind]))
    multiple = np.clip(np.rint(block / (_scale(bits) or np.float32(1))), -most, most)
    return [bits], multiple.astype(np.int64) & (1 << width) - 1


def _magnitudes(block: Array, unit: float, width: int) -> tuple[list[int], Array]:
    """Bits of the scales of a block whose magnitudes are divided into regions, and codes."""
    parts = np.floor(np.abs(block).astype(np.float64) / (unit or 1.0) * coding.UNIT)
    parts = parts.astype(np.int64)

    def above(limit: int) -> coding.Counted:
        exceeding = parts[parts > limit]
        return exceeding.size, int(exceeding.sum())

    limits, regions = coding.regions((parts.size, int(parts.sum())), width, above)
    found = [unit * (total / (coding.UNIT * max(count, 1))) for count, total in regions]
    region = np.sum([parts > limit for limit in limits], 0, np.int64)
    code = region + ((block < 0).astype(np.int64) << width - 1)
    return _nearest(np.array(found, np.float32)).tolist(), code


def _floats(row: Array, kind: str) -> Array:
    """Decode the floats in one row of bytes."""
    row = np.ascontiguousarray(row)
    if kind == "bfloat16":
        return np.asarray(_scale(row.view(np.uint16)))
    return row.view(kind)


def _decoded(codes: Array, scales: Array, kind: str) -> Array:
    """Decode the codes of values with scales."""
    block, half = np.arange(codes.size) // coding.BLOCK[kind], 1 << coding.VALUE_BITS[kind] - 1
    if kind in coding.MAGNITUDES:
        scale = scales[block * coding.MAGNITUDES[kind] + codes % half]
        multiple = 1 - 2 * (codes // half)
    else:
        scale, multiple = scales[block], (codes ^ half) - half
    values: Array = scale * multiple.astype(np.float32)
    return values


def _indices(row: Array, count: int, numel: int, kind: str) -> Array:
    """Decode the indices in one row of bytes; empty if the row is damaged."""
    row = np.ascontiguousarray(row)
    if kind in _UNSIGNED:
        return row.view(_UNSIGNED[kind]).astype(np.int64)
    low, at = coding.low_bits(numel, count), coding.low_bytes(numel, count)
    lower = np.unpackbits(row[:at], bitorder="little")[: count * low].reshape(count, low)
    upper = np.unpackbits(row[at:], bitorder="little")[: coding.high_bits(numel, count)]
    place = np.flatnonzero(upper)[:count]
    position = np.arange(place.size)
    x = (place - position << low) + lower[: place.size] @ (1 << np.arange(low))
    return x + position if upper.sum() == count else np.zeros(0, np.int64)
