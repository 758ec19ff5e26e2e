"""Numbers, names and collectives: what `stats()` says is what a recording of Horovod counts."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch
from horovod.torch.optimizer import _DistributedAdasumOptimizer, _DistributedOptimizer

import training
from horovod_topk.errors import NotAttachedError
from plain import PlainTopKEF as TopKEF
from training import Setup
from witness import assert_same_history, record, spoiled

SPARSE = {"ratio": 0.1, "min_numel": 0}


def built(setup: Setup | None = None, compression: object = None) -> tuple[Any, Any]:
    setup = setup or Setup()
    return setup.start(compression or TopKEF(**SPARSE))


# TopKEF, class and instance.


def test_of_gives_each_optimizer_its_own_state() -> None:
    _, first = built(compression=TopKEF)
    _, second = built(compression=TopKEF)
    assert TopKEF.of(first) is TopKEF.of(first)
    assert TopKEF.of(first) is not TopKEF.of(second)


def test_instance_speaks_for_its_only_optimizer() -> None:
    compression = TopKEF(**SPARSE)
    with pytest.raises(NotAttachedError, match="0 optimizers"):
        compression.stats()
    task, optimizer = built(compression=compression)
    training.ordinary(task, optimizer, 0)
    assert compression.stats() == TopKEF.of(optimizer).stats()
    assert list(compression.state_dict()["residuals"]) == [
        n for n, _ in reversed(list(task.named_parameters()))
    ]
    compression.reset()
    assert TopKEF.of(optimizer).stats().residual_norm == 0


def test_instance_with_two_optimizers_asks_which() -> None:
    compression = TopKEF(**SPARSE)
    task, first = built(compression=compression)
    _, second = built(compression=compression)
    for verb in ("stats", "state_dict", "reset"):
        with pytest.raises(NotAttachedError, match=r"2 optimizers.*TopKEF\.of\(optimizer\)"):
            getattr(compression, verb)()
    training.ordinary(task, first, 0)
    assert TopKEF.of(first).stats().steps == 1
    assert TopKEF.of(second).stats().steps == 0


def test_instance_forgets_an_optimizer_that_is_gone() -> None:
    compression = TopKEF(**SPARSE)
    _, first = built(compression=compression)
    del first, _
    _, second = built(compression=compression)
    assert compression.stats() == TopKEF.of(second).stats()


# Collectives.


@pytest.mark.parametrize("options", [{}, {"groups": 3}], ids=["one_bucket", "three_buckets"])
def test_one_named_allgather_a_bucket_of_fixed_size(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, optimizer = built(Setup(options=options))
    state = TopKEF.of(optimizer)
    recording = record(monkeypatch)
    seen = []
    for step in range(4):
        if step == 2:  # data does not change a payload's size
            with spoiled(next(task.parameters()), float("nan")):
                training.ordinary(task, optimizer, step)
        elif step == 3:
            with torch.no_grad():
                for p in task.parameters():
                    p.zero_()
            training.ordinary(task, optimizer, step)
        else:
            training.ordinary(task, optimizer, step)
        seen.append(recording.take())
    names, sizes = seen[0]
    buckets = state.stats().buckets
    assert buckets == options.get("groups", 1)
    assert len(names) == len(set(names)) == buckets
    assert all(name for name in names)
    assert all(later == (names, sizes) for later in seen)
    assert sum(sizes) == state.stats().payload_bytes
    assert state.stats().sent_bytes == (hvd.size() - 1) * sum(sizes)


def test_names_differ_between_optimizers_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = record(monkeypatch)
    optimizers = [built(), built(), built(compression=TopKEF(ratio=0.2)), built(Setup(named=False))]
    recording.take()
    for task, optimizer in optimizers:
        training.ordinary(task, optimizer, 0)
    names, _ = recording.take()
    assert len(set(names)) == len(optimizers)


def test_name_setting_is_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    task, optimizer = built(compression=TopKEF(ratio=0.1, name="mine"))
    recording = record(monkeypatch)
    training.ordinary(task, optimizer, 0)
    assert all(name.startswith("mine") for name in recording.take()[0])


@pytest.mark.parametrize("options", [{}, {"groups": 3}], ids=["one_bucket", "three_buckets"])
def test_hooks_launch_and_never_wait(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, optimizer = built(Setup(options=options))
    recording = record(monkeypatch)
    for step in range(3):
        optimizer.zero_grad()
        recording.take()
        waits = recording.waits
        task.loss(hvd.rank(), step).backward()
        assert len(recording.names) == TopKEF.of(optimizer).stats().buckets  # launched already
        assert recording.waits == waits
        optimizer.step()
        assert recording.waits == waits + TopKEF.of(optimizer).stats().buckets


def test_buckets_leave_as_they_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's bucket is under way before the first layer's gradient exists."""
    task, optimizer = built(Setup(options={"groups": 3}))
    launched: list[int] = []
    recording = record(monkeypatch)
    for p in task.parameters():
        p.register_hook(lambda gradient: launched.append(len(recording.names)))
    training.ordinary(task, optimizer, 0)
    assert launched[0] == 0
    assert launched[-1] >= 1


# Counters.


def test_late_parameters_are_named() -> None:
    task, optimizer = built(Setup(build=training.Optional))
    training.train(task, optimizer, range(6))
    late = TopKEF.of(optimizer).stats().late
    sometimes = 3 if hvd.rank() == 0 else 4  # of 6 steps
    assert late == {
        "sometimes.weight": sometimes,
        "sometimes.bias": sometimes,
        "never.weight": 6,
        "never.bias": 6,
    }


# Others' compressors.

SEAM = (
    (_DistributedOptimizer, "__init__"),
    (_DistributedOptimizer, "_allreduce_grad_async"),
    (_DistributedAdasumOptimizer, "__init__"),
    (hvd, "join"),
)
OTHERS = {
    "none": (Setup(), hvd.Compression.none),
    "none_groups": (Setup(options={"groups": 2}), hvd.Compression.none),
    "none_sum": (Setup(options={"op": hvd.Sum}), hvd.Compression.none),
    "none_sparse": (
        Setup(build=training.Embedded, optimizer=training.plain_sgd),
        hvd.Compression.none,
    ),
    "fp16": (Setup(optimizer=training.adam), hvd.Compression.fp16),
    "none_adasum": (Setup(options={"op": hvd.Adasum}), hvd.Compression.none),  # MPI alone has it
}


@pytest.mark.parametrize(("setup", "compression"), OTHERS.values(), ids=OTHERS)
def test_other_compressors_behave_as_without_us(
    setup: Setup, compression: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setup.options.get("op") == hvd.Adasum and not hvd.mpi_enabled():
        pytest.skip("Horovod's Adasum needs MPI")
    with_us = training.trajectory(setup, compression, 8)
    for owner, attribute in SEAM:
        monkeypatch.setattr(owner, attribute, getattr(owner, attribute).__wrapped__)
    assert_same_history(with_us, training.trajectory(setup, compression, 8))
