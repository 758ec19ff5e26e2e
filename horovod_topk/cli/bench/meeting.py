"""Where ranks wait for each other, and leave the cores to those who work.

In `hvd.barrier()` a rank that waits takes a whole core with `sched_yield`. Those that have ended
their step make it longer for the others so, where there are more ranks than cores.
"""

from __future__ import annotations

import horovod.torch as hvd
import torch

from horovod_topk.torch.collective import result_of


def meet() -> None:
    """Return once all ranks have called it."""
    most(0.0)


def most(value: float) -> float:
    """The largest of what the ranks give."""
    mine = torch.tensor([value], dtype=torch.float64)
    return float(result_of(hvd.allreduce_async(mine, op=hvd.Max, name="bench.meeting")))
