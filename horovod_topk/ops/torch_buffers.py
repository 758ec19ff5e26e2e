"""SGD's momentum buffer before its own update; see `horovod_topk.torch_training.sgd`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horovod_topk.kernels import native


@dataclass(frozen=True)
class Buffer:
    """One parameter's momentum buffer, and what it is prepared from."""

    buffer: Tensor  # it is written
    added: Tensor  # the gradient that the optimizer adds, but for weight decay
    parameter: Tensor
    arrivals: Tensor  # phi of each element after the step's exchange, flat
    before: Tensor | None  # the same before it; None: the buffer is dense SGD's
    factor: float  # c of an element that never arrives
    loss: float  # what an element that always arrives loses


@dataclass(frozen=True)
class Numbers:
    """Numbers of the next step of a parameter group."""

    momentum: float
    decay: float  # the optimizer's weight decay


def prepare(buffers: Sequence[Buffer], numbers: Numbers) -> None:
    """Prepare the momentum buffers of parameters."""
    library = native.find().library
    for each in buffers:
        if library is not None and _fits(each):
            _by_kernel(library, each, numbers)
        else:
            _by_torch(each, numbers)


def release(buffer: Tensor, arrivals: Tensor, momentum: float) -> None:
    """Make a buffer that of dense SGD, in place: with the same updates still to come.

    Args:
        buffer: a prepared buffer, after the optimizer's step.
        arrivals: phi of each element after that step, flat.
        momentum: the optimizer's.
    """
    b = _root(_root(arrivals)) * momentum
    buffer.mul_((b * ((1.0 - momentum) / momentum) / (1.0 - b)).view(buffer.shape))


class _Sgd(ctypes.Structure):
    """`topkef_sgd` of kernels/cpu/topkef.h."""

    _fields_ = tuple((name, ctypes.c_double) for name in ("momentum", "decay", "factor", "loss"))


def _tensors(each: Buffer) -> list[Tensor | None]:
    return [each.buffer, each.added, each.parameter, each.before, each.arrivals]


def _fits(each: Buffer) -> bool:
    """Whether the CPU kernel can read and write a parameter's tensors."""
    return each.buffer.dtype in (torch.float32, torch.float64) and all(
        tensor.device.type == "cpu"
        and tensor.dtype == each.buffer.dtype
        and tensor.is_contiguous()
        and not tensor.is_neg()
        for tensor in _tensors(each)
        if tensor is not None
    )


def _by_kernel(library: native.Library, each: Buffer, numbers: Numbers) -> None:
    sgd = _Sgd(numbers.momentum, numbers.decay, each.factor, each.loss)
    places = [0 if tensor is None else tensor.data_ptr() for tensor in _tensors(each)]
    if not numbers.decay:
        places[2] = 0
    size = each.buffer.numel(), each.buffer.element_size(), torch.get_num_threads()
    if each.buffer.numel():
        library.topkef_prepare_buffer(*places, ctypes.addressof(sgd), *size)


def _by_torch(each: Buffer, numbers: Numbers) -> None:
    """As `topkef_prepare_buffer` of kernels/cpu/topkef.h, for float32 bit for bit."""
    momentum, left = numbers.momentum, 1.0 - numbers.momentum
    phi, added = each.arrivals.view(each.buffer.shape), each.added
    if numbers.decay:
        added = added + each.parameter.detach() * numbers.decay
    before = torch.ones_like(phi) if each.before is None else each.before.view(phi.shape)
    b, b_before = (_root(_root(share)) * momentum for share in (phi, before))
    waiting = b_before * left / (1.0 - b_before) * each.buffer
    kept = (1.0 - phi * each.loss) * each.factor
    moved = (1.0 - b) / left * (waiting + kept * added)
    each.buffer.copy_((moved - added) / momentum)


def _root(array: Tensor) -> Tensor:
    """Correctly rounded square roots, which torch's own are not in float32."""
    return array.double().sqrt().to(array.dtype)
