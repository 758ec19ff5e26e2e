"""Keys of random numbers: the same on every run, and on every rank or on one alone.

A key names the seed of the settings, the tensor, where its payload travels, and a rank or "shared".
With the count of committed steps, which is part of every optimizer's state, all random numbers
follow from it (`horovod_topk.ops.philox`).
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
    """What a tensor's random numbers of one step follow from."""

    seed: int  # of the settings, equal on all ranks
    place: tuple[str, str, int]  # tensor, leg (see `Method.piece`), owner whose shard it is
    committed: Any  # steps before this one; in a graph a tensor
    rank: int  # this one
    writer: Callable[[int], int]  # the rank that wrote a row of payloads; this one in `encode`

    @property
    def shared(self) -> Stream:
        """Equal on all ranks: what one rank draws, all others can draw again."""
        return self._stream("shared")

    @property
    def own(self) -> Stream:
        """Of this rank, unlike those of its peers."""
        return self._stream(self.rank)

    def of_row(self, row: int) -> Stream:
        """`own` of the rank that wrote a row of payloads."""
        return self._stream(self.writer(row))

    def _stream(self, who: int | str) -> Stream:
        return Stream(_words(self.seed, self.place, who), self.committed)


@lru_cache(maxsize=1 << 14)
def _words(seed: int, place: tuple[str, str, int], who: int | str) -> tuple[int, int]:
    """Philox' key: 64 bits of a digest."""
    text = json.dumps([seed, *place, who])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def halves(ops: Ops[Array], stream: Stream, count: int, device: str) -> Array:
    """Numbers of 16 bits, [count] int64: the halves of 32-bit words, the lower one first."""
    words: Any = ops.random_bits(stream, -(-count // 2), 32, device)
    high = words >> 16
    pairs = ops.transposed(ops.joined([words - high * 65536, high]), 2)
    return ops.view(pairs, 0, count)


def uniform(ops: Ops[Array], stream: Stream, count: int, dtype: str, device: str) -> Array:
    """Numbers in [0, 1), [count] of a float dtype: multiples of 2^-24, the same in all of them."""
    numbers, out = (ops.zeros(count, dtype, device) for _ in range(2))
    ops.assign(numbers, ops.random_bits(stream, count, 24, device))
    ops.write_scaled(numbers, 2.0**-24, out, False)
    return out
