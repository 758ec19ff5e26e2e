"""Law 3: at ratio=1.0 training equals Horovod's own dense training, in every configuration."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor

import training
from plain import PlainTopKEF as TopKEF
from training import Setup, by_hand, trajectory
from witness import assert_close, assert_ranks_equal, assert_same_history

pytestmark = pytest.mark.everywhere

STEPS = 8


def each_branch(task: Any) -> list[list[Tensor]]:
    return [list(branch.parameters()) for branch in task.branches]


def two_lists(task: Any) -> list[list[Tensor]]:
    p = list(task.parameters())
    return [p[::2], p[1::2]]


def some_in_no_list(task: Any) -> list[list[Tensor]]:
    p = list(task.parameters())
    return [[p[5], p[0]], [p[3]]]


def head_alone(task: Any) -> list[list[Tensor]]:
    return [list(task.head.parameters())]


def with_own_rates(task: Any) -> list[dict[str, Any]]:
    """Several parameter groups, and a parameter that is not trained."""
    p = list(task.parameters())
    p[3].requires_grad_(False)
    return [{"params": p[:2], "lr": 0.01}, {"params": p[2:], "weight_decay": 0.0}]


EXACT = {
    "sgd_momentum": Setup(),
    "adam": Setup(optimizer=training.adam),
    "adamw": Setup(optimizer=training.adamw),
    "sum": Setup(options={"op": hvd.Sum}),
    "sum_adam": Setup(optimizer=training.adam, options={"op": hvd.Sum}),
    "predivide_power_of_two": Setup(options={"gradient_predivide_factor": 4.0}),
    "two_passes": Setup(options={"backward_passes_per_step": 2}, take_step=training.accumulated(2)),
    "step_before_the_last_pass": Setup(
        options={"backward_passes_per_step": 3}, take_step=training.accumulated(2)
    ),
    "passes_changed_midway": Setup(take_step=training.changing_passes),
    "groups_number": Setup(options={"groups": 2}),
    "groups_number_two_passes": Setup(
        options={"groups": 3, "backward_passes_per_step": 2}, take_step=training.accumulated(2)
    ),
    "groups_lists": Setup(groups=two_lists),
    "groups_lists_some_in_none": Setup(groups=some_in_no_list),
    "clipping": Setup(take_step=training.clipped),
    "clipping_groups": Setup(take_step=training.clipped, options={"groups": 2}),
    "model_zero_grad_to_none": Setup(take_step=training.with_model_zero_grad(True)),
    "model_zero_grad_in_place": Setup(take_step=training.with_model_zero_grad(False)),
    "gradients_never_cleared": Setup(optimizer=training.adam, take_step=training.without_clearing),
    "absent_on_some_ranks": Setup(build=training.Optional),
    "absent_on_all_ranks": Setup(build=partial(training.Optional, absent_everywhere=True)),
    "absent_zeroed_in_place": Setup(
        build=training.Optional, take_step=training.with_model_zero_grad(False)
    ),
    "sparse_embedding": Setup(build=training.Embedded, optimizer=training.plain_sgd),
    "sparse_embedding_absent_at_first": Setup(
        build=partial(training.Embedded, first=2), optimizer=training.plain_sgd
    ),
    "sparse_as_dense": Setup(
        build=training.Embedded,
        optimizer=training.plain_sgd,
        options={"sparse_as_dense": True},
    ),
    "tiny_tensors": Setup(build=training.Tiny),
    "float16": Setup(build=partial(training.perceptron, torch.float16)),
    "float64": Setup(build=partial(training.perceptron, torch.float64)),
    "mixed_dtypes": Setup(build=training.MixedDtypes, optimizer=training.adam),
    "mixed_dtypes_groups": Setup(
        build=training.MixedDtypes, optimizer=training.adam, groups=two_lists
    ),
    "hooks_in_another_order": Setup(build=training.Branches),
    "hooks_in_another_order_many_buckets": Setup(build=training.Branches, groups=each_branch),
    "unnamed": Setup(named=False),
    "tied_weights": Setup(build=training.Tied),
    "parameter_groups": Setup(parameter_groups=with_own_rates),
}

# Where Horovod's optimizer raises or hangs: compared with averages taken one tensor at a time.
BEYOND_DENSE = {
    "bfloat16": Setup(build=partial(training.perceptron, torch.bfloat16)),
    "channels_last": Setup(build=training.convolution),
    "transposed": Setup(build=training.Transposed),
}

CLOSE = {
    "sgd_momentum": Setup(),
    "adamw": Setup(optimizer=training.adamw),
    "sum_groups": Setup(options={"op": hvd.Sum, "groups": 2}),
    "predivide": Setup(options={"gradient_predivide_factor": 3.0}),
    "hooks_in_another_order_many_buckets": Setup(build=training.Branches, groups=each_branch),
}


@pytest.mark.everywhere(one_in=5)
@pytest.mark.parametrize("setup", EXACT.values(), ids=EXACT)
def test_equal_to_dense(setup: Setup) -> None:
    dense = trajectory(setup, hvd.Compression.none, STEPS)
    ours = trajectory(setup, TopKEF(ratio=1.0), STEPS)
    assert_same_history(ours, dense)


@pytest.mark.parametrize("setup", BEYOND_DENSE.values(), ids=BEYOND_DENSE)
def test_equal_to_averages_by_hand(setup: Setup) -> None:
    assert_same_history(trajectory(setup, TopKEF(ratio=1.0), STEPS), by_hand(setup, STEPS))


@pytest.mark.world_size(3, 4)
@pytest.mark.parametrize("setup", CLOSE.values(), ids=CLOSE)
def test_close_to_dense_at_more_ranks(setup: Setup) -> None:
    """Horovod adds ranks in another order than theirs."""
    dense = trajectory(setup, hvd.Compression.none, STEPS)
    ours = trajectory(setup, TopKEF(ratio=1.0), STEPS)
    assert_close(ours[-1], dense[-1], relative=1e-6)


@pytest.mark.parametrize(
    ("plain", "grouped"),
    [
        (Setup(build=training.Optional), {"options": {"groups": 2}}),
        (Setup(build=training.Embedded, optimizer=training.plain_sgd), {"groups": head_alone}),
    ],
    ids=["absent", "sparse"],
)
def test_groups_where_horovod_cannot(plain: Setup, grouped: dict[str, Any]) -> None:
    """Horovod hangs on absent parameters in groups and refuses sparse ones; so dense has none."""
    dense = trajectory(plain, hvd.Compression.none, STEPS)
    assert_same_history(trajectory(replace(plain, **grouped), TopKEF(ratio=1.0), STEPS), dense)


@pytest.mark.world_size(3)
@pytest.mark.parametrize("make", [training.sgd, training.adam], ids=["sgd", "adam"])
def test_process_set_of_two(make: training.MakeOptimizer, pair: hvd.ProcessSet) -> None:
    setup = Setup(optimizer=make, options={"process_set": pair})
    dense = trajectory(setup, hvd.Compression.none, STEPS)
    ours = trajectory(setup, TopKEF(ratio=1.0), STEPS)
    assert_same_history(ours, dense)
    if pair.included():
        assert_ranks_equal(ours[-1], pair)


@pytest.mark.world_size(3)
def test_rank_outside_the_process_set_is_inactive(pair: hvd.ProcessSet) -> None:
    task = Setup().task()
    optimizer = Setup(options={"process_set": pair}).distributed(task, TopKEF(ratio=1.0))
    stats = TopKEF.of(optimizer).stats()
    assert stats.active == pair.included()
    assert ("process set" in stats.skipped.get("*", "")) == (not pair.included())
    assert stats.ranks == (2 if pair.included() else 1)


def test_sparse_embedding_is_left_to_horovod() -> None:
    setup = Setup(build=training.Embedded, optimizer=training.plain_sgd)
    task, optimizer = setup.start(TopKEF(ratio=0.1, min_numel=0))
    training.train(task, optimizer, range(3))
    stats = TopKEF.of(optimizer).stats()
    assert "sparse" in stats.skipped["embedding.weight"]
    assert stats.elements == sum(p.numel() for p in task.head.parameters())
    assert list(TopKEF.of(optimizer).state_dict()["residuals"]) == ["head.bias", "head.weight"]
    assert_ranks_equal(task.parameters())
