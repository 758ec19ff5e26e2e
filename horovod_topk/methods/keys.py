"""Keys of random numbers: equal in every run, and equal on all ranks or different on each.

A key consists of the seed setting, the tensor's name, its direction and owner, and a rank or
"shared".
The key and the count of committed steps, which is part of every optimizer's state, determine all
random numbers (`horovod_topk.ops.philox`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from horovod_topk.ops import Ops
from horovod_topk.ops.philox import Stream

Array = TypeVar("Array")


@dataclass(frozen=True)
class Key:
    """The key of a tensor's random numbers in one step."""

    seed: int  # the seed setting, equal on all ranks
    identity: tuple[str, str, int]  # tensor, direction (see `Method.piece`), owner of the shard
    committed: Any  # number of committed steps; in a graph a tensor
    rank: Callable[[], int]  # returns this rank

    @property
    def shared(self) -> Stream:
        """Random numbers that are equal on all ranks."""
        return self._stream("shared")

    @property
    def own(self) -> Stream:
        """Random numbers of this rank, different from other ranks' numbers."""
        return self._stream(self.rank())

    def _stream(self, who: int | str) -> Stream:
        return Stream(_words(self.seed, self.identity, who), self.committed)


@lru_cache(maxsize=1 << 14)
def _words(seed: int, identity: tuple[str, str, int], who: int | str) -> tuple[int, int]:
    """The key of Philox: 64 bits of a digest."""
    text = json.dumps([seed, *identity, who])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def halves(ops: Ops[Array], stream: Stream, count: int, device: str) -> Array:
    """Random 16-bit numbers, [count] int64: the halves of 32-bit words, the lower half first."""
    words: Any = ops.random_bits(stream, -(-count // 2), 32, device)
    high = words >> 16
    pairs = ops.transposed(ops.joined([words - high * 65536, high]), 2)
    return ops.view(pairs, 0, count)


def uniform(ops: Ops[Array], stream: Stream, count: int, dtype: str, device: str) -> Array:
    """Random numbers in [0, 1), [count] of a float dtype: multiples of 2^-24, in any dtype."""
    numbers, out = (ops.zeros(count, dtype, device) for _ in range(2))
    ops.assign(numbers, ops.random_bits(stream, count, 24, device))
    ops.write_scaled(numbers, 2.0**-24, out, False)
    return out
