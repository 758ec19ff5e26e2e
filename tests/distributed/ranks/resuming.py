"""A run that goes on from a checkpoint, beside the one that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import training
from horovod_topk import checkpoint
from plain import PlainTopKEF as TopKEF
from training import Setup
from witness import assert_ranks_equal, assert_residuals, assert_same, residuals
from world import hvd


def assert_resumes(
    setup: Setup,
    make: Callable[..., TopKEF],
    folder: Path,
    take: Callable[[Any, Any, int], None] = training.ordinary,
) -> Any:
    """Three steps, a checkpoint, and three more with both: the same weights, to the bit.

    setup: of both; make: their compressors, given none or other settings; folder: any rank's own;
    take: a step. Returns the optimizer that went on.
    """
    folder = Path(hvd.broadcast_object(str(folder)))
    task = setup.task()
    optimizer = setup.distributed(task, make())
    for step in range(3):
        take(task, optimizer, step)
    checkpoint.save(folder, TopKEF.of(optimizer))
    hvd.barrier()
    again = setup.task()
    again.load_state_dict(task.state_dict())
    resumed = setup.distributed(again, make(name="resumed"))
    checkpoint.load(folder, TopKEF.of(resumed))
    for step in range(3, 6):
        take(task, optimizer, step)
        take(again, resumed, step)
    assert_ranks_equal(task.parameters())
    assert_same(training.snapshot(task), training.snapshot(again))
    assert_residuals(resumed, residuals(optimizer))
    return resumed
