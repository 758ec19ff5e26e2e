"""How a bucket is cut into pieces, as integers: what the kernels look up instead of computing it.

Four ways to cut, none of which changes a result:

- chunks of a tensor, for the first pass of an encode;
- runs of several chunks, for its other passes, about as many as programs fit on the device;
- tiles of a tensor, for a decode;
- the tensors themselves, a row each with the numbers in `COLUMNS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

HEAD, SHARE = 9, 10  # numbers of a recipe about the bucket, and about each tensor
FLOAT32, FLOAT16 = 0, 1  # kinds of values that the kernels have
_USED = 7  # numbers about a tensor that matter here: gradients are not split into shards
PACKED = 1  # a kind of indices that they do not have
SEARCHED, CARRIED, SAMPLED = 0, 1, 2  # how a tensor's threshold is found: see `_rule`
_SAMPLED_ROWS, _SHORTEST_ROW = 1024, 2048  # these and the next two as `Ops.sample` has them
_TAKEN = 16
_LEAST_RANK = 32
_DEVIATIONS = 4  # between the rank that is looked for in a sample and either end of the bracket

COLUMNS = (
    "numel",
    "k",
    "start",
    "width",
    "value_at",
    "index_at",
    "dtype",  # seven as the recipe has them
    "chunk0",
    "chunks",
    "run0",
    "runs",  # 0 where all elements are sent
    "tile0",
    "rule",
    "stride",  # the sample is the first `taken` of every `stride` elements,
    "taken",
    "count",  # in all so many
    "rank_low",  # in the sample: the bracket's lower end is this largest; 0: zero
    "rank_high",  # likewise the upper end; 0: infinity
)


@dataclass(frozen=True)
class Geometry:
    """Sizes in elements, powers of two where not said otherwise. They change speed only."""

    tile: int = 2048  # held at once by a program of the first pass
    chunk: int = 16384  # compensated by one program; a multiple of `tile`, at most 2**14
    slot: int = 1024  # keys near the threshold that a chunk can put aside
    lanes: int = 8192  # held at once by a program of the other passes; at most 2**14
    run_share: int = 16  # elements of a run for each key that it can put aside
    sample: int = 1 << 14  # elements looked at, about, where no earlier threshold helps
    crowd: int = 1 << 16  # keys in a bracket that are too many to search; any number
    programs: int = 132  # of the later passes: multiprocessors of the device; any number
    output: int = 8192  # summed at once by one decoding program
    block: int = 2048  # of these, held at once when they are written
    writers: int = 8  # decoding programs for each multiprocessor; any number


@dataclass(frozen=True)
class Head:
    """What a recipe says of its bucket."""

    tensors: int
    residual_bytes: int
    halves: bool  # values are float16, not float32
    flags_at: int
    payload_bytes: int
    sampled: bool


@dataclass(frozen=True)
class Tables:
    """The integers for one recipe and geometry."""

    recipe: tuple[int, ...]
    geometry: Geometry

    @cached_property
    def head(self) -> Head:
        """The recipe's first numbers."""
        tensors, residual, kind, flags_at, payload, sampled = self.recipe[:6]
        return Head(tensors, residual, kind == FLOAT16, flags_at, payload, bool(sampled))

    @cached_property
    def shares(self) -> list[tuple[int, ...]]:
        """A recipe's numbers for each tensor."""
        body = self.recipe[HEAD:]
        return [body[at : at + _USED] for at in range(0, len(body), SHARE)]

    @cached_property
    def numel(self) -> int:
        """Elements of the arenas."""
        return sum(share[0] for share in self.shares)

    @cached_property
    def run_chunks(self) -> int:
        """Chunks of a run."""
        even = -(-self.numel // (self.geometry.programs * self.geometry.chunk))
        return max(2, even)

    @property
    def run(self) -> int:
        """Elements of a run."""
        return self.run_chunks * self.geometry.chunk

    @property
    def run_slot(self) -> int:
        """Keys that a run can put aside: a power of two."""
        return power_of_two(-(-self.run // self.geometry.run_share))

    @cached_property
    def rows(self) -> list[list[int]]:
        """`COLUMNS` of each tensor."""
        geometry, rows = self.geometry, []
        chunk0 = run0 = tile0 = 0
        for share in self.shares:
            numel, k, width = share[0], share[1], share[3]
            chunks = -(-numel // geometry.chunk)
            runs = -(-numel // self.run) if width else 0
            rule = _rule(numel, k, self.head.sampled, geometry.sample)
            rows.append([*share, chunk0, chunks, run0, runs, tile0, *rule])
            chunk0, run0, tile0 = chunk0 + chunks, run0 + runs, tile0 + self._tiles(numel)
        return rows

    @cached_property
    def chunk_owners(self) -> list[int]:
        """The tensor of each chunk."""
        return _owners([-(-share[0] // self.geometry.chunk) for share in self.shares])

    @cached_property
    def run_owners(self) -> list[int]:
        """The tensor of each run."""
        return _owners([row[COLUMNS.index("runs")] for row in self.rows])

    @cached_property
    def tile_owners(self) -> list[int]:
        """The tensor of each tile."""
        return _owners([self._tiles(share[0]) for share in self.shares])

    @property
    def kind(self) -> int:
        """The dtype of all gradients, as in the recipe, or 3 where they differ."""
        kinds = {share[6] for share in self.shares}
        return kinds.pop() if len(kinds) == 1 else 3

    @property
    def most_entries(self) -> int:
        """The largest k of a tensor that has an index."""
        return max((share[1] for share in self.shares if share[3]), default=0)

    def _tiles(self, numel: int) -> int:
        return -(-numel // self.geometry.output)


def power_of_two(least: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(0, least - 1).bit_length()


def _owners(counts: Sequence[int]) -> list[int]:
    return [t for t, count in enumerate(counts) for _ in range(count)]


def _rule(numel: int, k: int, sampled: bool, size: int) -> tuple[int, ...]:
    """The columns from "rule" on.

    SAMPLED is `Ops.sample`: the lower end of the bracket is its threshold. SEARCHED looks at all
    elements. CARRIED looks near the last step's threshold first, and then at a sample; the bracket
    between its two ranks holds the k-th magnitude but for one sample in ten thousand.
    """
    if sampled:
        stride, taken, count = _rows(numel, _SAMPLED_ROWS, _SHORTEST_ROW)
        expected = k * count / numel if numel else 0.0
        rank = math.floor(expected - 2 * math.sqrt(expected))
        if rank >= _LEAST_RANK:
            return SAMPLED, stride, taken, count, rank, _above(expected)
    if numel <= size:
        return SEARCHED, 1, 1, numel, k, k
    stride, taken, count = _rows(numel, size // _TAKEN)
    expected = k * count / numel
    low = math.ceil(expected + _DEVIATIONS * math.sqrt(expected)) + 1
    return CARRIED, stride, taken, count, low if low <= count else 0, _above(expected)


def _rows(numel: int, rows: int, shortest: int = 1) -> tuple[int, int, int]:
    """(stride, taken, count) of a sample of at most about so many rows, as `Ops.sample` has it."""
    stride = max(numel // rows, shortest) | 1
    taken = min(_TAKEN, stride)
    return stride, taken, numel // stride * taken


def _above(expected: float) -> int:
    """The rank that is surely above one which is expected."""
    return max(0, math.floor(expected - _DEVIATIONS * math.sqrt(expected)))
