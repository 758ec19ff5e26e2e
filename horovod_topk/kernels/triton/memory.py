"""Memory that kernels use beside the arenas: tensors, their addresses, and scratch memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_scratch: dict[tuple[str, torch.device, int], Tensor] = {}


def current_stream(device: torch.device) -> int:
    """Return a number that identifies a device's current CUDA stream; it is 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def scratch(name: str, numel: int, dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    """At least `numel` elements with any content, shared by all buckets on a stream.

    Kernels on one stream run one after another, and none keeps data in it for a later call. While a
    CUDA graph is captured, new memory is allocated for the graph.
    """
    if capturing(device):
        return torch.empty(max(1, numel), dtype=dtype, device=device)
    found = _scratch.get((name, device, stream))
    if found is None or found.numel() < numel:
        found = torch.empty(max(1, numel), dtype=dtype, device=device)
        _scratch[name, device, stream] = found
    return found


def capturing(device: torch.device) -> bool:
    """Whether launches are being recorded in a CUDA graph instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_packed(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are in row-major order in memory, as kernels need them."""
    return tensor.is_contiguous() and not tensor.is_neg()


def packed(tensor: Tensor) -> Tensor:
    """Return a tensor whose elements are in row-major order in memory: a copy where needed."""
    return tensor if is_packed(tensor) else tensor.resolve_neg().contiguous()


def _write_nothing(tensor: Tensor) -> None:
    """Increment a tensor's version by an empty write in place."""
    tensor.view(-1)[:0].zero_()


# Tells autograd that a tensor that it may have saved has changed: kernels write to its memory.
note_writing = getattr(torch.autograd.graph, "increment_version", _write_nothing)  # PyTorch 2.2


class Addresses:
    """Addresses of tensors in an array on their device, copied only if they have changed.

    The copy from pinned memory is asynchronous. The pinned memory is new for each copy and is freed
    to torch, which does not reuse it before the copy is done. An array that a CUDA graph reads is
    never changed: other addresses are copied to a new array.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._array = torch.empty(max(1, count), dtype=torch.int64, device=device)
        self._latest: list[int] = []
        self._in_graph = False
        self._kept: list[Tensor] = []  # arrays that graphs read

    def point_to(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the array of addresses of contiguous tensors on its device; 0 for None."""
        return self.store([0 if each is None else each.data_ptr() for each in tensors])

    def store(self, addresses: list[int]) -> Tensor:
        """Return an array of these numbers on its device."""
        recorded = capturing(self._array.device)
        if addresses == self._latest:
            self._in_graph |= recorded
            return self._array
        is_cuda = self._array.is_cuda
        host = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        if recorded:  # the copy runs at each replay, and not now
            array = torch.empty_like(self._array).copy_(host, non_blocking=True)
            self._kept += [host, array]
            return array
        if self._in_graph:
            self._kept.append(self._array)
            self._array, self._in_graph = torch.empty_like(self._array), False
        self._latest = addresses
        return self._array.copy_(host, non_blocking=True)
