"""Law 8: ranks agree on their settings before they exchange."""

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


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_a_rank_with_another_optimizer_is_named(ratio: float) -> None:
    """Nothing that is sent depends on the optimizer here, and weights would go apart."""
    last = hvd.size() - 1
    setup = Setup(optimizer=training.adamw if hvd.rank() == last else training.plain_sgd)
    with pytest.raises(PlanMismatchError, match=rf"ranks disagree on optimizer: .* on rank {last}"):
        setup.distributed(setup.task(), TopKEF(ratio=ratio, min_numel=0))
