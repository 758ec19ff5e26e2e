"""How a bucket is divided among programs, as integer tables that kernels look up.

A bucket is divided in five ways, none of which changes a result:

- chunks of a tensor, for the first pass of an encode;
- runs of several chunks, for its other passes, about as many as programs run on the device;
- parcels of a tensor's entries, to encode their values;
- tiles of a tensor, for a decode;
- the tensors themselves, a row each with the numbers in `COLUMNS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from horovod_topk.ops import coding

MOST = 2**31 - 2**20  # elements of a bucket, bytes of its payloads: indices are 32-bit
HEAD, SHARE = 9, 10  # numbers in a recipe for the bucket, and for each tensor
FLOAT32, FLOAT16, BFLOAT16, INT8, INT4, SIGN, INT2, INT3 = range(8)  # kinds of values
_SCALED = {INT8: "int8", INT4: "int4", SIGN: "sign", INT2: "int2", INT3: "int3"}
BLOCKS = {kind: coding.BLOCK[name] for kind, name in _SCALED.items()}
MINMAX, MEANS, DITHERED, DITHERED_L2, TERNARY = range(8, 13)  # kinds of which all elements are sent
LONGEST = 1 << 16  # elements of a block that is summed by one program
_SUMMED = MEANS, DITHERED_L2  # whose scales are sums in float64, tile by tile
PACKED, SHORT = 1, 2  # kinds of indices: packed, and 16 bits each; 4: 32 bits each
AS_IS = 3  # the kind of a tensor that is sent whole, in the residual's dtype: float32 here
SEARCHED, CARRIED, SAMPLED = 0, 1, 2  # how a tensor's threshold is found: see `_rule`
_SAMPLED_ROWS, _SHORTEST_ROW = 1024, 2048  # these and the next two as in `Ops.sample`
_TAKEN = 16
_LEAST_RANK = 32
_DEVIATIONS = 4  # from the expected rank in a sample to either end of the bracket

COLUMNS = (
    "numel",
    "k",
    "start",
    "coding",  # kind of indices; 0: all elements are sent
    "value_at",
    "index_at",
    "dtype",
    "first",
    "gradient",
    "block",  # of kinds of which all elements are sent; the first ten are those of the recipe
    "flags_at",
    "payload_bytes",
    "payload",  # where the address of its bucket's payloads is, in a decode of several buckets
    "target",  # where the address of its gradient is, there
    "parts",  # shards that its gradient is split into
    "chunk0",
    "chunks",
    "run0",
    "runs",  # 0 if all elements are sent
    "tile0",
    "parcel0",
    "entry0",  # its first entry among those of all tensors that have indices
    "low",  # lower bits of a packed index
    "rule",
    "stride",  # the sample is the first `taken` of every `stride` elements,
    "taken",
    "count",  # elements of the sample
    "rank_low",  # rank in the sample of the bracket's lower end; 0: zero
    "rank_high",  # rank in the sample of the bracket's upper end; 0: infinity
)


@dataclass(frozen=True)
class Geometry:
    """Sizes in elements, powers of two if not said otherwise. They only affect speed."""

    tile: int = 2048  # loaded at once by a program of the first pass
    chunk: int = 16384  # compensated by one program; a multiple of `tile`, at most 2**14
    slot: int = 1024  # keys near the threshold that a chunk can store
    lanes: int = 4096  # loaded at once by a program of the other passes; at most 2**14
    run_share: int = 16  # elements of a run for each key that it can store
    sample: int = 1 << 14  # approximate sample size, without a usable earlier threshold
    crowd: int = 1 << 16  # most keys in a bracket that are searched; any number
    programs: int = 132  # programs of the later passes: multiprocessors; any number
    parcel: int = 2048  # entries encoded by one program; one block at least
    output: int = 8192  # summed at once by one decoding program
    block: int = 2048  # written at once by one decoding program
    decoders: int = 8  # decoding programs for each multiprocessor; any number


@dataclass(frozen=True)
class Head:
    """The facts about a bucket in a recipe."""

    tensors: int
    residual_bytes: int
    values: int  # kind of values
    flags_at: int
    payload_bytes: int
    sampled: bool
    parts: int  # shards that gradients are split into
    keeps: bool  # whether residuals keep what is not sent; else they become 0
    bits: int  # of a code, for kinds with codes of any number of bits


def joined(recipes: Sequence[Sequence[int]], arenas: Sequence[int], apart: int) -> tuple[int, ...]:
    """Return one recipe for several shards, which are then encoded as one bucket.

    Args:
        recipes: the recipe of each shard.
        arenas: number of elements from the first shard's arenas to those of each.
        apart: bytes from the beginning of one shard's payload to that of the next.
    """
    first, found = recipes[0], list[int]()
    for number, (recipe, arena) in enumerate(zip(recipes, arenas, strict=True)):
        for at in range(HEAD, len(recipe), SHARE):
            numel, k, start, kind, value_at, index_at, *others = recipe[at : at + SHARE]
            by = number * apart
            found += [numel, k, start + arena, kind, value_at + by, index_at + by, *others]
    return len(recipes) * first[0], *first[1:HEAD], *found


@dataclass(frozen=True)
class Tables:
    """The integer tables for one recipe and geometry."""

    recipe: tuple[int, ...]
    geometry: Geometry

    @cached_property
    def head(self) -> Head:
        """The first numbers of the recipe."""
        tensors, residual, kind, at, size, sampled, parts, keeps, bits = self.recipe[:HEAD]
        bits = {MINMAX: 8, MEANS: 1}.get(kind, bits)
        return Head(tensors, residual, kind, at, size, bool(sampled), parts, bool(keeps), bits)

    @cached_property
    def shares(self) -> list[tuple[int, ...]]:
        """The recipe's numbers for each tensor."""
        body, found = self.recipe[HEAD:], list[tuple[int, ...]]()
        for at in range(0, len(body), SHARE):
            numel, k, start, index, *places, block = body[at : at + SHARE]
            whole = index == AS_IS
            found.append((numel, k, start, 0 if whole else index, *places, 0 if whole else block))
        return found

    @cached_property
    def gradients(self) -> int:
        """Number of gradients."""
        return max((share[8] for share in self.shares), default=-1) + 1

    @property
    def writers(self) -> int:
        """Number of payloads, of an owner each, that are decoded as one."""
        return self.head.tensors // self.gradients if self.gradients else 1

    @cached_property
    def numel(self) -> int:
        """Number of elements that are encoded."""
        return sum(share[0] for share in self.shares)

    @property
    def extent(self) -> int:
        """Number of elements from the beginning of the arenas to the end of the last tensor."""
        return max((share[0] + share[2] for share in self.shares), default=0)

    @cached_property
    def run_chunks(self) -> int:
        """Number of chunks in a run."""
        even = -(-self.numel // (self.geometry.programs * self.geometry.chunk))
        return max(2, even)

    @property
    def run(self) -> int:
        """Number of elements in a run."""
        return self.run_chunks * self.geometry.chunk

    @property
    def run_slot(self) -> int:
        """Number of keys that a run can store: a power of two."""
        return power_of_two(-(-self.run // self.geometry.run_share))

    @cached_property
    def rows(self) -> list[list[int]]:
        """The `COLUMNS` of each tensor."""
        geometry, rows = self.geometry, []
        chunk0 = run0 = tile0 = parcel0 = entry0 = 0
        for share in self.shares:
            numel, k, kind = share[0], share[1], share[3]
            chunks = -(-numel // geometry.chunk)
            runs = -(-numel // self.run) if kind else 0
            low = coding.low_bits(numel, k) if kind == PACKED else 0
            rule = _rule(numel, k, self.head.sampled, geometry.sample)
            before = chunk0, chunks, run0, runs, tile0, parcel0, entry0
            rows.append([*share, *self._alone(share), self.head.parts, *before, low, *rule])
            chunk0, run0, tile0 = chunk0 + chunks, run0 + runs, tile0 + self._tiles(numel)
            parcel0, entry0 = parcel0 + self._parcels(share), entry0 + (k if kind else 0)
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

    @cached_property
    def parcel_owners(self) -> list[int]:
        """The tensor of each parcel."""
        return _owners([self._parcels(share) for share in self.shares])

    @property
    def coded(self) -> bool:
        """Whether all elements are sent, in codes with a scale for each block."""
        return self.head.values >= MINMAX

    @property
    def widest(self) -> int:
        """Number of elements of the largest block, if blocks differ in size."""
        return max((share[9] for share in self.shares), default=0)

    @property
    def block(self) -> int:
        """Number of entries that share their scales; any number for values without scales.

        Where blocks differ in size, as many as are measured at once of each.
        """
        if not self.coded:
            return BLOCKS.get(self.head.values, 128)
        return min(power_of_two(self.widest), self._measured)

    @property
    def written(self) -> int:
        """Number of elements that a decoding program writes at once; codes need more registers."""
        return self.geometry.block // (4 if self.coded else 1)

    @property
    def measured_rows(self) -> int:
        """Number of blocks that are measured at once."""
        return self._measured // self.block

    @property
    def block_tiles(self) -> int:
        """Number of tiles that the largest block's sums are added up from: a power of two."""
        return coding.tiles(self.widest)[0]

    @property
    def parcel_rows(self) -> int:
        """Number of blocks in a parcel, whose codes fill whole bytes."""
        return max(8 if self.coded else 1, self.geometry.parcel // self.block)

    @property
    def kind(self) -> int:
        """The dtype code of all gradients, as in the recipe, or 3 if they differ."""
        kinds = {share[6] for share in self.shares}
        return kinds.pop() if len(kinds) == 1 else 3

    @property
    def constants(self) -> tuple[object, ...]:
        """What buckets that are decoded together have in common."""
        return self.head.values, self.head.bits, self.kind, self.writers, self.geometry

    @cached_property
    def entries(self) -> int:
        """Number of entries that have an index."""
        return sum(share[1] for share in self.shares if share[3])

    @property
    def most_entries(self) -> int:
        """The largest k of a tensor that has an index."""
        return max((share[1] for share in self.shares if share[3]), default=0)

    @property
    def _measured(self) -> int:
        """Number of elements that are measured at once."""
        return coding.TILE if self.head.values in _SUMMED else self.geometry.parcel

    def _alone(self, share: tuple[int, ...]) -> tuple[int, ...]:
        """The columns from "flags_at" on, if a decode has this bucket alone."""
        return self.head.flags_at, self.head.payload_bytes, 0, 1 + share[8]

    def _parcels(self, share: tuple[int, ...]) -> int:
        return -(-share[1] // (self.parcel_rows * (share[9] or self.block)))

    def _tiles(self, numel: int) -> int:
        return -(-numel // self.geometry.output)


@dataclass(frozen=True)
class Together:
    """The integer tables to decode several buckets at once."""

    each: tuple[Tables, ...]

    @cached_property
    def rows(self) -> list[list[int]]:
        """The `COLUMNS` of all tensors, whose runs, tiles and entries follow one another."""
        rows, before = list[list[int]](), dict.fromkeys(("run0", "tile0", "entry0"), 0)
        target = len(self.each) - 1  # addresses of payloads come first
        for payload, tables in enumerate(self.each):
            for row in tables.rows:
                named = dict(zip(COLUMNS, row, strict=True))
                moved = {column: named[column] + at for column, at in before.items()}
                places = {"payload": payload, "target": named["target"] + target}
                rows.append([*(named | moved | places).values()])
            before["run0"] += len(tables.run_owners)
            before["tile0"] += len(tables.tile_owners)
            before["entry0"] += tables.entries
            target += tables.gradients
        return rows

    @property
    def run_owners(self) -> list[int]:
        """The tensor of each run."""
        return self._numbered([tables.run_owners for tables in self.each])

    @property
    def tile_owners(self) -> list[int]:
        """The tensor of each tile."""
        return self._numbered([tables.tile_owners for tables in self.each])

    @property
    def entries(self) -> int:
        """Number of entries that have an index."""
        return sum(tables.entries for tables in self.each)

    @property
    def most_entries(self) -> int:
        """The largest k of a tensor that has an index."""
        return max(tables.most_entries for tables in self.each)

    def _numbered(self, owners: Sequence[Sequence[int]]) -> list[int]:
        firsts = accumulate((len(tables.shares) for tables in self.each), initial=0)
        return [first + t for first, own in zip(firsts, owners, strict=False) for t in own]


def power_of_two(least: int) -> int:
    """The smallest power of two that is not below `least`."""
    return 1 << max(0, least - 1).bit_length()


def _owners(counts: Sequence[int]) -> list[int]:
    return [t for t, count in enumerate(counts) for _ in range(count)]


def _rule(numel: int, k: int, sampled: bool, size: int) -> tuple[int, ...]:
    """The columns from "rule" on: how a tensor's threshold is found.

    SAMPLED is `Ops.sample`: the lower end of the bracket is its threshold. SEARCHED uses all
    elements. CARRIED searches near the last step's threshold first, and then uses a sample; the
    bracket between its two ranks has the k-th magnitude except for one sample in ten thousand.
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
    """(stride, taken, count) of a sample of at most `rows` rows, as in `Ops.sample`."""
    stride = max(numel // rows, shortest) | 1
    taken = min(_TAKEN, stride)
    return stride, taken, numel // stride * taken


def _above(expected: float) -> int:
    """Rank, in a sample, of a magnitude almost surely above the threshold; 0: infinity."""
    return max(0, math.floor(expected - _DEVIATIONS * math.sqrt(expected)))
