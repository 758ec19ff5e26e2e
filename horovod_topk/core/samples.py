"""Evenly spaced samples of tensors, for sums of squares."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from horovod_topk.core.plan import BucketPlan
from horovod_topk.core.shards import shard_numel
from horovod_topk.ops import Ops

Array = TypeVar("Array")

SAMPLE = 1 << 15  # elements of a tensor that sums are computed from, at most


@dataclass(frozen=True)
class Sample:
    """Where a sample of a tensor is: in every `parts`-th block of one of its shards.

    Args:
        numel: number of elements of the tensor.
        shards: number of shards that it is split into; 1: it is whole.
        first: first block of the shard.
    """

    numel: int
    shards: int = 1
    first: int = 0

    @cached_property
    def parts(self) -> int:
        """One of so many blocks is sampled. It is odd, or all of them could be of one column."""
        return max(1, -(-shard_numel(self.numel, self.shards, self.first) // SAMPLE)) | 1

    @cached_property
    def share(self) -> float:
        """The sample's share of the tensor's elements."""
        return self.size / self.numel

    @cached_property
    def pick(self) -> tuple[int, int, int]:
        """The sample of a whole tensor, for `Ops.blocks`."""
        return self.shards, self.first, self.parts

    @cached_property
    def pick_within(self) -> tuple[int, int, int]:
        """The sample of an array that has the shard's elements alone."""
        return 1, 0, self.parts

    @cached_property
    def size(self) -> int:
        """Number of elements of the sample."""
        return shard_numel(shard_numel(self.numel, self.shards, self.first), self.parts, 0)


def constants(numbers: Sequence[float], bucket: BucketPlan, ops: Ops[Array]) -> Array:
    """Make an array of float32 numbers on a bucket's device, in the dtype of its residuals."""
    size = 4 * len(numbers)
    data = ops.zeros(size, "uint8", bucket.device)
    ops.store_bytes(data, 0, struct.pack(f"<{len(numbers)}f", *numbers))
    loaded = ops.load(data, size, 0, size)
    rows = ops.unpack_values(loaded, len(numbers), "float32", bucket.residual_dtype)
    return ops.row(rows, 0)
