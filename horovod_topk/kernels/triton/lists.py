"""Launches Triton kernels that compute with lists of tensors, once for all tensors of a list.

Functions are named after those of `horovod_topk.ops.protocol.Ops` (`Ops`), and compute the same.
Their tensors have to pass `suit`, or, where a kernel writes to them, `fit`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from horovod_topk.kernels.triton import elements, samples
from horovod_topk.kernels.triton.launching import EIGHT_WARPS, FOUR_WARPS, launch, on
from horovod_topk.kernels.triton.memory import Addresses, current_stream, is_packed, packed
from horovod_topk.ops.protocol import Place

BLOCK = int(elements.BLOCK)
KEPT = 4096  # arrays of addresses for lists of equal sizes


def suit(*lists: Sequence[Tensor]) -> bool:
    """Return whether all tensors are float32 and on one GPU: the answer is equal on all ranks."""
    device = lists[0][0].get_device()
    for tensors in lists:  # loops, as they run for each tensor in each step
        for tensor in tensors:
            if tensor.dtype is not torch.float32 or tensor.get_device() != device:
                return False
    return True


def fit(*lists: Sequence[Tensor]) -> bool:
    """Return whether kernels can write to tensors: they pass `suit` and are in row-major order."""
    return suit(*lists) and all(is_packed(tensor) for tensors in lists for tensor in tensors)


def follow(mean: Tensor, rate: float, gradients: Sequence[Tensor], out: Tensor) -> None:
    """Update the mean that says how often each element arrives, as `Ops.follow` does."""
    layout, flat = _layout_of(gradients), [*map(packed, gradients)]
    with on(mean.device):
        given = layout.point_to("follow", flat)
        layout.launch(elements.follow, given, mean, out, 1.0 - rate, rate)


def limit(arrays: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply each tensor in place by its factor if that is below 1, as `Ops.limit` does."""
    layout = _layout_of(arrays)
    with on(factors.device):
        layout.launch(elements.limit, layout.point_to("limit", arrays), factors)


def lost(
    gradients: Sequence[Tensor],
    residuals: tuple[Tensor, Tensor],
    arrivals: Tensor,
    places: tuple[Place, ...],
    states: Sequence[Tensor],
) -> None:
    """Compute the energy that error feedback takes from gradients, as `Ops.lost` does.

    Residuals are not rescaled in this step: there are no factors.
    """
    table, flat = _places(places, arrivals.device), [*map(packed, gradients)]
    with on(arrivals.device):
        given = table.point_to("lost", flat)
        arrays = table.array, given, *residuals, arrivals, *states
        launch(samples.lost, (len(places),), *arrays, **EIGHT_WARPS)


def energies(
    gradients: Sequence[Tensor],
    arrivals: Tensor,
    places: tuple[Place, ...],
    states: Sequence[Tensor],
    numbers: tuple[float, float, float],
) -> None:
    """Compute energies of exchanged gradients and Adam's factors, as `Ops.energies` does."""
    table, flat = _places(places, arrivals.device), [*map(packed, gradients)]
    factor, ranks, least = numbers
    with on(arrivals.device):
        given = table.point_to("energies", flat)
        arrays = table.array, given, arrivals, *states
        each = factor, 0.5 / ranks, least * least - 1.0
        launch(samples.energies, (len(places),), *arrays, *each, **EIGHT_WARPS)


def spikes(
    gradients: Sequence[Tensor],
    places: tuple[Place, ...],
    scales: Tensor,
    gain: float,
    means: tuple[Tensor, Tensor],
    factors: Tensor,
    numbers: tuple[float, float],
) -> None:
    """Compute mean norms of exchanged gradients and SGD's factors, as `Ops.spikes` does."""
    table, flat = _places(places, scales.device), [*map(packed, gradients)]
    rate, spike = numbers
    with on(scales.device):
        given = table.point_to("spikes", flat)
        arrays = table.array, given, scales, *means, factors
        launch(
            samples.spikes, (len(places),), *arrays, 1.0 / gain, rate - 1.0, spike, **EIGHT_WARPS
        )


def prepare_buffers(
    lists: Sequence[Sequence[Tensor]], losses: Sequence[float], momentum: float, decay: float
) -> None:
    """Prepare SGD's momentum buffers for its own update, as `ops.torch_buffers` does.

    Args:
        lists: buffers, gradients as SGD adds them, parameters and arrivals, which `fit`.
        losses: what an element of each tensor that always arrives loses.
        momentum, decay: the optimizer's.
    """
    layout = _layout_of(lists[0])
    with on(lists[0][0].device):
        given = [
            layout.point_to(name, tensors)
            for name, tensors in zip(("buffers", "added", "parameters", "phi"), lists, strict=True)
        ]
        bits = layout.store("losses", [_bits(loss) for loss in losses], lists[0][0].data_ptr())
        numbers = momentum, 1.0 - momentum, decay
        layout.launch(elements.prepare_buffer, *given, bits, *numbers, DECAYS=decay != 0.0)


def restore_buffers(buffers: Sequence[Tensor], arrivals: Sequence[Tensor], momentum: float) -> None:
    """Turn prepared buffers back into dense SGD's, after the optimizer's update."""
    layout = _layout_of(buffers)
    with on(buffers[0].device):
        given = layout.point_to("buffers", buffers), layout.point_to("phi", arrivals)
        layout.launch(elements.restore_buffer, *given, momentum, (1.0 - momentum) / momentum)


def prepare_moments(lists: Sequence[Sequence[Tensor]], numbers: Sequence[float]) -> None:
    """Prepare Adam's first moments for its own update, as `ops.torch_moments` does.

    Args:
        lists: moments, gradients as Adam adds them, exchanged gradients, arrivals, mean squares,
            factors of both classes, and the largest |m'| where v is 1; they `fit`.
        numbers: those of `horovod_topk.kernels.triton.elements.prepare_moment`, in its order.
    """
    layout = _layout_of(lists[0])
    names = "moments", "added", "gradients", "phi", "squares", "factors", "largest"
    with on(lists[0][0].device):
        given = [layout.point_to(*each) for each in zip(names, lists, strict=True)]
        layout.launch(elements.prepare_moment, *given, *numbers)


class _Memory:
    """Keeps addresses of lists of tensors on their device; not for use in CUDA graphs."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._known: dict[Hashable, Addresses] = {}

    def point_to(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Return the array of addresses of tensors."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        return self.store(name, addresses, addresses[0])

    def store(self, name: str, numbers: list[int], first: int) -> Tensor:
        """Return an array of int64 numbers.

        Lists of equal sizes, as of a transformer's layers, have an array each, and streams too.
        They are told apart by the address of their first tensor.
        """
        key = name, current_stream(self._device), first
        if key not in self._known:
            if len(self._known) >= KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = Addresses(self._count, self._device)
        return self._known[key].store(numbers)


class _Layout(_Memory):
    """Divides a list of tensors into blocks, one for each program of a kernel."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        super().__init__(len(sizes), device)
        rows, owners, start = list[int](), list[int](), 0
        for position, numel in enumerate(sizes):
            rows += [numel, start, len(owners)]
            owners += [position] * -(-numel // BLOCK)
            start += numel
        self._programs = len(owners)
        self._table = torch.tensor(rows, device=device)
        self._owners = torch.tensor(owners or [0], dtype=torch.int32, device=device)

    def launch(self, kernel: object, *arguments: object, **constants: object) -> None:
        """Launch one program for each block."""
        if self._programs:
            both = self._table, self._owners
            launch(kernel, (self._programs,), *both, *arguments, **constants, **FOUR_WARPS)


class _Places(_Memory):
    """Keeps on a device where samples of a list of tensors are."""

    def __init__(self, places: Sequence[Place], device: torch.device) -> None:
        super().__init__(len(places), device)
        self.array = torch.tensor(places, device=device).flatten()


def _layout_of(tensors: Sequence[Tensor]) -> _Layout:
    return _layout(tuple(tensor.numel() for tensor in tensors), tensors[0].device)


@functools.lru_cache(maxsize=1024)
def _layout(sizes: tuple[int, ...], device: torch.device) -> _Layout:
    return _Layout(sizes, device)


@functools.lru_cache(maxsize=1024)
def _places(places: tuple[Place, ...], device: torch.device) -> _Places:
    return _Places(places, device)


def _bits(number: float) -> int:
    """Return the bits of a float32."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])
