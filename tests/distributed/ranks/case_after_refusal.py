"""An optimizer that is refused leaves nothing behind: its parameters go to the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import training
from horovod_topk.errors import (
    ConfigError,
    PlanMismatchError,
    TopKError,
    UnsupportedOperationError,
)
from plain import PlainTopKEF as TopKEF
from training import Setup, Task
from witness import assert_ranks_equal, assert_same, bits

SPARSE = {"ratio": 0.1, "min_numel": 0}

REFUSED: dict[str, tuple[Callable[[], TopKEF], type[TopKError]]] = {
    "typo_in_ratios": (lambda: TopKEF(ratio={"typo.*": 0.5}), ConfigError),
    "momentum_twice": (lambda: TopKEF(momentum=0.9), ConfigError),
    "plans_differ": (lambda: TopKEF(ratio=0.1 if hvd.rank() else 0.2), PlanMismatchError),
}


def heavy_ball(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


HEAVY = Setup(optimizer=heavy_ball)


def refuse(task: Task, refused: str) -> pytest.ExceptionInfo[TopKError]:
    """What was raised: as long as it lives, so does the optimizer."""
    make, error = REFUSED[refused]
    with pytest.raises(error) as raised:
        HEAVY.distributed(task, make())
    return raised


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("refused", REFUSED)
def test_a_corrected_one_compresses(refused: str, groups: int | None) -> None:
    setup = Setup(optimizer=heavy_ball, options={"groups": groups})
    task, other = setup.task(), setup.task()
    raised = refuse(task, refused)
    optimizer, by_itself = (setup.distributed(t, TopKEF(**SPARSE)) for t in (task, other))
    for step in range(3):
        training.ordinary(task, optimizer, step)
        training.ordinary(other, by_itself, step)
    assert_ranks_equal(task.parameters())
    assert_same(training.snapshot(task), training.snapshot(other))
    assert TopKEF.of(optimizer).stats().steps == 3
    assert raised.value.cure


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("refused", REFUSED)
def test_a_dense_one_trains(refused: str) -> None:
    task = HEAVY.task()
    raised = refuse(task, refused)
    optimizer = HEAVY.distributed(task, hvd.Compression.none)
    training.train(task, optimizer, range(3))
    by_itself = training.trajectory(HEAVY, hvd.Compression.none, 3)[-1]
    assert_ranks_equal(task.parameters())
    torch.testing.assert_close(training.snapshot(task), by_itself)  # Horovod adds up in any order
    assert raised.value.cure


@pytest.mark.parametrize("refused", REFUSED)
def test_the_users_optimizer_keeps_its_momentum(refused: str) -> None:
    task = Setup().task()
    own = heavy_ball(task.parameters())
    before = dict(own.param_groups[0])
    make, error = REFUSED[refused]
    with pytest.raises(error):
        hvd.DistributedOptimizer(own, named_parameters=task.named_parameters(), compression=make())
    assert own.param_groups[0] == before


@pytest.mark.world_size(3)
def test_horovods_hooks_stay_where_nothing_is_compressed() -> None:
    """In a process set of one rank there is nobody to exchange with; Horovod has hooks there."""
    process_set = hvd.add_process_set([0])
    task = HEAVY.task()
    if hvd.rank() == 0:
        setup = Setup(optimizer=heavy_ball, options={"process_set": process_set, "groups": 2})
        optimizer = setup.distributed(task, TopKEF(clip_norm=1e6))
        assert not TopKEF.of(optimizer).active
        assert len(optimizer._grad_accs) == len(list(task.parameters()))
        training.train(task, optimizer, range(3))
        plain = HEAVY.task()
        by_hand = heavy_ball(plain.parameters())
        for step in range(3):
            by_hand.zero_grad()
            plain.loss(0, step).backward()
            by_hand.step()
        assert_same(training.snapshot(task), training.snapshot(plain))
    hvd.barrier()
    hvd.remove_process_set(process_set)


@pytest.mark.parametrize("op", ["Adasum", "Max", "Min", "Product"])
def test_other_operations(op: str) -> None:
    """They would pass for an average."""
    task = Setup().task()
    before = bits(task.parameters()).clone()
    with pytest.raises(UnsupportedOperationError, match=rf"op=hvd\.{op} .*op=hvd\.Average or"):
        Setup(options={"op": getattr(hvd, op)}).distributed(task, TopKEF)
    assert torch.equal(bits(task.parameters()), before)
    assert all(p.grad is None for p in task.parameters())
    optimizer = Setup(options={"op": hvd.Sum}).distributed(task, TopKEF(**SPARSE))
    assert TopKEF.of(optimizer).reduction == "sum"
    training.ordinary(task, optimizer, 0)
    assert_ranks_equal(task.parameters())


# Two optimizers of one parameter, and optimizers that Horovod cannot make anew.


@pytest.mark.parametrize("first", [TopKEF(**SPARSE), hvd.Compression.none], ids=["ours", "dense"])
def test_two_optimizers_do_not_share_a_parameter(first: Any) -> None:
    """While both exist: the first may be a reference cycle that nobody refers to."""
    task, optimizer = Setup().start(first)
    for second in (TopKEF(**SPARSE), hvd.Compression.none):
        if first is second is hvd.Compression.none:
            continue
        with pytest.raises(ConfigError, match=r"'net.0.bias'.*another hvd.Dist.*Delete the other"):
            Setup().distributed(task, second)
    training.ordinary(task, optimizer, 0)
    del optimizer
    optimizer = Setup().distributed(task, TopKEF(**SPARSE))
    training.train(task, optimizer, range(2))
    assert_ranks_equal(task.parameters())
    assert TopKEF.of(optimizer).stats().steps == 2


class Lookahead(torch.optim.Optimizer):
    """Made of an optimizer, not of parameters."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_a_wrapper_goes_around_horovods_optimizer() -> None:
    """As the error says."""
    task, plain = Setup().task(), Setup().task()
    around = Lookahead(heavy_ball(task.parameters()))
    with pytest.raises(ConfigError, match=r"Lookahead of its parameter groups.*pass that one to h"):
        hvd.DistributedOptimizer(around, task.named_parameters(), compression=TopKEF(**SPARSE))
    optimizer = HEAVY.distributed(task, TopKEF(**SPARSE))
    other = HEAVY.distributed(plain, TopKEF(**SPARSE))
    for step in range(3):
        optimizer.zero_grad()
        task.loss(hvd.rank(), step).backward()
        Lookahead(optimizer).step()
        training.ordinary(plain, other, step)
    assert_same(training.snapshot(task), training.snapshot(plain))
    assert TopKEF.of(optimizer).stats().steps == 3


def test_a_failure_between_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's hooks on parameters go as well."""
    task, other = HEAVY.task(), HEAVY.task()
    with monkeypatch.context() as patched:
        patched.setattr("horovod_topk.torch.hooks.Hooks.watch", fails)
        with pytest.raises(ArithmeticError) as raised:
            HEAVY.distributed(task, TopKEF(**SPARSE))
    optimizer, by_itself = (HEAVY.distributed(t, TopKEF(**SPARSE)) for t in (task, other))
    for step in range(2):
        training.ordinary(task, optimizer, step)
        training.ordinary(other, by_itself, step)
    assert_same(training.snapshot(task), training.snapshot(other))
    assert raised.value is not None


def fails(*args: Any) -> None:
    raise ArithmeticError
