"""Device memory that kernels need beside the arenas: addresses of gradients, and scratch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_scratch: dict[tuple[str, torch.device, int], Tensor] = {}


def scratch(name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """At least `numel` elements of any content, which all buckets on a stream share.

    They may: kernels on one stream run one after another, and none leaves anything in it for a
    later call. While a graph is captured the memory is the graph's own.
    """
    if capturing(device):
        return torch.empty(max(1, numel), dtype=dtype, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _scratch.get((name, device, stream))
    if found is None or found.numel() < numel:
        found = torch.empty(max(1, numel), dtype=dtype, device=device)
        _scratch[name, device, stream] = found
    return found


def capturing(device: torch.device) -> bool:
    """Whether what is launched now is recorded in a graph instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Addresses:
    """Addresses of gradients as an array on their device, copied only where they changed.

    The copy leaves from pinned memory without waiting. That memory is new for each copy and goes
    back to torch, which does not hand it out again before the copy is over. An array that a graph
    reads is kept as it is: other addresses go to a new one.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._array = torch.zeros(max(1, count), dtype=torch.int64, device=device)
        self._latest: list[int] = []
        self._in_graph = False
        self._kept: list[Tensor] = []  # what graphs read

    def point_to(self, gradients: Sequence[Tensor]) -> Tensor:
        """The array, for contiguous gradients on its device."""
        addresses = [gradient.data_ptr() for gradient in gradients]
        recorded = capturing(self._array.device)
        if addresses == self._latest:
            self._in_graph |= recorded
            return self._array
        host = torch.tensor(addresses, dtype=torch.int64, pin_memory=self._array.is_cuda)
        if recorded:  # copied at each replay, and not before
            array = torch.empty_like(self._array).copy_(host, non_blocking=True)
            self._kept += [host, array]
            return array
        if self._in_graph:
            self._kept.append(self._array)
            self._array, self._in_graph = torch.empty_like(self._array), False
        self._latest = addresses
        return self._array.copy_(host, non_blocking=True)
