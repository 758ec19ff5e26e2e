"""World size 1: nothing to exchange, and TopKEF says so."""

from __future__ import annotations

import logging
from functools import partial

import horovod.torch as hvd
import pytest
import torch

import training
from horovod_topk.errors import ConfigError, UnsupportedOperationError
from plain import PlainTopKEF as TopKEF
from training import Setup
from witness import assert_same, assert_same_history

pytestmark = pytest.mark.world_size(1)


@pytest.mark.parametrize("compression", [TopKEF, TopKEF(ratio=0.01)], ids=["class", "instance"])
def test_trains_as_without_compression(compression: object) -> None:
    dense = training.trajectory(Setup(), hvd.Compression.none)
    assert_same_history(training.trajectory(Setup(), compression), dense)


def test_stats_and_log_say_that_it_is_inactive(caplog: pytest.LogCaptureFixture) -> None:
    task = Setup().task()
    with caplog.at_level(logging.WARNING, "horovod_topk"):
        optimizer = Setup().distributed(task, TopKEF)
    assert "world size 1" in caplog.text
    training.ordinary(task, optimizer, 0)
    stats = TopKEF.of(optimizer).stats()
    assert not stats.active
    assert "world size 1" in stats.skipped["*"]
    assert (stats.ranks, stats.steps, stats.sent_bytes, stats.reduction) == (1, 0, 0, 1.0)


def test_state_is_empty_and_loads() -> None:
    compression = TopKEF(ratio=0.1)
    optimizer = Setup().distributed(Setup().task(), compression)
    assert compression.state_dict() == {}
    compression.load_state_dict({})
    compression.reset()
    TopKEF.of(optimizer).on_step(lambda counters: pytest.fail("no step is exchanged"))


@pytest.mark.parametrize("op", ["Adasum", "Max", "Min", "Product"])
def test_other_operations_are_refused_here_too(op: str) -> None:
    task = Setup().task()
    with pytest.raises(UnsupportedOperationError, match=rf"op=hvd\.{op} "):
        Setup(options={"op": getattr(hvd, op)}).distributed(task, TopKEF)


def test_join_is_not_refused() -> None:
    optimizer = Setup().distributed(Setup().task(), TopKEF)
    assert hvd.join() == 0
    assert isinstance(optimizer, torch.optim.SGD)


def test_momentum_is_left_to_the_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    def heavy_ball(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # type: ignore[arg-type]

    dense = training.trajectory(Setup(optimizer=heavy_ball), hvd.Compression.none)
    with caplog.at_level(logging.WARNING, "horovod_topk"):
        ours = training.trajectory(Setup(optimizer=training.plain_sgd), TopKEF(momentum=0.9))
    assert_same_history(ours, dense)
    assert "leaves momentum=0.9 to SGD" in caplog.text


def test_gradients_are_clipped_here_too() -> None:
    """As `clip_grad_norm_` does, which is all that `clip_norm` is for one rank."""
    setup = Setup(optimizer=training.plain_sgd)
    runs = []
    for compression in (TopKEF(clip_norm=0.01), hvd.Compression.none):
        task, optimizer = setup.start(compression)
        for step in range(3):
            optimizer.zero_grad()
            task.loss(0, step).backward()
            if compression is hvd.Compression.none:
                torch.nn.utils.clip_grad_norm_(task.parameters(), 0.01)
            optimizer.step()
        runs.append(training.snapshot(task))
    for ours, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_gradients_are_clipped_as_dense_ones(sparse: bool) -> None:
    """A token that occurs twice counts as the sum."""
    p = torch.nn.Embedding(5, 2, sparse=sparse)
    torch.nn.init.zeros_(p.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(p.parameters(), lr=1.0),
        named_parameters=p.named_parameters(),
        compression=TopKEF(clip_norm=0.5),
        sparse_as_dense=True,
    )
    p(torch.tensor([3, 1, 3])).sum().backward()
    optimizer.step()
    expected = torch.tensor([0.0, 1, 0, 2, 0])[:, None].expand(5, 2) * 0.5 / 10**0.5
    torch.testing.assert_close(p.weight.detach(), -expected)


def test_a_sparse_gradient_is_not_left_unclipped_here_either() -> None:
    setup = Setup(build=training.Embedded, optimizer=training.plain_sgd)
    task, optimizer = setup.start(TopKEF(clip_norm=0.01))
    before = training.snapshot(task)
    task.loss(0, 0).backward()
    kept = [p.grad.to_dense() for p in task.parameters() if p.grad is not None]
    message = r"'embedding.weight'.*sparse, and clip_norm=0\.01.*sparse_as_dense=True"
    with pytest.raises(ConfigError, match=message):
        optimizer.step()
    assert_same(training.snapshot(task), before)
    assert_same([p.grad.to_dense() for p in task.parameters() if p.grad is not None], kept)


def test_momentum_reaches_sparse_gradients_here() -> None:
    """It is the optimizer's own, and so no error."""
    runs = []
    for make, compression in (
        (training.plain_sgd, TopKEF(momentum=0.9)),
        (partial(torch.optim.SGD, lr=0.05, momentum=0.9), hvd.Compression.none),
    ):
        setup = Setup(build=training.Embedded, optimizer=make)
        runs.append(training.trajectory(setup, compression, 4))
    assert_same_history(*runs)


def test_clipping_knows_of_a_scaler_that_the_optimizer_applies_itself() -> None:
    """Fused optimizers get scaled gradients, and the scale beside them."""
    p = torch.nn.Parameter(torch.zeros(10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p], lr=1.0, fused=True),
        named_parameters=[("p", p)],
        compression=TopKEF(clip_norm=0.5),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((3.0 * p).sum()).backward()
    scaler.step(optimizer)
    assert float(p.detach().norm()) == pytest.approx(0.5, rel=1e-5)


def test_what_is_not_kept_is_not_asked_for() -> None:
    optimizer = Setup().distributed(Setup().task(), TopKEF)
    state = TopKEF.of(optimizer)
    with pytest.raises(KeyError, match=r"no\.such"):
        state.residual("no.such")
    assert state.clock == (0, None, (), ())
