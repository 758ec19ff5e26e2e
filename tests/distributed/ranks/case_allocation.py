"""Adaptive allocation on real ranks: they change shares together, also after a restart."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import training
from horovod_topk.core.control import allocation
from plain import PlainTopKEF as TopKEF
from resuming import assert_resumes
from training import Setup
from witness import assert_ranks_equal

SETTINGS = {"ratio": 0.1, "min_numel": 0, "momentum": "auto", "allocation": "adaptive"}
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
}


@pytest.fixture(autouse=True)
def _early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "FIRST", 1)  # allocations after 1, 2, 4 committed steps


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_a_restart_goes_on_to_the_bit(exchange: str, tmp_path: Path) -> None:
    make = partial(TopKEF, exchange=exchange, **SETTINGS)
    resumed = assert_resumes(Setup(optimizer=training.plain_sgd), make, tmp_path)
    ratios = TopKEF.of(resumed).stats().ratios
    assert min(ratios.values()) < 0.1 < max(ratios.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_stay_equal(name: str) -> None:
    setup = Setup(optimizer=OPTIMIZERS[name])
    task = setup.task()
    optimizer = setup.distributed(task, TopKEF(**SETTINGS))
    for step in range(6):
        training.ordinary(task, optimizer, step)
    assert_ranks_equal(task.parameters())
    assert TopKEF.of(optimizer).stats().ratios
