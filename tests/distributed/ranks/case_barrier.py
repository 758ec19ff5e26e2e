"""How the ranks of `horovod-topk bench` wait for each other."""

from __future__ import annotations

import time

import horovod.torch as hvd

from horovod_topk.cli.bench.ranks import HorovodRanks, barrier, mean, most

LATE = 0.5  # seconds


def test_ranks_that_wait_leave_the_cores_to_the_others() -> None:
    ranks = HorovodRanks()
    barrier(ranks)  # its name is learnt
    if hvd.rank() == 0:
        time.sleep(LATE)
    began, worked = time.perf_counter(), time.thread_time()
    barrier(ranks)
    waited, worked = time.perf_counter() - began, time.thread_time() - worked
    assert worked < waited / 4 + 0.05


def test_all_ranks_hear_of_the_largest() -> None:
    mine = [float(hvd.rank()), 1.0]
    assert most(HorovodRanks(), mine) == [hvd.size() - 1, 1.0]
    assert mean(HorovodRanks(), mine) == [(hvd.size() - 1) / 2, 1.0]
