"""Prepares and restores the momentum buffers of `horovod_topk.torch_training.sgd`."""

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
    loss: float  # what an element that always arrives loses


@dataclass(frozen=True)
class Numbers:
    """Numbers of the next step of a parameter group."""

    momentum: float
    decay: float  # the optimizer's weight decay


def prepare(buffers: Sequence[Buffer], numbers: Numbers) -> None:
    """Prepare the momentum buffers of parameters for the optimizer's update."""
    library = native.find().library
    for each in buffers:
        tensors = [each.buffer, each.added, each.parameter, each.arrivals]
        if library is not None and _fit(tensors):
            sgd = _Sgd(numbers.momentum, numbers.decay, each.loss)
            places = [tensor.data_ptr() for tensor in tensors]
            if not numbers.decay:
                places[2] = 0
            library.topkef_prepare_buffer(*places, ctypes.addressof(sgd), *_size(each.buffer))
        else:
            _prepare_by_torch(each, numbers)


def restore(buffer: Tensor, arrivals: Tensor, momentum: float) -> None:
    """Turn a prepared buffer, after the update, back into dense SGD's, in place.

    Args:
        buffer: the buffer.
        arrivals: phi of each element, flat: what the buffer was prepared with.
        momentum: the optimizer's, in that update.
    """
    library = native.find().library
    if library is not None and _fit([buffer, arrivals]):
        places = buffer.data_ptr(), arrivals.data_ptr()
        library.topkef_restore_buffer(*places, momentum, *_size(buffer))
    else:
        _restore_by_torch(buffer, arrivals, momentum)


class _Sgd(ctypes.Structure):
    """`topkef_sgd` of kernels/cpu/topkef.h."""

    _fields_ = tuple((name, ctypes.c_double) for name in ("momentum", "decay", "loss"))


def _size(buffer: Tensor) -> tuple[int, int, int]:
    return buffer.numel(), buffer.element_size(), torch.get_num_threads()


def _fit(tensors: Sequence[Tensor]) -> bool:
    """Whether the CPU kernels can read and write these tensors, the first a buffer."""
    return tensors[0].dtype in (torch.float32, torch.float64) and all(
        tensor.device.type == "cpu"
        and tensor.dtype == tensors[0].dtype
        and tensor.is_contiguous()
        and not tensor.is_neg()
        for tensor in tensors
    )


def _prepare_by_torch(each: Buffer, numbers: Numbers) -> None:
    """As `topkef_prepare_buffer` of kernels/cpu/topkef.h, for float32 bit for bit."""
    momentum, left = numbers.momentum, 1.0 - numbers.momentum
    phi, added = each.arrivals.view(each.buffer.shape), each.added
    if numbers.decay:
        added = added + each.parameter.detach() * numbers.decay
    b = _root(_root(phi)) * momentum
    kept = 1.0 - phi * each.loss
    moved = (1.0 - b) / left * (each.buffer * momentum + kept * added)
    each.buffer.copy_((moved - added) / momentum)


def _restore_by_torch(buffer: Tensor, arrivals: Tensor, momentum: float) -> None:
    """As `topkef_restore_buffer` of kernels/cpu/topkef.h, for float32 bit for bit."""
    b = _root(_root(arrivals)) * momentum
    buffer.mul_((b * ((1.0 - momentum) / momentum) / (1.0 - b)).view(buffer.shape))


def _root(array: Tensor) -> Tensor:
    """Correctly rounded square roots, which torch's own are not in float32."""
    return array.double().sqrt().to(array.dtype)
