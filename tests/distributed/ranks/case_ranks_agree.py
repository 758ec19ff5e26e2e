"""Law 2: after every step all ranks hold bitwise the same parameters."""

from __future__ import annotations

import pytest

import training
from plain import PlainTopKEF as TopKEF
from training import Setup
from witness import assert_ranks_equal

pytestmark = pytest.mark.everywhere

SETUPS = {
    "momentum": Setup(),
    "adam_branches": Setup(build=training.Branches, optimizer=training.adam),
}


@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("values", ["float32", "float16"])
@pytest.mark.parametrize("ratio", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_bitwise_equal_after_every_step(setup: Setup, ratio: float, values: str) -> None:
    task = setup.task()
    optimizer = setup.distributed(task, TopKEF(ratio=ratio, values=values, min_numel=0))
    for step in range(6):
        setup.take_step(task, optimizer, step)
        assert_ranks_equal(task.parameters())
