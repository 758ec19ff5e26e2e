"""Methods that draw random numbers, of both kinds. For tests alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from horovod_topk.methods.keys import Key, uniform
from horovod_topk.methods.protocol import Bucket, Codec, Context, Piece, Rounds, Seeded, Work
from horovod_topk.ops import Ops, coding

LARGE = 64.0  # a rank with another key than others has values that are so far off


@dataclass(frozen=True, kw_only=True)
class Dithered(Codec, Seeded):
    """Subtractive dither: float16 of values and shared random numbers, which readers subtract."""

    id: ClassVar[int] = 253

    def data_bytes(self, piece: Piece) -> int:
        return coding.value_bytes("float16", piece.numel)

    def pack(self, ops: Ops[Any], piece: Piece, values: Any, context: Context[Any]) -> Any:
        total = ops.clone(values)
        ops.compensate(_dither(ops, context.key, total), total, total)
        return ops.pack_values(total, "float16")

    def unpack(
        self, ops: Ops[Any], piece: Piece, rows: Any, dtype: str, context: Context[Any]
    ) -> Any:
        numel = piece.numel
        read = ops.unpack_values(rows, numel, "float16", dtype)
        count = ops.numel(read) // numel
        out = ops.zeros(count * numel, dtype, "cpu")
        for row in range(count):
            here = ops.view(out, row * numel, (row + 1) * numel)
            ops.assign(here, ops.row(read, row))
            ops.subtract_at(here, None, _dither(ops, context.key, here))
        return ops.load(out, numel, 0, numel)


def _dither(ops: Ops[Any], key: Key | None, like: Any) -> Any:
    assert key is not None
    drawn = uniform(ops, key.shared, ops.numel(like), "float32", "cpu")
    total = ops.clone(drawn)
    ops.write_scaled(drawn, LARGE, total, False)
    return total


@dataclass(frozen=True, kw_only=True)
class DitheredSum(Rounds, Seeded):
    """Ranks add up their values and shared random numbers, which each takes off the mean."""

    id: ClassVar[int] = 254
    rounds: ClassVar[int] = 1
    min_numel: int = 64

    def elements(self, piece: Piece, i: int) -> int:
        return piece.numel

    def send(self, ops: Ops[Any], bucket: Bucket, piece: Piece, i: int, work: Work[Any]) -> Any:
        total = ops.clone(work.values)
        ops.compensate(_shared(ops, work, total), total, total)
        return total

    def finish(
        self, ops: Ops[Any], bucket: Bucket, piece: Piece, work: Work[Any]
    ) -> tuple[Any, Any]:
        applied = ops.clone(work.reduced[0])
        ops.subtract_at(applied, None, _shared(ops, work, applied))
        return applied, ops.clone(work.values)


def _shared(ops: Ops[Any], work: Work[Any], like: Any) -> Any:
    assert work.key is not None
    return uniform(ops, work.key.shared, ops.numel(like), "float32", "cpu")
