"""Random numbers from Philox4x32-10, with the same bits in every framework.

A counter-based generator has no state: a number is a function of a key of 64 bits and a counter of
128 bits (Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3). The counter is

    word 0      the block: numbers 4 b to 4 b + 3 of an array are block b
    word 1      0
    words 2, 3  number of committed steps before this one, the low word first

so that a step that was rolled back draws the same numbers again, and a run that resumes from a
checkpoint draws the same numbers as an uninterrupted run.

The words of a counter are 32-bit numbers in int64 arrays, or Python integers if all elements are
equal. No product overflows: multipliers are split into halves of 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WORD = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85

Word = Any  # an int64 array, or an int
Shift = Callable[[Word, int], Word]  # right, by a number of bits


@dataclass(frozen=True)
class Stream:
    """All random numbers of one key in one step; see `horovod_topk.ops.Ops.random_bits`."""

    key: tuple[int, int]  # two 32-bit words
    committed: Any  # number of committed steps: an int, or in a graph a tensor, [] int64

    def numbers(self) -> tuple[int, int, Any]:
        """A kernel's arguments for drawing an array: the key, and the committed steps."""
        return (*self.key, self.committed)


def words(stream: Stream, blocks: Word, shift: Shift) -> tuple[Word, Word, Word, Word]:
    """The four words of each block.

    Args:
        stream: the key and the count of committed steps.
        blocks: [B] int64, 0, 1, 2 ...
        shift: shifts int64 arrays, which are never negative, to the right.
    """
    committed = stream.committed
    counter = blocks, 0, committed & WORD, shift(committed, 32)
    return philox(counter, stream.key, shift)


def philox(
    counter: tuple[Word, Word, Word, Word], key: tuple[int, int], shift: Shift
) -> tuple[Word, Word, Word, Word]:
    """The Philox4x32-10 generator on four words; `shift` as in `words`."""
    a, b, c, d = counter
    for i in range(ROUNDS):
        left, right = ((k + i * by) & WORD for k, by in zip(key, KEY_STEPS, strict=True))
        high, low = _product(a, MULTIPLIERS[0], shift)
        other_high, other_low = _product(c, MULTIPLIERS[1], shift)
        a, b, c, d = other_high ^ b ^ left, other_low, high ^ d ^ right, low
    return a, b, c, d


def _product(word: Word, by: int, shift: Shift) -> tuple[Word, Word]:
    """The high and the low word of a product of two words."""
    low = word * (by & 0xFFFF)
    middle = word * (by >> 16) + shift(low, 16)
    return shift(middle, 16), (middle & 0xFFFF) * 0x10000 + (low & 0xFFFF)
