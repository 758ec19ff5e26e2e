"""Steps of SGD, Adam and AdamW depend on how often elements arrive, on every rank alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracle.updates import Exact
from torch import Tensor, nn

import training
import world
from case_grad_scaler import scaler_at
from horovod_topk.guard import Guard
from horovod_topk.torch_training.gradients import local
from plain import PlainTopKEF as TopKEF
from training import Setup, Task
from witness import assert_ranks_equal, assert_same
from world import hvd

LR, DECAY, BETAS, MOMENTUM, STEPS = 0.02, 0.1, (0.5, 0.99), 0.9, 10
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, momentum=MOMENTUM),
    "Adam": partial(torch.optim.Adam, betas=BETAS),
    "AdamW": partial(torch.optim.AdamW, betas=BETAS),
}


def making(kind: str, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """What makes an optimizer of parameters."""
    return partial(OPTIMIZERS[kind], **{"lr": LR, "weight_decay": DECAY} | options)


class Valley(Task):
    """A loss whose gradients swing from side to side."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 30) * 0.1)

    def loss(self, rank: int, step: int) -> Tensor:
        noise = 0.1 * training.noise(rank, step, (40, 30))
        return (self.weight - noise + 0.2 * (-1.0) ** step).square().sum()


class Slopes(Valley):
    """A valley that is much steeper in some directions."""

    def loss(self, rank: int, step: int) -> Tensor:
        noise = 0.1 * training.noise(rank, step, (40, 30))
        return (torch.logspace(-1, 1, 30) * (self.weight - noise)).square().sum()


class Valleys(Task):
    """Two valleys."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Valley(), Valley()

    def loss(self, rank: int, step: int) -> Tensor:
        return self.first.loss(rank, step) + self.second.loss(rank, step)


def auto(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": 0.2, "min_numel": 0, "momentum": "auto"} | settings)


def begun(kind: str, build: Any = Valley, settings: Any = None, **options: Any) -> tuple[Any, Any]:
    """A task and its compressed optimizer."""
    setup = Setup(build=build, optimizer=making(kind, **options))
    return setup.start(auto(**settings or {}))


def exchanged_by_hand(task: Task, optimizer: Any, step: int, loss_times: float = 1.0) -> Any:
    """Exchange gradients; returns a context for a step on them as they are."""
    optimizer.zero_grad()
    (task.loss(hvd.rank(), step) * loss_times).backward()
    if world.CONTROLLER == "torchrun":
        return contextlib.nullcontext()
    optimizer.synchronize()
    return optimizer.skip_synchronize()


def by_closure(task: Task, optimizer: Any, step: int) -> None:
    """Gradients are computed, and exchanged, within the step."""
    is_ddp, losses = world.CONTROLLER == "torchrun", list[Tensor]()

    def closure() -> Tensor:
        exchanged_by_hand(task, optimizer, step)
        losses.append(torch.ones(()))
        return losses[-1]

    with contextlib.nullcontext() if is_ddp else optimizer.skip_synchronize():
        assert optimizer.step(closure) is losses[-1]


def clipped(task: Task, optimizer: Any, step: int) -> None:
    """Gradients are clipped after the exchange."""
    with exchanged_by_hand(task, optimizer, step):
        nn.utils.clip_grad_norm_(task.parameters(), 0.5)
        optimizer.step()


def falling(task: Any, optimizer: Any, step: int) -> None:
    """The learning rate and the momentum fall, as schedulers let them."""
    for group in optimizer.param_groups:
        group["lr"], group["momentum"] = LR * 0.8**step, MOMENTUM - 0.05 * step
    training.ordinary(task, optimizer, step)


def arrays(optimizer: Any, name: str) -> list[Tensor]:
    """A state of all tensors."""
    return [*TopKEF.of(optimizer).state_dict()[f"state.{name}"]["residuals"].values()]


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("kind", "options", "take", "exchange"),
    [
        ("SGD", {}, training.ordinary, "allgather"),
        ("SGD", {"nesterov": True}, falling, "sharded"),
        ("SGD", {"fused": True}, by_closure, "allgather"),
        ("AdamW", {}, clipped, "sharded"),
        ("Adam", {"amsgrad": True}, training.ordinary, "allgather"),
        ("AdamW", {"fused": True}, by_closure, "allgather"),
    ],
    ids=["SGD", "Nesterov", "fused SGD", "clipped", "Adam", "fused AdamW"],
)
def test_steps_are_those_of_the_formula(
    kind: str, options: dict[str, Any], take: Any, exchange: str
) -> None:
    settings = {"exchange": exchange, "follow_lr": "auto"}
    task, optimizer = begun(kind, settings=settings, **options)
    exact, applied, least = Exact(task.weight), list[Tensor](), 1.0
    optimizer.register_step_post_hook(lambda *_: applied.append(task.weight.grad.clone()))
    unit = largest = 0.0  # learning rates
    for step in range(STEPS):
        take(task, optimizer, step)
        (codes,), factors = arrays(optimizer, "arrivals"), arrays(optimizer, "factors")
        (group,) = optimizer.param_groups
        unit, largest = max(group["lr"], 0.95 * unit), max(largest, group["lr"])
        pair = torch.ones(2) if kind == "SGD" else factors[0]
        exact.step(group, applied[-1], pair, 0.5 * (unit / largest) ** 2)
        assert codes.tolist() == exact.codes.reshape(-1).tolist()
        near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(local(task.weight).double(), torch.tensor(exact.p), **near)
        assert_ranks_equal([task.weight.detach(), codes, *factors])
        least = min(least, TopKEF.of(optimizer).stats().step_factor)
    assert TopKEF.of(optimizer).stats().steps == STEPS
    assert kind == "SGD" or 0.0999 < least < 0.95
    assert codes.min() < 128 < codes.max()


@pytest.mark.whole
@pytest.mark.world_size(2)
def test_ranks_send_what_moves_adams_weights_most() -> None:
    """Weights are about v^(-1/4); a v far below its mean counts as a larger one."""
    task, optimizer = begun("AdamW", Slopes)
    by_magnitude = list[bool]()
    for step in range(8):
        residuals = TopKEF.of(optimizer).state_dict()["residuals"]
        waiting = residuals["weight"].view(40, 30).clone() if residuals else torch.zeros(40, 30)
        v = optimizer.state[task.weight].get("exp_avg_sq", torch.ones(40, 30)).clone()
        (gradient,) = torch.autograd.grad(task.loss(hvd.rank(), step), [task.weight])
        training.ordinary(task, optimizer, step)
        left = TopKEF.of(optimizer).state_dict()["residuals"]["weight"].view(40, 30)
        sent, magnitude = left == 0, (waiting + gradient).abs()
        least = 2.0 ** (v.mean().log2().floor() - 7)
        keys = magnitude * v.clamp(min=least) ** -0.25
        assert sent.sum() == 240
        assert keys[sent].min() > keys[~sent].max() / 1.25
        by_magnitude.append(bool(magnitude[sent].min() >= magnitude[~sent].max()))
    assert by_magnitude[0] and not any(by_magnitude[1:])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_is_sent_whole_has_the_optimizers_own_step(kind: str) -> None:
    """After `set_ratio(1.0)` weights and state are those of dense training, to the bit."""
    (task, optimizer), (twin, dense) = begun(kind), begun(kind, settings={"ratio": 1.0})
    TopKEF.of(optimizer).set_ratio(1.0)
    for step in range(4):
        training.ordinary(task, optimizer, step)
        training.ordinary(twin, dense, step)
    assert_same(training.snapshot(task), training.snapshot(twin))
    ours, its = (each.state_dict()["state"][0] for each in (optimizer, dense))
    assert list(ours) == list(its) and all(torch.equal(ours[key], its[key]) for key in its)
    assert all((codes == 255).all() for codes in arrays(optimizer, "arrivals"))


@pytest.mark.whole
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_dense_run_goes_on_from_a_checkpoint_and_the_reverse(kind: str) -> None:
    """The optimizer's state has its own keys, and SGD's momentum goes on as fast as before."""
    task, optimizer = begun(kind)
    plain = nn.Parameter(task.weight.detach().clone())
    dense = making(kind)([plain])
    for _ in range(3):
        plain.grad = torch.ones(40, 30)
        dense.step()
    optimizer.load_state_dict(dense.state_dict())
    with torch.no_grad():
        task.weight.copy_(plain)
    training.ordinary(task, optimizer, 0)
    if kind == "SGD":
        assert all(codes.min() > 240 for codes in arrays(optimizer, "arrivals"))
    ours, its = (each.state_dict() for each in (optimizer, dense))
    assert list(ours["state"][0]) == list(its["state"][0])
    for key, value in its["state"][0].items():
        found = ours["state"][0][key]
        assert (found.dtype, found.device, found.shape) == (value.dtype, value.device, value.shape)
    its["state"] = ours["state"]
    dense.load_state_dict(its)
    before, plain.grad = plain.detach().clone(), torch.zeros(40, 30)
    dense.step()
    assert not torch.equal(before, plain)


@pytest.mark.world_size(2)
def test_training_goes_on_dense_after_a_fall_back() -> None:
    """The optimizer applies what its buffer holds, with its own momentum."""
    task, optimizer = begun("SGD", settings={"guard": Guard(nonfinite=2)})
    training.train(task, optimizer, range(6))
    buffer, p = optimizer.state[task.weight]["momentum_buffer"], task.weight
    for _ in range(2):
        with exchanged_by_hand(task, optimizer, 0, torch.nan):
            p.grad.zero_()
            optimizer.step()
    before, start = buffer.double().clone(), p.detach().double().clone()
    training.ordinary(task, optimizer, 6)
    assert TopKEF.of(optimizer)._compressor.guard.has_ended
    own = MOMENTUM * before + p.grad + DECAY * start
    torch.testing.assert_close(buffer.double(), own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(p.double(), start - LR * own, rtol=1e-4, atol=1e-5)
    assert_ranks_equal([p.detach(), buffer])


@pytest.mark.world_size(2, 3)
def test_ranks_agree_where_owners_alone_select() -> None:
    """All ranks have the same weights, also a rank that owns no shard of the tensor."""
    settings = {"ratio": (1.0, 0.05), "exchange": "sharded"}
    task, optimizer = begun("SGD", settings=settings)
    for step in range(STEPS):
        training.ordinary(task, optimizer, step)
        assert_ranks_equal([task.weight.detach()])
    (codes,) = arrays(optimizer, "arrivals")
    assert codes.min() < 143 < 159 < codes.max()  # phi of 0.1, and of 0.15


# Steps that raise.


def everything(task: Any, optimizer: Any) -> list[Tensor]:
    """Copies of weights, of the optimizer's state, and of TopKEF's."""
    found = [p.detach() for p in task.parameters()]
    found += [each for p in task.parameters() for each in optimizer.state.get(p, {}).values()]
    state = TopKEF.of(optimizer).state_dict()
    parts = [part for key, part in state.items() if key == "residuals" or "state." in key]
    parts = [part.get("residuals", part) for part in parts]
    return [each.clone() for each in (*found, *(x for part in parts for x in part.values()))]


def raising(*_: Any) -> None:
    raise InterruptedError


def raise_once(optimizer: Any) -> None:
    """Take a step that raises in the optimizer's own."""
    optimizer._init_group = raising
    with pytest.raises(InterruptedError):
        optimizer.step()
    del optimizer._init_group


def in_a_hook(task: Any, optimizer: Any, step: int) -> None:
    """A hook that a user has registered before the exchange."""
    hook = optimizer.register_step_pre_hook(raising)
    with exchanged_by_hand(task, optimizer, step), contextlib.suppress(InterruptedError):
        optimizer.step()
    hook.remove()
    assert task.second.weight.grad is not None


def in_its_own_step(task: Any, optimizer: Any, step: int) -> None:
    """Once gradients are hidden."""
    with exchanged_by_hand(task, optimizer, step):
        raise_once(optimizer)
    assert task.second.weight.grad is None
    optimizer.state_dict()
    assert task.second.weight.grad is not None


def in_its_own_step_and_unseen(task: Any, optimizer: Any, step: int) -> None:
    """As `in_its_own_step`, without any hook until the next backward."""
    with exchanged_by_hand(task, optimizer, step):
        raise_once(optimizer)


def in_a_closure(task: Any, optimizer: Any, step: int) -> None:
    """A closure that has exchanged gradients."""

    def closure() -> Tensor:
        exchanged_by_hand(task, optimizer, step)
        raise InterruptedError

    is_ddp = world.CONTROLLER == "torchrun"
    around = contextlib.nullcontext() if is_ddp else optimizer.skip_synchronize()
    with around, contextlib.suppress(InterruptedError):
        optimizer.step(closure)


@pytest.mark.everywhere
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    "fail", [in_a_hook, in_its_own_step, in_its_own_step_and_unseen, in_a_closure]
)
def test_a_step_that_raises_has_not_happened(kind: str, fail: Any) -> None:
    """Nothing has changed, and training goes on as it does without that step."""
    found = []
    for fails in (False, True):
        task, optimizer = begun(kind, Valleys)
        for step in range(4):
            if fails and step in (0, 2):
                before = everything(task, optimizer)
                fail(task, optimizer, step)
                for one, other in zip(before, everything(task, optimizer), strict=step > 0):
                    assert torch.equal(one, other)
            training.ordinary(task, optimizer, step)
        found.append(everything(task, optimizer))
    assert_same(*found)
    assert TopKEF.of(optimizer).stats().rolled_back == 2


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_has_not_happened(kind: str, fused: bool) -> None:
    """A fused step is called, and applies nothing."""

    def take(step: int, times: float = 1.0) -> None:
        scale = float(scaler.scale(torch.ones(())))
        with exchanged_by_hand(task, optimizer, step, scale * times):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()

    found = []
    for fails in (False, True):
        scaler = scaler_at(8.0)
        task, optimizer = begun(kind, Valleys, {"grad_scaler": scaler}, fused=fused)
        for step in range(4):
            if fails and step in (0, 2):
                before = everything(task, optimizer)
                take(step, torch.inf)
                for one, other in zip(before, everything(task, optimizer), strict=step > 0):
                    assert torch.equal(one, other)
            take(step)
        found.append(everything(task, optimizer))
    assert_same(*found)
    assert scaler.get_scale() == 2.0


def test_a_step_may_be_taken_again() -> None:
    """With the gradients that the one which raised has used."""
    found = []
    for fails in (False, True):
        task, optimizer = begun("AdamW", Valleys)
        for step in range(3):
            with exchanged_by_hand(task, optimizer, step):
                if fails and step == 1:
                    raise_once(optimizer)
                optimizer.step()
        found.append(everything(task, optimizer))
    assert_same(*found)


def test_users_hooks_see_gradients_and_weights_around_a_step() -> None:
    """Also those that were registered before compression was attached."""
    seen = list[tuple[str, Tensor, Tensor]]()

    def look(when: str) -> Any:
        def hook(optimizer: Any, *_: Any) -> None:
            ((p,),) = (group["params"] for group in optimizer.param_groups)
            seen.append((when, p.grad.clone(), p.detach().clone()))

        return hook

    def watched(parameters: Any) -> torch.optim.Optimizer:
        optimizer = making("SGD")(parameters)
        optimizer.register_step_pre_hook(look("before"))
        optimizer.register_step_post_hook(look("after"))
        return optimizer

    setup = Setup(build=Valley, optimizer=watched)
    task: Any = setup.task()
    optimizer: Any = setup.distributed(task, auto())
    if world.CONTROLLER != "torchrun":  # Horovod makes a new optimizer, without the hooks
        optimizer.register_step_pre_hook(look("before"))
        optimizer.register_step_post_hook(look("after"))
    for step in range(3):
        start = task.weight.detach().clone()
        training.ordinary(task, optimizer, step)
        # Horovod's own step calls hooks before it exchanges gradients, and once more at its end.
        around = seen[-2:] if world.CONTROLLER == "torchrun" else seen[-3:-1]
        (first, early, before), (last, late, after) = around
        assert (first, last) == ("before", "after")
        assert torch.equal(early, late) and torch.equal(early, task.weight.grad)
        assert torch.equal(before, start) and torch.equal(after, task.weight)
        assert not torch.equal(before, after)
