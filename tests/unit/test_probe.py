"""A gradient that changed after its bucket was sent is noticed."""

from __future__ import annotations

import math

import pytest
import torch

from horovod_topk.core.probe import ELEMENTS, Probe
from horovod_topk.ops.torch import TorchOps


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


def test_gradients_that_stay_are_still() -> None:
    probe, sent = Probe(TorchOps()), gradients()
    probe.take(sent)
    assert probe.still(sent)
    assert probe.still([gradient.clone() for gradient in sent])


@pytest.mark.parametrize("position", [0, 1, 2, 3, 6])
def test_one_scaled_gradient_is_noticed(position: int) -> None:
    probe, sent = Probe(TorchOps()), gradients()
    probe.take(sent)
    sent[position].data.mul_(0.5)
    assert not probe.still(sent)


def test_the_last_element_that_is_looked_at() -> None:
    probe, sent = Probe(TorchOps()), [torch.zeros(100)]
    probe.take(sent)
    sent[0][ELEMENTS] = 1.0
    assert probe.still(sent)
    sent[0][ELEMENTS - 1] = 1.0
    assert not probe.still(sent)
