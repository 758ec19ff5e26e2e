"""Computes with lists of tensors as with one flat tensor, in a few operations for all of them.

On an accelerator a small operation takes the host longer than the device. So what is to be done
with each of many tensors is done once, with their elements one after another, in row-major order.
No function here waits for a device, except when it first gets tensors of some sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from horovod_topk.kernels import triton
from horovod_topk.ops.coding import SHARD_BLOCK
from horovod_topk.ops.protocol import Pick

Item = TypeVar("Item")

_verbs: Any = torch  # operations on lists of tensors have no annotations


def by_kernels(
    items: Sequence[Item], tensors: Callable[[Item], Sequence[Tensor]]
) -> Iterator[tuple[ModuleType | None, list[Item]]]:
    """Split items into lists that kernels can compute with, one a device and dtype, and the others.

    tensors: returns those of an item that kernels read and write.

    Yields:
        The module of kernels, `kernels.triton.updates.lists`, or None, and a list of items.
    """
    fit, others = dict[tuple[torch.device, torch.dtype], list[Item]](), list[Item]()
    for item in items:
        found = tensors(item)
        ours = triton.module("updates.lists", found[0].device.type)
        is_fit = ours is not None and ours.suit(found)
        kind = found[0].device, found[0].dtype
        (fit.setdefault(kind, []) if is_fit else others).append(item)
    for (device, _), own in fit.items():
        yield triton.module("updates.lists", device.type), own
    if others:
        yield None, others


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Join the elements of tensors of any shape. The result of a single tensor may be a view."""
    if len(tensors) > 1 and all(tensor.dim() == 1 for tensor in tensors):
        return torch.cat(list(tensors))
    joined: Tensor = _verbs._C._nn.flatten_dense_tensors(tensors)
    return joined


def shaped(joined: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor in the shapes of others, to compute with both as lists.

    Such operations are fast if strides are equal. Those of dimensions of size 1 may be any.
    """
    views = _verbs._C._nn.unflatten_dense_tensors(joined, like)
    return [
        view.as_strided(each.shape, each.stride())
        if view.stride() != each.stride() and each.is_contiguous()
        else view
        for view, each in zip(views, like, strict=True)
    ]


def multiply(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply tensors in place by a flat tensor of factors, one for each element."""
    _verbs._foreach_mul_(tensors, shaped(factors, tensors))


def scale(tensors: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Multiply each tensor in place by its factor."""
    _verbs._foreach_mul_(tensors, factors)


def positions(tensors: Sequence[Tensor]) -> Tensor:
    """Return, for each element, the position of its tensor in the list."""
    sizes = tuple(tensor.numel() for tensor in tensors)
    total, device = sum(sizes), tensors[0].device
    is_small = total < 1 << 31
    places = torch.arange(total, dtype=torch.int32 if is_small else torch.int64, device=device)
    ends = _ends(sizes, places.dtype, device)
    return torch.bucketize(places, ends, right=True, out_int32=True)


def spread(numbers: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Repeat each number for each element of its tensor: flat."""
    return numbers.index_select(0, positions(tensors))


def root(array: Tensor) -> Tensor:
    """Return square roots; on CPUs they are correctly rounded, unlike torch's own in float32."""
    if array.device.type != "cpu":
        return array.sqrt()
    return array.double().sqrt().to(array.dtype)


def segment_sums(array: Tensor, sizes: Sequence[int]) -> Tensor:
    """`Ops.segment_sums`."""
    lengths = _lengths(tuple(sizes), array.device)
    return torch.segment_reduce(array, "sum", lengths=lengths, unsafe=True)


def sample_index(sizes: Sequence[int], picks: Sequence[Pick], device: torch.device) -> Tensor:
    """Return where the samples of `Ops.blocks` are, if their tensors are joined."""
    found, start = list[Tensor](), 0
    for numel, (shards, first, parts) in zip(sizes, picks, strict=True):
        shard = _shard(numel, shards, first)
        found.append(shard[_shard(shard.numel(), parts, 0)] + start)
        start += numel
    return torch.cat(found).to(device, torch.int32 if start < 1 << 31 else torch.int64)


def _shard(numel: int, parts: int, first: int) -> Tensor:
    """Return where the elements of a shard are; see `Ops.shard`."""
    own = torch.arange((numel // (SHARD_BLOCK * parts) + 1) * SHARD_BLOCK, device="cpu")
    places = (own // SHARD_BLOCK * parts + first) * SHARD_BLOCK + own % SHARD_BLOCK
    return places[places < numel]


@functools.lru_cache(maxsize=1024)
def _ends(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return where each tensor ends, given their sizes, if they are joined."""
    return torch.tensor(sizes, device="cpu").cumsum(0).to(device, dtype)


@functools.lru_cache(maxsize=1024)
def _lengths(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(sizes, device=device)
