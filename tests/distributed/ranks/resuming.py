"""A run that goes on from a checkpoint, beside the one that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

import training
from horovod_topk import checkpoint
from witness import assert_ranks_equal, assert_residuals, assert_same, residuals
from world import TopKEF, hvd


def assert_resumes(
    start: Callable[[], tuple[Any, Any]],
    folder: Path,
    take: Callable[[Any, Any, int], None] = training.ordinary,
) -> None:
    """Five steps, a checkpoint, and four more with both: the same weights, to the bit.

    start: makes a model and its optimizer; folder: any rank's own; take: a step.
    """
    folder, kept = Path(hvd.broadcast_object(str(folder))), BytesIO()
    task, optimizer = start()
    for step in range(5):
        take(task, optimizer, step)
    checkpoint.save(folder, TopKEF.of(optimizer))
    torch.save([task.state_dict(), optimizer.state_dict()], kept)
    hvd.barrier()
    again, resumed = start()
    kept.seek(0)
    weights, rest = torch.load(kept, weights_only=True)
    again.load_state_dict(weights)
    resumed.load_state_dict(rest)
    checkpoint.load(folder, TopKEF.of(resumed))
    for step in range(5, 9):
        take(task, optimizer, step)
        take(again, resumed, step)
    assert_ranks_equal(task.parameters())
    assert_same(training.snapshot(task), training.snapshot(again))
    assert_residuals(resumed, residuals(optimizer))
