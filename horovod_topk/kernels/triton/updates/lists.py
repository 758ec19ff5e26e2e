"""Launches Triton kernels that compute with lists of tensors, once for all tensors of a list.

Functions are named after those of `horovod_topk.ops.protocol.Ops` (`Ops`), and compute the same.
Their tensors have to pass `suit`. Those that are not in row-major order in memory are copied.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Hashable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from horovod_topk.kernels.triton.launching import EIGHT_WARPS, KINDS, SIXTEEN_WARPS, launch, on
from horovod_topk.kernels.triton.memory import (
    Addresses,
    current_stream,
    note_writing,
    packed,
    scratch,
)
from horovod_topk.kernels.triton.updates import elements, samples
from horovod_topk.ops.coding import shard_numel
from horovod_topk.ops.protocol import Place

BLOCK, NUMBERS, SMALL = int(elements.BLOCK), int(elements.NUMBERS), int(samples.SMALL)
KEPT = 4096  # arrays of addresses for lists of equal sizes


def suit(tensors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> bool:
    """Return whether kernels can compute with tensors: the answer is equal on all ranks.

    Tensors have one dtype, of at most 32 bits; others are float32. All are on one GPU.
    """
    device, dtype = tensors[0].get_device(), tensors[0].dtype
    if dtype not in KINDS:
        return False
    for tensor in tensors:  # loops, as they run for each tensor in each step
        if tensor.dtype is not dtype or tensor.get_device() != device:
            return False
    for tensor in others:
        if tensor.dtype is not torch.float32 or tensor.get_device() != device:
            return False
    return True


def energy_withheld(
    gradients: Sequence[Tensor],
    residuals: tuple[Tensor, Tensor],
    arrivals: Tensor,
    places: tuple[Place, ...],
    states: Sequence[Tensor],
) -> None:
    """Compute the energy that error feedback takes from gradients: `TrackerKernels`.

    Residuals are not rescaled in this step: there are no factors.
    """
    table, flat = _places(places, arrivals.device), [*map(packed, gradients)]
    with on(arrivals.device):
        given = table.point_to("lost", flat)
        arrays = table.array, given, *residuals, arrivals, *states
        table.launch(samples.energy_withheld, flat, *arrays)


def energy_of_owner(
    exchanged: Sequence[Tensor],
    residuals: tuple[Tensor, Tensor],
    arrivals: Tensor,
    places: tuple[Place, ...],
    states: Sequence[Tensor],
    numbers: tuple[float, float],
) -> None:
    """Add the energy that an owner's error feedback takes away: `TrackerKernels`."""
    table, flat = _places(places, arrivals.device), [*map(packed, exchanged)]
    with on(arrivals.device):
        given = table.point_to("owner", flat)
        arrays = table.array, given, *residuals, arrivals, *states
        table.launch(samples.energy_of_owner, flat, *arrays, *numbers)


def energies(
    gradients: Sequence[Tensor],
    arrivals: Tensor,
    places: tuple[Place, ...],
    states: Sequence[Tensor],
    message: Tensor,
    numbers: tuple[float, float, float],
) -> None:
    """Compute energies of exchanged gradients and Adam's damping: `TrackerKernels`."""
    table, flat = _places(places, arrivals.device), [*map(packed, gradients)]
    *sums, gains, damping = states
    factor, ranks, least = numbers
    sent = message.view(torch.float32)
    with on(arrivals.device):
        given = table.point_to("energies", flat)
        arrays = table.array, given, arrivals, *sums, sent, gains, damping
        rows = sent.stride(0), sent.shape[0]
        each = *rows, factor, 0.5 / ranks, 1.0 / sent.shape[0], least * least - 1.0
        table.launch(samples.energies, flat, *arrays, *each)


def spikes(
    gradients: Sequence[Tensor],
    places: tuple[Place, ...],
    scales: Tensor,
    gain: float,
    means: tuple[Tensor, Tensor],
    damping: Tensor,
    numbers: tuple[float, float],
) -> None:
    """Compute mean norms of exchanged gradients, and limit sudden ones: `TrackerKernels`."""
    table, flat = _places(places, scales.device), [*map(packed, gradients)]
    rate, spike = numbers
    large = _layout(tuple(g.numel() if g.numel() > SMALL else 0 for g in flat), scales.device)
    with on(scales.device):
        given = table.point_to("spikes", flat)
        arrays = table.array, given, scales, *means, damping
        table.launch(samples.spikes, flat, *arrays, 1.0 / gain, rate - 1.0, spike)
        large.launch(elements.limit, given, damping, KIND=KINDS[flat[0].dtype])
    for gradient, limited in zip(gradients, flat, strict=True):
        _return(gradient, limited)


def rms(arrays: Sequence[Tensor], places: tuple[Place, ...]) -> Tensor:
    """Return the root mean squares of samples of tensors, which `suit`.

    They are in scratch memory: the next call for tensors of this dtype writes to it again.
    """
    device, name = arrays[0].device, f"rms {arrays[0].dtype}"
    table, flat = _places(places, device), [*map(packed, arrays)]
    with on(device):
        out = scratch(name, len(arrays), torch.float32, device, current_stream(device))
        given = table.point_to("rms", flat)
        table.launch(samples.rms, flat, table.array, given, out)
    return out[: len(arrays)]


def shards(tensors: Sequence[Tensor], parts: int, firsts: Sequence[int]) -> list[Tensor]:
    """Copy a shard of each tensor to scratch memory, as float32; the next call writes to it again.

    firsts: each shard's first block; see `Ops.shard`.
    """
    device, flat = tensors[0].device, [*map(packed, tensors)]
    pairs = zip(flat, firsts, strict=True)
    sizes = [shard_numel(tensor.numel(), parts, first) for tensor, first in pairs]
    layout = _layout(tuple(sizes), device)
    with on(device):
        # Each shard begins at a multiple of 16 bytes.
        wide = [-(-size // 4) * 4 for size in sizes]
        out = scratch("shards", sum(wide), torch.float32, device, current_stream(device))
        starts = accumulate(wide, initial=0)
        made = [out[at : at + size] for at, size in zip(starts, sizes, strict=False)]
        rows = [
            number
            for tensor, shard, first in zip(flat, made, firsts, strict=True)
            for number in (tensor.data_ptr(), shard.data_ptr(), first)
        ]
        given = layout.store("shards", rows, (rows[0], firsts[0]))
        layout.launch(elements.shards, given, parts, KIND=KINDS[flat[0].dtype])
    return made


def update(
    tensors: Sequence[Sequence[Tensor]],
    others: Sequence[Sequence[Tensor]],
    numbers: Sequence[tuple[float, ...]],
    later: Tensor,
) -> None:
    """Update tensors of one dtype and optimizer, and how often their elements arrive: one launch.

    Args:
        tensors: a weight, its gradient and moments: SGD's momentum buffer, or Adam's two or three.
        others: of each tensor, the codes; for Adam, also the factors of both classes, and the rms.
        numbers: of each tensor, 1, or -1 to maximize, and the decay of weights. Then SGD's mu, lr,
            nesterov, loss and 1 / (1 - mu), or Adam's `beta1`, `beta2`, `again`, `now`, `stays`,
            `rate`, `scale`, `eps`, `most`, `reach` and 1 - `beta2` of the formulas, and the step.
        later: codes after a step, of elements that do not arrive and of those that do.
    """
    flat = [[*map(packed, own)] for own in tensors]
    sets, rows = dict[tuple[float, ...], int](), list[int]()
    for own, more, of in zip(flat, others, numbers, strict=True):
        rows.append(sets.setdefault(of, len(sets)))
        rows += [*map(Tensor.data_ptr, own), *[0] * (5 - len(own))]
        rows += [*map(Tensor.data_ptr, more), *[0] * (3 - len(more))]
    padded = [number for of in sets for number in (*of, *[0.0] * NUMBERS)[:NUMBERS]]
    layout = _layout_of([weight for weight, *_ in flat])
    kernel = elements.adam if len(others[0]) > 1 else elements.sgd
    with on(later.device):
        # A step's factors and those of the next one are at two addresses, in turn.
        first = rows[1], rows[7]
        both = layout.store("rows", rows, first), layout.store("sets", _bits(padded), first)
        layout.launch(kernel, *both, later, KIND=KINDS[flat[0][0].dtype])
    for given, written in zip(tensors, flat, strict=True):
        for at, each in enumerate(written):
            if at != 1:
                _return(given[at], each)


class _Memory:
    """Keeps addresses of lists of tensors on their device; not for use in CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Hashable, Addresses] = {}

    def point_to(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Return the array of addresses of tensors."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        return self.store(name, addresses, addresses[0])

    def store(self, name: str, numbers: list[int], first: Hashable) -> Tensor:
        """Return an array of int64 numbers.

        Lists of equal sizes, as of a transformer's layers, have an array each, and streams too.
        They are told apart by `first`, as by the address of their first tensor.
        """
        key = name, current_stream(self._device), first, len(numbers)
        if key not in self._known:
            if len(self._known) >= KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = Addresses(len(numbers), self._device)
        return self._known[key].store(numbers)


class _Layout(_Memory):
    """Divides a list of tensors into blocks, one for each program of a kernel."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        super().__init__(device)
        rows, owners = list[int](), list[int]()
        for position, numel in enumerate(sizes):
            rows += [numel, len(owners)]
            owners += [position] * -(-numel // BLOCK)
        self._programs = len(owners)
        self._table = torch.tensor(rows, device=device)
        self._owners = torch.tensor(owners or [0], dtype=torch.int32, device=device)

    def launch(self, kernel: object, *arguments: object, **constants: object) -> None:
        """Launch one program for each block."""
        if self._programs:
            both = self._table, self._owners
            launch(kernel, (self._programs,), *both, *arguments, **constants, **EIGHT_WARPS)


class _Places(_Memory):
    """Keeps on a device where samples of a list of tensors are."""

    def __init__(self, places: Sequence[Place], device: torch.device) -> None:
        super().__init__(device)
        self.array, self._count = torch.tensor(places, device=device).flatten(), len(places)

    def launch(self, kernel: object, tensors: Sequence[Tensor], *arguments: object) -> None:
        """Launch one program for each tensor."""
        kind = KINDS[tensors[0].dtype]
        launch(kernel, (self._count,), *arguments, KIND=kind, **SIXTEEN_WARPS)


def _layout_of(tensors: Sequence[Tensor]) -> _Layout:
    return _layout(tuple(tensor.numel() for tensor in tensors), tensors[0].device)


@functools.lru_cache(maxsize=1024)
def _layout(sizes: tuple[int, ...], device: torch.device) -> _Layout:
    return _Layout(sizes, device)


@functools.lru_cache(maxsize=1024)
def _places(places: tuple[Place, ...], device: torch.device) -> _Places:
    return _Places(places, device)


def _return(tensor: Tensor, written: Tensor) -> None:
    """Note that a kernel has written to a tensor, or to its copy, which is copied back."""
    note_writing(tensor)
    if written is not tensor:
        tensor.copy_(written)


def _bits(numbers: list[float]) -> list[int]:
    """Return the bits of numbers as float32."""
    return array("i", array("f", numbers).tobytes()).tolist()
