"""Law 5: a step commits or rolls back as a whole; residuals are exact to the bit either way."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import training
from plain import PlainTopKEF as TopKEF
from training import Setup, Task, exchange, take
from witness import (
    assert_ranks_equal,
    assert_residuals,
    assert_same,
    bits,
    nothing_changes,
    residuals,
    spoiled,
)
from world import hvd

pytestmark = pytest.mark.everywhere

SPARSE = {"ratio": 0.1, "min_numel": 0}
WARM_STEPS = 3


def warm(
    setup: Setup | None = None, compression: object = None, steps: int = WARM_STEPS
) -> tuple[Any, Any]:
    """A task and its optimizer after a few steps, so that residuals are not zero."""
    setup = setup or Setup()
    task, optimizer = setup.start(compression or TopKEF(**SPARSE))
    for step in range(steps):
        setup.take_step(task, optimizer, step)
    assert steps == 0 or TopKEF.of(optimizer).stats().residual_norm > 0
    return task, optimizer


def assert_undisturbed(task: Task, optimizer: Any, steps: int) -> None:
    """Weights and residuals are those of a run of so many ordinary steps."""
    other, plain = warm(steps=steps)
    assert_same(training.snapshot(task), training.snapshot(other))
    assert_residuals(optimizer, residuals(plain))


# Non-finite gradients.


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("value", "settings", "stepped"),
    [
        (math.nan, SPARSE, True),
        (math.inf, SPARSE, False),
        (-math.inf, {"ratio": 1.0}, True),
        (math.nan, {"ratio": 1.0}, False),
        (math.inf, SPARSE | {"values": "float16"}, True),
        (math.nan, SPARSE | {"values": "float16"}, False),
    ],
)
def test_non_finite_gradient_on_one_rank(
    value: float, settings: dict[str, Any], stepped: bool
) -> None:
    setup = Setup()
    task, optimizer = setup.start(TopKEF(**settings))
    for step in range(WARM_STEPS):
        setup.take_step(task, optimizer, step)
    flagged: list[tuple[str, ...]] = []
    TopKEF.of(optimizer).on_step(lambda counters: flagged.append(counters.flagged))
    before = residuals(optimizer)
    parameters = dict(task.named_parameters())
    on_last = hvd.rank() == hvd.size() - 1
    with spoiled(parameters["net.3.weight"], value, 77) if on_last else nullcontext():
        exchange(task, optimizer, WARM_STEPS)

    for name, p in parameters.items():
        assert p.grad is not None
        assert p.grad.isnan().all() if name == "net.3.weight" else p.grad.isfinite().all()
    assert_ranks_equal(p.grad for p in parameters.values() if p.grad is not None)
    if stepped:  # the user's decision, and a bad one, but the residuals stay sound
        take(optimizer)
    else:
        exchange(task, optimizer, WARM_STEPS + 1)  # rolls back
    assert_residuals(optimizer, before)
    assert TopKEF.of(optimizer).stats().rolled_back == 1
    assert flagged == [("net.3.weight",)]


# Steps that are not taken.


@pytest.mark.parametrize("clear", ["optimizer", "model_to_none", "model_in_place"])
def test_skipped_step_leaves_no_trace(clear: str) -> None:
    task, optimizer = warm()
    with nothing_changes(task, optimizer):
        exchange(task, optimizer, 99)
        if clear == "optimizer":
            optimizer.zero_grad()
        else:
            task.zero_grad(set_to_none=clear == "model_to_none")
    for step in range(WARM_STEPS, 6):
        task.zero_grad(set_to_none=clear != "model_in_place")
        task.loss(hvd.rank(), step).backward()
        optimizer.step()
    assert_undisturbed(task, optimizer, 6)
    stats = TopKEF.of(optimizer).stats()
    assert (stats.steps, stats.rolled_back) == (6, 1)


@pytest.mark.parametrize("clear", [True, False], ids=["to_none", "in_place"])
def test_parameter_absent_after_a_skipped_step(clear: bool) -> None:
    """Zeros left in place of an exchanged gradient are no gradient exchanged twice."""
    task, optimizer = warm(Setup(build=training.Optional))
    with nothing_changes(task, optimizer):
        exchange(task, optimizer, 6)
        task.zero_grad(set_to_none=clear)
    for step in (7, 8):
        task.zero_grad(set_to_none=clear)
        task.loss(hvd.rank(), step).backward()
        optimizer.step()
    assert_ranks_equal(task.parameters())


def test_step_without_any_gradient_left_commits_nothing() -> None:
    """Clearing gradients and then stepping, to keep schedulers in time, applies nothing."""
    task, optimizer = warm(Setup(optimizer=training.plain_sgd))
    with nothing_changes(task, optimizer):
        exchange(task, optimizer, 99)
        optimizer.zero_grad()
        take(optimizer)


def test_discarded_gradients_of_an_adversary_never_reach_a_residual() -> None:
    """The discriminator's optimizer exchanges what the generator's loss left in it."""
    task, optimizer = warm()
    for step in range(WARM_STEPS, 6):
        optimizer.zero_grad()
        with nothing_changes(task, optimizer):
            (-task.loss(hvd.rank(), 100 + step)).backward()  # another loss, another optimizer
            optimizer.synchronize()
            optimizer.zero_grad()
        training.ordinary(task, optimizer, step)
    assert_undisturbed(task, optimizer, 6)


# What does not commit.


def test_nothing_is_committed_between_synchronize_and_step() -> None:
    task, optimizer = warm()
    before = residuals(optimizer)
    exchange(task, optimizer, WARM_STEPS)
    assert_residuals(optimizer, before)
    take(optimizer)
    assert not torch.equal(bits(residuals(optimizer).values()), bits(before.values()))


@pytest.mark.horovod
@pytest.mark.parametrize("make", [training.sgd, training.adam], ids=["sgd", "adam"])
def test_broadcasts_commit_nothing(make: training.MakeOptimizer) -> None:
    task, optimizer = warm(Setup(optimizer=make))
    with nothing_changes(task, optimizer):
        hvd.broadcast_parameters(task.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    stats = TopKEF.of(optimizer).stats()
    assert (stats.steps, stats.rolled_back) == (WARM_STEPS, 0)


@pytest.mark.horovod
@pytest.mark.parametrize("make", [training.sgd, training.adam], ids=["sgd", "adam"])
def test_broadcast_of_a_new_optimizers_state_commits_nothing(
    make: training.MakeOptimizer,
) -> None:
    """It takes a step on zero gradients, inside Horovod, to make the state."""
    task, optimizer = warm(Setup(optimizer=make), steps=0)
    hvd.broadcast_parameters(task.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert TopKEF.of(optimizer).stats().steps == 0
    assert TopKEF.of(optimizer).stats().residual_norm == 0
    training.ordinary(task, optimizer, 0)
    assert TopKEF.of(optimizer).stats().steps == 1


@pytest.mark.horovod
def test_broadcast_after_synchronize_does_not_commit_what_it_replaced() -> None:
    """It puts zeros in place of the exchanged gradients, and steps on those."""
    task, optimizer = warm(steps=0)
    before = residuals(optimizer)
    exchange(task, optimizer, 0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert_residuals(optimizer, before)


# Saving and resuming.


def test_loading_residuals_drops_a_step_under_way() -> None:
    task, optimizer = warm()
    saved = TopKEF.of(optimizer).state_dict()
    exchange(task, optimizer, 99)
    TopKEF.of(optimizer).load_state_dict(saved)
    assert_residuals(optimizer, saved["residuals"])
    training.train(task, optimizer, range(WARM_STEPS, 6))
    assert_undisturbed(task, optimizer, 6)


# Gradients that a user edits, and steps that are cut off.


def halved(p: Tensor) -> None:
    assert p.grad is not None
    p.grad = p.grad * 0.5


@pytest.mark.parametrize("edited", [slice(None), slice(1)], ids=["all", "one"])
def test_gradients_that_are_replaced_after_the_exchange_are_applied(edited: slice) -> None:
    """To the bit what the same does in place."""
    setup, runs = Setup(), []
    for in_place in (True, False):
        task, optimizer = setup.start(TopKEF(**SPARSE))
        for step in range(4):
            exchange(task, optimizer, step)
            for p in list(task.parameters())[edited]:
                assert p.grad is not None
                p.grad.mul_(0.5) if in_place else halved(p)
            take(optimizer)
        stats = TopKEF.of(optimizer).stats()
        assert (stats.steps, stats.rolled_back) == (4, 0)
        runs.append((training.snapshot(task), residuals(optimizer)))
    assert_same(runs[0][0], runs[1][0])
    assert torch.equal(bits(runs[0][1].values()), bits(runs[1][1].values()))


@pytest.mark.parametrize("how", ["load", "reset"])
def test_a_step_cut_off_after_backward_is_dropped(how: str) -> None:
    """And the next one is as if it had not been."""
    (task, optimizer), (other, never) = warm(), warm()
    saved = TopKEF.of(optimizer).state_dict()
    optimizer.zero_grad()
    task.loss(hvd.rank(), 77).backward()
    for state in (TopKEF.of(optimizer), TopKEF.of(never)):
        state.load_state_dict(saved) if how == "load" else state.reset()
    for step in range(WARM_STEPS, WARM_STEPS + 3):
        training.ordinary(task, optimizer, step)
        training.ordinary(other, never, step)
    assert_same(training.snapshot(task), training.snapshot(other))
    assert_residuals(optimizer, residuals(never))


@pytest.mark.horovod
def test_gradients_of_a_step_that_was_cut_off_can_be_exchanged_anew() -> None:
    task, optimizer = warm()
    optimizer.zero_grad()
    task.loss(hvd.rank(), WARM_STEPS).backward()
    state = TopKEF.of(optimizer)
    state.load_state_dict(state.state_dict())
    optimizer.step()
    assert_undisturbed(task, optimizer, WARM_STEPS + 1)
