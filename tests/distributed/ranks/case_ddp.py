"""What DistributedDataParallel does by itself, and what it may be asked for, with compression."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import training
from horovod_topk.errors import (
    ConfigError,
    NotAttachedError,
    PlanMismatchError,
    RepeatedSynchronizeError,
    ShapeChangedError,
    StepBeforeSynchronizeError,
    UnsupportedDtypeError,
    UnsupportedOperationError,
)
from horovod_topk.torch_training import in_backward, steps
from horovod_topk.torch_training.state import live_states
from plain import PlainTopKEF as TopKEF
from training import Setup, Task, noise
from witness import (
    assert_ranks_equal,
    assert_residuals,
    assert_same,
    bits,
    nothing_changes,
    residuals,
)
from world import adapter, hvd

pytestmark = pytest.mark.everywhere

SPARSE = {"ratio": 0.1, "min_numel": 0}


class Backwards(Task):
    """Layers in the opposite order of their use: DDP's buckets change after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(30, 5), nn.Linear(60, 30), nn.Linear(20, 60)

    def loss(self, rank: int, step: int) -> Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(noise(rank, step, (8, 20))))))
        return (self.last(hidden) - 1).square().mean()


def run(setup: Setup, compression: Any, steps: int = 6) -> tuple[list[Tensor], Any]:
    """The parameters after some steps, and the optimizer."""
    task, optimizer = setup.start(compression)
    for step in range(steps):
        setup.take_step(task, optimizer, step)
    assert_ranks_equal(task.parameters())
    return training.snapshot(task), optimizer


def take(model: Any, optimizer: Any, step: int) -> None:
    """A step of a model that is wrapped by hand."""
    optimizer.zero_grad()
    model(hvd.rank(), step).backward()
    optimizer.step()


# Buckets, and how gradients come.


def test_rebuilt_buckets_lose_nothing() -> None:
    """To the bit what one bucket does."""
    setup, whole = (Setup(build=Backwards, options={"bucket_cap_mb": m}) for m in (0.004, 25))
    parameters, optimizer = run(setup, TopKEF(**SPARSE))
    sizes = optimizer.ddp._get_ddp_logging_data()
    assert sizes["has_rebuilt_buckets"] and sizes["rebuilt_bucket_sizes"] != sizes["bucket_sizes"]
    expected, other = run(whole, TopKEF(**SPARSE))
    assert_same(parameters, expected)
    assert_residuals(optimizer, residuals(other))


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 25},
        {"broadcast_buffers": False, "bucket_cap_mb": 0.004},
    ],
    ids=str,
)
def test_options_of_ddp_change_no_bit(options: dict[str, Any], exchange: str) -> None:
    settings = {**SPARSE, "momentum": "auto", "exchange": exchange}
    plain, _ = run(Setup(), TopKEF(**settings))
    ours, optimizer = run(Setup(options=options), TopKEF(**settings))
    assert_same(ours, plain)
    assert TopKEF.of(optimizer).stats().steps == 6


@pytest.mark.parametrize("view", [False, True])
def test_dtypes_of_a_static_graph_change_no_bit(view: bool) -> None:
    """In the first backward DDP calls no bucket the last if each dtype has its own bucket."""
    static = {"static_graph": True, "gradient_as_bucket_view": view}
    (plain, _), (ours, _) = (
        run(Setup(build=training.MixedDtypes, options=options), TopKEF(**SPARSE))
        for options in ({}, static)
    )
    assert_same(ours, plain)


@pytest.mark.parametrize("view", [True, False])
def test_gradients_accumulate_without_an_exchange(view: bool) -> None:
    """As if the gradients of all passes were one."""
    setup = Setup(options={"gradient_as_bucket_view": view})
    (task, optimizer), (other, plain) = (
        (task, setup.distributed(task, TopKEF(**SPARSE))) for task in (setup.task(), setup.task())
    )
    for step in range(4):
        optimizer.zero_grad()
        for i in range(2):
            with optimizer.ddp.no_sync() if i < 1 else nullcontext():
                task.loss(hvd.rank(), step).backward()
        optimizer.step()
        plain.zero_grad()
        (2 * other.loss(hvd.rank(), step)).backward()
        plain.step()
    assert_same(training.snapshot(task), training.snapshot(other))
    assert TopKEF.of(optimizer).stats().steps == 4


def test_what_an_unused_parameter_has_not_sent_is_applied() -> None:
    """DDP leaves the gradients of parameters alone that no rank has used."""
    setup = Setup(build=training.Optional, optimizer=training.plain_sgd)
    task, optimizer = setup.start(TopKEF(**SPARSE))
    start, dense, given = training.snapshot(task), setup.task(), None
    for step in range(8):
        optimizer.zero_grad()
        task.absent_everywhere = dense.absent_everywhere = step >= 4
        task.loss(hvd.rank(), step).backward()
        dense.load_state_dict(task.state_dict())
        dense.zero_grad()
        dense.loss(hvd.rank(), step).backward()
        optimizer.step()
        local = [torch.zeros_like(p) if p.grad is None else p.grad for p in dense.parameters()]
        means = [hvd.allreduce(gradient) for gradient in local]
        given = means if given is None else [a + b for a, b in zip(given, means, strict=True)]
    assert given is not None
    left = [hvd.allreduce(e) for e in residuals(optimizer).values()]
    names = list(residuals(optimizer))
    for (name, p), before, whole in zip(task.named_parameters(), start, given, strict=True):
        applied = (before - p.detach()) / 0.05 + left[names.index(name)].view_as(p)
        torch.testing.assert_close(applied, whole, rtol=1e-4, atol=1e-4)
    assert task.never.weight.grad is None  # nothing was left of it, and nothing is made up


def test_a_parameter_that_is_frozen_later_stays_where_it_is() -> None:
    setup = Setup(options={"find_unused_parameters": True})
    task, optimizer = setup.start(TopKEF(**SPARSE, momentum="auto"))
    for step in range(6):
        if step == 3:
            optimizer.zero_grad()
            task.net[0].weight.requires_grad_(False)
            before = task.net[0].weight.detach().clone()
        training.ordinary(task, optimizer, step)
    assert torch.equal(task.net[0].weight, before)
    assert TopKEF.of(optimizer).stats().steps == 6
    assert_ranks_equal(task.parameters())


@pytest.mark.parametrize(
    "options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str
)
def test_what_is_frozen_between_wrapping_and_attaching(options: dict[str, Any]) -> None:
    """DDP waits for its gradient for ever, unless it looks for unused parameters."""
    task = Setup().task()
    model = DistributedDataParallel(task, **options)
    task.net[0].weight.requires_grad_(False)
    optimizer = training.sgd(p for p in task.parameters() if p.requires_grad)
    if not options:
        with pytest.raises(ConfigError, match=r"net.0.weight.*after the model was wrapped.*find_u"):
            TopKEF(**SPARSE).attach(model, optimizer)
        model = DistributedDataParallel(task)
    TopKEF(**SPARSE).attach(model, optimizer)
    for step in range(3):
        take(model, optimizer, step)
    assert_ranks_equal(task.parameters())
    assert adapter.TopKEF.of(model).stats().steps == 3


def test_what_is_trained_only_after_wrapping_is_named() -> None:
    """DDP would never exchange its gradient, and ranks would differ."""
    task = Setup().task()
    task.net[0].weight.requires_grad_(False)
    model = DistributedDataParallel(task, find_unused_parameters=True)
    task.net[0].weight.requires_grad_(True)
    task.net[1].weight.requires_grad_(False)  # as many as before, of other sizes
    with pytest.raises(ConfigError, match=r"net.0.weight.*when the model was wrapped.*model.modul"):
        TopKEF(**SPARSE).attach(model, training.sgd(task.parameters()))


def test_a_layer_that_is_replaced_after_wrapping_is_named() -> None:
    task = Setup().task()
    model = DistributedDataParallel(task)
    head, task.net[3] = task.net[3], nn.Linear(33, 5)
    with pytest.raises(ConfigError, match=r"net.3.weight.*no part of the model.*when it is compl"):
        TopKEF(**SPARSE).attach(model, training.sgd(task.parameters()))
    task.net[3] = nn.Identity()
    with pytest.raises(ConfigError, match=r"of shape \[10.*or it was taken out"):
        TopKEF(**SPARSE).attach(model, training.sgd(task.parameters()))
    task.net[3] = head
    TopKEF(**SPARSE).attach(model, training.sgd(task.parameters()))


def test_a_parameter_that_ddp_waits_for_is_named() -> None:
    """DDP itself raises an error one step later."""
    task, optimizer = Setup().start(TopKEF(**SPARSE))
    training.ordinary(task, optimizer, 0)
    task.net[0].weight.requires_grad_(False)
    with (
        nothing_changes(task, optimizer),
        pytest.raises(StepBeforeSynchronizeError, match=r"net.0.weight.*find_unused_parameters=T"),
    ):
        training.ordinary(task, optimizer, 1)


def test_a_second_backward_in_one_step_is_refused() -> None:
    task, optimizer = Setup().start(TopKEF(**SPARSE))
    training.ordinary(task, optimizer, 0)
    optimizer.zero_grad()
    task.loss(hvd.rank(), 1).backward()
    with (
        nothing_changes(task, optimizer),
        pytest.raises(RepeatedSynchronizeError, match=r"inside no_sync\(\)"),
    ):
        task.loss(hvd.rank(), 2).backward()


def test_one_backward_through_two_models() -> None:
    """To the bit what each of them does alone."""

    def train(apart: bool) -> list[Tensor]:
        tasks = [Setup().task() for _ in range(2)]
        optimizers = [Setup().distributed(t, TopKEF(**SPARSE, exchange="sharded")) for t in tasks]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = [task.loss(hvd.rank(), step + 10 * i) for i, task in enumerate(tasks)]
            for loss in losses if apart else [sum(losses)]:
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        return [p for task in tasks for p in training.snapshot(task)]

    assert_same(train(apart=False), train(apart=True))


@pytest.mark.world_size(3)
@pytest.mark.parametrize("exchange", ["sharded", "hierarchical"])
def test_a_model_of_some_of_the_ranks(exchange: str) -> None:
    dist.new_group([0, 1])  # its members are in different numbers of groups
    group = dist.new_group([0, 2])
    if hvd.rank() != 1:
        task = Setup().task()
        model = DistributedDataParallel(task, process_group=group)
        optimizer = training.sgd(task.parameters())
        adapter.TopKEF(**SPARSE, momentum=0, exchange=exchange).attach(model, optimizer)
        for step in range(4):
            take(model, optimizer, step)
        mine = bits(task.parameters())
        found = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(found, mine, group)
        assert torch.equal(*found)
        stats = adapter.TopKEF.of(model).stats()
        assert (stats.ranks, stats.steps) == (2, 4)
    hvd.barrier()


# One hook a model, in torch's own convention too.


def test_torchs_own_way_to_register_a_hook() -> None:
    ours, _ = run(Setup(), TopKEF(**SPARSE))
    task = Setup().task()
    model, optimizer = DistributedDataParallel(task), training.sgd(task.parameters())
    model.register_comm_hook(*TopKEF(**SPARSE).hook(model, optimizer))
    for step in range(6):
        take(model, optimizer, step)
    assert_same(training.snapshot(task), ours)
    assert adapter.TopKEF.of(model).stats().steps == 6


def test_a_second_hook_is_refused_and_dense_steps_go_through_the_first() -> None:
    task, optimizer = Setup().start(TopKEF(**SPARSE))
    training.ordinary(task, optimizer, 0)
    with pytest.raises(ConfigError, match="attached to this model and this optimizer already"):
        TopKEF().attach(optimizer.ddp, optimizer)
    with pytest.raises(ConfigError, match=r"hook, exchange, and .*call attach\(\)"):
        TopKEF().hook(optimizer.ddp, training.adamw(task.parameters()))
    TopKEF.of(optimizer).set_ratio(1.0)
    training.ordinary(task, optimizer, 1)
    assert TopKEF.of(optimizer).stats().residual_norm == 0
    assert_ranks_equal(task.parameters())


@pytest.mark.parametrize("in_closure", [True, False])
def test_a_hook_that_was_never_registered_is_noticed(in_closure: bool) -> None:
    """As Lightning's DDPStrategy leaves it on CPUs, which trains dense without a word."""
    task = Setup().task()
    model, optimizer = DistributedDataParallel(task), training.sgd(task.parameters())
    TopKEF(**SPARSE).hook(model, optimizer)

    def closure() -> float:
        loss = model(hvd.rank(), 0)
        loss.backward()
        return float(loss)

    if not in_closure:
        closure()
    before = bits(task.parameters())
    with pytest.raises(StepBeforeSynchronizeError, match=r"never called this .* hook.*Lightning"):
        optimizer.step(closure if in_closure else None)
    assert torch.equal(bits(task.parameters()), before)
    with pytest.raises(NotAttachedError, match="no compressor's hook is registered with this Dist"):
        adapter.TopKEF.of(model)


def test_a_step_on_gradients_of_this_rank_alone() -> None:
    task, optimizer = Setup().start(TopKEF(**SPARSE))
    training.ordinary(task, optimizer, 0)
    optimizer.zero_grad()
    with optimizer.ddp.no_sync():
        task.loss(hvd.rank(), 1).backward()
    with (
        nothing_changes(task, optimizer),
        pytest.raises(StepBeforeSynchronizeError, match=r"not exchanged.*outside of no_sync\(\)"),
    ):
        optimizer.step()


@pytest.mark.parametrize("way", ["no_sync", "module"])
def test_no_backward_at_all_exchanges(way: str) -> None:
    """The hook is registered: attaching once more would not help."""
    task = Setup().task()
    model, optimizer = DistributedDataParallel(task), training.sgd(task.parameters())
    TopKEF(**SPARSE).attach(model, optimizer)
    before = bits(task.parameters())
    with model.no_sync() if way == "no_sync" else nullcontext():
        (model if way == "no_sync" else model.module)(hvd.rank(), 0).backward()
    with pytest.raises(StepBeforeSynchronizeError, match=r"has exchanged any.*outside of no_sync"):
        optimizer.step()
    assert torch.equal(bits(task.parameters()), before)
    take(model, optimizer, 1)
    assert_ranks_equal(task.parameters())


@pytest.mark.parametrize("replaces", [True, False])
def test_attaching_between_backward_and_step(replaces: bool) -> None:
    task = Setup().task()
    model, optimizer = DistributedDataParallel(task), training.sgd(task.parameters())
    if replaces:
        TopKEF(**SPARSE).attach(model, before := training.sgd(task.parameters()))
        take(model, before, 0)
        before.zero_grad()
    model(hvd.rank(), 0).backward()
    TopKEF(**SPARSE).attach(model, optimizer)
    before = bits(task.parameters())
    for _ in range(2):
        nn.utils.clip_grad_norm_(task.parameters(), 0.05)
        with pytest.raises(StepBeforeSynchronizeError, match=r"attach\(\) was called between back"):
            optimizer.step()
    assert torch.equal(bits(task.parameters()), before)
    with model.no_sync():
        model(hvd.rank(), 0).backward()
    with pytest.raises(StepBeforeSynchronizeError, match="has exchanged any"):
        optimizer.step()
    take(model, optimizer, 1)
    assert_ranks_equal(task.parameters())


def test_joining_is_refused() -> None:
    _, optimizer = Setup().start(TopKEF(**SPARSE))
    with pytest.raises(UnsupportedOperationError, match=r"join\(\) was called"):
        optimizer.ddp.join()


@pytest.mark.parametrize("module", [in_backward, steps], ids=["backward", "step"])
def test_a_step_is_not_recorded_in_a_cuda_graph(module: Any) -> None:
    """The error changes nothing, and training goes on. The test only pretends a capture."""
    task, optimizer = Setup().start(TopKEF(**SPARSE))
    take(optimizer.ddp, optimizer, 0)
    with (
        nothing_changes(task, optimizer),
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(UnsupportedOperationError, match=r"CUDA graph.*make_graphed_callables"),
    ):
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        refuse, gpu = module.refuse_recording, torch.device("cuda", 0)
        patch.setattr(module, "refuse_recording", lambda what, device: refuse(what, gpu))
        take(optimizer.ddp, optimizer, 1)
    take(optimizer.ddp, optimizer, 1)
    assert_ranks_equal(task.parameters())


# Another optimizer for the same model.


def replaced(optimizer: Any, make: Callable[[Any], Any], compression: Any) -> Any:
    """Attach a new optimizer of the model in place of the first, and return it."""
    other = make(optimizer.ddp.parameters())
    other.ddp = optimizer.ddp
    compression.attach(other.ddp, other)
    return other


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_a_new_optimizer_inherits_residuals(exchange: str) -> None:
    """To the bit, and the first optimizer's memory is free."""
    setup = Setup()
    task, compression = setup.task(), TopKEF(**SPARSE, exchange=exchange)
    optimizer = setup.distributed(task, compression)
    state, steps = TopKEF.of(optimizer), list[int]()
    state.on_step(lambda counters: steps.append(counters.step))
    memory = weakref.ref(state._compressor)
    for step in range(8):
        if step == 4:
            before = state.state_dict()
            optimizer = replaced(optimizer, training.adamw, compression)
            after = state.state_dict()
            for part in (lambda d: d, lambda d: d.get("owned", {"residuals": {}})):
                kept, now = part(before)["residuals"], part(after)["residuals"]
                assert kept.keys() == now.keys()
                assert all(torch.equal(kept[name], now[name]) for name in kept)
            gc.collect()
            assert memory() is None, "memory of the first optimizer's residuals is still held"
        training.ordinary(task, optimizer, step)
    assert_ranks_equal(task.parameters())
    assert TopKEF.of(optimizer) is state is compression.behind
    assert (state.stats().steps, state.stats().rolled_back) == (4, 0)
    assert steps == list(range(1, 9))


@pytest.mark.parametrize("make", [training.sgd, training.adamw])
def test_a_new_optimizer_has_its_own_momentum(make: Callable[[Any], Any]) -> None:
    """Steps equal those of a new model, once the first optimizer has sent all residuals."""
    settings = {**SPARSE, "momentum": "auto", "follow_lr": True}

    def train(anew: bool) -> list[Tensor]:
        other = training.adamw if make is training.sgd else training.sgd
        task = Setup().task()
        optimizer = Setup(optimizer=other).distributed(task, TopKEF(**settings))
        for step in range(5):
            if step == 4:
                TopKEF.of(optimizer).set_ratio(1.0)
            training.ordinary(task, optimizer, step)
        if anew:
            del task.__dict__["loss"]
            optimizer = Setup(optimizer=make).distributed(task, TopKEF(**settings))
        else:
            optimizer = replaced(optimizer, make, TopKEF(**settings))
        training.train(task, optimizer, range(5, 12))
        assert TopKEF.of(optimizer).stats().rolled_back == 0
        return training.snapshot(task)

    assert_same(train(anew=False), train(anew=True))


@pytest.mark.parametrize("in_closure", [True, False])
def test_a_step_of_an_optimizer_that_is_not_attached(in_closure: bool) -> None:
    """Such training had no error feedback, and nothing said so."""
    task, optimizer = Setup().start(TopKEF(**SPARSE))
    training.ordinary(task, optimizer, 0)
    other = training.adamw(task.parameters())

    def closure() -> Tensor:
        other.zero_grad()
        loss = task.loss(hvd.rank(), 1)
        loss.backward()
        return loss

    if not in_closure:
        closure()
    with (
        nothing_changes(task, optimizer),
        pytest.raises(NotAttachedError, match=r"AdamW.step\(\) was called.*Attach the compressor"),
    ):
        other.step(closure if in_closure else None)
    other = replaced(optimizer, training.adamw, TopKEF(**SPARSE))
    training.train(task, other, range(2, 4))
    assert (TopKEF.of(other).stats().steps, TopKEF.of(other).stats().rolled_back) == (2, 0)
    with nothing_changes(task, other), pytest.raises(NotAttachedError, match=r"SGD.step\(\) was"):
        training.ordinary(task, optimizer, 4)  # the one that was replaced


def test_a_deleted_optimizer_is_an_error_of_backward() -> None:
    task, optimizer = Setup().start(TopKEF(**{**SPARSE, "follow_lr": True}))
    training.ordinary(task, optimizer, 0)
    model, state = optimizer.ddp, TopKEF.of(optimizer)
    before = state.state_dict()["residuals"]
    del optimizer
    gc.collect()
    with pytest.raises(NotAttachedError, match=r"was deleted\. Attach the compressor again"):
        task.loss(hvd.rank(), 1).backward()
    other = training.adamw(task.parameters())
    TopKEF(**SPARSE).attach(model, other)
    assert all(torch.equal(state.residual(name), kept) for name, kept in before.items())
    training.ordinary(task, other, 2)
    assert state.stats().steps == 1


def test_a_model_wrapped_anew_steps_while_the_old_one_is_there() -> None:
    task, optimizer = Setup().start(TopKEF(**SPARSE))
    training.ordinary(task, optimizer, 0)
    model, other = DistributedDataParallel(task), training.adamw(task.parameters())
    TopKEF(**SPARSE).attach(model, other)

    def closure() -> Tensor:
        other.zero_grad()
        loss = model(hvd.rank(), 1)
        loss.backward()
        return loss

    other.step(closure)
    assert adapter.TopKEF.of(model).stats().steps == TopKEF.of(optimizer).stats().steps == 1


def test_an_optimizer_goes_on_with_a_model_wrapped_anew() -> None:
    """As where a layer is trained from a later step on; the first model is there no more."""
    task = Setup().task()
    task.net[0].weight.requires_grad_(False)
    optimizer = training.adamw(task.parameters())
    for _ in range(2):
        model = DistributedDataParallel(task)
        TopKEF(**SPARSE).attach(model, optimizer)
        for step in range(2):
            take(model, optimizer, step)
        assert adapter.TopKEF.of(model).stats().steps == 2
        task.net[0].weight.requires_grad_(True)
    assert optimizer.state[task.net[0].bias]["step"] == 4
    with pytest.raises(ConfigError, match="AdamW has a compressor attached"):
        adapter.LocalSteps(optimizer, task.named_parameters())
    assert_ranks_equal(task.parameters())


def test_a_model_that_is_converted_too_late() -> None:
    """DistributedDataParallel exchanges nothing from then on, and does not say so."""
    task, optimizer = Setup().start(TopKEF(**SPARSE))
    training.ordinary(task, optimizer, 0)
    task.to(torch.float64)
    optimizer.zero_grad()
    task.net(torch.ones(8, 20, dtype=torch.float64)).square().mean().backward()
    with pytest.raises(ShapeChangedError, match=r"float64 on cpu, its residual .*float32"):
        optimizer.step()
    model = DistributedDataParallel(Setup().task())
    model.to(torch.float64)
    with pytest.raises(ConfigError, match=r"net.*float32 when .*float64 now.*model.module"):
        TopKEF(**SPARSE).attach(model, training.sgd(model.parameters()))


@pytest.mark.parametrize(
    ("settings", "frozen", "says"),
    [
        ({"exchange": "sharded"}, False, "TopK with exchange='sharded' cannot .*Attach the same"),
        ({}, True, r"net.0.weight.*requires_grad was changed.*DistributedDataParallel\(model.mod"),
    ],
    ids=["exchange", "frozen"],
)
def test_a_new_optimizer_that_is_refused_changes_nothing(
    settings: dict[str, Any], frozen: bool, says: str
) -> None:
    plain, _ = run(Setup(), TopKEF(**SPARSE))
    task, optimizer = Setup().start(TopKEF(**SPARSE))
    for step in range(6):
        training.ordinary(task, optimizer, step)
        task.net[0].weight.requires_grad_(not frozen)
        with pytest.raises(ConfigError, match=says):
            replaced(optimizer, training.adamw, TopKEF(**SPARSE, **settings))
        task.net[0].weight.requires_grad_(True)
    assert_same(training.snapshot(task), plain)


# Copies.


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copied_model_does_not_train_until_it_is_attached(
    duplicate: Callable[[Any], Any],
) -> None:
    """PyTorch leaves its hook out, so that it would be dense."""
    task = Setup().task()
    model, optimizer = DistributedDataParallel(task), training.sgd(task.parameters())
    TopKEF(**SPARSE).attach(model, optimizer)
    again = duplicate(duplicate(model))
    with pytest.raises(NotAttachedError, match=r"is a copy of one .*attach\(model, optimizer"):
        again(hvd.rank(), 0)
    with torch.no_grad():
        expected = model(hvd.rank(), 0)
        assert torch.equal(again(hvd.rank(), 0), expected)
    assert torch.equal(again.eval()(hvd.rank(), 0), expected)
    again.train().requires_grad_(False)
    assert torch.equal(again(hvd.rank(), 0), expected)
    again.requires_grad_(True)
    dense = DistributedDataParallel(again.module)
    dense(hvd.rank(), 0).backward()
    dense.zero_grad()
    other = training.sgd(again.module.parameters())
    TopKEF(**SPARSE).attach(again, other)
    for each, own in ((model, optimizer), (again, other)):
        each(hvd.rank(), 0).backward()
        own.step()
    assert torch.equal(bits(again.module.parameters()), bits(task.parameters()))
    with pytest.raises(NotAttachedError, match="is a copy of one"):
        duplicate(again)(hvd.rank(), 0)


# Optimizers that cannot be attached, and what is left of the attempt.


def fails(*args: Any, **kwargs: Any) -> None:
    raise ArithmeticError


def in_ddp(model: Any, optimizer: Any) -> None:
    """PyTorch refuses the hook, after all of our own checks."""
    model.register_comm_hook, compression = fails, TopKEF(**SPARSE)
    with pytest.raises(ArithmeticError):
        compression.attach(model, optimizer)
    del model.register_comm_hook
    assert not compression._living_states()


def between_hooks(model: Any, optimizer: Any) -> None:
    """Some hooks are registered and others not."""
    optimizer.register_step_post_hook = fails
    with pytest.raises((ArithmeticError, ConfigError)):
        TopKEF(**SPARSE).attach(model, optimizer)
    del optimizer.register_step_post_hook


def as_the_order_is_wrong(model: Any, optimizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"an optimizer, SGD\. Pass the model first"):
        TopKEF(**SPARSE).attach(optimizer, model)
    with pytest.raises(ConfigError, match=r"no optimizer\. Pass the model first"):
        TopKEF(**SPARSE).attach(model, model)


def on_all_ranks(model: Any, optimizer: Any) -> None:
    with pytest.raises(PlanMismatchError):
        TopKEF(ratio=0.1 + 0.1 * hvd.rank()).attach(model, optimizer)


@pytest.mark.parametrize("fail", [in_ddp, between_hooks, as_the_order_is_wrong, on_all_ranks])
def test_what_fails_leaves_nothing_behind(fail: Callable[[Any, Any], None]) -> None:
    """The model trains dense, and then with compression, as if it had not been tried."""

    def train(tried: bool) -> list[Tensor]:
        task = Setup().task()
        model, optimizer = DistributedDataParallel(task), training.sgd(task.parameters())
        before = vars(model).keys() | vars(optimizer).keys(), len(live_states())
        if tried:
            fail(model, optimizer)
            gc.collect()
            assert before == (vars(model).keys() | vars(optimizer).keys(), len(live_states()))
            assert not any(hooks for key, hooks in vars(optimizer).items() if "_hooks" in key)
        for step in range(4):
            if step == 2:
                TopKEF(**SPARSE).attach(model, optimizer)
            take(model, optimizer, step)
        assert adapter.TopKEF.of(model).stats().steps == 2
        return training.snapshot(task)

    assert_same(train(tried=True), train(tried=False))


@pytest.mark.parametrize("make", [training.sgd, training.adamw])
def test_memory_is_free_once_a_model_is_deleted(make: Callable[[Any], Any]) -> None:
    """Python's garbage collection, which may come much later, is not needed."""

    def trained() -> list[Any]:
        task = Setup().task()
        model, optimizer = DistributedDataParallel(task), make(task.parameters())
        adapter.TopKEF(min_numel=0).attach(model, optimizer)
        for step in range(2):
            take(model, optimizer, step)
        runner = adapter.TopKEF.of(model)._compressor
        return [model, optimizer, weakref.ref(runner), weakref.ref(*runner.registry.all_arenas())]

    trained()  # what is imported in the first steps keeps some frames
    gc.collect()
    gc.disable()
    try:
        *owners, runner, arenas = trained()
        assert None not in (runner(), arenas())
        owners.clear()
        assert (runner(), arenas()) == (None, None)
    finally:
        gc.enable()


class Turned(Task):
    """Multiplies by a complex parameter, or by a real one that is read as such."""

    def __init__(self, *, is_real: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 6)
        weight = torch.ones(6, dtype=torch.complex64)
        self.weight = nn.Parameter(torch.view_as_real(weight) if is_real else weight)

    def loss(self, rank: int, step: int) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        output = self.linear(noise(rank, step, (8, 20))) * weight
        return (output - 1j).abs().square().mean()


def test_a_complex_parameter_is_kept_as_a_real_one() -> None:
    """As the error advises."""
    model = DistributedDataParallel(Turned(is_real=False))
    with pytest.raises(UnsupportedDtypeError, match=r"'weight': .*complex64.*shape \[..., 2\]"):
        TopKEF(**SPARSE).attach(model, training.sgd(model.parameters()))
    model = DistributedDataParallel(Turned(is_real=True))
    optimizer = training.sgd(model.parameters())
    TopKEF(**SPARSE).attach(model, optimizer)
    for step in range(3):
        take(model, optimizer, step)
    assert_ranks_equal(model.parameters())


# What does not go together.


def sparse_layer() -> Any:
    return training.Embedded(), {}


def split_by_tensor_parallelism() -> Any:
    task = training.perceptron()
    task.net[0].weight._st_info = ()  # as torch.distributed.tensor.parallel.ddp leaves it
    return task, {}


def low_precision() -> Any:
    from torch.nn.parallel.distributed import _MixedPrecision

    return training.perceptron(), {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)}


def skipping() -> Any:
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    return training.perceptron(), options


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (sparse_layer, r"embedding.weight.*sparse=False"),
        (split_by_tensor_parallelism, r"net.0.weight.*tensor parallelism"),
        (low_precision, r"mixed_precision=.*torch.autocast"),
        (skipping, r"skip_all_reduce_unused_params=True.*out"),
    ],
)
def test_models_that_are_refused(make: Callable[[], Any], says: str) -> None:
    task, options = make()
    model = DistributedDataParallel(task, **options)
    with pytest.raises(ConfigError, match=says):
        TopKEF().attach(model, training.sgd(task.parameters()))


def test_fsdp_is_refused() -> None:
    class FSDPModule(nn.Module): ...

    with pytest.raises(ConfigError, match=r"FSDP gives a rank the sum of a shard.*docs/fsdp.md"):
        TopKEF().attach(FSDPModule(), training.sgd([nn.Parameter(torch.zeros(2))]))
    with pytest.raises(ConfigError, match=r"Linear'> is no DistributedDataParallel\. Pass"):
        TopKEF().attach(nn.Linear(2, 2), training.sgd([nn.Parameter(torch.zeros(2))]))


@pytest.mark.parametrize(
    ("chosen", "more", "says"),
    [
        (slice(1, None), [], r"net.0.weight': the model trains it, and no optimizer has it"),
        (slice(None), [nn.Parameter(torch.zeros(2))], r"shape \[2\]': SGD trains it, and the di"),
    ],
    ids=["fewer", "more"],
)
def test_an_optimizer_of_other_parameters(chosen: slice, more: list[Any], says: str) -> None:
    task = training.perceptron()
    optimizer = training.sgd(list(task.parameters())[chosen] + more)
    with pytest.raises(ConfigError, match=says):
        TopKEF().attach(DistributedDataParallel(task), optimizer)


@pytest.mark.parametrize("groups", [2, [nn.Parameter(torch.zeros(2))]], ids=["number", "flat"])
def test_groups_that_are_no_lists(groups: Any) -> None:
    """A list of parameters would be read as groups of none of them."""
    task = training.perceptron()
    with pytest.raises(ConfigError, match=r"groups= has a \w+ in the place of a list"):
        TopKEF().attach(DistributedDataParallel(task), training.sgd(task.parameters()), groups)


def test_an_error_in_a_hook_ends_backward_and_not_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes out of `backward()` as it was raised, on all ranks here; DDP goes on."""
    task, optimizer = Setup().start(TopKEF(**SPARSE))
    training.ordinary(task, optimizer, 0)
    state = TopKEF.of(optimizer)
    with monkeypatch.context() as patched, nothing_changes(task, optimizer):
        patched.setattr(state._each[0], "launch", broken)
        optimizer.zero_grad()
        with pytest.raises(ArithmeticError, match="in bucket 0"):
            task.loss(hvd.rank(), 1).backward()
        assert all(p.grad.isnan().all() for p in task.parameters())
    optimizer.zero_grad()
    training.ordinary(task, optimizer, 2)
    assert_ranks_equal(task.parameters())
    assert state.stats().steps == 2


def broken(ordinal: int) -> None:
    raise ArithmeticError(f"in bucket {ordinal}")


@pytest.mark.parametrize("name", ["none", "fp16"])
def test_the_environment_asks_for_torchs_own_hooks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, _ = run(Setup(), None)
    monkeypatch.setenv("HOROVOD_TOPK_COMPRESSION", name)
    ours, optimizer = run(Setup(), TopKEF(**SPARSE))
    for one, other in zip(ours, dense, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    assert not adapter.TopKEF.of(optimizer.ddp).active
    TopKEF().attach(optimizer.ddp, training.adamw(optimizer.ddp.parameters()))  # the hook stays
