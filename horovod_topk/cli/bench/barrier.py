"""A barrier that sleeps while it waits, so that other ranks can use the cores.

In `hvd.barrier()` a waiting rank occupies a whole core with `sched_yield`. With more ranks than
cores, ranks that have ended their step would slow down the others.
"""

from __future__ import annotations

import horovod.torch as hvd
import torch

from horovod_topk.torch.collective import result_of


def barrier() -> None:
    """Wait until all ranks have called it."""
    most(0.0)


def most(value: float) -> float:
    """The largest of the ranks' values."""
    mine = torch.tensor([value], dtype=torch.float64)
    return float(result_of(hvd.allreduce_async(mine, op=hvd.Max, name="bench.barrier")))
