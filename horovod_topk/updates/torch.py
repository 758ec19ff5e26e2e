"""One pass over each tensor of a PyTorch optimizer: its weight, moments, and how often it arrives.

Kernels have the bits of `horovod_topk.updates.formulas`. Where none can compute an update,
operations of PyTorch do: with the same bits for float32 on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horovod_topk.kernels import native, triton
from horovod_topk.kernels.triton.memory import note_writing
from horovod_topk.ops import coding
from horovod_topk.ops import torch_lists as lists
from horovod_topk.ops.torch import TorchOps
from horovod_topk.updates import formulas
from horovod_topk.updates.formulas import Adam, Sgd
from horovod_topk.updates.tracker import whole_sample

_OPS = TorchOps()


@dataclass
class Update:
    """One tensor's update in the step that begins."""

    weight: Tensor
    gradient: Tensor
    maximize: bool
    codes: Tensor  # of phi, uint8, flat
    damping: Tensor | None  # c of both classes, [2]; SGD: None
    numbers: Sgd | Adam
    moments: Sequence[Tensor] = ()  # the optimizer's: its momentum buffer, or Adam's two or three
    rms: Tensor | None = None  # of Adam's weight, []
    step: int = 0  # Adam's t, by which a second moment in bfloat16 is rounded


def update(updates: Sequence[Update]) -> None:
    """Update tensors of one optimizer, and how often their elements arrive."""
    if isinstance(updates[0].numbers, Adam):
        for each, rms in zip(updates, measure_weights([u.weight for u in updates]), strict=True):
            each.rms = rms
    library, rest = native.find().library, list[Update]()
    fit: dict[int, list[Update]] = {}
    for each in updates:
        fits = library is not None and _fits(each)
        (fit.setdefault(each.weight.element_size(), []) if fits else rest).append(each)
    for size, some in fit.items():
        assert library is not None
        records = (native.UpdateFields * len(some))(*map(_record, some))
        library.topkef_update_all(records, None, len(some), size, torch.get_num_threads())
    for ours, some in lists.by_kernels(rest, _tensors):
        if ours is not None:
            later = codes_after(some[0].codes.device)
            arrays = [*map(_tensors, some)], [*map(_others, some)]
            ours.update(*arrays, [*map(_numbers, some)], later)
            continue
        for each in some:
            update_by_torch(each)


class _Verbs:
    """`horovod_topk.updates.formulas.Verbs`."""

    def root(self, array: Tensor) -> Tensor:
        return lists.root(array)

    def where(self, condition: Tensor, one: Any, other: Any) -> Tensor:
        return torch.where(condition, one, other)


VERBS = _Verbs()


def update_by_torch(each: Update) -> None:
    """Update one tensor by PyTorch's operations: with the bits of kernels on a CPU.

    Arrays of 16-bit floats are computed with in float32. They are rounded to nearest, except a
    second moment in bfloat16: 0.999 v would be rounded back to v, and v could never fall.
    """
    numbers, shape = each.numbers, each.weight.shape
    wide = torch.promote_types(each.weight.dtype, torch.float32)
    codes = following(each.codes, each.gradient)
    share = formulas.share(codes.to(wide)).view(shape)
    own, g, *moments = (a.to(wide) for a in (each.weight, each.gradient, *each.moments))
    g = -g if each.maximize else g
    if numbers.decay:
        g = g + own * numbers.decay
    if isinstance(numbers, Sgd):
        (buffer,) = moments
        weight, after_step = formulas.sgd(own, buffer, g, share, numbers)
        each.moments[0].copy_(after_step)
    else:
        assert each.damping is not None
        moment, square, *largest = moments
        kept = moment, square, largest[0] if largest else None
        often = formulas.arrives_often(each.codes).view(shape)
        factor = torch.where(often, *each.damping) if numbers.beta1 else 1.0
        now = share, factor, each.rms
        weight, *new = formulas.adam(own, kept, g, *now, numbers, VERBS)
        if each.moments[1].dtype == torch.bfloat16:
            new[1] = rounded_at_random(new[1], each.step)
        for memory, value in zip(each.moments, new, strict=False):
            memory.copy_(value)
    each.weight.copy_(weight)
    each.codes.copy_(codes)


def rounded_at_random(values: Tensor, step: int) -> Tensor:
    """Round float32 numbers up or down to bfloat16, to themselves on average."""
    at = torch.arange(values.numel(), device=values.device).view(values.shape)
    bits = values.float().contiguous().view(torch.int32) + coding.noise(at, step).to(torch.int32)
    cut = (bits >> 16 << 16).view(torch.float32)
    return torch.where(values.isnan(), values, cut).bfloat16()


def following(codes: Tensor, gradient: Tensor) -> Tensor:
    """Codes of phi after a step, given those before it and the exchanged gradient."""
    after, now = codes_after(codes.device), codes.long()
    return torch.where(gradient.reshape(-1).ne(0), after[1][now], after[0][now])


def measure_weights(weights: Sequence[Tensor]) -> list[Tensor]:
    """Root mean squares of weights, [] each, of samples of their elements."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for at, weight in enumerate(weights):
        alike.setdefault((weight.device, weight.dtype), []).append(at)
    found = dict[int, Tensor]()
    for (device, dtype), places in alike.items():
        some = [weights[at] for at in places]
        samples = [whole_sample(weight.numel()) for weight in some]
        picks = tuple(sample.whole for sample in samples)
        ours = triton.module("updates.lists", device.type)
        if ours is not None and ours.suit(some):
            roots = ours.rms(some, picks)
        else:
            wide = torch.promote_types(dtype, torch.float32)
            sums = _OPS.energies_of(some, None, picks, str(wide)[6:])
            roots = lists.root(sums / _sizes(tuple(each.size for each in samples), wide, device))
        found |= zip(places, roots, strict=True)
    return [found[at] for at in range(len(weights))]


def _fits(each: Update) -> bool:
    """Whether the CPU kernel can read and write a tensor's arrays."""
    tensors = each.weight, each.gradient, *each.moments
    return each.weight.dtype in (torch.float32, torch.float64) and all(
        tensor.device.type == "cpu"
        and tensor.dtype == each.weight.dtype
        and tensor.is_contiguous()
        and not tensor.is_neg()
        for tensor in tensors
    )


def _record(each: Update) -> native.UpdateFields:
    """What the CPU kernel gets of a tensor."""
    moments = [moment.data_ptr() for moment in each.moments] + [0, 0]
    places = each.gradient.data_ptr(), each.weight.data_ptr(), *moments[:3]
    own = each.codes.data_ptr(), each.weight.numel(), -1.0 if each.maximize else 1.0
    pair, rms = each.damping, each.rms
    arrays = own[0], 0 if pair is None else pair.data_ptr(), 0 if rms is None else rms.data_ptr()
    made = native.UpdateFields(*places, *arrays, *own[1:])
    if isinstance(each.numbers, Adam):
        made.numbers.adam = native.AdamFields(*vars(each.numbers).values())
    else:
        made.numbers.sgd = native.SgdFields(*vars(each.numbers).values())
    for tensor in (each.weight, *each.moments):
        note_writing(tensor)
    return made


def _tensors(each: Update) -> Sequence[Tensor]:
    """What GPU kernels read and write of a tensor, in one dtype."""
    return each.weight, each.gradient, *each.moments


def _others(each: Update) -> Sequence[Tensor]:
    """The other arrays that GPU kernels read and write."""
    if each.damping is None or each.rms is None:
        return (each.codes,)
    return each.codes, each.damping, each.rms


def _numbers(each: Update) -> tuple[float, ...]:
    """Numbers of a tensor for `horovod_topk.kernels.triton.updates.lists.update`."""
    of, sign = each.numbers, -1.0 if each.maximize else 1.0
    if isinstance(of, Sgd):
        own = of.momentum, of.rate, of.nesterov, of.cut, 1.0 / (1.0 - of.momentum)
        return sign, of.decay, *own
    moments = of.beta1, of.beta2, of.again, of.now
    weights = of.stays, of.rate, of.scale, of.eps, of.most, of.reach
    return sign, of.decay, *moments, *weights, 1.0 - of.beta2, each.step


@functools.lru_cache(maxsize=1024)
def _sizes(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(sizes, dtype=dtype, device=device)


@functools.cache
def codes_after(device: torch.device) -> Tensor:
    """`formulas.AFTER` on a device."""
    return torch.tensor(formulas.AFTER, dtype=torch.uint8, device=device)
