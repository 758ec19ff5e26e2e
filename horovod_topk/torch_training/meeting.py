"""Meetings of a process group, in the store that its ranks have found each other with.

A meeting takes no collective: ranks that do not come run other collectives, which would be taken
for it. A rank that waits in a collective for long looks whether others meet without it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from horovod_topk.core.exchange.agreement import in_rows
from horovod_topk.core.exchange.meeting import CURE, wait_until
from horovod_topk.errors import PlanMismatchError

_CAME = b"\0"  # what a rank says begins so if it has come to a meeting
_PATIENCE = timedelta(seconds=2)  # between two looks for a meeting
_MET: weakref.WeakKeyDictionary[dist.ProcessGroup, int]  # number of meetings so far
_MET = weakref.WeakKeyDictionary()


class Meeting:
    """Meetings of one process group; see `core.exchange.meeting.Meets`.

    Args:
        group: the process group, whose backend has a store.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        self._ranks = range(dist.get_world_size(group))

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Meeting | None:
        """The meetings of a process group; None: its backend has no store, such as MPI."""
        return None if _get_process_group_store(group) is None else cls(group)

    def meet(self, data: bytes, name: str, *, patient: bool = False) -> list[bytes]:
        """`Meets.meet`."""
        self._post(_CAME + data)
        wait_until(lambda: not self._missing(), name, self._rank, self._missing, patient=patient)
        said = list(map(self._said, self._ranks))
        _MET[self._group] = self._met + 1
        elsewhere = [rank for rank in self._ranks if not said[rank].startswith(_CAME)]
        if elsewhere:
            came = [rank for rank in self._ranks if rank not in elsewhere]
            raise _parted(came, elsewhere[0], said[elsewhere[0]].decode())
        rows = b"".join(each[1:] for each in said)
        return in_rows(rows, len(data), len(said), self._rank)

    def wait_for(self, work: Any, name: str) -> None:
        """Wait for a collective, a `dist.Work` of this name.

        Raises:
            PlanMismatchError: other ranks meet instead of taking part.
        """
        while True:
            try:
                work.wait(_PATIENCE)
                return
            except RuntimeError:  # it has failed, or waits for other ranks
                if work.is_completed():
                    raise
            missing = self._missing()
            here = [rank for rank in self._ranks if rank not in missing]
            came = [rank for rank in here if self._said(rank).startswith(_CAME)]
            if came:
                self._post(name.encode())
                raise _parted(came, self._rank, name)

    @property
    def _store(self) -> Any:
        return _get_process_group_store(self._group)

    @property
    def _met(self) -> int:
        return _MET.get(self._group, 0)

    def _missing(self) -> list[int]:
        """Ranks that have not come to the present meeting."""
        return [rank for rank in self._ranks if not self._store.check([self._key(rank)])]

    def _said(self, rank: int) -> bytes:
        """Return what a rank has posted for the present meeting; it has to have posted."""
        return bytes(self._store.get(self._key(rank)))

    def _post(self, data: bytes) -> None:
        self._store.set(self._key(self._rank), data)

    def _key(self, rank: int) -> str:
        return f"horovod_topk/{self._met}/{rank}"


def _parted(came: Sequence[int], rank: int, name: str) -> PlanMismatchError:
    """The error where some ranks meet, and another one waits for a collective."""
    return PlanMismatchError(
        f"rank {', '.join(map(str, came))} has loaded or reset a state, called set_ratio() or made "
        f"another number of steps, alone: rank {rank} has not, and waits for the payloads of "
        f"{name!r}",
        cure=CURE,
    )
