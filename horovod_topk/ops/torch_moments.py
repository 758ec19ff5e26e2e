"""Adam's first moment before the optimizer's own update; see `horovod_topk.torch_training.adam`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horovod_topk.kernels import native

CHUNK = 1 << 24  # elements
Foreach = Any  # torch's operations on lists of tensors have no annotations


@dataclass(frozen=True)
class Moment:
    """One parameter's first moment, and what it is prepared from."""

    moment: Tensor  # it is written
    added: Tensor  # the gradient that the optimizer adds: with weight decay, or negated
    gradient: Tensor  # as it was exchanged, but for a factor
    arrivals: Tensor  # phi of each element after the step's exchange, flat
    factors: Tensor  # c of each class
    square: Tensor  # Adam's v before the step
    most: Tensor  # the largest |m'| where v is 1, in the optimizer's units, divided by beta1: []


@dataclass(frozen=True)
class Numbers:
    """Numbers of the next step of parameters that have made equally many."""

    beta1: float  # the optimizer's
    before: float  # 1 - beta1^t after the last step
    now: float  # the same after the next one
    rate: float  # an element is of the first class if phi - rate > limit where it has arrived, ...
    limit: float  # ... and if phi > limit where it has not
    beta2: float  # the optimizer's


def prepare(moments: Sequence[Moment], numbers: Numbers) -> None:
    """Prepare the first moments of parameters."""
    library, rest = native.find().library, list[Moment]()
    for each in moments:
        if library is not None and _fits(each):
            _by_kernel(library, each, numbers)
        else:
            rest.append(each)
    for chunk in _chunks(rest):
        _by_torch(chunk, numbers)


def _chunks(moments: Sequence[Moment]) -> Iterator[list[Moment]]:
    """Split moments into lists of at most `CHUNK` elements, whose copies fit into memory."""
    chunk, numel = list[Moment](), 0
    for each in moments:
        if chunk and numel + each.moment.numel() > CHUNK:
            yield chunk
            chunk, numel = [], 0
        chunk.append(each)
        numel += each.moment.numel()
    if chunk:
        yield chunk


class _Adam(ctypes.Structure):
    """`topkef_adam` of kernels/cpu/topkef.h."""

    _fields_ = tuple(
        (name, ctypes.c_double)
        for name in (
            *("beta", "again", "now", "later", "often", "rarely", "rate", "limit"),
            *("beta2", "most"),
        )
    )


def _fits(each: Moment) -> bool:
    """Whether the CPU kernel can read and write a moment's tensors."""
    tensors = each.moment, each.added, each.gradient, each.arrivals, each.square
    return each.moment.dtype in (torch.float32, torch.float64) and all(
        tensor.device.type == "cpu"
        and tensor.dtype == each.moment.dtype
        and tensor.is_contiguous()
        and not tensor.is_neg()
        for tensor in tensors
    )


def _by_kernel(library: native.Library, each: Moment, numbers: Numbers) -> None:
    beta1, before, now = numbers.beta1, numbers.before, numbers.now
    often, rarely = each.factors.tolist()
    weights = now / before / beta1, now / beta1, 1.0 / beta1 - 1.0
    factors = often, rarely, numbers.rate, numbers.limit
    adam = _Adam(beta1, *weights, *factors, numbers.beta2, float(each.most))
    tensors = each.moment, each.added, each.gradient, each.arrivals, each.square
    places = [tensor.data_ptr() for tensor in tensors]
    size = each.moment.numel(), each.moment.element_size(), torch.get_num_threads()
    if each.moment.numel():
        library.topkef_prepare_moment(*places, ctypes.addressof(adam), *size)


def _by_torch(moments: Sequence[Moment], numbers: Numbers) -> None:
    """As `topkef_prepare_moment` of kernels/cpu/topkef.h, for float32 bit for bit."""
    beta1, before, now = numbers.beta1, numbers.before, numbers.now
    ops: Foreach = torch
    phis = [each.arrivals for each in moments]
    kept = [_root(phi) for phi in phis]
    ops._foreach_mul_(kept, beta1)
    factors = [_factor(each, numbers) for each in moments]
    weights, others = ops._foreach_mul(factors, now / beta1), ops._foreach_neg(kept)
    ops._foreach_add_(others, 1.0)
    ops._foreach_mul_(weights, others)
    ops._foreach_mul_(kept, now / before / beta1)
    shapes = [each.moment.shape for each in moments]
    weights, kept = (
        [flat.view(shape) for flat, shape in zip(flats, shapes, strict=True)]
        for flats in (weights, kept)
    )
    written, added = [each.moment for each in moments], [each.added for each in moments]
    ops._foreach_mul_(written, kept)
    ops._foreach_add_(written, ops._foreach_mul(weights, added))
    limits = _limits(moments, numbers)
    ops._foreach_minimum_(written, limits)
    ops._foreach_maximum_(written, ops._foreach_neg(limits))
    ops._foreach_sub_(written, ops._foreach_mul(added, 1.0 / beta1 - 1.0))


def _limits(moments: Sequence[Moment], numbers: Numbers) -> list[Tensor]:
    """Return the largest magnitude of each moment, given the v that the step will compute."""
    ops: Foreach = torch
    added = [each.added for each in moments]
    squares = ops._foreach_mul(added, added)
    ops._foreach_mul_(squares, 1.0 - numbers.beta2)
    ops._foreach_add_(squares, ops._foreach_mul([each.square for each in moments], numbers.beta2))
    return [_root(square) * each.most for square, each in zip(squares, moments, strict=True)]


def _root(array: Tensor) -> Tensor:
    """Return square roots; on CPUs they are correctly rounded, unlike torch's own in float32."""
    if array.device.type != "cpu":
        return array.sqrt()
    return array.double().sqrt().to(array.dtype)


def _factor(each: Moment, numbers: Numbers) -> Tensor:
    """Expand a tensor's factors c, one for each class, to one for each element: flat."""
    phi, (often, rarely) = each.arrivals, each.factors
    has_arrived = each.gradient.reshape(-1).ne(0).to(phi)
    return torch.where(phi - numbers.rate * has_arrived > numbers.limit, often, rarely)
