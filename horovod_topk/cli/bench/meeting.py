"""Waiting that leaves the cores to those who work.

Horovod's own, in `hvd.barrier()` too, takes a whole core with `sched_yield`. Ranks that have ended
their step and wait so for the others make that step longer where there are more ranks than cores.
"""

from __future__ import annotations

import time

import horovod.torch as hvd
import torch

PAUSE = 50e-6  # seconds between two looks at a collective under way


def rest_until_done(handle: int) -> None:
    """Sleep until a collective is over; its result is still to be fetched."""
    while not hvd.poll(handle):
        time.sleep(PAUSE)


def meet() -> None:
    """Return once all ranks have called it."""
    most(0.0)


def most(value: float) -> float:
    """The largest of what the ranks give."""
    mine = torch.tensor([value], dtype=torch.float64)
    handle = hvd.allreduce_async(mine, op=hvd.Max, name="bench.meeting")
    rest_until_done(handle)
    return float(hvd.synchronize(handle))
