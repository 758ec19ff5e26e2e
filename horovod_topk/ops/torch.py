"""PyTorch implementation of `Ops`, on the CPU and on accelerators.

If this package has a kernel for a bucket (`horovod_topk.kernels`), the kernel encodes and decodes
it. All other operations are torch's. Selection on the CPU is exact and avoids sorting: a strided
sample gives a threshold a little below the k-th magnitude, one pass keeps the candidates above it,
and `topk` runs on these few. If there are fewer than k candidates, the full `topk` gives the
threshold.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from horovod_topk.kernels import native, triton
from horovod_topk.kernels.triton.memory import note_writing
from horovod_topk.kernels.triton.memory import packed as _packed
from horovod_topk.ops import coding
from horovod_topk.ops import torch_lists as lists
from horovod_topk.ops import torch_packing as packing
from horovod_topk.ops.coding import SHARD_BLOCK
from horovod_topk.ops.philox import Stream, words
from horovod_topk.ops.protocol import (
    EACH,
    HEAD,
    Fused,
    Pick,
    Place,
    TernaryKernel,
    TrackerKernels,
    Velocities,
)
from horovod_topk.ops.verbs import IndexedVerbs

log = logging.getLogger("horovod_topk")

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
CODES = {DTYPES[name]: code for code, name in enumerate(("float16", "bfloat16", "float32"))}
CODES[torch.float64] = 3  # its code in a recipe
WIDE = (torch.float32, torch.float64)
STORED_CODES = {"bfloat16": 2, "int8": 3, "stable8": 3, "int4": 4}  # kinds in a recipe
APART = 64  # arrays that are made together begin at multiples of so many elements
FEW = 2  # headers that are copied to the host one by one


class TorchOps(IndexedVerbs):
    """`horovod_topk.ops.Ops` for torch.Tensor.

    Args:
        kernels: use this package's kernels if available; False: only torch's operations.
    """

    pack_bits, unpack_bits = staticmethod(packing.pack_bits), staticmethod(packing.unpack_bits)
    pack_digits, unpack_digits = (
        staticmethod(packing.pack_digits),
        staticmethod(packing.unpack_digits),
    )
    pack_index, unpack_index = staticmethod(packing.pack_index), staticmethod(packing.unpack_index)
    finite, above = staticmethod(packing.finite), staticmethod(packing.above)
    segment_sums = staticmethod(lists.segment_sums)
    clone, root = staticmethod(torch.clone), staticmethod(torch.sqrt)
    numel = staticmethod(torch.numel)

    def __init__(self, *, kernels: bool = True) -> None:
        self._use_kernels, self._sample_index = kernels, functools.cache(lists.sample_index)

    def zeros(self, numel: int, dtype: str, device: str = "cpu") -> Tensor:
        return torch.zeros(numel, dtype=DTYPES[dtype], device=device)

    def arrays(self, numels: Sequence[int], dtype: str, device: str) -> list[Tensor]:
        starts = [*accumulate((-(-n // APART) * APART for n in numels), initial=0)]
        whole = self.zeros(starts[-1], dtype, device)
        return [whole[at : at + n] for at, n in zip(starts, numels, strict=False)]

    def numbers(self, numbers: Sequence[float], dtype: str, device: str = "cpu") -> Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=device).to(DTYPES[dtype])

    def arange(self, count: int, device: str = "cpu") -> Tensor:
        return torch.arange(count, device=device)

    def random_bits(self, stream: Stream, count: int, bits: int, device: str) -> Tensor:
        library = self._library(torch.device(device).type)
        if library is not None:
            out = torch.empty(count, dtype=torch.int64, device="cpu")
            key = native.integers(stream.numbers())
            library.topkef_random_bits(key, count, bits, out.data_ptr())
            return out
        ours = self._triton("baselines.draws", device)
        if ours is not None:
            found: Tensor = ours.random_bits(stream, count, bits, device)
            return found
        blocks = torch.arange(-(-count // 4), device=device)
        drawn = torch.stack(words(stream, blocks, operator.rshift), 1) >> (32 - bits)
        return drawn.view(-1)[:count]

    def random_index(self, stream: Stream, numel: int, k: int, device: str) -> Tensor:
        library = self._library(device)
        if library is None:
            drawn = self.random_bits(stream, k, 31, device)
            found: Tensor = coding.random_index(drawn, self.arange(k + 1, device), numel)
            return found
        out = torch.empty(k, dtype=torch.int64, device="cpu")
        library.topkef_random_index(native.integers(stream.numbers()), numel, k, out.data_ptr())
        return out

    def dtype(self, array: Tensor) -> str:
        return str(array.dtype).removeprefix("torch.")

    def device(self, array: Tensor) -> str:
        return str(array.device)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def assign(self, out: Tensor, source: Tensor) -> None:
        out.copy_(source)

    def compensate(self, residual: Tensor, gradient: Tensor, out: Tensor) -> Tensor:
        library = self._library(residual.device.type)
        if library is None or not _fit(residual, gradient, out):
            torch.add(residual, gradient.reshape(-1), out=out)
            return out
        packed = _packed(gradient)
        places = residual.data_ptr(), packed.data_ptr(), out.data_ptr(), out.numel()
        kinds = out.element_size(), CODES[gradient.dtype]
        finite = library.topkef_compensate(*places, *kinds, torch.get_num_threads())
        return out.new_full((1,), 0.0 if finite else math.nan)

    def withheld(
        self, residual: Tensor, gradient: Tensor, most: float, alone: float
    ) -> tuple[Tensor, Tensor] | None:
        g = gradient.reshape(-1).to(residual.dtype)
        total = residual + g
        waited = g.abs().clamp_(min=most, max=alone)
        limit = torch.where(residual == 0, torch.full_like(total, alone), waited)
        exceeds = total.abs() > limit
        if total.device.type == "cpu" and not exceeds.any():
            return None
        edge = torch.copysign(limit, total)
        rest = torch.where(exceeds, total - edge, torch.full_like(total, -0.0))
        return torch.where(exceeds, edge - g, residual), rest

    def update_velocity(
        self, velocity: Tensor, factor: float, gradient: Tensor, out: Tensor
    ) -> None:
        library = self._library(velocity.device.type)
        if library is None:
            torch.mul(velocity, factor, out=out)
            out.add_(gradient.reshape(-1))
            return
        packed = _packed(gradient)
        places = velocity.data_ptr(), factor, packed.data_ptr(), out.data_ptr()
        size = out.numel(), out.element_size()
        library.topkef_update_velocity(*places, *size, torch.get_num_threads())

    def tracker_kernels(
        self, gradients: Sequence[Tensor], others: Sequence[Tensor], factors: Sequence[float] = ()
    ) -> TrackerKernels:
        ours = self._triton("updates.lists", others[0].device)
        if ours is not None and not factors and ours.suit(gradients, others):
            own = ours.energy_withheld, ours.energy_of_owner
            return TrackerKernels(*own, ours.energies, ours.spikes)
        library = self._library(others[0].device.type)
        if library is None or any(g.dtype != others[0].dtype for g in gradients):
            return TrackerKernels()
        return TrackerKernels(
            energy_withheld=functools.partial(self._energy_withheld, library, factors)
        )

    def _energy_withheld(
        self,
        library: native.Library,
        factors: Sequence[float],
        gradients: Sequence[Tensor],
        residuals: tuple[Tensor, Tensor],
        arrivals: Tensor,
        places: tuple[Place, ...],
        states: Sequence[Tensor],
    ) -> None:
        """`TrackerKernels.energy_withheld` on a CPU, also if residuals wait to be rescaled."""
        sums = torch.empty(2 * len(places), dtype=torch.float64, device="cpu")
        packed = [_packed(gradient) for gradient in gradients]
        scale = native.numbers(factors) if factors else None
        arenas = residuals[0].data_ptr(), scale, residuals[1].data_ptr(), arrivals.data_ptr()
        size = native.table(places), len(places), residuals[0].element_size()
        given = native.addresses([gradient.data_ptr() for gradient in packed])
        library.topkef_lost(given, *arenas, *size, torch.get_num_threads(), sums.data_ptr())
        scales, fading, before, after = states
        energy_withheld: Tensor = self.transposed(sums.to(residuals[0].dtype) * scales, 2)
        after.copy_(self.finite(fading * before + energy_withheld))

    def energies_of(
        self,
        arrays: Sequence[Tensor],
        arrivals: Tensor | None,
        places: tuple[Place, ...],
        dtype: str,
    ) -> Tensor:
        kind, library = arrays[0].dtype, self._library(arrays[0].device.type)
        if library is None or kind not in WIDE or any(a.dtype != kind for a in arrays):
            found: Tensor = super().energies_of(arrays, arrivals, places, dtype)
            return found
        count = (1 if arrivals is None else 2) * len(places)
        sums = torch.empty(count, dtype=torch.float64, device="cpu")
        packed = [_packed(array) for array in arrays]
        given = native.addresses([array.data_ptr() for array in packed])
        codes = None if arrivals is None else arrivals.data_ptr()
        size = native.table(places), len(places), packed[0].element_size()
        library.topkef_energies(given, codes, *size, torch.get_num_threads(), sums.data_ptr())
        return sums.to(DTYPES[dtype])

    def kernel_kind(self, device: str) -> str:
        if self._triton("updates.lists", device) is not None:
            return f"Triton {triton.version()}"
        kind = torch.device(device).type
        return "framework" if kind == "cpu" else kind

    def weighted(self, values: Tensor, squares: Tensor) -> Tensor:
        flat = squares.reshape(-1).to(values.dtype)
        mantissa, one = coding.FLOAT_BITS[self.dtype(values)]
        kind = torch.int32 if values.dtype == torch.float32 else torch.int64
        stride = max(flat.numel() // 64, 16) | 1
        sample = flat[: flat.numel() // stride * stride].view(-1, stride)[:, :16].double()
        mean = (sample.mean() if sample.numel() else sample.sum()).to(values.dtype).abs()
        least = ((mean.view(kind) >> mantissa) - 7).clamp_(min=0) << mantissa
        least = torch.where(mean != 0, least, torch.full_like(mean, math.inf).view(kind))
        bits = flat.abs().view(kind).clamp_(min=least)
        return (
            bits.div_(4, rounding_mode="floor").neg_().add_(one // 4 * 5).view(values.dtype)
            * values
        )

    def select(self, candidate: Tensor, k: int) -> Tensor:
        magnitude = candidate.abs()
        if k == magnitude.numel():
            return torch.arange(k, device=candidate.device)
        if candidate.device.type != "cpu":  # the number of candidates would wait for the device
            return torch.topk(magnitude, k, sorted=False).indices.sort().values
        if magnitude.numel() <= coding.SAMPLE:
            return _largest(magnitude, k)
        candidates = _at_least(magnitude, _guess_threshold(magnitude, k))
        if candidates.numel() < k:
            candidates = _at_least(magnitude, torch.topk(magnitude, k).values[-1])
        return candidates[_largest(magnitude[candidates], k)]

    def sample(self, candidate: Tensor, k: int) -> Tensor:
        magnitude, count = candidate.abs().nan_to_num_(math.inf, math.inf), candidate.numel()
        stride, rank = coding.sample_rank(count, k)
        if not rank:
            return self.select(candidate, k)
        rows = magnitude[: count // stride * stride].view(-1, stride)[:, :16]
        chosen = magnitude >= torch.topk(rows.reshape(-1), rank).values[-1]
        missing = k - int(chosen.sum())
        if not 0 <= missing <= k / 2:
            return self.select(candidate, k)
        free = chosen[:k].logical_not().nonzero().squeeze(1)  # enough: at most k are chosen
        chosen[free[:missing]] = True
        return chosen.nonzero().squeeze(1)

    def take(self, array: Tensor, index: Tensor) -> Tensor:
        library = self._library(array.device.type)
        if library is None or array.dtype not in WIDE:
            return array.reshape(-1)[index]
        packed, at, out = _packed(array), _packed(index), array.new_empty(index.numel())
        places = packed.data_ptr(), at.data_ptr(), out.data_ptr()
        library.topkef_take(*places, at.numel(), out.element_size())
        return out

    def place(self, values: Tensor, index: Tensor, numel: int) -> Tensor:
        return values.new_zeros(numel).index_copy_(0, index, values)

    def cast(self, array: Tensor, dtype: str) -> Tensor:
        return array.to(getattr(torch, dtype))

    def pack_values(self, values: Tensor, kind: str) -> Tensor:
        library = self._library(values.device.type) if values.dtype in WIDE else None
        if library is None or kind not in STORED_CODES or not values.is_contiguous():
            return packing.pack_values(values, kind)
        count, size = values.numel(), (values.element_size(), torch.get_num_threads())
        out = torch.empty(coding.value_bytes(kind, count), dtype=torch.uint8, device="cpu")
        code = STORED_CODES[kind], kind == "stable8"
        library.topkef_pack_values(values.data_ptr(), count, *code, out.data_ptr(), *size)
        return out

    def unpack_values(self, rows: Tensor, count: int, kind: str, dtype: str) -> Tensor:
        is_one = len(rows) == 1 and kind in STORED_CODES and DTYPES[dtype] in WIDE
        library = self._library(rows.device.type) if is_one and rows.is_contiguous() else None
        if library is None:
            return packing.unpack_values(rows, count, kind, DTYPES[dtype])
        out = torch.empty(1, count, dtype=DTYPES[dtype], device="cpu")
        size = out.element_size(), torch.get_num_threads()
        code = STORED_CODES[kind]
        library.topkef_unpack_values(rows.data_ptr(), count, code, out.data_ptr(), *size)
        return out

    def are_scales(self, rows: Tensor) -> Tensor:
        return (rows.isfinite() & (rows >= 0)).all(1)

    def subtract_at(self, candidate: Tensor, index: Tensor | None, sent: Tensor) -> None:
        sent = sent.to(candidate.dtype)
        library = self._library(candidate.device.type)
        if index is None:
            candidate.sub_(sent)
        elif library is None or candidate.dtype not in WIDE or not candidate.is_contiguous():
            candidate.index_add_(0, index, sent, alpha=-1)
        else:
            at, values = _packed(index), _packed(sent)
            places = candidate.data_ptr(), at.data_ptr(), values.data_ptr()
            library.topkef_subtract_at(*places, at.numel(), candidate.element_size())

    def write_product(
        self,
        left: Tensor,
        right: Tensor,
        shape: tuple[int, int, int],
        scale: float,
        gradient: Tensor,
        poisoned: bool,
    ) -> None:
        library = self._library(gradient.device.type)
        is_plain = gradient.dtype == left.dtype and _packed(gradient) is gradient
        if poisoned or library is None or not is_plain:
            super().write_product(left, right, shape, scale, gradient, poisoned)
            return
        _product(library, left, right, shape, scale, False, gradient)
        note_writing(gradient)

    def subtract_product(
        self, candidate: Tensor, left: Tensor, right: Tensor, shape: tuple[int, int, int]
    ) -> None:
        library = self._library(candidate.device.type)
        if library is None:
            m, k, n = shape
            candidate.view(m, n).addmm_(left.view(m, k), right.view(k, n), alpha=-1)
        else:
            _product(library, left, right, shape, 1.0, True, candidate)

    def orthonormal(self, rows: Tensor, count: int) -> Tensor:
        library = self._library(rows.device.type)
        if library is None:
            verbs: Tensor = super().orthonormal(rows, count)
            return verbs
        basis = rows.clone()
        length = basis.numel() // count
        library.topkef_orthonormal(basis.data_ptr(), count, length, basis.element_size())
        return basis

    def divided(self, array: Tensor, by: Tensor) -> Tensor:
        return torch.where(by != 0, array / by, 0.0)

    def limit(self, arrays: Sequence[Tensor], factors: Tensor) -> None:
        if factors.device.type != "cpu":  # their values would wait for the device
            lists.multiply(arrays, lists.spread(factors.clamp(max=1.0), arrays))
            return
        for array, factor in zip(arrays, factors.tolist(), strict=True):
            if factor < 1.0:
                array.mul_(factor)

    def largest(self, array: Tensor, size: int) -> Tensor:
        return packing.blocks(array, size, -math.inf).amax(1)

    def column_largest(self, rows: Tensor) -> Tensor:
        return rows.amax(0)

    def sums(self, array: Tensor, size: int) -> Tensor:
        blocks = packing.blocks(array, size)
        if array.dtype == torch.int64:
            return blocks.sum(1)
        count, tile = coding.tiles(size)
        padded = torch.nn.functional.pad(blocks, (0, count * tile - size))
        sums: Tensor = coding.added_up(padded.view(-1, count, tile))
        return sums

    def count_above(self, array: Tensor, limit: Tensor) -> Tensor:
        # On a CPU, in stretches that stay in the cache.
        stretches = torch.split(array, 1 << 16) if array.device.type == "cpu" else (array,)
        counts = [torch.count_nonzero(each.abs() > limit) for each in stretches]
        return torch.stack(counts).sum().to(torch.float32).view(1)

    def spread(self, array: Tensor, size: int, count: int) -> Tensor:
        return array.repeat_interleave(size, -1)[..., :count]

    def shard(self, gradient: Tensor, parts: int, first: int) -> Tensor:
        flat = gradient.reshape(-1)
        rounds = flat.numel() // (SHARD_BLOCK * parts)
        whole = flat[: rounds * parts * SHARD_BLOCK].view(rounds, parts, SHARD_BLOCK)
        rest = flat[(rounds * parts + first) * SHARD_BLOCK :][:SHARD_BLOCK]
        shard = flat.new_empty(rounds * SHARD_BLOCK + rest.numel())
        shard[: rounds * SHARD_BLOCK].view(rounds, SHARD_BLOCK).copy_(whole[:, first])
        shard[rounds * SHARD_BLOCK :] = rest
        return shard

    def scale(self, arrays: Sequence[Tensor], factors: Sequence[float]) -> None:
        if arrays and arrays[0].device.type != "cpu":
            lists.scale(arrays, factors)
        else:
            super().scale(arrays, factors)

    def shards(self, tensors: Sequence[Tensor], parts: int, firsts: Sequence[int]) -> list[Tensor]:
        ours = self._triton("updates.lists", tensors[0].device) if tensors else None
        if ours is None or not ours.suit(tensors):
            return super().shards(tensors, parts, firsts)
        made: list[Tensor] = ours.shards(tensors, parts, firsts)
        return made

    def split_shards(self, gradient: Tensor, firsts: Sequence[int], outs: Sequence[Tensor]) -> None:
        flat, parts = gradient.reshape(-1), len(firsts)
        rounds = flat.numel() // (SHARD_BLOCK * parts)
        whole = flat[: rounds * parts * SHARD_BLOCK].view(rounds, parts, SHARD_BLOCK)
        rest = flat[rounds * parts * SHARD_BLOCK :]
        for first, out in zip(firsts, outs, strict=True):
            out[: rounds * SHARD_BLOCK].view(rounds, SHARD_BLOCK).copy_(whole[:, first])
            out[rounds * SHARD_BLOCK :].copy_(rest[first * SHARD_BLOCK : (first + 1) * SHARD_BLOCK])

    def blocks(self, tensors: Sequence[Tensor], picks: Sequence[Pick], dtype: str) -> Tensor:
        if tensors[0].device.type != "cpu":
            sizes, device = tuple(tensor.numel() for tensor in tensors), tensors[0].device
            index = self._sample_index(sizes, tuple(picks), device)
            return lists.flat(tensors).index_select(0, index).to(DTYPES[dtype])
        found = list[Tensor]()
        for tensor, (shards, first, parts) in zip(tensors, picks, strict=True):
            shard = tensor if shards == 1 else self.shard(tensor, shards, first)
            found.append(shard.reshape(-1) if parts == 1 else self.shard(shard, parts, 0))
        return torch.cat(found).to(DTYPES[dtype])

    def store_bytes(self, payload: Tensor, at: int, data: bytes) -> None:
        payload[at : at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def store_nonfinite(self, payload: Tensor, at: int, parts: Sequence[Tensor]) -> None:
        count = -(-len(parts) // 8)
        bits = torch.zeros(count * 8, dtype=torch.uint8, device=payload.device)
        flags = torch.stack([_is_finite(part).logical_not() for part in parts])
        bits[: len(parts)] = flags.to(torch.uint8)
        weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
        payload[at : at + count] = (bits.view(count, 8) * weights).sum(1, dtype=torch.uint8)

    def poison(self, array: Tensor, checked: Tensor) -> None:
        array.masked_fill_(_is_finite(checked).logical_not(), math.nan)

    def store_flags(self, payload: Tensor, at: int, flags: Sequence[bool]) -> None:
        data = sum(flag << bit for bit, flag in enumerate(flags)).to_bytes(
            -(-len(flags) // 8), "little"
        )
        bits = torch.tensor(list(data), dtype=torch.uint8, device=payload.device)
        payload[at : at + len(data)] |= bits

    def to_host(self, payload: Tensor) -> bytes:
        # A list would have an object for each byte, and torch may have no NumPy.
        here = payload.contiguous().cpu()
        return ctypes.string_at(here.data_ptr(), here.numel())

    def validate(
        self,
        gathered: Tensor,
        width: int,
        count: int,
        sound: Sequence[Tensor],
        check: Callable[[list[bytes], list[list[bool]]], list[bool]],
        tensors: int,
    ) -> list[bool]:
        rows = gathered.view(-1, width)[:, :count]
        # An accelerator copies two rows one by one as fast as both, which takes a kernel first.
        each = [row.tolist() for row in rows] if len(rows) <= FEW else rows.tolist()
        heads = [bytes(head) for head in each]
        return check(heads, torch.stack(list(sound)).tolist() if sound else [])

    def accumulator(self, gradient: Tensor, dtype: str) -> Tensor:
        if gradient.dtype == DTYPES[dtype] and gradient.is_contiguous():
            return gradient.view(-1).zero_()
        return torch.zeros(gradient.numel(), dtype=DTYPES[dtype], device=gradient.device)

    def accumulate(self, out: Tensor, index: Tensor | None, values: Tensor) -> None:
        for rank, row in enumerate(values.to(out.dtype)):
            if index is None:
                out.add_(row)
            else:
                out.index_add_(0, index[rank], row)

    def write_scaled(self, total: Tensor, scale: float, gradient: Tensor, poisoned: bool) -> None:
        if poisoned:
            gradient.fill_(math.nan)
            return
        if scale != 1.0:
            total.mul_(scale)
        if total.data_ptr() != gradient.data_ptr():
            gradient.copy_(total.view(gradient.shape))

    def write_placed(
        self, values: Tensor, index: Tensor, scale: float, gradient: Tensor, poisoned: bool
    ) -> None:
        if poisoned or not gradient.is_contiguous():
            super().write_placed(values, index, scale, gradient, poisoned)
            return
        scaled = (values * scale).to(gradient.dtype)
        library = self._library(gradient.device.type)
        if library is None or gradient.dtype not in WIDE:
            gradient.zero_().view(-1).index_copy_(0, index, scaled)
            return
        at = _packed(index)
        entries = scaled.data_ptr(), at.data_ptr(), at.numel()
        out = gradient.data_ptr(), gradient.numel(), gradient.element_size()
        library.topkef_place(*entries, *out, torch.get_num_threads())
        note_writing(gradient)

    def fused(self, recipe: Sequence[int], device: str) -> Fused[Tensor] | None:
        if not self._use_kernels:
            return None
        if device == "cpu":
            library = native.find().library
            return None if library is None else CpuBucket(recipe, library)
        reason = triton.unsupported(recipe, device)
        if reason is not None:
            _warn_once(device, reason)
            return None
        from horovod_topk.kernels.triton.topk.bucket import TritonBucket  # it needs Triton

        return TritonBucket(recipe, device)

    def _library(self, device: str) -> native.Library | None:
        """The kernel library for arrays on a device; None: use torch's own operations."""
        return native.find().library if self._use_kernels and device == "cpu" else None

    def _triton(self, name: str, device: str | torch.device) -> Any:
        """A module of Triton kernels for arrays on a device; None: use torch's own operations."""
        return triton.module(name, torch.device(device).type) if self._use_kernels else None

    def ternary(self, device: str) -> TernaryKernel[Tensor] | None:
        library, ours = self._library(device), self._triton("baselines.ternary", device)
        if ours is not None:
            found: TernaryKernel[Tensor] = ours.TritonTernary()
            return found
        return None if library is None else CpuTernary(library)

    def norm(self, array: Tensor) -> float:
        return float(torch.linalg.vector_norm(array, dtype=torch.float64))

    def square(self, array: Tensor) -> Tensor:
        wide = torch.float64 if array.dtype == torch.float64 else torch.float32
        norm: Tensor = torch.linalg.vector_norm(array, dtype=wide)  # 25 times slower in float64
        return (norm * norm).to(torch.float32).view(1)


class CpuTernary:
    """`horovod_topk.ops.protocol.TernaryKernel` for tensors in host memory."""

    def __init__(self, library: native.Library) -> None:
        self._library = library

    def moments(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, out = _packed(values), torch.empty(3, dtype=torch.float64, device="cpu")
        size = values.numel(), values.element_size(), torch.get_num_threads()
        self._library.topkef_moments(values.data_ptr(), *size, out.data_ptr())
        return out[:1].float(), out[1:2], out[2:]

    def pack(self, values: Tensor, limit: Tensor, scale: Tensor, stream: Stream) -> Tensor:
        values, count = _packed(values), values.numel()
        out = torch.empty(4 + -(-count // coding.digits(3)), dtype=torch.uint8, device="cpu")
        place = values.data_ptr(), count, values.element_size()
        key = native.integers(stream.numbers())
        self._library.topkef_pack_ternary(
            *place, limit.item(), scale.item(), key, out.data_ptr(), torch.get_num_threads()
        )
        return out


class CpuBucket:
    """`horovod_topk.ops.Fused` for tensors in host memory, with torch's number of threads."""

    def __init__(self, recipe: Sequence[int], library: native.Library) -> None:
        self._kernel = native.NativeBucket(recipe, library)
        self._payload_bytes, width = recipe[4], recipe[1]
        self._dtype = torch.float32 if width == 4 else torch.float64
        self._starts = [start * width for start in recipe[HEAD + 2 :: EACH]]
        gradients = set(recipe[HEAD + 6 :: EACH])
        self._corrects = gradients == {2 if width == 4 else 3}  # gradients have residuals' dtype

    def encode(
        self,
        residual: Tensor,
        candidate: Tensor,
        gradients: Sequence[Tensor],
        payload: Tensor,
        streams: Sequence[Stream] = (),
        squares: Sequence[Tensor | None] = (),
    ) -> None:
        arenas = [residual], [candidate]
        self.encode_shards([self], *arenas, gradients, [payload], [()], None, streams, squares)

    def encode_shards(
        self,
        kernels: Sequence[CpuBucket],
        residuals: Sequence[Tensor],
        candidates: Sequence[Tensor],
        gradients: Sequence[Tensor],
        payloads: Sequence[Tensor],
        factors: Sequence[Sequence[float]],
        velocities: Velocities[Tensor] | None,
        streams: Sequence[Stream] = (),
        squares: Sequence[Tensor | None] = (),
    ) -> None:
        packed = [g if g.is_contiguous() and not g.is_neg() else _packed(g) for g in gradients]
        starts, correction = [each._starts for each in kernels], None
        weighing = [None if v is None else _packed(v.to(self._dtype)) for v in squares]
        if velocities is not None or any(factors) or weighing:
            pairs = zip(factors, starts, strict=True)
            scales = [each or [1.0] * len(tensors) for each, tensors in pairs]
            correction = self._correction(scales, velocities, weighing)
        self._kernel.encode(
            [each._kernel for each in kernels],
            [e.data_ptr() + at for e, each in zip(residuals, starts, strict=True) for at in each],
            [gradient.data_ptr() for gradient in packed],
            [e.data_ptr() + at for e, each in zip(candidates, starts, strict=True) for at in each],
            [payload.data_ptr() for payload in payloads],
            torch.get_num_threads(),
            correction,
            [number for each in streams for number in each.numbers()],
        )

    def _correction(
        self,
        scales: Sequence[Sequence[float]],
        own: Velocities[Tensor] | None,
        squares: Sequence[Tensor | None],
    ) -> native.Correction:
        """What the kernel rescales residuals, corrects gradients and selects elements by."""
        made = native.Correction(
            scales=native.numbers([scale for each in scales for scale in each])
        )
        if own is not None:
            assert self._corrects  # `core.codec.momentum.check_dtypes` has checked it
            made.velocities = native.addresses([u.data_ptr() for u in own.before])
            made.following = native.addresses([u.data_ptr() for u in own.after])
            made.momentum, made.nesterov = own.factor, own.nesterov
        if squares:
            made.squares = native.addresses([None if v is None else v.data_ptr() for v in squares])
        return made

    def decode(
        self, gathered: Tensor, scale: float, flags: Sequence[bool], gradients: Sequence[Tensor]
    ) -> tuple[int, int] | None:
        targets = [
            g if g.is_contiguous() and not g.is_neg() else g.new_empty(g.shape) for g in gradients
        ]
        wrong = self._kernel.decode(
            gathered.data_ptr(),
            gathered.numel() // self._payload_bytes,
            scale,
            flags,
            [target.data_ptr() for target in targets],
            torch.get_num_threads(),
        )
        if wrong is None:
            for target, gradient in zip(targets, gradients, strict=True):
                note_writing(gradient)
                if target is not gradient:
                    gradient.copy_(target)
        return wrong


@functools.cache
def _warn_once(device: str, reason: str) -> None:
    """Log once, and not for each bucket, why a device has no kernel."""
    log.warning("TopKEF compresses on %s by torch's own operations: %s", device, reason)


def _fit(residual: Tensor, gradient: Tensor, out: Tensor) -> bool:
    """Whether kernels can add a gradient to a residual of these dtypes and strides."""
    if residual.dtype != out.dtype or not (residual.is_contiguous() and out.is_contiguous()):
        return False
    if torch.float64 in (residual.dtype, gradient.dtype):
        return residual.dtype == gradient.dtype
    return residual.dtype == torch.float32 and gradient.dtype in CODES


def _is_finite(tensor: Tensor) -> Tensor:
    """Whether all elements are finite, as a scalar: from minimum and maximum, to save memory."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.stack(torch.aminmax(tensor)).isfinite().all()


def _product(
    library: native.Library,
    left: Tensor,
    right: Tensor,
    shape: tuple[int, int, int],
    scale: float,
    subtracts: bool,
    out: Tensor,
) -> None:
    """Write scale * left right to memory, or subtract left right from it."""
    factors = left.data_ptr(), right.data_ptr(), *shape
    place = out.data_ptr(), out.element_size(), torch.get_num_threads()
    library.topkef_product(*factors, scale, subtracts, *place)


def _guess_threshold(magnitude: Tensor, k: int) -> Tensor:
    """Estimate a magnitude that slightly more than k elements reach, by a strided sample."""
    stride, rank = coding.guess_rank(magnitude.numel(), k)
    return torch.topk(magnitude[::stride], rank).values[-1]


def _at_least(magnitude: Tensor, threshold: Tensor) -> Tensor:
    """Ascending indices of magnitudes not below a threshold; NaN is never below."""
    return magnitude.lt(threshold).logical_not_().nonzero().squeeze(1)


def _largest(magnitude: Tensor, k: int) -> Tensor:
    """Ascending positions of the k largest; of equal ones the lower; NaN counts as infinity."""
    magnitude = magnitude.nan_to_num(nan=math.inf, posinf=math.inf)
    smallest_kept = torch.topk(magnitude, k, sorted=False).values.min()
    keep = magnitude >= smallest_kept
    surplus = int(keep.sum()) - k
    if surplus:
        ties = (magnitude == smallest_kept).nonzero().squeeze(1)
        keep[ties[ties.numel() - surplus :]] = False
    return keep.nonzero().squeeze(1)
