"""The status that each rank sends to all others after a change of ranks."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from horovod_topk.core.control.guard import Memory
from horovod_topk.core.control.schedule import MEMORY, Clock

_GUARD = len(Memory._fields)
_FIELDS = struct.Struct(f"<16s16sIQddId?8sI{MEMORY + 1}d?{_GUARD}d")
UNKNOWN = bytes(8)


@dataclass(frozen=True)
class RankStatus:
    """One rank's status in an elastic job."""

    member: bytes  # 16 bytes, unique to this process
    job: bytes  # 16 bytes: `member` of the rank 0 with which the job began
    units: int  # number of ranks for which its residual is scaled; 0: it has just joined
    clock: Clock
    norm: float  # norm of its residual
    lost: int  # ranks whose residuals the job has lost so far
    lost_norm: float  # estimated norm of these residuals
    pooled: bool  # whether all ranks have the mean of all residuals
    plan: bytes = UNKNOWN  # digest of its plan; `UNKNOWN` before its first step

    def pack(self) -> bytes:
        """Pack the status into bytes, as many on every rank."""
        committed, asked, decision, guard = Clock(*self.clock)
        ratio = math.nan if asked is None else asked
        known = self.member, self.job, self.units, committed, ratio, self.norm
        decided = (*decision, *[0.0] * (MEMORY + 1 - len(decision)))
        facts = self.lost, self.lost_norm, self.pooled, self.plan
        watched = bool(guard), *(guard or [0.0] * _GUARD)
        return _FIELDS.pack(*known, *facts, len(decision), *decided, *watched)

    @classmethod
    def unpack(cls, data: bytes) -> RankStatus:
        """Unpack the bytes of `pack`."""
        member, job, units, committed, ratio, norm, *rest = _FIELDS.unpack(data)
        (*facts, count), numbers = rest[:5], rest[5:]
        has_guard, *guard = numbers[MEMORY + 1 :]
        asked = None if math.isnan(ratio) else ratio
        decision, known = tuple(numbers[:count]), tuple(guard) if has_guard else ()
        return cls(member, job, units, Clock(committed, asked, decision, known), norm, *facts)


@dataclass(frozen=True)
class Membership:
    """The statuses of all ranks, by rank."""

    statuses: Sequence[RankStatus]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.statuses)

    @property
    def old(self) -> list[int]:
        """Ranks that were in the job before the change."""
        return [rank for rank, each in enumerate(self.statuses) if each.units]

    @property
    def eldest(self) -> RankStatus:
        """The status of the first rank that was in the job before; of rank 0 if none was."""
        return self.statuses[next(iter(self.old), 0)]

    @property
    def plans_differ(self) -> bool:
        """Whether two ranks have different plans, where known."""
        return len({each.plan for each in self.statuses} - {UNKNOWN}) > 1

    @property
    def missing(self) -> int:
        """Number of ranks that are gone together with their residuals."""
        eldest = self.eldest
        return 0 if eldest.pooled else max(0, eldest.units - len(self.old))

    @property
    def astray(self) -> list[int]:
        """Old ranks whose last commit is of another step than the eldest rank's."""
        step = self.eldest.clock[0]
        return [rank for rank in self.old if self.statuses[rank].clock[0] != step]

    @property
    def typical_norm(self) -> float:
        """Root mean square of the residuals' norms of ranks that were there before."""
        squares = [self.statuses[rank].norm ** 2 for rank in self.old]
        return math.sqrt(sum(squares) / len(squares)) if squares else 0.0
