"""Verbs of `Ops` by other verbs: base classes of its implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_topk.ops import coding
from horovod_topk.ops.orthonormal import orthonormal
from horovod_topk.ops.protocol import Ops, Place, TrackerKernels


def sampled_energies(
    ops: Ops[Any], arrays: Sequence[Any], arrivals: Any, places: tuple[Place, ...], dtype: str
) -> Any:
    """`Ops.energies_of` by other operations."""
    picks = [place[3:] for place in places]
    sizes = [_sampled(*place[2:]) for place in places]
    sampled: Any = ops.blocks(arrays, picks, dtype)
    squared = sampled * sampled
    if arrivals is None:
        return ops.segment_sums(squared, sizes)
    codes = [ops.view(arrivals, place[1], place[1] + place[2]) for place in places]
    found: Any = ops.blocks(codes, picks, "float32")
    often: Any = ops.cast(found > coding.OFTEN - 1.0, dtype)
    classes = squared * often, squared - squared * often
    return ops.joined([ops.segment_sums(each, sizes) for each in classes])


def _sampled(numel: int, shards: int, first: int, parts: int) -> int:
    """Number of elements of a sample."""
    return coding.shard_numel(coding.shard_numel(numel, shards, first), parts, 0)


class SharedVerbs:
    """Verbs of `Ops` written with other verbs, and the defaults of a library without kernels."""

    def global_index(self: Any, index: Any, parts: int, first: int) -> Any:
        block = coding.SHARD_BLOCK
        return (index // block * parts + first) * block + index % block

    def scale(self: Any, arrays: Sequence[Any], factors: Sequence[Any]) -> None:
        for array, factor in zip(arrays, factors, strict=True):
            self.write_scaled(array, factor, array, False)

    def shards(self: Any, tensors: Sequence[Any], parts: int, firsts: Sequence[int]) -> list[Any]:
        pairs = zip(tensors, firsts, strict=True)
        return [self.shard(tensor, parts, first) for tensor, first in pairs]

    def split_shards(self: Any, gradient: Any, firsts: Sequence[int], outs: Sequence[Any]) -> None:
        for first, out in zip(firsts, outs, strict=True):
            self.assign(out, self.shard(gradient, len(firsts), first))

    def either(self, left: Sequence[bool], right: Sequence[bool]) -> Sequence[bool]:
        return [a or b for a, b in zip(left, right, strict=True)]

    def write_placed(
        self: Any, values: Any, index: Any, scale: float, gradient: Any, poisoned: bool
    ) -> None:
        whole = self.place(values, index, self.numel(gradient))
        self.write_scaled(whole, scale, gradient, poisoned)

    def write_product(
        self: Any, left: Any, right: Any, shape: Any, scale: float, gradient: Any, poisoned: bool
    ) -> None:
        self.write_scaled(self.matmul(left, right, shape), scale, gradient, poisoned)

    def subtract_product(self: Any, candidate: Any, left: Any, right: Any, shape: Any) -> None:
        self.subtract_at(candidate, None, self.matmul(left, right, shape))

    def orthonormal(self: Any, rows: Any, count: int) -> Any:
        return orthonormal(self, rows, count)

    def energies_of(
        self: Any, arrays: Sequence[Any], arrivals: Any, places: tuple[Place, ...], dtype: str
    ) -> Any:
        return sampled_energies(self, arrays, arrivals, places, dtype)

    def arrays(self: Any, numels: Sequence[int], dtype: str, device: str) -> list[Any]:
        return [self.zeros(numel, dtype, device) for numel in numels]

    def kernel_kind(self, device: str) -> str:
        return "framework"

    def tracker_kernels(self, *arrays: Any) -> TrackerKernels:
        return TrackerKernels()

    def fused(self, recipe: Sequence[int], device: str) -> Any:
        return None

    def ternary(self, device: str) -> Any:
        return None


class IndexedVerbs(SharedVerbs):
    """Verbs of libraries whose arrays are indexed, reshaped and multiplied as NumPy's are."""

    def view(self, array: Any, start: int, stop: int) -> Any:
        return array[start:stop]

    def row(self, array: Any, position: int) -> Any:
        return array[position]

    def columns(self, rows: Any, start: int, stop: int | None) -> Any:
        return rows[:, start:stop]

    def rows(self: Any, gathered: Any, width: int) -> int:
        count: int = self.numel(gathered) // width
        return count

    def store(self: Any, payload: Any, at: int, part: Any) -> None:
        payload[at : at + self.numel(part)] = part

    def load(self, gathered: Any, width: int, at: int, count: int) -> Any:
        return gathered.reshape(-1, width)[:, at : at + count]

    def matmul(self, left: Any, right: Any, shape: tuple[int, int, int]) -> Any:
        m, k, n = shape
        return (left.reshape(m, k) @ right.reshape(k, n)).reshape(-1)

    def transposed(self: Any, array: Any, rows: int) -> Any:
        return self.clone(array.reshape(rows, -1).T.reshape(-1))
