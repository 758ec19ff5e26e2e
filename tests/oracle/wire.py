"""A reader of payloads, from the docstrings of `core.payload` and `methods.topk` and nothing else.

Of a plan it takes what the format leaves to it: names, sizes, k, and which tensors have indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_topk.core.plan.buckets import BucketPlan
from horovod_topk.methods.topk import Entries


@dataclass(frozen=True)
class Decoded:
    """One payload as a receiver understands it."""

    flagged: set[str]  # names of tensors with a NaN or an infinity
    dense: dict[str, NDArray[Any]]  # name -> flat values in the value dtype, zero where none came
    chosen: dict[str, NDArray[Any]]  # name -> indices sent


class Cursor:
    """Reads sections one after another."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def take(self, dtype: str, count: int) -> NDArray[Any]:
        """The next `count` little-endian numbers."""
        taken = np.frombuffer(self._data, np.dtype(dtype).newbyteorder("<"), count, self._at)
        self._at += taken.nbytes
        return taken

    def align(self, to: int = 8) -> None:
        """Step over the padding, which has to be zero."""
        stop = -(-self._at // to) * to
        assert not any(self._data[self._at : stop]), "padding is not zero"
        self._at = stop

    @property
    def at_end(self) -> bool:
        """Whether every byte was read."""
        return self._at == len(self._data)

    def bits(self, count: int) -> NDArray[Any]:
        """The next `count` bits, the lowest of a byte first."""
        taken = np.unpackbits(self.take("u1", (count + 7) // 8), bitorder="little")
        assert not taken[count:].any(), "bits after the last are not zero"
        return taken[:count].astype(np.int64)


def read(bucket: BucketPlan, data: bytes) -> Decoded:
    """Decode one rank's payload of a bucket."""
    tensors = bucket.tensors
    cursor = Cursor(data, 24)
    flags = cursor.take("u1", (len(tensors) + 7) // 8)
    cursor.align()
    values = {t.spec.name: _values(cursor, bucket, t.k) for t in tensors}
    cursor.align()
    chosen = {t.spec.name: np.arange(t.k) for t in tensors if t.index is None}
    for kind, stored in (("int32", "u4"), ("int16", "u2")):
        belong = [t for t in tensors if t.index == kind]
        chosen |= {t.spec.name: cursor.take(stored, t.k).astype(int) for t in belong}
        cursor.align()
    packed = [t for t in tensors if t.index == "packed"]
    chosen |= {t.spec.name: _packed(cursor, t.spec.numel, t.k) for t in packed}
    cursor.align(16)
    assert cursor.at_end, "bytes left over"
    dense = {t.spec.name: _spread(t, chosen[t.spec.name], values[t.spec.name]) for t in tensors}
    return Decoded(_flagged(tensors, flags), dense, chosen)


def _bfloat16(cursor: Cursor, count: int) -> NDArray[Any]:
    return (cursor.take("u2", count).astype(np.uint32) << 16).view(np.float32)


def _values(cursor: Cursor, bucket: BucketPlan, k: int) -> NDArray[Any]:
    """The next k values; float32 where they are sent shorter than that."""
    kind = bucket.config.value_kind(bucket.residual_dtype)
    if kind == "bfloat16":
        return _bfloat16(cursor, k)
    if kind.startswith("float"):
        return cursor.take(kind, k)
    each = {"int3": 4, "int2": 2, "sign": 1}.get(kind)
    if each:
        return _one_of(cursor, k, each)
    scale = np.repeat(_bfloat16(cursor, -(-k // 128)), 128)[:k]
    assert (scale >= 0).all(), "a scale is negative"
    if kind == "int8":
        multiple = cursor.take("i1", k).astype(np.float32)
        assert (multiple > -128).all()
    else:
        nibbles = cursor.bits(4 * k).reshape(k, 4) @ [1, 2, 4, -8]
        assert (nibbles > -8).all()
        multiple = nibbles.astype(np.float32)
    return scale * multiple


def _one_of(cursor: Cursor, k: int, each: int) -> NDArray[Any]:
    """The next k values, each of which is plus or minus one of `each` scales of its block."""
    scales = _bfloat16(cursor, each * -(-k // 1024))
    assert (scales >= 0).all(), "a scale is negative"
    bits = each.bit_length()
    entries = cursor.bits(bits * k).reshape(k, bits)
    number = entries[:, :-1] @ [1 << bit for bit in range(bits - 1)] if bits > 1 else 0
    scale = scales[np.arange(k) // 1024 * each + number]
    return scale * np.where(entries[:, -1], -1, 1).astype(np.float32)


def _packed(cursor: Cursor, n: int, k: int) -> NDArray[Any]:
    """The next k of n indices."""
    low = min(range(32), key=lambda bits: k * bits + (n - k) // 2**bits)
    lower = cursor.bits(k * low).reshape(k, low) @ [1 << bit for bit in range(low)]
    upper = np.flatnonzero(cursor.bits(k + (n - k) // 2**low))
    assert upper.size == k, "not k bits are set"
    x = (upper - np.arange(k)) * 2**low + lower
    return np.asarray(x + np.arange(k), np.int64)


def _spread(tensor: Entries, index: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    assert (np.diff(index) > 0).all(), "indices do not ascend strictly"
    dense = np.zeros(tensor.spec.numel, values.dtype)
    dense[index] = values
    return dense


def _flagged(tensors: tuple[Entries, ...], flags: NDArray[Any]) -> set[str]:
    bits = [bool(flags[t // 8] >> t % 8 & 1) for t in range(8 * len(flags))]
    assert not any(bits[len(tensors) :]), "a bit beyond the last tensor is set"
    return {tensor.spec.name for tensor, bit in zip(tensors, bits, strict=False) if bit}
