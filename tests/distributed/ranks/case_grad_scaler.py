"""Loss scaling: residuals in unscaled units, whatever becomes of the scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.amp import GradScaler

import training
from horovod_topk.errors import (
    ConfigError,
    GradientChangedError,
    PlanMismatchError,
    UnsupportedDtypeError,
)
from plain import PlainTopKEF as TopKEF
from training import Setup, Task
from witness import (
    assert_ranks_equal,
    assert_residuals,
    assert_same,
    assert_same_history,
    nothing_changes,
    residuals,
    spoiled,
)
from world import hvd

SPARSE = {"ratio": 0.1, "min_numel": 0}
SCALES = (1024.0, 1024.0, 4096.0, 0.5, 2.0**16, 2.0**16)


def scaler_at(scale: float) -> GradScaler:
    return GradScaler("cpu", init_scale=scale, growth_interval=1000)


def take(task: Task, optimizer: Any, scaler: GradScaler, step: int) -> None:
    """GradScaler's recipe for Horovod."""
    optimizer.zero_grad()
    scaler.scale(task.loss(hvd.rank(), step)).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


def scaled_run(setup: Setup, settings: dict[str, Any], scales: Sequence[float]) -> Any:
    """Parameters after each step, and the residuals after the last."""
    task, scaler = setup.task(), scaler_at(scales[0])
    optimizer = setup.distributed(task, TopKEF(**settings, grad_scaler=scaler))
    history = []
    for step, scale in enumerate(scales):
        if step:
            scaler.update(scale)
        take(task, optimizer, scaler, step)
        history.append(training.snapshot(task))
    return history, residuals(optimizer), TopKEF.of(optimizer).stats()


def test_a_scaler_on_one_rank_alone_is_refused() -> None:
    setup, scaler = Setup(), scaler_at(1024.0) if hvd.rank() else None
    with pytest.raises(PlanMismatchError, match="ranks disagree on grad_scaler"):
        setup.distributed(setup.task(), TopKEF(**SPARSE, grad_scaler=scaler))


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    "settings",
    [
        SPARSE,
        SPARSE | {"values": "int8"},
        SPARSE | {"values": "float16"},
        SPARSE | {"exchange": "sharded"},
        {"ratio": 1.0},
    ],
    ids=["float32", "int8", "float16", "sharded", "dense"],
)
def test_a_scale_that_changes_changes_nothing(settings: dict[str, Any]) -> None:
    """To the bit, as the scales are powers of two."""
    setup = Setup(optimizer=training.plain_sgd)
    history, kept, stats = scaled_run(setup, settings, SCALES)
    task, optimizer = setup.start(TopKEF(**settings))
    expected = []
    for step in range(len(SCALES)):
        training.ordinary(task, optimizer, step)
        expected.append(training.snapshot(task))
    assert_same_history(history, expected)
    assert_residuals(optimizer, kept)
    assert stats.gradient_norm == TopKEF.of(optimizer).stats().gradient_norm


@pytest.mark.everywhere
@pytest.mark.parametrize("overflow", ["last_layer", "first_layer"])
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(overflow: str, exchange: str) -> None:
    setup, scaler = Setup(), scaler_at(1024.0)
    task = setup.task()
    settings = SPARSE | {"exchange": exchange}
    optimizer = setup.distributed(task, TopKEF(**settings, grad_scaler=scaler))
    for step in range(3):
        take(task, optimizer, scaler, step)
        scaler.update()
    parameters = list(task.parameters())
    place = parameters[-1] if overflow == "last_layer" else parameters[0]
    owned = TopKEF.of(optimizer).state_dict().get("owned", {"residuals": {}})
    with nothing_changes(task, optimizer):
        with spoiled(place, math.inf) if hvd.rank() == 1 else nullcontext():
            take(task, optimizer, scaler, 50)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    after = TopKEF.of(optimizer).state_dict().get("owned", {"residuals": {}})
    assert all(torch.equal(after["residuals"][n], e) for n, e in owned["residuals"].items())
    take(task, optimizer, scaler, 3)
    stats = TopKEF.of(optimizer).stats()
    assert (stats.steps, stats.rolled_back) == (4, 1)
    assert_ranks_equal(task.parameters())


def test_a_disabled_scaler_changes_nothing() -> None:
    setup = Setup()
    task, scaler = setup.task(), GradScaler("cpu", enabled=False)
    optimizer = setup.distributed(task, TopKEF(**SPARSE, grad_scaler=scaler))
    for step in range(3):
        take(task, optimizer, scaler, step)
    assert_same(training.snapshot(task), training.trajectory(setup, TopKEF(**SPARSE), 3)[-1])


@pytest.mark.horovod
def test_stepping_without_synchronizing_first_is_refused() -> None:
    """The scaler would unscale what has been sent already, and leave no trace of it."""
    setup, scaler = Setup(), scaler_at(1024.0)
    task, optimizer = setup.start(TopKEF(**SPARSE, grad_scaler=scaler))
    take(task, optimizer, scaler, 0)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(task.loss(hvd.rank(), 1)).backward()
    with (
        nothing_changes(task, optimizer),
        pytest.raises(GradientChangedError, match="unscaled the gradients before"),
    ):
        scaler.step(optimizer)


@pytest.mark.horovod
def test_float16_parameters_are_refused() -> None:
    task = torch.nn.Linear(3, 2).half()
    with pytest.raises(UnsupportedDtypeError, match="float16 gradients cannot"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(task.parameters(), lr=0.1),
            named_parameters=task.named_parameters(),
            compression=TopKEF(grad_scaler=scaler_at(2.0)),
        )


def test_a_scale_of_zero_is_refused() -> None:
    setup, scaler = Setup(), scaler_at(1024.0)
    task, optimizer = setup.start(TopKEF(**SPARSE, grad_scaler=scaler))
    take(task, optimizer, scaler, 0)
    scaler.update(0.0)
    optimizer.zero_grad()
    with nothing_changes(task, optimizer), pytest.raises(ConfigError, match=r"scale is 0\.0"):
        scaler.scale(task.loss(hvd.rank(), 1)).backward()


@pytest.mark.parametrize("told", [True, False])
def test_a_scaler_that_is_not_known_is_warned_of(
    told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Velocities and residuals are in units of its scale then, which changes."""
    setup = Setup(optimizer=training.sgd)
    task, scaler = setup.task(), scaler_at(1024.0)
    own = {"grad_scaler": scaler} if told else {}
    optimizer = setup.distributed(task, TopKEF(**SPARSE, momentum="auto", **own))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(3):
        take(task, optimizer, scaler, step)
        scaler.update()
    warnings = TopKEF.of(optimizer).stats().warnings
    assert caplog.text.count("Pass TopKEF(grad_scaler=scaler)") == len(warnings) == (not told)
    assert all("in units of its scale, 1024 now" in each for each in warnings)


def test_a_scaler_that_scales_nothing_is_not_warned_of() -> None:
    """Nor one where nothing is kept from step to step."""
    for scaler, settings in (
        (GradScaler("cpu", enabled=False), SPARSE),
        (scaler_at(1024.0), {"ratio": 1.0, "momentum": "auto"}),
    ):
        setup = Setup(optimizer=training.sgd)
        task, optimizer = setup.start(TopKEF(**settings))
        take(task, optimizer, scaler, 0)
        assert not TopKEF.of(optimizer).stats().warnings
