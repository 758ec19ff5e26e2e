"""A schedule and a codec with measures, for tests alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from horovod_topk.methods.protocol import Bucket, Codec, Context, Piece
from horovod_topk.ops import Ops, coding
from horovod_topk.schedules import Decision, Schedule


@dataclass(frozen=True, kw_only=True)
class ByGradient(Schedule):
    """A larger ratio after a step whose squared gradients were above `limit` in the mean of ranks.

    It remembers how many steps it has seen, and the last mean.
    """

    measures: ClassVar[tuple[str, ...]] = ("gradient", "residual")

    limit: float = 100.0
    larger: float = 0.25

    def ratios(self, usual: float) -> tuple[float, ...]:
        return (self.larger,)

    def decide(
        self, before: Decision, level: float, usual: float, told: Mapping[str, Sequence[float]]
    ) -> Decision:
        mean = sum(told["gradient"]) / len(told["gradient"])
        seen = before[1] if before else 0.0
        return (self.larger if mean > self.limit else usual, seen + 1, mean)


@dataclass(frozen=True, kw_only=True)
class Counting(Codec):
    """Signs of a tensor; tells how many elements have a magnitude above 1."""

    id: ClassVar[int] = 251
    measured: ClassVar[tuple[str, ...]] = ("above",)

    def data_bytes(self, piece: Piece) -> int:
        return coding.value_bytes("sign", piece.numel)

    def pack(self, ops: Ops[Any], piece: Piece, values: Any, context: Context[Any]) -> Any:
        return ops.pack_values(values, "sign")

    def unpack(
        self, ops: Ops[Any], piece: Piece, rows: Any, dtype: str, context: Context[Any]
    ) -> Any:
        return ops.unpack_values(rows, piece.numel, "sign", dtype)

    def measure(self, ops: Ops[Any], bucket: Bucket, piece: Any, values: Any) -> Sequence[Any]:
        return (ops.cast(ops.sums(ops.cast(abs(values) > 1.0, "int64"), piece.numel), "float32"),)
