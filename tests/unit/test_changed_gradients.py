"""A gradient whose values change after its bucket was sent is noticed."""

from __future__ import annotations

import math

import pytest
import torch

from horovod_topk.core.plan import make_plan
from horovod_topk.errors import GradientChangedError
from horovod_topk.methods.topk import TopK
from horovod_topk.torch_training.buckets import Buckets
from horovod_topk.torch_training.ready import first_elements
from horovod_topk.torch_training.specs import spec_of


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
    buckets = Buckets(parameters)
    specs = [spec_of(name, p) for p, name in parameters.items()]
    buckets.index(make_plan(specs, TopK(), groups=[specs]))
    for p, gradient in zip(parameters, each, strict=True):
        p.grad = gradient
        assert buckets.add(buckets.slots[id(p)], gradient, gradient) is (gradient is each[-1])
    buckets.sent[0] = first_elements(each)
    return buckets


def test_gradients_that_stay_are_accepted() -> None:
    each = gradients()
    assert sent(each).gradients(0) == each


@pytest.mark.parametrize("position", [0, 1, 2, 3, 6])
def test_one_scaled_gradient_is_noticed(position: int) -> None:
    each = gradients()
    buckets = sent(each)
    each[position].data.mul_(0.5)
    with pytest.raises(GradientChangedError, match="w"):
        buckets.gradients(0)


def test_zeros_of_both_signs_are_equal() -> None:
    each = [torch.tensor([0.0])]
    buckets = sent(each)
    each[0].data.neg_()
    buckets.gradients(0)


def test_sixteen_elements_are_looked_at() -> None:
    each = [torch.arange(100.0).view(10, 10), torch.ones(2)]
    assert first_elements(each).tolist() == [*range(16), 1, 1]
    buckets = sent(each)
    each[0].data.view(-1)[16] = -1.0
    buckets.gradients(0)
    each[0].data.view(-1)[15] = -1.0
    with pytest.raises(GradientChangedError):
        buckets.gradients(0)
