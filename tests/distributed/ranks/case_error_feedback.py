"""At small ratios training equals error feedback recomputed from its formulas, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import training
from plain import PlainTopKEF as TopKEF
from reference import ErrorFeedback
from training import Setup
from witness import assert_same
from world import hvd

pytestmark = pytest.mark.everywhere

STEPS = 6


@dataclass(frozen=True)
class Row:
    """A training run, and the settings of TopKEF."""

    setup: Setup = field(default_factory=Setup)
    settings: Mapping[str, Any] = field(default_factory=lambda: {"ratio": 0.1, "min_numel": 0})
    passes: int = 1
    average: bool = True


def both_ways(task: Any) -> list[list[torch.Tensor]]:
    p = list(task.parameters())
    return [[p[4], p[1]], [p[0]]]


ROWS = {
    "momentum": Row(),
    "adamw": Row(Setup(optimizer=training.adamw)),
    "one_percent": Row(settings={"ratio": 0.01, "min_numel": 0}),
    "half_of_a_tensor": Row(settings={"ratio": 0.5, "min_numel": 0}),
    "float16": Row(settings={"ratio": 0.1, "min_numel": 0, "values": "float16"}),
    "small_tensors_dense": Row(settings={"ratio": 0.1, "min_numel": 300}),
    "small_tensors_dense_float16": Row(
        settings={"ratio": 0.1, "min_numel": 300, "values": "float16"}
    ),
    "groups_number": Row(Setup(options={"groups": 3})),
    "groups_lists": Row(Setup(groups=both_ways)),
    "sum": Row(Setup(options={"op": hvd.Sum}), average=False),
    "predivide": Row(Setup(options={"gradient_predivide_factor": 2.0})),
    "two_passes": Row(
        Setup(options={"backward_passes_per_step": 2}, take_step=training.accumulated(2)),
        passes=2,
    ),
    "hooks_in_another_order": Row(Setup(build=training.Branches)),
}


@pytest.mark.everywhere(one_in=4)
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_equal_to_the_formulas(row: Row) -> None:
    task = row.setup.task()
    optimizer = row.setup.distributed(task, TopKEF(**row.settings))
    expected = ErrorFeedback(
        row.setup.task(),
        row.setup.optimizer,
        ranks=hvd.size(),
        average=row.average,
        **row.settings,
    )
    for step in range(STEPS):
        row.setup.take_step(task, optimizer, step)
        expected.step(range(row.passes * step, row.passes * (step + 1)))
        assert_same(training.snapshot(task), training.snapshot(expected.task))
        for name, residual in expected.residuals[hvd.rank()].items():
            mine = TopKEF.of(optimizer).residual(name)
            assert torch.equal(mine, torch.from_numpy(residual)), f"step {step}: {name}"
    if row.settings["ratio"] < 0.5:
        assert TopKEF.of(optimizer).stats().residual_norm > 0
