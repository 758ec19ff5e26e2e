"""Adam's first moment before the optimizer's own update; see `horovod_topk.torch_training.adam`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horovod_topk.kernels import native
from horovod_topk.ops import torch_lists as lists

CLASSES = 2  # of elements; see `horovod_topk.core.arrivals`
ROUNDING = 1e-5  # relative: moments so near to their limit count as limited


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
    for ours, some, own in lists.by_kernels(rest, _tensors):
        if ours is not None:
            ours.prepare_moments(own, _numbers(numbers))
            continue
        for chunk in lists.chunks(some, lambda each: each.moment, lambda each: each.arrivals.dtype):
            _by_torch(chunk, numbers)


def undo(moments: Sequence[Moment], numbers: Numbers) -> None:
    """Turn prepared first moments that no update has used back into what they were, to rounding.

    Those of elements that were limited are not known any more: they become 0.
    """
    beta1, before, now = numbers.beta1, numbers.before, numbers.now
    for each in moments:
        phi, added = each.arrivals, each.added.reshape(-1)
        b = lists.root(phi) * beta1
        of = lists.positions([each.moment])
        moved = each.moment.reshape(-1) + added * (1.0 / beta1 - 1.0)
        is_limited = moved.abs() >= _limits([each], added, of, numbers) * (1.0 - ROUNDING)
        weights = _factors([each], phi, of, numbers) * (now / beta1) * (1.0 - b)
        own = (moved - weights * added) / (b * (now / before / beta1))
        own = own.masked_fill(is_limited | (b == 0.0), 0.0)
        each.moment.copy_(own.view(each.moment.shape))


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


def _tensors(each: Moment) -> Sequence[Tensor]:
    """Return what kernels read and write of a moment."""
    own = each.moment, each.added, each.gradient, each.arrivals, each.square
    return *own, each.factors, each.most


def _numbers(numbers: Numbers) -> Sequence[float]:
    """Return the numbers of `horovod_topk.kernels.triton.elements.prepare_moment`, in its order."""
    beta1, before, now, beta2 = numbers.beta1, numbers.before, numbers.now, numbers.beta2
    weights = beta1, now / before / beta1, now / beta1, 1.0 / beta1 - 1.0
    return *weights, numbers.rate, numbers.limit, beta2, 1.0 - beta2


def _by_torch(moments: Sequence[Moment], numbers: Numbers) -> None:
    """As `topkef_prepare_moment` of kernels/cpu/topkef.h, for float32 bit for bit.

    moments: moments of one device and dtype.
    """
    beta1, before, now = numbers.beta1, numbers.before, numbers.now
    phi, written = (
        lists.flat([each.arrivals for each in moments]),
        [each.moment for each in moments],
    )
    added = lists.flat([each.added for each in moments]).to(phi.dtype)
    of = lists.positions(written)
    b = lists.root(phi) * beta1
    weights = _factors(moments, phi, of, numbers) * (now / beta1) * (1.0 - b)
    moved = lists.flat(written) * (b * (now / before / beta1)) + weights * added
    limits = _limits(moments, added, of, numbers)
    moved = torch.maximum(torch.minimum(moved, limits), -limits)
    lists.write(moved - added * (1.0 / beta1 - 1.0), written)


def _limits(moments: Sequence[Moment], added: Tensor, of: Tensor, numbers: Numbers) -> Tensor:
    """Return the largest magnitude of each element, given the v that the step will compute."""
    squares = added * added * (1.0 - numbers.beta2)
    squares = squares + lists.flat([each.square for each in moments]) * numbers.beta2
    most = torch.stack([each.most for each in moments]).to(squares)
    return lists.root(squares) * most.index_select(0, of)


def _factors(moments: Sequence[Moment], phi: Tensor, of: Tensor, numbers: Numbers) -> Tensor:
    """Repeat the factors c of tensors and classes for each element.

    of: the position of each element's tensor.
    """
    has_arrived = lists.flat([each.gradient for each in moments]).ne(0).to(phi)
    is_rare = phi - numbers.rate * has_arrived <= numbers.limit
    factors = torch.cat([each.factors for each in moments])  # those of both classes, in turn
    return factors.index_select(0, of * CLASSES + is_rare)
