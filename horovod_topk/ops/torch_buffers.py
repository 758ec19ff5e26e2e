"""Prepares and restores the momentum buffers of `horovod_topk.torch_training.sgd`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horovod_topk.kernels import native
from horovod_topk.ops import torch_lists as lists


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
    library, rest = native.find().library, list[Buffer]()
    for each in buffers:
        tensors = [each.buffer, each.added, each.parameter, each.arrivals]
        if library is not None and _fit(tensors):
            sgd = _Sgd(numbers.momentum, numbers.decay, each.loss)
            places = [tensor.data_ptr() for tensor in tensors]
            if not numbers.decay:
                places[2] = 0
            library.topkef_prepare_buffer(*places, ctypes.addressof(sgd), *_size(each.buffer))
        else:
            rest.append(each)
    for ours, some, own in lists.by_kernels(rest, _tensors):
        if ours is not None:
            losses = [each.loss for each in some]
            ours.prepare_buffers(own, losses, numbers.momentum, numbers.decay)
            continue
        for chunk in lists.chunks(some, lambda each: each.buffer, _kind):
            _prepare_by_torch(chunk, numbers)


def restore(prepared: Sequence[tuple[Tensor, Tensor]], momentum: float) -> None:
    """Turn prepared buffers, after the update, back into dense SGD's, in place.

    Args:
        prepared: each buffer, and phi of each element, flat, that it was prepared with.
        momentum: the optimizer's, in that update.
    """
    library, rest = native.find().library, list[tuple[Tensor, Tensor]]()
    for buffer, arrivals in prepared:
        if library is not None and _fit([buffer, arrivals]):
            places = buffer.data_ptr(), arrivals.data_ptr()
            library.topkef_restore_buffer(*places, momentum, *_size(buffer))
        else:
            rest.append((buffer, arrivals))
    for ours, some, own in lists.by_kernels(rest, lambda pair: pair):
        if ours is not None:
            ours.restore_buffers(*own, momentum)
            continue
        for chunk in lists.chunks(some, lambda pair: pair[0], lambda pair: pair[1].dtype):
            _restore_by_torch(chunk, momentum)


def undo(buffers: Sequence[Buffer], numbers: Numbers) -> None:
    """Turn prepared buffers that no update has used back into what they were, to rounding."""
    momentum, left = numbers.momentum, 1.0 - numbers.momentum
    for each in buffers:
        phi, added = each.arrivals, each.added.reshape(-1)
        if numbers.decay:
            added = added + each.parameter.detach().reshape(-1) * numbers.decay
        b = lists.root(lists.root(phi)) * momentum
        moved = each.buffer.reshape(-1) * momentum + added
        before = (moved * left / (1.0 - b) - (1.0 - phi * each.loss) * added) / momentum
        each.buffer.copy_(before.view(each.buffer.shape))


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


def _kind(each: Buffer) -> tuple[torch.dtype, float]:
    """Return what the buffers of a chunk have in common, beside their own device and dtype."""
    return each.arrivals.dtype, each.loss


def _tensors(each: Buffer) -> Sequence[Tensor]:
    """Return what kernels read and write of a buffer."""
    return each.buffer, each.added, each.parameter.detach(), each.arrivals


def _prepare_by_torch(chunk: Sequence[Buffer], numbers: Numbers) -> None:
    """As `topkef_prepare_buffer` of kernels/cpu/topkef.h, for float32 bit for bit.

    chunk: buffers of one device, dtype and loss.
    """
    momentum, left = numbers.momentum, 1.0 - numbers.momentum
    phi = lists.flat([each.arrivals for each in chunk])
    added = lists.flat([each.added for each in chunk])
    if numbers.decay:
        added = added + lists.flat([each.parameter.detach() for each in chunk]) * numbers.decay
    b = lists.root(lists.root(phi)) * momentum
    kept = 1.0 - phi * chunk[0].loss
    buffers = [each.buffer for each in chunk]
    moved = (1.0 - b) / left * (lists.flat(buffers) * momentum + kept * added)
    lists.write((moved - added) / momentum, buffers)


def _restore_by_torch(chunk: Sequence[tuple[Tensor, Tensor]], momentum: float) -> None:
    """As `topkef_restore_buffer` of kernels/cpu/topkef.h, for float32 bit for bit."""
    buffers, phis = zip(*chunk, strict=True)
    b = lists.root(lists.root(lists.flat(phis))) * momentum
    lists.multiply(buffers, b * ((1.0 - momentum) / momentum) / (1.0 - b))
