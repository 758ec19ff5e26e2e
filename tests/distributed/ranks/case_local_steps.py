"""Local steps over real collectives; their laws are tests/properties/test_local_steps.py."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import training
from witness import assert_ranks_equal
from world import adapter, hvd

SMALL: dict[str, Any] = {"ratio": 0.1, "min_numel": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"every": 3, "decay": 0.95},
    "sharded": {"every": 3, "compression": lambda: adapter.TopKEF(**SMALL, exchange="sharded")},
    "in the background": {"every": 4, "fragments": 2, "delay": 3},
    "in the background, two rounds": {"every": 4, "delay": 3, "compression": adapter.Dense},
    "seconds": {"every": "0.02s", "clip": 2.0},
}


def local_steps(task: training.Task, **settings: Any) -> Any:
    inner = torch.optim.AdamW(task.parameters(), lr=0.01)
    made = {"compression": adapter.TopKEF(**SMALL), **settings}
    if not isinstance(made["compression"], adapter.TopKEF | type):
        made["compression"] = made["compression"]()
    return adapter.LocalSteps(inner, task.named_parameters(), **made)


def started() -> training.Task:
    torch.manual_seed(0)
    return training.perceptron()


def take(task: training.Task, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    task.loss(hvd.rank(), step).backward()
    optimizer.step()


@pytest.mark.everywhere
@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("setting", SETTINGS)
def test_ranks_end_with_equal_weights(setting: str) -> None:
    task = started()
    optimizer = local_steps(task, **SETTINGS[setting])
    step = 0
    while optimizer.rounds < 4:
        take(task, optimizer, step)
        step += 1
    optimizer.synchronize()
    assert_ranks_equal(task.parameters())
    assert adapter.TopKEF.of(optimizer).stats().rolled_back == 0
    pairs = zip(task.parameters(), started().parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def test_memory_is_free_once_local_steps_are_deleted() -> None:
    """Python's garbage collection, which may come much later, is not needed."""

    def trained() -> tuple[Any, Any]:
        task = started()
        optimizer = local_steps(task, every=2)
        for step in range(4):
            take(task, optimizer, step)
        return optimizer, weakref.ref(adapter.TopKEF.of(optimizer)._state)

    trained()  # what is imported in the first steps keeps some frames
    gc.collect()
    gc.disable()
    try:
        optimizer, runner = trained()
        assert runner() is not None
        del optimizer
        assert runner() is None
    finally:
        gc.enable()


def test_two_optimizers_of_one_model() -> None:
    task = started()
    named = list(task.named_parameters())
    halves = [
        adapter.LocalSteps(torch.optim.SGD([p for _, p in half], lr=0.1), half, every=2)
        for half in (named[:3], named[3:])
    ]
    for step in range(4):
        task.zero_grad()
        task.loss(hvd.rank(), step).backward()
        for each in halves:
            each.step()
    assert_ranks_equal(task.parameters())
