"""What each rank tells the others when they meet after a change of ranks."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from horovod_topk.core.guard import Memory
from horovod_topk.core.schedule import MEMORY, Clock

_GUARD = len(Memory._fields)
_FIELDS = struct.Struct(f"<16s16sIQddId?8sI{MEMORY + 1}d?{_GUARD}d")
UNKNOWN = bytes(8)


@dataclass(frozen=True)
class RankStatus:
    """One rank's part in the job so far."""

    member: bytes  # 16 bytes that no other process has
    job: bytes  # 16 bytes; those of the member that was rank 0 when the job began
    units: int  # how many ranks its residual is of; 0: it has just come
    clock: Clock
    norm: float  # of its residual
    lost: int  # ranks that the job has lost so far
    lost_norm: float  # of their residuals, about
    pooled: bool  # whether all ranks have the mean of all residuals
    plan: bytes = UNKNOWN  # digest of what it exchanges; `UNKNOWN` before its first step

    def pack(self) -> bytes:
        """As bytes, equally many for every rank."""
        committed, asked, decision, guard = Clock(*self.clock)
        ratio = math.nan if asked is None else asked
        known = self.member, self.job, self.units, committed, ratio, self.norm
        decided = (*decision, *[0.0] * (MEMORY + 1 - len(decision)))
        facts = self.lost, self.lost_norm, self.pooled, self.plan
        watched = bool(guard), *(guard or [0.0] * _GUARD)
        return _FIELDS.pack(*known, *facts, len(decision), *decided, *watched)

    @classmethod
    def unpack(cls, data: bytes) -> RankStatus:
        """What `pack` made."""
        member, job, units, committed, ratio, norm, *rest = _FIELDS.unpack(data)
        (*facts, count), numbers = rest[:5], rest[5:]
        has_guard, *guard = numbers[MEMORY + 1 :]
        asked = None if math.isnan(ratio) else ratio
        decision, known = tuple(numbers[:count]), tuple(guard) if has_guard else ()
        return cls(member, job, units, Clock(committed, asked, decision, known), norm, *facts)


@dataclass(frozen=True)
class Membership:
    """All ranks' statuses, by rank."""

    statuses: Sequence[RankStatus]

    @property
    def ranks(self) -> int:
        """How many they are."""
        return len(self.statuses)

    @property
    def old(self) -> list[int]:
        """Who was there before."""
        return [rank for rank, each in enumerate(self.statuses) if each.units]

    @property
    def eldest(self) -> RankStatus:
        """The first who was there before; rank 0 where nobody was."""
        return self.statuses[next(iter(self.old), 0)]

    @property
    def plans_differ(self) -> bool:
        """Whether ranks exchange different things, as far as they know yet what they exchange."""
        return len({each.plan for each in self.statuses} - {UNKNOWN}) > 1

    @property
    def missing(self) -> int:
        """How many ranks are gone whose residuals are gone with them."""
        eldest = self.eldest
        return 0 if eldest.pooled else max(0, eldest.units - len(self.old))

    @property
    def astray(self) -> list[int]:
        """Who was there before, and went back to another step than the eldest, and so the model."""
        step = self.eldest.clock[0]
        return [rank for rank in self.old if self.statuses[rank].clock[0] != step]

    @property
    def typical_norm(self) -> float:
        """Root mean square of the residuals' norms of those who were there before."""
        squares = [self.statuses[rank].norm ** 2 for rank in self.old]
        return math.sqrt(sum(squares) / len(squares)) if squares else 0.0

    @property
    def members(self) -> set[bytes]:
        """All of them."""
        return {each.member for each in self.statuses}
