"""Process sets of Horovod, found or added, for nodes and cross groups in any framework.

Horovod refuses a second process set of the same ranks, has no public function to find the first,
and deletes all of them when it shuts down. So this module reads Horovod's own table, by the only
private function that it uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

from horovod.common import process_sets
from horovod.common.process_sets import ProcessSet

from horovod_topk.core.plan.nodes import Location, here

_NOBODY = 2**31 - 1  # an id that no process set has


class ProcessSetRanks:
    """The ranks of a process set, as `core.exchange.Collective` of any framework knows them.

    Args:
        process_set: the ranks that exchange.
        timer: notes when collectives run.
    """

    horovod: ClassVar[Any]  # its module for the framework
    in_order = False  # `Meets.in_order`: collectives are matched by name

    def __init__(self, process_set: Any, timer: Any) -> None:
        self._process_set, self.timer = process_set, timer

    @property
    def rank(self) -> int:
        """Rank within the process set."""
        return int(self._process_set.rank())

    @property
    def size(self) -> int:
        """Ranks in the process set."""
        return int(self._process_set.size())

    @property
    def location(self) -> Location:
        """Where this rank runs, as Horovod's launcher numbers local ranks."""
        return here(self.horovod.rank(), self.horovod.local_rank())

    def can_split(self, groups: Sequence[Sequence[int]]) -> bool:
        """Whether process sets of these groups exist, or can be added."""
        return can_add(self._global(groups), self._process_set)

    def split(self, groups: Sequence[Sequence[int]]) -> list[Self | None]:
        """Collectives over the process sets of these groups; missing process sets are added."""
        found = find_or_add(self._global(groups))
        return [type(self)(each, timer=self.timer) if each.included() else None for each in found]

    def _global(self, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """Convert groups of ranks within the process set to groups of Horovod's global ranks."""
        ranks = self._process_set.ranks
        return [[ranks[rank] for rank in group] for group in groups]


def can_add(groups: Sequence[Sequence[int]], among: ProcessSet) -> bool:
    """Whether there is a process set for each of these groups, or this rank can add it.

    groups: Horovod's ranks, ascending.
    among: process set of the ranks that call this; adding takes all ranks.
    """
    known = _table()
    if all(tuple(group) in known for group in groups):
        return True
    return among.process_set_id == 0 and _is_dynamic()


def find_or_add(groups: Sequence[Sequence[int]]) -> list[ProcessSet]:
    """Find or add process sets of these groups. A collective of all ranks if some are missing."""
    return [_found(group) or process_sets.add_process_set(list(group)) for group in groups]


def _found(group: Sequence[int]) -> ProcessSet | None:
    number = _table().get(tuple(group))
    if number is None:
        return None
    found = ProcessSet(list(group))
    found.process_set_id = number
    return found


def _table() -> dict[tuple[int, ...], int]:
    """Ids of all process sets by their ranks."""
    numbered = process_sets._basics._get_process_set_ids_and_ranks()
    return {tuple(ranks): number for number, ranks in numbered.items()}


def _is_dynamic() -> bool:
    """Whether process sets can be added: if not, Horovod raises an error on removing one."""
    nobody = ProcessSet([0])
    nobody.process_set_id = _NOBODY
    try:
        process_sets.remove_process_set(nobody)
    except ValueError:
        return False
    return True
