"""Misuse is a clear error, on every rank, before a parameter or a residual has changed."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

import training
from horovod_topk.core.exchange.meeting import VARIABLE
from horovod_topk.errors import (
    ConfigError,
    GradientChangedError,
    MissingRanksError,
    OutsideOptimizerError,
    OverlappingGradientError,
    RepeatedSynchronizeError,
    ShapeChangedError,
    StepBeforeSynchronizeError,
    UnsupportedOperationError,
)
from meeting import FOLDER
from plain import PlainTopKEF as TopKEF
from training import Setup, Task
from witness import assert_ranks_equal, bits, nothing_changes, record

SPARSE = {"ratio": 0.1, "min_numel": 0}


def warm(compression: object = None, **options: Any) -> tuple[Any, Any]:
    """A task and its optimizer after two steps."""
    setup = Setup(options=options)
    task, optimizer = setup.start(compression or TopKEF(**SPARSE))
    passes = options.get("backward_passes_per_step", 1)
    for step in range(2):
        training.accumulated(passes)(task, optimizer, step)
    assert TopKEF.of(optimizer).stats().residual_norm > 0
    return task, optimizer


def says(*parts: str) -> str:
    """A pattern for a message with these parts in this order."""
    return ".*".join(re.escape(part) for part in parts)


def assert_still_works() -> None:
    """Horovod, and new optimizers of the same plan, go on after an error."""
    task, _ = warm()
    assert_ranks_equal(task.parameters())


# Settings.


@pytest.mark.parametrize("compression", [TopKEF, TopKEF(ratio=0.1)], ids=["class", "instance"])
def test_outside_an_optimizer(compression: object) -> None:
    with pytest.raises(OutsideOptimizerError, match=says("[3, 2]", "hvd.DistributedOptimizer")):
        hvd.allreduce(torch.ones(3, 2), name="outside", compression=compression)
    assert hvd.allreduce(torch.ones(3, 2), name="outside", op=hvd.Sum).sum() == 12


def test_a_rank_that_compresses_alone_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """That its job ends is in ../test_missing_ranks.py; here the other rank comes late."""
    monkeypatch.setenv(VARIABLE, "0.5")
    raised = FOLDER / "raised"
    if hvd.rank() == 0:
        said = "rank 0 waited 0.5 s in 'topkef.agreement', to which some other rank did not come"
        with pytest.raises(MissingRanksError, match=said):
            warm()
        raised.touch()
    while not raised.exists():
        time.sleep(0.01)
    if hvd.rank() == 1:
        Setup().start(TopKEF(**SPARSE))
    hvd.barrier()
    assert_still_works()


# Gradients that changed.


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (torch.ones(5, 13), "[5, 13] float32"),
        (torch.ones(12, 5), "[12, 5] float32"),
        (torch.ones(5, 12).double(), "[5, 12] float64"),
        (torch.ones(5, 12).half(), "[5, 12] float16"),
    ],
)
def test_tensor_changed_under_a_residual(data: torch.Tensor, found: str) -> None:
    """Where autograd sees the new gradient, it refuses or casts it; where it does not, we do."""
    setup = Setup(build=training.Optional, options={"groups": 2})
    task, optimizer = setup.start(TopKEF(**SPARSE))
    training.ordinary(task, optimizer, 0)
    before = TopKEF.of(optimizer).state_dict()["residuals"]
    optimizer.zero_grad()
    task.never.weight.data = data.clone()
    parameters = bits(task.parameters()).clone()
    task.loss(hvd.rank(), 0).backward()
    message = says("'never.weight'", found, "residual [5, 12] float32", "Build the distributed")
    with pytest.raises(ShapeChangedError, match=message):
        optimizer.step()
    assert torch.equal(parameters, bits(task.parameters()))
    after = TopKEF.of(optimizer).state_dict()["residuals"]
    assert torch.equal(bits(before.values()), bits(after.values()))
    assert_still_works()


def test_gradient_whose_elements_share_memory() -> None:
    """An expanded gradient cannot take what came back; said before anything is sent."""
    task = Setup(build=training.Optional).task()
    optimizer = Setup().distributed(task, TopKEF(**SPARSE))
    training.ordinary(task, optimizer, 0)
    before = TopKEF.of(optimizer).state_dict()["residuals"]
    optimizer.zero_grad()
    task.loss(hvd.rank(), 2).backward()
    task.never.weight.grad = torch.ones(1, 1).expand(5, 12)
    message = says("'never.weight'", "strides (0, 0)", "clone()")
    with pytest.raises(OverlappingGradientError, match=message):
        optimizer.step()
    after = TopKEF.of(optimizer).state_dict()["residuals"]
    assert torch.equal(bits(before.values()), bits(after.values()))
    assert_still_works()


def test_gradient_became_sparse_over_a_residual() -> None:
    setup = Setup(build=training.Embedded, optimizer=training.plain_sgd)
    task = setup.task()
    task.embedding.sparse = False
    optimizer = setup.distributed(task, TopKEF(**SPARSE))
    training.ordinary(task, optimizer, 0)
    optimizer.zero_grad()
    task.embedding.sparse = True
    message = says("'embedding.weight'", "became sparse", "sparse_as_dense=True")
    with nothing_changes(task, optimizer), pytest.raises(ShapeChangedError, match=message):
        task.loss(hvd.rank(), 1).backward()


CHANGED = {"momentum": {"momentum": 0.9}, "clip_norm": {"clip_norm": 0.5}}


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
@pytest.mark.parametrize("setting", CHANGED)
def test_sparse_gradient_that_would_not_be_changed_as_asked(
    setting: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod's own path knows neither momentum correction nor clipping on each rank."""
    options = {"backward_passes_per_step": 2} if late else {}
    setup = Setup(
        build=training.Embedded,
        optimizer=training.plain_sgd,
        options=options,
        groups=lambda task: [[p] for p in task.parameters()],
    )
    task, optimizer = setup.start(TopKEF(**SPARSE, **CHANGED[setting]))
    recording = record(monkeypatch)
    message = says("'embedding.weight'", f"sparse, and {setting}=", "sparse_as_dense=True")
    with nothing_changes(task, optimizer), pytest.raises(ConfigError, match=message):
        task.loss(hvd.rank(), 1).backward()
        assert late
        optimizer.synchronize()
    assert not late or recording.names == []


@pytest.mark.parametrize("setting", CHANGED)
def test_the_cure_for_a_sparse_gradient(setting: str) -> None:
    """Trains as the same with a layer whose gradients are dense."""
    runs = []
    for options in ({"sparse_as_dense": True}, {}):
        setup = Setup(build=training.Embedded, optimizer=training.plain_sgd, options=options)
        task = setup.task()
        task.embedding.sparse = bool(options)
        optimizer = setup.distributed(task, TopKEF(**SPARSE, **CHANGED[setting]))
        training.train(task, optimizer, range(3))
        runs.append(training.snapshot(task))
    for ours, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(ours, theirs)


class Idle(Task):
    """Many parameters, of which one takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.idle = nn.ModuleList(nn.Linear(3, 2) for _ in range(12))

    def loss(self, rank: int, step: int) -> torch.Tensor:
        loss: torch.Tensor = self.used(training.noise(rank, step, (2, 3))).sum()
        return loss


def test_refused_synchronize_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod visits late parameters in an order of each rank's own (a set's): a bucket sent by
    the ranks that came to it before the error would wait for the others for ever.
    """
    setup = Setup(build=Idle, groups=lambda task: [[p] for p in task.parameters()])
    task, optimizer = setup.start(TopKEF(**SPARSE))
    task.loss(hvd.rank(), 0).backward()
    task.idle[5].weight.data = torch.ones(4, 3)
    recording = record(monkeypatch)
    with pytest.raises(ShapeChangedError, match=says("'idle.5.weight'", "[4, 3]")):
        optimizer.synchronize()
    assert recording.names == []


def in_place(task: Task, optimizer: Any) -> None:
    for p in task.parameters():
        p.grad.mul_(0.5)


def one_tensor_through_data(task: Task, optimizer: Any) -> None:
    list(task.parameters())[2].grad.data.mul_(0.5)


def replaced_by_a_copy(task: Task, optimizer: Any) -> None:
    p = next(task.parameters())
    p.grad = p.grad.clone()


def clipped(task: Task, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(task.parameters(), 1e-3)


def removed(task: Task, optimizer: Any) -> None:
    next(task.parameters()).grad = None


def unscaled(task: Task, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(1))
    scaler.unscale_(optimizer)


CHANGES = [in_place, one_tensor_through_data, replaced_by_a_copy, clipped, removed, unscaled]


@pytest.mark.parametrize(
    ("ratio", "options"), [(0.1, {}), (1.0, {"groups": 3})], ids=["sparse", "dense_in_groups"]
)
@pytest.mark.parametrize("change", CHANGES)
def test_gradient_changed_before_synchronize(
    change: Callable[[Task, Any], None], ratio: float, options: dict[str, Any]
) -> None:
    setup = Setup(options=options)
    task, optimizer = setup.start(TopKEF(ratio=ratio, min_numel=0))
    training.ordinary(task, optimizer, 0)
    optimizer.zero_grad()
    with nothing_changes(task, optimizer):
        task.loss(hvd.rank(), 1).backward()
        change(task, optimizer)
        with pytest.raises(
            GradientChangedError, match=says("net.", "optimizer.synchronize(), then step inside")
        ):
            optimizer.step()


def test_gradient_changed_between_passes_is_legal() -> None:
    """Before the last pass nothing has been sent yet."""
    task, optimizer = warm(backward_passes_per_step=2)
    optimizer.zero_grad()
    task.loss(hvd.rank(), 10).backward()
    in_place(task, optimizer)
    task.loss(hvd.rank(), 11).backward()
    optimizer.step()
    assert_ranks_equal(task.parameters())


# Steps out of order.


@pytest.mark.parametrize("inside_skip", [False, True])
def test_scaler_step_before_synchronize(inside_skip: bool) -> None:
    task, optimizer = warm()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    error = StepBeforeSynchronizeError if inside_skip else GradientChangedError
    with nothing_changes(task, optimizer):
        scaler.scale(task.loss(hvd.rank(), 2)).backward()
        with pytest.raises(error, match=says("optimizer.synchronize()")):
            if inside_skip:
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)


@pytest.mark.parametrize("passes", [1, 2])
def test_skip_synchronize_without_synchronize(passes: int) -> None:
    task, optimizer = warm(backward_passes_per_step=passes)
    optimizer.zero_grad()
    with nothing_changes(task, optimizer):
        task.loss(hvd.rank(), 9).backward()
        with (
            optimizer.skip_synchronize(),
            pytest.raises(
                StepBeforeSynchronizeError, match=says("skip_synchronize()", "synchronize()")
            ),
        ):
            optimizer.step()


def twice(task: Task, optimizer: Any) -> None:
    optimizer.synchronize()


def step_without_skip(task: Task, optimizer: Any) -> None:
    optimizer.step()


def accumulate(task: Task, optimizer: Any) -> None:
    for i in range(optimizer.backward_passes_per_step):
        task.loss(hvd.rank(), 20 + i).backward()
    optimizer.synchronize()


REPEATS = [twice, step_without_skip, accumulate]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("repeat", REPEATS)
def test_exchanged_gradient_is_not_exchanged_again(
    repeat: Callable[[Task, Any], None], passes: int
) -> None:
    task, optimizer = warm(backward_passes_per_step=passes)
    optimizer.zero_grad()
    with nothing_changes(task, optimizer):
        for i in range(passes):
            task.loss(hvd.rank(), 10 + i).backward()
        optimizer.synchronize()
        with pytest.raises(
            RepeatedSynchronizeError, match=says("net.", "exchanged already", "skip_synchronize()")
        ):
            repeat(task, optimizer)


@pytest.mark.usefixtures("no_optimizers")
def test_join() -> None:
    task, optimizer = warm()
    with (
        nothing_changes(task, optimizer),
        pytest.raises(UnsupportedOperationError, match=says("hvd.join()", "SGD with 6", "delete")),
    ):
        hvd.join()
    training.ordinary(task, optimizer, 2)
    del task, optimizer
    gc.collect()
    assert hvd.join() in range(hvd.size())
    assert_still_works()


@pytest.mark.usefixtures("no_optimizers")
def test_join_sees_that_an_optimizer_is_gone_without_help() -> None:
    task, optimizer = warm()
    del task, optimizer  # a reference cycle: still there until someone collects
    assert hvd.join() in range(hvd.size())


@pytest.mark.usefixtures("no_optimizers")
def test_join_with_a_dense_optimizer() -> None:
    setup = Setup()
    task, optimizer = setup.start(hvd.Compression.none)
    training.train(task, optimizer, range(2 if hvd.rank() else 3))
    assert hvd.join() in range(hvd.size())


# Gradients that Horovod would not exchange.


def test_a_closure_whose_gradients_would_not_be_exchanged() -> None:
    task, optimizer = warm()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = task.loss(hvd.rank(), 7)
        loss.backward()
        return loss

    with nothing_changes(task, optimizer):
        for step in (optimizer.step, lambda it: optimizer.step(closure=it)):
            with pytest.raises(StepBeforeSynchronizeError, match="before it calls the closure"):
                step(closure)
    with (
        optimizer.skip_synchronize(),
        pytest.raises(StepBeforeSynchronizeError, match="ranks differ from here on"),
    ):
        optimizer.step(closure)


def test_a_closure_that_synchronizes_is_what_a_step_without_one_is() -> None:
    (task, optimizer), (other, plain) = warm(), warm()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = task.loss(hvd.rank(), 7)
        loss.backward()
        optimizer.synchronize()
        return loss

    with optimizer.skip_synchronize():
        optimizer.step(closure)
    training.ordinary(other, plain, 7)
    assert torch.equal(bits(task.parameters()), bits(other.parameters()))
    assert TopKEF.of(optimizer).stats().steps == TopKEF.of(plain).stats().steps


class Extragradient(torch.optim.Optimizer):
    """Evaluates its closure so many times a step, and moves by each gradient or by the last."""

    def __init__(self, parameters: Any, times: int = 2, each: bool = True) -> None:
        super().__init__(parameters, {"times": times, "each": each})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        for group in self.param_groups:
            for left in reversed(range(group["times"])):
                with torch.enable_grad():
                    loss = closure()
                for p in group["params"]:
                    p.sub_(p.grad, alpha=0.05 if group["each"] or not left else 0.0)
        return loss


def closure_of(task: Task, optimizer: Any, step: int, *, passes: int = 1) -> Callable[[], Any]:
    """One that exchanges in every so many evaluations."""
    done = []

    def closure() -> Any:
        done.append(len(done))
        if len(done) % passes == 1 % passes:
            optimizer.zero_grad()
        loss = task.loss(hvd.rank(), step + len(done))
        loss.backward()
        if len(done) % passes == 0:
            optimizer.synchronize()
        return loss

    return closure


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_that_exchanges_is_evaluated_once_a_step(by_name: bool) -> None:
    """Parameters have moved by then, but residuals are those of before, and the next step works."""
    setup = Setup(optimizer=Extragradient)
    task, optimizer = setup.start(TopKEF(**SPARSE))
    closure = closure_of(task, optimizer, 7)
    with (
        optimizer.skip_synchronize(),
        pytest.raises(UnsupportedOperationError, match=says("once more", "Compression.none")),
    ):
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    optimizer.param_groups[0]["times"] = 1
    for step in range(2):
        with optimizer.skip_synchronize():
            optimizer.step(closure_of(task, optimizer, step))
    stats = TopKEF.of(optimizer).stats()
    assert (stats.steps, stats.rolled_back) == (2, 1)
    assert_ranks_equal(task.parameters())


def test_a_closure_is_evaluated_again_before_it_exchanges() -> None:
    """Two passes, of which the second exchanges: one exchange a step."""
    setup = Setup(
        optimizer=lambda parameters: Extragradient(parameters, each=False),
        options={"backward_passes_per_step": 2},
    )
    task, optimizer = setup.start(TopKEF(**SPARSE))
    closure = closure_of(task, optimizer, 0, passes=2)
    for _ in range(2):
        with optimizer.skip_synchronize():
            optimizer.step(closure)
    assert TopKEF.of(optimizer).stats().steps == 2
    assert_ranks_equal(task.parameters())


@pytest.mark.parametrize(
    "settings", [{}, {"max_iter": 2}, {"max_iter": 1, "line_search_fn": "strong_wolfe"}], ids=str
)
def test_lbfgs_that_needs_several_gradients(settings: dict[str, Any]) -> None:
    task = Setup().task()
    with pytest.raises(UnsupportedOperationError, match=says("LBFGS has max_iter=", "max_iter=1")):
        Setup(optimizer=lambda p: torch.optim.LBFGS(p, **settings)).distributed(task, TopKEF)
    setup = Setup(optimizer=lambda p: torch.optim.LBFGS(p, lr=0.05, max_iter=1))
    optimizer = setup.distributed(task, TopKEF(**SPARSE))
    for step in range(2):
        with optimizer.skip_synchronize():
            optimizer.step(closure_of(task, optimizer, step))
    assert TopKEF.of(optimizer).stats().steps == 2
    assert_ranks_equal(task.parameters())


def made_between(task: Task, optimizer: Any, step: int) -> None:
    """Gradients of a later parameter that are made after the others were exchanged."""
    later = [p for p in task.parameters() if p not in optimizer._requires_update]
    optimizer.zero_grad()
    for p in later:
        p.requires_grad_(False)
    task.loss(hvd.rank(), step).backward()
    optimizer.synchronize()
    for p in later:
        p.requires_grad_(True)
        p.grad = torch.ones_like(p)
    with optimizer.skip_synchronize():
        optimizer.step()


@pytest.mark.parametrize("take", [training.ordinary, training.exchange, made_between])
@pytest.mark.parametrize("later", ["unfrozen", "added"])
def test_a_parameter_that_is_trained_later_only(
    later: str, take: Callable[[Task, Any, int], None]
) -> None:
    setup = Setup()
    task = setup.task()
    last = next(p for name, p in task.named_parameters() if name == "net.3.weight")
    if later == "unfrozen":
        last.requires_grad_(False)
        optimizer = setup.distributed(task, TopKEF(**SPARSE))
    else:
        first = [p for p in task.parameters() if p is not last]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(first, lr=0.1),
            named_parameters=[(n, p) for n, p in task.named_parameters() if p is not last],
            compression=TopKEF(**SPARSE),
        )
    optimizer.zero_grad()
    last.grad = None
    if later == "unfrozen":
        training.ordinary(task, optimizer, 0)
        last.requires_grad_(True)
    else:
        optimizer.add_param_group({"params": [last], "lr": 0.1})
    named = "'net.3.weight'" if later == "unfrozen" else r"'of shape \[.*\]'"
    with (
        nothing_changes(task, optimizer),
        pytest.raises(UnsupportedOperationError, match=f"{named}.*without being exchanged"),
    ):
        take(task, optimizer, 1)


def test_a_scheduler_stays_outside_of_an_elastic_state() -> None:
    """And its state dict inside, as docs/elastic.md says."""
    from horovod_topk.torch.elastic import TorchState

    task, topk = Setup().task(), TopKEF(ratio=0.1)
    optimizer = Setup().distributed(task, topk)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    parts = {"model": task, "optimizer": optimizer, "compression": topk}
    with pytest.raises(ConfigError, match=r"scheduler= is a StepLR.*its state_dict\(\) inside"):
        TorchState(**parts, scheduler=scheduler)
    state = TorchState(**parts, schedule=scheduler.state_dict())
    for step in range(4):
        if step % 2 == 0:
            state.sync()
            scheduler.load_state_dict(state.schedule)
        training.ordinary(task, optimizer, step)
        scheduler.step()
        state.schedule = scheduler.state_dict()
        state.commit()
    assert optimizer.param_groups[0]["lr"] == 0.05 / 16
    assert_ranks_equal(task.parameters())
