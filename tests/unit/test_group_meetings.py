"""Meetings of a process group of torch.distributed: ranks are threads that share a store."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed as dist

from horovod_topk.errors import PlanMismatchError
from horovod_topk.torch_training import collective
from horovod_topk.torch_training.collective import Meeting

SOON = 0.2  # seconds after which a rank that need not wait is done


class Group:
    """A process group of two ranks, as one of them has it."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store, rank


class Endless:
    """A collective that the other rank never joins."""

    def wait(self, patience: timedelta) -> None:
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def _groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "_get_process_group_store", lambda group: group.store)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


def ranks(store: Any) -> list[Meeting]:
    return [Meeting(Group(store, rank)) for rank in range(2)]  # type: ignore[arg-type]


def test_a_group_with_the_name_of_a_destroyed_one_meets_anew(pool: ThreadPoolExecutor) -> None:
    """It has the keys of the destroyed one: what its ranks said is not taken for an answer."""
    store = dist.HashStore()
    for life in range(3):
        early, late = ranks(store)
        for number in range(life + 1):
            came = pool.submit(early.meet, bytes([life, number, 0]), "name")
            with pytest.raises(TimeoutError):
                came.result(SOON)
            rows = [bytes([life, number, rank]) for rank in range(2)]
            assert late.meet(rows[1], "name") == came.result(10) == rows


def test_ranks_that_have_parted_can_meet(pool: ThreadPoolExecutor) -> None:
    came, waits = ranks(dist.HashStore())
    meets = pool.submit(came.meet, b"x", "name")
    for part in (lambda: waits.wait_for(Endless(), "payloads"), lambda: meets.result(10)):
        with pytest.raises(PlanMismatchError, match=r"rank 0 has loaded.*rank 1.*'payloads'"):
            part()
    meets = pool.submit(came.meet, b"y", "name")
    assert waits.meet(b"z", "name") == meets.result(10) == [b"y", b"z"]


def test_ranks_that_meet_for_different_things_are_told(pool: ThreadPoolExecutor) -> None:
    """As when two optimizers step in another order on one rank."""
    one, other = ranks(dist.HashStore())
    meets = pool.submit(one.meet, b"x", "first")
    for part in (lambda: other.meet(b"y", "second"), lambda: meets.result(10)):
        with pytest.raises(PlanMismatchError, match=r"rank 0 .*'first', rank 1 in 'second'"):
            part()
    meets = pool.submit(one.meet, b"x", "second")
    assert other.meet(b"\0", "second") == meets.result(10) == [b"x", b"\0"]
