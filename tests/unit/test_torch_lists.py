"""Compares operations on lists of tensors with the same operations on each tensor."""

from __future__ import annotations

import pytest
import torch

from horovod_topk.ops import torch_lists as lists
from horovod_topk.ops.torch import TorchOps

SHAPES = [(70, 100), (0,), (), (3, 5), (40, 60), (7000,)]


def drawn(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_samples_are_those_of_blocks(dtype: torch.dtype) -> None:
    tensors = drawn(dtype)
    tensors[0] = tensors[0].t()
    picks = [(3, 1, 3), (1, 0, 1), (1, 0, 1), (4, 3, 1), (1, 0, 3), (2, 1, 5)]
    expected = TorchOps().blocks(tensors, picks, "float32")
    sizes = [tensor.numel() for tensor in tensors]
    index = lists.sample_index(sizes, picks, torch.device("cpu"))
    assert torch.equal(lists.flat(tensors)[index].float(), expected)


def test_factors_are_those_of_limit() -> None:
    tensors, factors = drawn(), torch.tensor([0.5, 0.1, 0.3, 1.0, 2.0**-100, 1.0])
    tensors[4] = tensors[4].t()
    expected = [tensor.clone() for tensor in tensors]
    TorchOps().limit(expected, factors)
    lists.multiply(tensors, lists.spread(factors, tensors))
    assert all(map(torch.equal, tensors, expected))


def test_numbers_are_spread_over_their_tensors() -> None:
    tensors = drawn()
    expected = torch.cat([torch.full((t.numel(),), at) for at, t in enumerate(tensors)])
    assert torch.equal(lists.positions(tensors), expected)


def test_views_have_the_strides_of_others() -> None:
    alike = torch.zeros(6, 4, 1, 1).to(memory_format=torch.channels_last)
    (view,) = lists.shaped(torch.arange(24.0), [alike])
    assert view.stride() == alike.stride()
    assert torch.equal(view.flatten(), torch.arange(24.0))
