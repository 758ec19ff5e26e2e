"""NumPy operations: the oracle the other implementations are tested against.

Written for clarity, not speed. Source of the selection rule: a stable sort by magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_UNSIGNED = {"int16": "uint16", "int32": "uint32"}


class NumpyOps:
    """`horovod_topk.ops.Ops` for numpy.ndarray (float16, float32 and float64 gradients)."""

    def zeros(self, numel: int, dtype: str, device: str = "cpu") -> Array:
        return np.zeros(numel, dtype)

    def arange(self, count: int, device: str = "cpu") -> Array:
        return np.arange(count)

    def view(self, array: Array, start: int, stop: int) -> Array:
        return array[start:stop]

    def row(self, array: Array, position: int) -> Array:
        one: Array = array[position]
        return one

    def numel(self, array: Array) -> int:
        return array.size

    def clone(self, array: Array) -> Array:
        return array.copy()

    def assign(self, out: Array, source: Array) -> None:
        out[...] = source

    def compensate(self, residual: Array, gradient: Array, out: Array) -> None:
        np.add(residual, gradient.reshape(-1).astype(residual.dtype), out=out)

    def select(self, candidate: Array, k: int) -> Array:
        magnitude = np.abs(candidate)
        magnitude[np.isnan(magnitude)] = np.inf
        return np.sort(np.argsort(-magnitude, kind="stable")[:k])

    def sample(self, candidate: Array, k: int) -> Array:
        n = candidate.size
        magnitude = np.abs(candidate)
        magnitude[np.isnan(magnitude)] = np.inf
        stride = max(n // 1024, 2048) | 1
        sample = magnitude[: n // stride * stride].reshape(-1, stride)[:, :16].ravel()
        expected = k * sample.size / n
        rank = math.floor(expected - 2 * math.sqrt(expected))
        if rank < 32:
            return self.select(candidate, k)
        chosen = magnitude >= np.sort(sample)[-rank]
        missing = k - np.count_nonzero(chosen)
        if not 0 <= missing <= k / 2:
            return self.select(candidate, k)
        chosen[np.flatnonzero(~chosen)[:missing]] = True
        return np.flatnonzero(chosen)

    def take(self, array: Array, index: Array) -> Array:
        return array.reshape(-1)[index]

    def quantise(self, values: Array, dtype: str) -> Array:
        if values.dtype == dtype:
            return values
        largest = np.finfo(dtype).max
        return np.clip(values, -largest, largest).astype(np.float32).astype(dtype)

    def deduct(self, candidate: Array, index: Array | None, sent: Array) -> None:
        candidate[slice(None) if index is None else index] -= sent.astype(candidate.dtype)

    def store(self, payload: Array, at: int, parts: Sequence[Array], dtype: str) -> None:
        for part in parts:
            data = part.astype(_UNSIGNED.get(dtype, dtype)).view(np.uint8)
            payload[at : at + data.size] = data
            at += data.size

    def load(self, gathered: Array, width: int, at: int, count: int, dtype: str) -> Array:
        stored = np.dtype(_UNSIGNED.get(dtype, dtype))
        loaded = gathered.reshape(-1, width)[:, at : at + count * stored.itemsize].view(stored)
        return loaded.astype(np.int64) if dtype in _UNSIGNED else loaded

    def store_bytes(self, payload: Array, at: int, data: bytes) -> None:
        payload[at : at + len(data)] = np.frombuffer(data, np.uint8)

    def store_nonfinite(self, payload: Array, at: int, parts: Sequence[Array]) -> None:
        bits = np.packbits([not np.isfinite(part).all() for part in parts], bitorder="little")
        payload[at : at + bits.size] = bits

    def to_host(self, payload: Array) -> bytes:
        return payload.tobytes()

    def examine(
        self, gathered: Array, width: int, count: int, check: Callable[[list[bytes]], list[bool]]
    ) -> list[bool]:
        return check([head.tobytes() for head in gathered.reshape(-1, width)[:, :count]])

    def accumulator(self, gradient: Array, dtype: str) -> Array:
        return np.zeros(gradient.size, dtype)

    def accumulate(self, out: Array, index: Array | None, values: Array) -> None:
        for rank, row in enumerate(values.astype(out.dtype)):
            out[slice(None) if index is None else index[rank]] += row

    def deliver(self, total: Array, scale: float, gradient: Array, poisoned: bool) -> None:
        scaled = (total * total.dtype.type(scale)).reshape(gradient.shape)
        gradient[...] = np.nan if poisoned else scaled

    def fused(self, recipe: Sequence[int], device: str) -> None:
        return None

    def same(self, left: Array, right: Array) -> bool:
        return bool(np.array_equal(left, right, equal_nan=True))

    def norm(self, array: Array) -> float:
        return float(np.linalg.norm(array.astype(np.float64)))
