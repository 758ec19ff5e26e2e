"""A reader of payloads, from the docstring of `horovod_topk.core.payload` and nothing else.

Of a plan it takes what the format leaves to it: names, sizes, k, and which tensors have indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_topk.core.plan import BucketPlan, TensorPlan


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

    def align(self) -> None:
        """Step over the padding, which has to be zero."""
        stop = (self._at + 7) // 8 * 8
        assert not any(self._data[self._at : stop]), "padding is not zero"
        self._at = stop

    @property
    def at_end(self) -> bool:
        """Whether every byte was read."""
        return self._at == len(self._data)


def read(bucket: BucketPlan, data: bytes) -> Decoded:
    """Decode one rank's payload of a bucket."""
    tensors = bucket.tensors
    cursor = Cursor(data, 24)
    flags = cursor.take("u1", (len(tensors) + 7) // 8)
    cursor.align()
    values = {t.spec.name: cursor.take(bucket.value_dtype, t.k) for t in tensors}
    cursor.align()
    chosen = {t.spec.name: np.arange(t.k) for t in tensors if t.index is None}
    for stored, belongs in (("u4", _is_large), ("u2", _is_small)):
        chosen |= {
            t.spec.name: cursor.take(stored, t.k).astype(int) for t in filter(belongs, tensors)
        }
        cursor.align()
    assert cursor.at_end, "bytes left over"
    dense = {t.spec.name: _spread(t, chosen[t.spec.name], values[t.spec.name]) for t in tensors}
    return Decoded(_flagged(tensors, flags), dense, chosen)


def _is_large(tensor: TensorPlan) -> bool:
    return tensor.index is not None and tensor.spec.numel > 2**16


def _is_small(tensor: TensorPlan) -> bool:
    return tensor.index is not None and tensor.spec.numel <= 2**16


def _spread(tensor: TensorPlan, index: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    assert (np.diff(index) > 0).all(), "indices do not ascend strictly"
    dense = np.zeros(tensor.spec.numel, values.dtype)
    dense[index] = values
    return dense


def _flagged(tensors: tuple[TensorPlan, ...], flags: NDArray[Any]) -> set[str]:
    bits = [bool(flags[t // 8] >> t % 8 & 1) for t in range(8 * len(flags))]
    assert not any(bits[len(tensors) :]), "a bit beyond the last tensor is set"
    return {tensor.spec.name for tensor, bit in zip(tensors, bits, strict=False) if bit}
