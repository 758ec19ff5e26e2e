"""Process sets are found again where they exist, and added only where Horovod can."""

from __future__ import annotations

from typing import Any

import pytest
from horovod.common import process_sets as theirs

from horovod_topk import process_sets
from horovod_topk.core.plan.nodes import Location


class Basics:
    """Stands for Horovod's library: four ranks, of which this is rank 1, and a table of sets."""

    def __init__(self, *sets: list[int], dynamic: bool) -> None:
        self.table = dict(enumerate([[0, 1, 2, 3], *sets]))
        self.dynamic = dynamic

    def rank(self) -> int:
        return 1

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return self.table

    def _add_process_set_impl(self, ranks: list[int]) -> int | None:
        assert self.dynamic
        if ranks in self.table.values():
            return None  # Horovod refuses a second one
        self.table[len(self.table)] = ranks
        return len(self.table) - 1

    def _remove_process_set_impl(self, number: int) -> int | None:
        if not self.dynamic:
            raise ValueError("Set HOROVOD_DYNAMIC_PROCESS_SETS=1")
        assert number not in self.table, "a process set was removed"


def of(ranks: list[int], number: int) -> Any:
    found = theirs.ProcessSet(ranks)
    found.process_set_id = number
    return found


EVERYONE = [0, 1, 2, 3]


def test_what_is_there_is_used_and_the_rest_added(monkeypatch: pytest.MonkeyPatch) -> None:
    basics = Basics([0, 1], dynamic=True)
    monkeypatch.setattr(theirs, "_basics", basics)
    for _ in range(2):  # the second time all are there
        found = process_sets.find_or_add([[0, 1], [2, 3], EVERYONE])
        assert [each.process_set_id for each in found] == [1, 2, 0]
        assert [each.ranks for each in found] == [[0, 1], [2, 3], EVERYONE]
        assert [each.included() for each in found] == [True, False, True]
    assert len(basics.table) == 3


@pytest.mark.parametrize(
    ("dynamic", "among", "groups", "expected"),
    [
        (False, 0, [[0, 1]], True),  # it is there
        (False, 0, [EVERYONE], True),
        (False, 0, [], True),
        (False, 0, [[0, 1], [2, 3]], False),
        (True, 0, [[0, 1], [2, 3]], True),
        (True, 1, [[0], [1]], False),  # ranks 2 and 3 would have to add them too
        (True, 1, [[0, 1]], True),
    ],
)
def test_what_can_be_added(
    dynamic: bool,
    among: int,
    groups: list[list[int]],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    basics = Basics([0, 1], dynamic=dynamic)
    monkeypatch.setattr(theirs, "_basics", basics)
    before = dict(basics.table)
    assert process_sets.can_add(groups, of(before[among], among)) is expected
    assert basics.table == before


def test_ranks_in_a_row_have_one_first() -> None:
    pairs = [(0, 0), (1, 1), (2, 0), (3, 1)]  # rank and local rank, two on each of two nodes
    locations = [process_sets.location(*pair) for pair in pairs]
    assert [each.first for each in locations] == [0, 0, 2, 2]
    assert [each.local_rank for each in locations] == [0, 1, 0, 1]
    assert all(isinstance(each, Location) and each.host for each in locations)
