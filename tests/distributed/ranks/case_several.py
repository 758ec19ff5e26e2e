"""Several optimizers of one model: under DDP in one list, under Horovod each distributed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import training
from case_conservation import Both
from horovod_topk import checkpoint
from horovod_topk.errors import (
    ConfigError,
    NotAttachedError,
    RepeatedSynchronizeError,
    StateDictError,
)
from training import Task, noise
from witness import assert_close, assert_ranks_equal, assert_same, bits, spoiled
from world import CONTROLLER, adapter, hvd

DENSE = {"ratio": 1.0, "values": "float32", "exchange": "allgather"}
SPARSE = {"ratio": 0.05, "min_numel": 0, "warmup": None, "values": "float32"}
OVER_DDP = pytest.mark.skipif(CONTROLLER != "torchrun", reason="Horovod has no list of optimizers")

Split = Callable[[Any], Sequence[list[Any]]]


class Pair(Task):
    """Two networks: `one` learns to tell real from made, and `other` to make."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 4))
        self.other = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 12))

    def forward(self, rank: int, step: int, whose: str = "both") -> Tensor:
        """The loss of one of the networks, or of both; of "through" `one` is not to learn."""
        real = noise(rank, step, (8, 12))
        if whose in ("one", "both"):
            loss = (self.one(real) - 1).square().mean()
        if whose in ("other", "both"):
            own = (self.other(noise(rank, step + 500, (8, 4))) - real).square().mean()
            loss = own if whose == "other" else loss + own
        if whose in ("against", "through"):
            made = self.other(noise(rank, step + 500, (8, 4)))
            if whose == "through":
                return (self.one(made) - 1).square().mean()
            loss = (self.one(real) - 1).square().mean() + self.one(made.detach()).square().mean()
        return loss


class Job:
    """A model and its optimizers, distributed as a user does it.

    Args:
        split: returns the parameters of each optimizer; others are frozen.
        make: makes each optimizer.
        settings: of the compressor; None: dense.
        options: of DistributedDataParallel.
    """

    def __init__(
        self, split: Split, make: Sequence[Any], settings: dict[str, Any] | None, **options: Any
    ) -> None:
        torch.manual_seed(7)
        self.task = Pair()
        parts = split(self.task)
        trained = [p for part in parts for p in part]
        for p in self.task.parameters():
            p.requires_grad_(any(p is each for each in trained))
        self.optimizers = [each(own) for each, own in zip(make, parts, strict=True)]
        self.model: Any = self.task
        compression = None if settings is None else adapter.TopKEF(**settings)
        if CONTROLLER == "torchrun":
            self.model = DistributedDataParallel(self.task, bucket_cap_mb=0.001, **options)
            if compression is not None:
                compression.attach(self.model, self.optimizers)
            return
        named = {"named_parameters": [*self.task.named_parameters()]}
        named["compression"] = compression or hvd.Compression.none
        self.optimizers = [hvd.DistributedOptimizer(each, **named) for each in self.optimizers]

    def backward(self, step: int, whose: str = "both") -> None:
        self.model(hvd.rank(), step, whose).backward()

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    @property
    def states(self) -> list[Any]:
        """The states that `TopKEF.of` returns; DDP has one for all optimizers."""
        if CONTROLLER == "torchrun":
            return [adapter.TopKEF.of(self.model)]
        return [adapter.TopKEF.of(each) for each in self.optimizers]

    def residuals(self, network: str) -> list[Tensor]:
        found = [state.state_dict()["residuals"] for state in self.states]
        every = {name: kept for each in found for name, kept in each.items()}
        return [kept for name, kept in sorted(every.items()) if name.startswith(f"{network}.")]

    def total(self, count: str) -> int:
        return sum(getattr(state.stats(), count) for state in self.states)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.02)


def by_dimensions(task: Any) -> Sequence[list[Any]]:
    every = list(task.parameters())
    return [p for p in every if p.ndim == 2], [p for p in every if p.ndim != 2]


def by_network(task: Any) -> Sequence[list[Any]]:
    return list(task.one.parameters()), list(task.other.parameters())


# Loops.

Take = Callable[[Job, int], None]


def ordinary(job: Job, step: int) -> None:
    job.zero_grad()
    job.backward(step)
    for each in job.optimizers:
        each.step()


def in_turns(job: Job, step: int) -> None:
    """As most GANs are trained; `one` gets gradients of the second loss, which nobody applies."""
    for each, whose in zip(job.optimizers, ("against", "through"), strict=True):
        each.zero_grad()
        job.backward(step, whose)
        each.step()


def cleared_at_once(job: Job, step: int) -> None:
    """In the second backward the gradients of `one` pile up on those that it has applied."""
    job.zero_grad()
    for each, whose in zip(job.optimizers, ("against", "through"), strict=True):
        job.backward(step, whose)
        each.step()


def with_zeros(job: Job, step: int) -> None:
    """Gradients of zeros in the place of none."""
    for each, whose in zip(job.optimizers, ("against", "through"), strict=True):
        each.zero_grad(set_to_none=False)
        job.backward(step, whose)
        each.step()


def toggled(job: Job, step: int) -> None:
    """As Lightning's `toggle_optimizer`."""
    networks = job.task.one, job.task.other
    for at, whose in enumerate(("against", "through")):
        networks[1 - at].requires_grad_(False)
        job.backward(step, whose)
        job.optimizers[at].step()
        job.optimizers[at].zero_grad()
        networks[1 - at].requires_grad_(True)


def two_losses(job: Job, step: int) -> None:
    """Both backwards before both steps, as of an actor and its critic."""
    job.zero_grad()
    job.backward(step, "one")
    job.backward(step, "other")
    for each in job.optimizers:
        each.step()


def one_more_often(job: Job, step: int) -> None:
    """Both get gradients in each backward; `other` applies those of one in three."""
    job.zero_grad()
    job.backward(step)
    job.optimizers[0].step()
    if step % 3 == 1:
        job.optimizers[1].step()


def train(job: Job, steps: int, take: Take = ordinary, first: int = 0) -> list[Tensor]:
    for step in range(first, first + steps):
        take(job, step)
    assert_ranks_equal(job.task.parameters())
    return training.snapshot(job.task)


ALTERNATING = [
    pytest.param(take, options, marks=[] if take is toggled else OVER_DDP)
    for take in (in_turns, cleared_at_once, with_zeros, toggled)
    for options in ({}, {"gradient_as_bucket_view": True})
    if CONTROLLER == "torchrun" or not options
]


# Laws.


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("split", "make"),
    [
        (by_dimensions, (muon, training.adamw)),
        (by_network, (training.sgd, training.adamw)),
        (by_network, (training.adam, training.adam)),
    ],
    ids=["muon-adamw", "sgd-adamw", "adam-adam"],
)
@pytest.mark.parametrize("take", [ordinary, one_more_often])
def test_where_all_is_sent_training_is_dense_to_the_bit(split: Any, make: Any, take: Take) -> None:
    if CONTROLLER != "torchrun" and take is one_more_often:
        pytest.skip("Horovod refuses to clear gradients that it has begun to exchange")
    ours, dense = (Job(split, make, settings) for settings in (DENSE, None))
    start = training.snapshot(ours.task)
    assert_same(train(ours, 5, take), train(dense, 5, take))
    assert not any(map(torch.equal, start, training.snapshot(ours.task)))


@pytest.mark.everywhere
@pytest.mark.parametrize(("take", "options"), ALTERNATING)
def test_two_losses_in_turns_are_dense_to_the_bit(take: Take, options: dict[str, Any]) -> None:
    make, options = (training.adam, training.sgd), {"find_unused_parameters": True, **options}
    ours, dense = (Job(by_network, make, settings, **options) for settings in (DENSE, None))
    assert_same(train(ours, 5, take), train(dense, 5, take))
    assert ours.total("steps") == 10


@pytest.mark.everywhere
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(("take", "options"), ALTERNATING)
def test_two_losses_in_turns_with_residuals(take: Take, options: dict[str, Any]) -> None:
    """Each network's steps count; the other one's gradients and residuals stay as they are."""
    make, options = (training.adamw, training.sgd), {"find_unused_parameters": True, **options}
    job = Job(by_network, make, SPARSE, **options)
    train(job, 4, take)
    before, moments = bits(job.residuals("other")), copy.deepcopy(job.optimizers[1].state_dict())
    job.zero_grad()
    job.task.other.requires_grad_(take is not toggled)
    job.backward(9, "against")
    assert all(p.grad is None for p in job.task.other.parameters())
    job.optimizers[0].step()
    job.task.other.requires_grad_(True)
    assert torch.equal(bits(job.residuals("other")), before)
    assert str(moments) == str(job.optimizers[1].state_dict())
    job.optimizers[0].zero_grad()
    train(job, 4, take, 10)
    assert job.total("steps") == 17
    assert not any("not applied" in text for state in job.states for text in state.stats().warnings)


@pytest.mark.everywhere
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("view", [True, False])
def test_two_backwards_before_two_steps(view: bool) -> None:
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    job, alike = (Job(by_network, (training.adamw, training.sgd), SPARSE, **options) for _ in "12")
    assert_same(train(job, 8, two_losses), train(alike, 8, ordinary))
    assert job.total("steps") == alike.total("steps") == 16
    assert torch.equal(bits(job.residuals("one")), bits(alike.residuals("one")))


@OVER_DDP
@pytest.mark.everywhere
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_network_that_one_rank_alone_has_used(view: bool, set_to_none: bool) -> None:
    """All ranks step it: others see it by what DistributedDataParallel writes."""
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    job = Job(by_network, (training.adamw, training.sgd), SPARSE, **options)
    train(job, 2)
    for step in range(2, 8):
        for each in job.optimizers:
            each.zero_grad(set_to_none=set_to_none)
        job.backward(step, "both" if hvd.rank() == step % hvd.size() else "one")
        assert any(p.grad.any() for p in job.task.other.parameters())
        for each in job.optimizers:
            each.step()
        assert_ranks_equal(job.task.parameters())
    assert job.total("steps") == 16 and job.total("rolled_back") == 0


@pytest.mark.everywhere
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_each_network_trains_as_if_it_were_alone(exchange: str) -> None:
    """Each tensor is adapted by the optimizer that has it, and by no other."""
    settings = {"ratio": 0.05, "min_numel": 0, "exchange": exchange}
    make = training.sgd, training.adamw
    job = Job(by_network, make, settings)
    trained = train(job, 8)
    stats = [state.stats() for state in job.states]
    assert job.total("steps") == 16 and not any(each.warnings for each in stats)
    assert job.total("elements") == sum(p.numel() for p in job.task.parameters())
    for at, network in enumerate(("one", "other")):

        def alone(task: Any, network: str = network) -> Sequence[list[Any]]:
            return (list(getattr(task, network).parameters()),)

        def take(own: Job, step: int, network: str = network) -> None:
            own.zero_grad()
            own.backward(step, network)
            own.optimizers[0].step()

        own = Job(alone, (make[at],), settings)
        assert_same(train(own, 8, take)[4 * at : 4 * at + 4], trained[4 * at : 4 * at + 4])
        assert torch.equal(bits(own.residuals(network)), bits(job.residuals(network)))


@OVER_DDP
@pytest.mark.everywhere
@pytest.mark.parametrize("make", [training.sgd, training.adamw])
@pytest.mark.parametrize("by", ["rate", "gradient", "zeros", "requires_grad"])
def test_a_frozen_network_is_as_a_frozen_group(make: Any, by: str) -> None:
    """To the bit one optimizer with two groups, of which one does not learn in the first steps."""

    def grouped(parameters: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        return make([{"params": every[:4]}, {"params": every[4:]}])

    settings = {"ratio": 0.05, "min_numel": 0}
    unused = {"find_unused_parameters": by == "requires_grad"}
    two = Job(by_network, (make, make), settings, **unused)
    one = Job(lambda task: (list(task.parameters()),), (grouped,), settings, **unused)

    def frozen(job: Job, step: int) -> None:
        is_frozen, group = step < 4, job.optimizers[-1].param_groups[-1]
        others = job.task.other
        group["lr"] = 0.0 if by == "rate" and is_frozen else 0.01
        others.requires_grad_(not (by == "requires_grad" and is_frozen))
        job.zero_grad()
        job.backward(step)
        if by in ("gradient", "zeros") and is_frozen:
            others.zero_grad(set_to_none=by == "gradient")
        for each in job.optimizers:
            each.step()
        others.requires_grad_(True)

    start = training.snapshot(two.task.other)
    assert_same(train(two, 4, frozen), train(one, 4, frozen))
    if by != "zeros":  # on which weights decay
        assert_same(start, training.snapshot(two.task.other))
    assert not any(map(torch.any, two.residuals("other")))
    assert_same(train(two, 6, frozen, 4), train(one, 6, frozen, 4))
    assert_same(two.residuals("other"), one.residuals("other"))


@OVER_DDP
@pytest.mark.everywhere
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_nothing_is_lost_and_nothing_comes_twice(exchange: str) -> None:
    """What was applied is what the steps used, less what all residuals have."""
    job = Job(by_network, (training.plain_sgd,) * 2, {**SPARSE, "exchange": exchange})
    task, rate = job.task, 0.05
    seen: dict[int, Tensor] = {}
    for p in task.parameters():
        p.register_hook(partial(lambda key, gradient: seen.update({key: gradient.clone()}), id(p)))
    start, used = training.snapshot(task), [torch.zeros_like(p) for p in task.parameters()]
    for step in range(9):
        before = bits(job.residuals("other"))
        one_more_often(job, step)
        applied = [*task.one.parameters(), *(task.other.parameters() if step % 3 == 1 else ())]
        assert torch.equal(before, bits(job.residuals("other"))) == (step % 3 != 1)
        for p, total in zip(task.parameters(), used, strict=True):
            total += seen[id(p)] if any(p is each for each in applied) else 0.0
    (state,) = job.states
    saved = state.state_dict()
    for (name, p), first, total in zip(task.named_parameters(), start, used, strict=True):
        waits = saved["residuals"][name].reshape(p.shape)
        mean = hvd.allreduce(total - waits, name=f"used.{name}")
        if exchange == "sharded":
            shards = hvd.allgather_object(saved["owned"]["residuals"][name].sum())
            moved = float((first - p.detach()).sum()) / rate
            assert abs(moved - float(mean.sum() - sum(shards))) < 1e-3 * float(total.norm())
        else:
            assert_close([(first - p.detach()) / rate], [mean], 1e-4)


# States.


def interrupted(folder: Path, settings: dict[str, Any], *, by_file: bool) -> tuple[Job, Job]:
    """A job that was not interrupted, and one that goes on from what was saved at its half."""
    make = training.sgd, training.adamw
    take = one_more_often if CONTROLLER == "torchrun" else ordinary
    first, again = (Job(by_network, make, settings) for _ in "12")
    train(first, 5, take)
    again.task.load_state_dict(copy.deepcopy(first.task.state_dict()))
    for ours, theirs in zip(again.optimizers, first.optimizers, strict=True):
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for at, (old, new) in enumerate(zip(first.states, again.states, strict=True)):
        if by_file:
            checkpoint.save(folder, old, name=f"topkef{at}")
            checkpoint.load(folder, new, name=f"topkef{at}")
        else:
            new.load_state_dict(old.state_dict())
    train(first, 5, take, 5)
    train(again, 5, take, 5)
    return first, again


@pytest.mark.everywhere
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
@pytest.mark.parametrize("by_file", [True, False], ids=["file", "state_dict"])
def test_a_restart_changes_no_bit(exchange: str, by_file: bool, tmp_path: Path) -> None:
    settings = {"ratio": 0.1, "min_numel": 0, "exchange": exchange}  # with a warm-up
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    first, again = interrupted(folder, settings, by_file=by_file)
    assert_same(training.snapshot(again.task), training.snapshot(first.task))
    for network in ("one", "other"):
        assert torch.equal(bits(again.residuals(network)), bits(first.residuals(network)))
    if by_file:
        assert [state.steps for state in again.states] == [state.steps for state in first.states]


@OVER_DDP
def test_a_checkpoint_is_shared_out_to_another_exchange(tmp_path: Path) -> None:
    """What all residuals have together stays, and each optimizer has its own counters."""
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    saved, loaded = (
        Job(by_network, (training.sgd, training.adamw), {**SPARSE, "exchange": exchange})
        for exchange in ("allgather", "sharded")
    )
    train(saved, 7, one_more_often)
    checkpoint.save(folder, *saved.states)
    hvd.barrier()
    checkpoint.load(folder, *loaded.states)
    theirs, own = (job.states[0].state_dict() for job in (saved, loaded))
    assert theirs["optimizers"][1]["committed"] == 2 and own["optimizers"] == theirs["optimizers"]
    for name, kept in theirs["residuals"].items():
        mean = hvd.allreduce(kept, name=f"saved.{name}")
        assert_close([hvd.allreduce(own["residuals"][name], name=f"loaded.{name}")], [mean])
    train(loaded, 2)


@OVER_DDP
def test_a_state_goes_from_two_optimizers_to_one_and_back() -> None:
    """Arrays are by tensor name, whichever optimizer had them; the format of one is as it was."""
    job = Job(by_network, (training.plain_sgd,) * 2, SPARSE)
    train(job, 4)
    (state,) = job.states
    saved = state.state_dict()
    assert [each["committed"] for each in saved["optimizers"]] == [4, 4]
    whole = Job(lambda task: (list(task.parameters()),), (training.plain_sgd,), SPARSE)
    (single,) = whole.states
    single.load_state_dict(saved)
    assert "optimizers" not in single.state_dict() and single.state_dict()["committed"] == 4
    for name, kept in saved["residuals"].items():
        assert torch.equal(single.residual(name), kept) and bool(kept.any())
    state.reset()
    assert not any(map(torch.any, state.state_dict()["residuals"].values()))
    state.load_state_dict(single.state_dict())
    assert torch.equal(bits(job.residuals("one")), bits(whole.residuals("one")))
    assert torch.equal(bits(job.residuals("other")), bits(whole.residuals("other")))


@OVER_DDP
def test_a_state_that_does_not_fit_changes_nothing() -> None:
    job = Job(by_network, (training.sgd, training.adamw), SPARSE)
    train(job, 3)
    (state,) = job.states
    before = state.state_dict()
    for network in ("one", "other"):
        wrong = copy.deepcopy(before)
        wrong["residuals"][f"{network}.0.weight"] = torch.zeros(3)
        with pytest.raises(StateDictError, match=rf"{network}\.0\.weight.*3 elements"):
            state.load_state_dict(wrong)
    strange = copy.deepcopy(before)
    strange["residuals"]["third"] = torch.zeros(3)
    with pytest.raises(StateDictError, match=r"third.*has no such tensor"):
        state.load_state_dict(strange)
    with pytest.raises(StateDictError, match="which are no counters"):
        state.load_state_dict({**before, "optimizers": 2})
    now = state.state_dict()
    assert all(torch.equal(now["residuals"][n], kept) for n, kept in before["residuals"].items())


@OVER_DDP
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_two_optimizers_take_the_place_of_one_and_the_reverse(exchange: str) -> None:
    """Residuals stay, as where one takes the place of another."""
    compression = adapter.TopKEF(**SPARSE, exchange=exchange)
    job = Job(lambda task: (list(task.parameters()),), (training.sgd,), None)
    compression.attach(job.model, job.optimizers[0])
    heard = list[int]()
    adapter.TopKEF.of(job.model).on_step(lambda counters: heard.append(counters.optimizer))
    train(job, 3)
    before = [bits(job.residuals(network)) for network in ("one", "other")]
    makers = training.adamw, training.sgd
    parts = by_network(job.task)
    job.optimizers = [make(part) for make, part in zip(makers, parts, strict=True)]
    compression.attach(job.model, job.optimizers)
    assert [bits(job.residuals(n)).tolist() for n in ("one", "other")] == [
        each.tolist() for each in before
    ]
    train(job, 3, first=3)
    job.optimizers = [training.adamw(job.task.parameters())]
    compression.attach(job.model, job.optimizers[0])
    train(job, 3, first=6)
    assert heard == [0, 0, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0]
    assert job.total("steps") == 3 and job.total("rolled_back") == 0


# Steps.


def test_an_infinity_in_one_network_is_not_the_others() -> None:
    """A GradScaler skips the steps of one optimizer."""
    job = Job(by_network, (training.adamw, training.sgd), SPARSE)
    train(job, 2)
    one = bits(job.residuals("one"))
    with spoiled(job.task.one[0].weight, float("inf")):
        job.zero_grad()
        job.backward(2)
    for each in job.optimizers:
        each.synchronize() if CONTROLLER != "torchrun" else None
    assert all(p.grad.isfinite().all() for p in job.task.other.parameters())
    assert not job.task.one[0].weight.grad.isfinite().all()
    other = bits(job.residuals("other"))
    if CONTROLLER == "torchrun":
        job.optimizers[1].step()
    else:
        with job.optimizers[1].skip_synchronize():
            job.optimizers[1].step()
    assert torch.equal(bits(job.residuals("one")), one)
    assert not torch.equal(bits(job.residuals("other")), other)
    job.zero_grad()
    train(job, 2, first=3)
    assert (job.total("steps"), job.total("rolled_back")) == (9, 1)


@OVER_DDP
@pytest.mark.parametrize("known", [True, False])
def test_a_scaled_loss_of_each_network(known: bool) -> None:
    """Powers of two change no bit, and a scaler that skips one optimizer's step rolls it back."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    options = {"find_unused_parameters": True}
    settings = {**SPARSE, **({"grad_scaler": scaler} if known else {})}
    job = Job(by_network, (training.adamw, training.sgd), settings, **options)
    alike = Job(by_network, (training.adamw, training.sgd), SPARSE, **options)

    def scaled(job: Job, step: int) -> None:
        for each, whose in zip(job.optimizers, ("against", "through"), strict=True):
            each.zero_grad()
            loss = job.model(hvd.rank(), step, whose)
            scaler.scale(loss).backward()
            scaler.step(each)
        scaler.update()

    trained, expected = train(job, 6, scaled), train(alike, 6, in_turns)
    if known:
        assert_same(trained, expected)
    with spoiled(job.task.other[0].weight, float("inf")):
        scaled(job, 6)
    assert job.total("steps") == 13
    assert job.optimizers[0].state[job.task.one[0].weight]["step"] == 7


@OVER_DDP
def test_an_optimizer_whose_parameters_are_all_frozen() -> None:
    job = Job(by_network, (training.adamw, training.sgd), None)
    job.task.other.requires_grad_(False)
    job.model = DistributedDataParallel(job.task)
    adapter.TopKEF(**SPARSE).attach(job.model, job.optimizers)
    before = training.snapshot(job.task.other)

    def take(job: Job, step: int) -> None:
        job.zero_grad()
        job.backward(step, "one")
        for each in job.optimizers:
            each.step()

    train(job, 3, take)
    assert job.total("steps") == 3
    assert_same(before, training.snapshot(job.task.other))


@OVER_DDP
def test_statistics_are_of_all_optimizers() -> None:
    job = Job(by_network, (training.adamw, training.sgd), {**SPARSE, "name": "pair"})
    (state,) = job.states
    heard = list[tuple[int, int]]()
    state.on_step(lambda counters: heard.append((counters.optimizer, counters.step)))
    train(job, 4, one_more_often)
    stats, saved = state.stats(), state.state_dict()
    assert heard == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3), (0, 4)]  # 1 and 3 roll back
    assert stats.elements == sum(p.numel() for p in job.task.parameters())
    norms = [float(kept.double().norm()) ** 2 for kept in saved["residuals"].values()]
    assert abs(stats.residual_norm - sum(norms) ** 0.5) < 1e-5 * stats.residual_norm
    assert state.steps == stats.steps + stats.rolled_back == len(heard)
    assert f"{stats.elements:,} elements in 2 buckets" in str(stats)
    state.set_ratio(1.0)
    assert state.ratio == 1.0
    train(job, 1)
    assert not any(map(torch.any, state.state_dict()["residuals"].values()))
    with pytest.raises(ConfigError, match="ratio"):
        state.set_ratio(0.3)


@OVER_DDP
def test_two_losses_in_turns_of_one_optimizer() -> None:
    """The first loss's gradients were exchanged twice, and what was sent stayed in the residual."""
    job = Job(
        lambda task: (list(task.parameters()),),
        (training.sgd,),
        SPARSE,
        find_unused_parameters=True,
    )
    with pytest.raises(RepeatedSynchronizeError, match=r"one\.\d\.(weight|bias).*zero_grad"):
        two_losses(job, 0)
    job.zero_grad()
    train(job, 2)


# Optimizers that are refused, and classes around several.


@OVER_DDP
def test_a_class_around_both_is_warned_of() -> None:
    job = Job(by_dimensions, (muon, training.adamw), None)
    adapter.TopKEF(min_numel=0).attach(job.model, Both(*job.optimizers))
    (warning,) = adapter.TopKEF.of(job.model).stats().warnings
    assert "attach(model, [optimizer.inner[0], optimizer.inner[1]])" in warning


@OVER_DDP
def test_what_no_list_can_be() -> None:
    job = Job(by_network, (training.adamw, training.sgd), None)
    one, other = job.optimizers
    whole = training.sgd(job.task.parameters())
    for alone in (one, other, [other], []):
        with pytest.raises(ConfigError, match=r"as a list: TopKEF\(\).attach\(model, \[muon, ad"):
            adapter.TopKEF().attach(job.model, alone)
    with pytest.raises(ConfigError, match=r"one\.0\.weight.*AdamW has it, and SGD beside it"):
        adapter.TopKEF().attach(job.model, [one, whole])
    adapter.TopKEF().attach(job.model, [one, other])
    for again in ([one, other], one):
        with pytest.raises(ConfigError, match=r"attached to this model.*as one list"):
            adapter.TopKEF().attach(job.model, again)
    train(job, 1)
    job.zero_grad()
    job.backward(1)
    with pytest.raises(NotAttachedError, match=r"SGD.step\(\) was called, and compression is"):
        whole.step()
