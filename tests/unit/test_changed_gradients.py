"""A gradient whose values change after its bucket was sent is noticed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from horovod_topk.core.plan.buckets import make_plan
from horovod_topk.errors import GradientChangedError
from horovod_topk.methods import METHODS
from horovod_topk.methods.topk import TopK
from horovod_topk.torch_training.gradients import COMPARED, Buckets, first_elements, spec_of


def gradients() -> list[torch.Tensor]:
    """float32 and bfloat16, contiguous and not, smaller than what is looked at, and NaN."""
    torch.manual_seed(0)
    return [
        torch.randn(30, 40),
        torch.randn(30, 40).t(),
        torch.randn(3),
        torch.randn(100).bfloat16(),
        torch.tensor([math.nan, 1.0]),
        torch.zeros(0),
        torch._neg_view(torch.randn(50)),
    ]


def sent(each: list[torch.Tensor]) -> Buckets:
    """Buckets whose only one was sent with these gradients."""
    parameters = {torch.zeros_like(gradient): str(i) for i, gradient in enumerate(each)}
    specs = [spec_of(name, p) for p, name in parameters.items()]
    buckets = Buckets(parameters, make_plan(specs, TopK(), groups=[specs]))
    for p, gradient in zip(parameters, each, strict=True):
        p.grad = gradient
        assert buckets.add(buckets.slots[id(p)], gradient, gradient) is (gradient is each[-1])
    buckets.sent[0] = first_elements(each)
    return buckets


@pytest.mark.parametrize("position", [0, 1, 2, 3, 6])
def test_one_scaled_gradient_is_noticed(position: int) -> None:
    each = gradients()
    buckets = sent(each)
    assert buckets.gradients(0) == each
    each[position].data.mul_(0.5)
    with pytest.raises(GradientChangedError, match="w"):
        buckets.gradients(0)


def test_all_elements_of_a_small_gradient_are_looked_at_and_the_first_of_a_large_one() -> None:
    each = [torch.arange(600.0).view(20, 30), torch.ones(2)]
    assert first_elements(each).tolist() == [*range(COMPARED), 1, 1]
    buckets = sent(each)
    each[0].data.view(-1)[COMPARED] = -1.0
    each[0].data.view(-1)[0].neg_()  # zeros of both signs are equal
    buckets.gradients(0)
    each[0].data.clamp_(max=COMPARED - 2.0)
    with pytest.raises(GradientChangedError):
        buckets.gradients(0)


def test_a_write_behind_the_elements_that_are_looked_at_is_noticed_by_its_count() -> None:
    each = [torch.ones(COMPARED + 1)]
    buckets = sent(each)
    each[0][-1] = 2.0
    with pytest.raises(GradientChangedError):
        buckets.gradients(0)


# What a step uses, as far as it can be told before the step.


class Stepped:
    """An optimizer's groups, one a parameter, at these learning rates."""

    def __init__(self, buckets: Buckets, *rates: Any) -> None:
        slots = buckets.slots.values()
        groups = zip(slots, rates, strict=False)
        self.param_groups = [{"params": [s.parameter], "lr": rate} for s, rate in groups]


def exchanged(*each: torch.Tensor) -> Buckets:
    buckets = sent(list(each))
    buckets.note_exchanged(0)
    return buckets


def use(
    buckets: Buckets, *rates: Any, with_zeros: bool = False
) -> tuple[set[str], set[str]] | None:
    optimizer = Stepped(buckets, *(rates or [0.1] * len(buckets.slots)))
    found = buckets.use_of(optimizer, with_zeros=with_zeros)
    return None if found is None else (set(found.without), set(found.frozen))


NO_RATES = [None, 1e-30, -0.1, [0.0], lambda: 0.0, torch.zeros(2), math.nan]


@pytest.mark.parametrize(
    ("rate", "freezes"),
    [
        *((rate, True) for rate in (0, 0.0, torch.tensor(0.0), torch.tensor([0.0]), np.float32(0))),
        *((rate, False) for rate in NO_RATES),
    ],
)
def test_a_rate_of_zero_of_any_kind_freezes(rate: Any, freezes: bool) -> None:
    buckets = exchanged(torch.ones(3), torch.ones(4))
    assert use(buckets, 0.1, rate) == (set(), {"1"} if freezes else set())
    assert use(buckets, rate, rate) == (set(), {"0", "1"} if freezes else set())


def test_a_parameter_that_is_in_no_group_is_not_used() -> None:
    assert use(exchanged(torch.ones(3), torch.ones(4)), 0.1) == ({"1"}, set())


def _set_to_none(p: Any) -> None:
    p.grad = None


def _replaced_by_zeros(p: Any) -> None:
    p.grad = torch.zeros_like(p)


DROPPING: list[Callable[[Any], object]] = [
    _set_to_none,
    _replaced_by_zeros,
    lambda p: p.grad.zero_(),
    lambda p: p.grad.mul_(0.0),
]


@pytest.mark.parametrize("drop", DROPPING)
def test_a_gradient_that_was_dropped_is_not_used(drop: Callable[[Any], object]) -> None:
    buckets = exchanged(torch.ones(3), torch.ones(4), torch.zeros(5))
    parameters = [slot.parameter for slot in buckets.slots.values()]
    drop(parameters[1])
    assert use(buckets) == ({"1"}, set())


def test_clipped_zeros_and_replaced_gradients_are_used() -> None:
    """Zeros that were exchanged: ranks have sent nothing, and what they keep is new."""
    buckets = exchanged(torch.ones(3), torch.zeros(5))
    parameters = [slot.parameter for slot in buckets.slots.values()]
    torch.nn.utils.clip_grad_norm_(parameters, 0.1)
    assert use(buckets) == (set(), set())
    for p in parameters:
        p.grad = p.grad * 2.0  # type: ignore[operator]
    assert use(buckets) == (set(), set())


def test_gradients_that_were_all_dropped_are_not_applied() -> None:
    for drop in DROPPING:
        buckets = exchanged(torch.ones(3), torch.ones(5000))
        for slot in buckets.slots.values():
            drop(slot.parameter)
        assert use(buckets) is None


@pytest.mark.parametrize("drop", DROPPING[1:])
def test_zeros_that_ranks_may_have_exchanged_are_used(drop: Callable[[Any], object]) -> None:
    """As those of `Threshold`, which sends nothing of a tensor that is below it."""
    assert [m for m, kind in METHODS.items() if kind.may_send_nothing] == [
        "RandomK",
        "QSGD",
        "Threshold",
    ]
    buckets = exchanged(torch.ones(3), torch.ones(4))
    drop(next(iter(buckets.slots.values())).parameter)
    assert use(buckets, with_zeros=True) == (set(), set())
