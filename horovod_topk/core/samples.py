"""Evenly spaced samples of tensors, for sums of squares."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from horovod_topk.core.shards import shard_numel

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
        """Every which block is in the sample; odd, as even ones could be of the same columns."""
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
