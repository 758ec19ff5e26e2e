"""What a step uses of the exchanged gradients decides, tensor by tensor, what its residuals are.

Losses are linear, so that gradients depend on no weight, and plain SGD has to move each weight by
lr times the mean gradients of the steps that use them, in whatever steps they arrive.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import training
from plain import PlainTopKEF
from training import Setup, Task, exchange, noise, ordinary
from witness import assert_ranks_equal, assert_same
from world import TopKEF, hvd

N, LR = 900, 0.5
ACTIVE, FROZEN = 4, 6  # steps before and after a freeze, and in it


class Linear(Task):
    """Two parameters and a linear loss."""

    ddp_options: Mapping[str, Any] = {"find_unused_parameters": True}

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (nn.Parameter(torch.zeros(N)) for _ in range(2))

    def loss(self, rank: int, step: int) -> Tensor:
        ours = zip((self.body, self.head), gradients(rank, step), strict=True)
        return sum((p * g).sum() for p, g in ours)  # type: ignore[return-value]


def gradients(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return noise(rank, step, (N,)), noise(rank, step + 5000, (N,))


def mean_gradients(steps: range, which: int) -> Tensor:
    """The sum over steps of the mean gradient of the body (0) or the head (1)."""
    ranks = range(hvd.size())
    return sum(gradients(r, s)[which] for r in ranks for s in steps) / hvd.size()  # type: ignore


def groups(task: Any) -> Any:
    return [{"params": [task.body]}, {"params": [task.head]}]


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=LR)


def build(compression: Any, optimizer: Callable[[Any], Any] = sgd) -> tuple[Any, Any]:
    setup = Setup(Linear, optimizer, parameter_groups=groups)
    return setup.start(compression)


def sparse(**settings: Any) -> PlainTopKEF:
    return PlainTopKEF(**{"ratio": 0.02, "min_numel": 0, "guard": None, **settings})


def assert_nothing_is_lost(task: Any, optimizer: Any, last: int, of_head: list[range]) -> None:
    """One more step at ratio 1 sends all that waits; then all that was computed is applied."""
    TopKEF.of(optimizer).set_ratio(1.0)
    ordinary(task, optimizer, last)
    assert TopKEF.of(optimizer).stats().residual_norm == 0.0
    body = mean_gradients(range(last + 1), 0)
    head = sum(mean_gradients(steps, 1) for steps in [*of_head, range(last, last + 1)])
    torch.testing.assert_close(task.body.detach(), -LR * body, rtol=0, atol=1e-4)
    torch.testing.assert_close(task.head.detach(), -LR * head, rtol=0, atol=1e-4)
    assert_ranks_equal(task.parameters())


# Ways to freeze the head: what is done before a step, and to exchanged gradients.


def _rate(value: Any) -> Callable[[Any, Any], None]:
    def freeze(task: Any, optimizer: Any) -> None:
        optimizer.param_groups[1]["lr"] = value

    return freeze


def _no_group(task: Any, optimizer: Any) -> None:
    del optimizer.param_groups[1:]


def _no_gradient(task: Any, optimizer: Any) -> None:
    task.head.requires_grad_(False)


def _thaw(task: Any, optimizer: Any, group: Any) -> None:
    optimizer.param_groups[1:] = [group]
    group["lr"] = LR
    task.head.requires_grad_(True)


def _nothing(task: Any, optimizer: Any) -> None:
    pass


def _none(task: Any, optimizer: Any) -> None:
    task.head.grad = None


def _zero(task: Any, optimizer: Any) -> None:
    task.head.grad.zero_()


def _zeros(task: Any, optimizer: Any) -> None:
    task.head.grad = torch.zeros_like(task.head)


WAYS = {
    "rate": (_rate(0.0), _nothing),
    "rate_of_a_tensor": (_rate(torch.tensor(0.0)), _nothing),
    "rate_between_exchange_and_step": (_nothing, _rate(0.0)),
    "no_group": (_no_group, _nothing),
    "requires_grad": (_no_gradient, _nothing),
    "gradient_none": (_nothing, _none),
    "gradient_zeroed": (_nothing, _zero),
    "gradient_replaced": (_nothing, _zeros),
}
EXCHANGES = ("allgather", "sharded")


def frozen_run(way: str, task: Any, optimizer: Any) -> Iterator[tuple[int, bool]]:
    """Number of each step that was taken, and whether it was frozen."""
    before, after = WAYS[way]
    group = optimizer.param_groups[1]
    for step in range(ACTIVE + FROZEN + ACTIVE):
        is_frozen = ACTIVE <= step < ACTIVE + FROZEN
        if is_frozen:
            before(task, optimizer)
        exchange(task, optimizer, step)
        if is_frozen:
            after(task, optimizer)
        with optimizer.skip_synchronize():
            optimizer.step()
        if is_frozen:
            _thaw(task, optimizer, group)
        yield step, is_frozen


@pytest.mark.one_in(2)
@pytest.mark.everywhere(one_in=4)
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("exchange_", EXCHANGES)
@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_layer_wakes_as_it_was(way: str, exchange_: str) -> None:
    """With plain error feedback: what waits stays, to the bit, and nothing of a freeze comes."""
    task, optimizer = build(sparse(exchange=exchange_))
    state = TopKEF.of(optimizer)
    seen: dict[bool, set[bytes]] = {True: set(), False: set()}
    for _, is_frozen in frozen_run(way, task, optimizer):
        seen[is_frozen].add(state.residual("head").numpy().tobytes())
    assert len(seen[True]) == 1 and seen[True] < seen[False]  # that of the last step before
    stats = state.stats()
    assert (stats.steps, stats.rolled_back) == (2 * ACTIVE + FROZEN, 0)
    assert not stats.warnings
    last = 2 * ACTIVE + FROZEN
    assert_nothing_is_lost(task, optimizer, last, [range(ACTIVE), range(last - ACTIVE, last)])


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


DEFAULT = {"ratio": 0.02, "min_numel": 0, "warmup": None}
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (momentum, DEFAULT),
    "adamw": (adamw, DEFAULT),
    "velocity": (sgd, DEFAULT | {"momentum": 0.9}),
    "sharded": (momentum, DEFAULT | {"exchange": "sharded"}),
    "hierarchical": (adamw, DEFAULT | {"exchange": "hierarchical"}),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("way", ["rate", "gradient_none"])
def test_state_of_a_frozen_layer_with_momentum(way: str, settings: str) -> None:
    optimizer_of, ours = SETTINGS[settings]
    task, optimizer = build(TopKEF(**ours), optimizer_of)
    before, weights = {}, None
    for _, is_frozen in frozen_run(way, task, optimizer):
        state = of_head(TopKEF.of(optimizer).state_dict())
        if is_frozen:
            kept = {"residuals", "owned", "state.norms"} if way == "rate" else {*state}
            assert {k: v for k, v in state.items() if k in kept} == {
                k: v for k, v in before.items() if k in kept
            }
            assert torch.equal(task.head.detach(), weights)
        before, weights = state, task.head.detach().clone()
    assert task.head.isfinite().all()
    assert_ranks_equal(task.parameters())


def of_head(state: Any) -> dict[str, bytes]:
    """All that a state dict has of the head."""
    parts = {"residuals": state} | {k: v for k, v in state.items() if isinstance(v, dict)}
    return {
        key: part["residuals"]["head"].numpy().tobytes()
        for key, part in parts.items()
        if "head" in part.get("residuals", {})
    }


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_warm_up_that_begins_at_a_rate_of_0(settings: str) -> None:
    optimizer_of, ours = SETTINGS[settings]
    task, optimizer = build(TopKEF(**ours | {"warmup": "auto"}), optimizer_of)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, step / 3))
    for step in range(6):
        training.ordinary(task, optimizer, step)
        scheduler.step()
        if step == 0:
            assert not task.body.any()
    stats = TopKEF.of(optimizer).stats()
    assert (stats.steps, stats.rolled_back, stats.warnings) == (6, 0, ())
    assert task.body.isfinite().all() and task.body.any()
    assert_ranks_equal(task.parameters())


# Optimizers that clear gradients, or evaluate them twice.


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization over plain SGD, as most implementations of it are."""

    def __init__(self, parameters: Any, lr: float = LR) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self._all():
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad, alpha=0.05)
            p.grad = None

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self._all():
            p.copy_(self.state[p]["old"]).add_(p.grad, alpha=-LR)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        closure()
        self.first_step()
        closure()
        self.second_step()

    def _all(self) -> Iterator[Any]:
        return (p for group in self.param_groups for p in group["params"])


STEPS = 12


def test_an_optimizer_that_evaluates_its_closure_at_a_perturbed_point() -> None:
    """The first exchange of each step moves no weight for good, and is taken back."""
    task, optimizer = build(sparse(), Sharpness)
    for step in range(STEPS + 1):

        def closure(step: int = step) -> None:
            task.loss(hvd.rank(), step).backward()
            optimizer.synchronize()

        optimizer.zero_grad()
        if step == STEPS:
            TopKEF.of(optimizer).set_ratio(1.0)
        with optimizer.skip_synchronize():
            optimizer.step(closure)
    stats = TopKEF.of(optimizer).stats()
    assert (stats.steps, stats.rolled_back) == (STEPS + 1, STEPS + 1)
    assert not stats.warnings
    expected = -LR * mean_gradients(range(STEPS + 1), 0)
    torch.testing.assert_close(task.body.detach(), expected, rtol=0, atol=1e-4)


# Exchanges that no step applies.


@contextmanager
def warnings_of(optimizer: Any, caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Warnings that are in the log, and the same in the statistics."""
    found: list[str] = []
    with caplog.at_level(logging.WARNING, "horovod_topk"):
        yield found
    found += TopKEF.of(optimizer).stats().warnings
    assert [r.getMessage() for r in caplog.records if "exchanges of" in r.getMessage()] == found


def by_hand(task: Any, optimizer: Any, step: int) -> None:
    exchange(task, optimizer, step)
    with torch.no_grad():
        for p in task.parameters():
            p.add_(p.grad, alpha=-LR)


def in_vain(task: Any, optimizer: Any, step: int) -> None:
    """As a discriminator: another loss's backward runs through its parameters first."""
    training.thrown_away(task, optimizer, 100 + step)
    ordinary(task, optimizer, step)


def cleared(task: Any, optimizer: Any, step: int) -> None:
    exchange(task, optimizer, step)
    optimizer.zero_grad()
    with optimizer.skip_synchronize():
        optimizer.step()


CAUSES = {
    "by_hand": (by_hand, "No step.. was seen", 10),
    "scheduled": (by_hand, r"was seen between them\. Weights", 10),
    "replaced": (by_hand, "step was replaced by .*own_step", 10),
    "in_vain": (in_vain, "another loss's backward", 9),
    "cleared": (cleared, "were None or zeros", 10),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_exchanges_that_no_step_applies(cause: str, caplog: pytest.LogCaptureFixture) -> None:
    one_step, text, number = CAUSES[cause]
    task, optimizer = build(sparse())
    if cause == "scheduled":
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    elif cause == "replaced":

        def own_step() -> None:
            """Not the optimizer's."""

        optimizer.step = own_step
    with warnings_of(optimizer, caplog) as found:
        for step in range(number):
            one_step(task, optimizer, step)
    assert len(found) == 1
    assert (
        found[0].startswith("TopKEF: 8 of the last")
        and "exchanges of SGD (2 tensors, such as " in found[0]
    )
    assert re.search(text, found[0])


def test_what_is_in_vain_changes_no_bit() -> None:
    """A discriminator is trained as without the generator's steps."""
    alone, both = (build(sparse()) for _ in range(2))
    for step in range(STEPS):
        ordinary(*alone, step)
        in_vain(*both, step)
    assert_same(training.snapshot(both[0]), training.snapshot(alone[0]))


@pytest.mark.horovod
def test_a_gradient_that_came_before_an_exchange_in_vain_and_not_after() -> None:
    """Each tensor has its own bucket, so that no other one's end exchanges the head's zeros."""
    setup = Setup(Linear, sgd, groups=lambda task: [[task.body], [task.head]])
    task, optimizer = setup.start(sparse(ratio=1.0))
    exchange(task, optimizer, 0)
    optimizer.zero_grad()
    (task.body * gradients(hvd.rank(), 1)[0]).sum().backward()
    optimizer.step()
    torch.testing.assert_close(task.body.detach(), -LR * mean_gradients(range(1, 2), 0))
    assert not task.head.any()


@pytest.mark.horovod
def test_a_rank_without_a_batch_after_an_exchange_in_vain_takes_what_the_others_computed() -> None:
    task, optimizer = build(sparse(ratio=1.0))
    exchange(task, optimizer, 0)
    optimizer.zero_grad()
    if hvd.rank() == 0:
        task.loss(0, 1).backward()
    optimizer.step()
    for weight, gradient in zip((task.body, task.head), gradients(0, 1), strict=True):
        torch.testing.assert_close(weight.detach(), -LR * gradient / hvd.size())


def test_healthy_runs_and_single_skips_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    task, optimizer = build(sparse())
    with warnings_of(optimizer, caplog) as found:
        for step in range(30):
            ordinary(task, optimizer, step)
            if step % 3 == 0:
                training.thrown_away(task, optimizer, 100 + step)
    assert found == []
    assert TopKEF.of(optimizer).stats().rolled_back == 10


def test_steps_with_a_nan_are_not_counted_twice(caplog: pytest.LogCaptureFixture) -> None:
    task, optimizer = build(sparse())
    with warnings_of(optimizer, caplog) as found:
        for step in range(12):
            optimizer.zero_grad()
            (task.loss(hvd.rank(), step) * (float("nan") if step else 1.0)).backward()
            optimizer.synchronize()
    assert found == []
    assert TopKEF.of(optimizer).stats().rolled_back == 11
