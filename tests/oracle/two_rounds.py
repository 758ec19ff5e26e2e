"""A method of two dependent rounds with shared and per-rank state: rank-1 power iteration.

For tests alone.

A tensor is seen as a matrix M of 8 columns, or as many as are asked for. Round 0 adds up
p = M (c - q), with q of the step before and a constant c; round 1 adds up q' = M^T p / |p|^2, and
p q'^T is applied: PowerSGD of rank 1 (Vogels 2019). q' is shared state, since all ranks received
it. Whether the count of steps is odd is a rank's own state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from horovod_topk.methods.protocol import Bucket, Piece, Rounds, StateSpec, Work
from horovod_topk.ops import Ops

COLUMNS = 8


@dataclass(frozen=True, kw_only=True)
class TwoRounds(Rounds):
    """Rank-1 power iteration; see the module."""

    id: ClassVar[int] = 250
    rounds: ClassVar[int] = 2
    min_numel: int = 64
    columns: int = COLUMNS

    def piece(self, part: Piece, direction: str) -> Piece:
        part = super().piece(part, direction)
        return replace(part, whole=part.whole or part.numel % self.columns > 0)

    def state(self, piece: Piece) -> Mapping[str, StateSpec]:
        return {"q": StateSpec(self.columns, shared=True), "steps": StateSpec(1)}

    def elements(self, piece: Piece, i: int) -> int:
        return piece.numel // self.columns if i == 0 else self.columns

    def send(self, ops: Ops[Any], bucket: Bucket, piece: Piece, i: int, work: Work[Any]) -> Any:
        columns = self.columns
        rows = piece.numel // columns
        if i == 0:
            direction = _counted(ops, bucket, columns)  # 0, 1, 2 ...
            ops.subtract_at(direction, None, work.state["q"])
            return ops.matmul(work.values, direction, (rows, columns, 1))
        p = work.reduced[0]
        along = ops.matmul(ops.transposed(work.values, rows), p, (columns, rows, 1))
        return ops.divided(along, ops.matmul(p, p, (1, rows, 1)))

    def finish(
        self, ops: Ops[Any], bucket: Bucket, piece: Piece, work: Work[Any]
    ) -> tuple[Any, Any]:
        p, q = work.reduced
        steps = ops.view(_counted(ops, bucket, 2), 1, 2)
        ops.subtract_at(steps, None, work.state["steps"])  # 1, 0, 1, 0 ...
        work.following |= {"q": q, "steps": steps}
        shape = (piece.numel // self.columns, 1, self.columns)
        return ops.matmul(p, q, shape), ops.matmul(p, work.sent[1], shape)


def _counted(ops: Ops[Any], bucket: Bucket, count: int) -> Any:
    """0, 1, ... count - 1 in the dtype of residuals."""
    numbers = ops.zeros(count, bucket.residual_dtype, bucket.device)
    ops.assign(numbers, ops.arange(count, bucket.device))
    return numbers
