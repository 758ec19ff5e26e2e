"""Law 2: after every step all ranks hold bitwise the same parameters."""

from __future__ import annotations

from typing import Any

import pytest

import training
from horovod_topk.errors import PlanMismatchError
from plain import PlainTopKEF as TopKEF
from training import Setup
from witness import assert_ranks_equal
from world import hvd

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


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("setting", [{"ratio": 0.2}, {"values": "float16"}], ids=str)
def test_a_rank_with_other_settings_is_named_and_training_goes_on(setting: Any) -> None:
    """`tests/properties/test_agreement.py` has everything that ranks may differ in."""
    last, setup = hvd.size() - 1, Setup()
    usual = {"ratio": 0.1, "min_numel": 0}
    task = setup.task()
    with pytest.raises(PlanMismatchError, match=rf"ranks disagree on settings.* on rank {last}"):
        setup.distributed(task, TopKEF(**usual | (setting if hvd.rank() == last else {})))
    for each in training.trajectory(setup, TopKEF(**usual), 2):
        assert_ranks_equal(each)
