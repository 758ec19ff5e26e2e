"""Encoding of values and indices to bytes in torch; see `horovod_topk.ops.protocol.Ops`.

No function here waits for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horovod_topk.ops import coding

_FLOATS = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_PLAIN = {"int16": torch.int16, "int32": torch.int32}  # torch has no full set of unsigned dtypes
_MASK = {"int16": 0xFFFF, "int32": 0xFFFFFFFF}


def pack_values(values: Tensor, kind: str) -> Tensor:
    """`Ops.pack_values`."""
    if kind in _FLOATS:
        return _as_bytes(narrowed(values, _FLOATS[kind]))
    count, block = values.numel(), coding.BLOCK[kind]
    limited = finite(values)
    parts = blocks(limited, block)
    largest = parts.abs().amax(1)
    if kind in coding.MAGNITUDES:
        return _packed_magnitudes(limited, parts, largest, kind)
    divisor = largest.new_full([1], coding.DIVISOR[kind])  # torch multiplies by 1 / a number
    scale = _scale_above(largest / divisor)
    body = _packed_multiples(parts, _widened(scale), kind)
    return torch.cat([_as_bytes(scale), body[: -(-count * coding.VALUE_BITS[kind] // 8)]])


def finite(values: Tensor) -> Tensor:
    """`Ops.finite`."""
    known = values.nan_to_num(0.0, 0.0, 0.0)
    return known.clamp_(-coding.LIMIT, coding.LIMIT).float()


def above(array: Tensor) -> Tensor:
    """`Ops.above`."""
    return _widened(_scale_above(array))


def blocks(array: Tensor, size: int, filler: float = 0) -> Tensor:
    """Reshape a flat array to [blocks, size]; the last block is padded with `filler`."""
    padding = (0, -array.numel() % size)
    return torch.nn.functional.pad(array, padding, value=filler).view(-1, size)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """`Ops.pack_bits`."""
    if 8 % bits == 0:  # a byte has a whole number of codes
        shifts = bits * torch.arange(8 // bits, dtype=torch.uint8, device=codes.device)
        return (blocks(codes.to(torch.uint8), 8 // bits) << shifts).sum(1, dtype=torch.uint8)
    shifts = torch.arange(bits, device=codes.device)
    return _packed_bits((codes[:, None] >> shifts & 1).reshape(-1))


def unpack_bits(rows: Tensor, count: int, bits: int) -> Tensor:
    """`Ops.unpack_bits`."""
    if 8 % bits == 0:
        shifts = bits * torch.arange(8 // bits, dtype=torch.uint8, device=rows.device)
        several = rows[:, :, None] >> shifts & (1 << bits) - 1
        return several.reshape(rows.shape[0], -1)[:, :count].to(torch.int64)
    single = _bits(rows)[:, : count * bits].reshape(rows.shape[0], count, bits)
    return (single.to(torch.int64) << torch.arange(bits, device=rows.device)).sum(2)


def pack_digits(codes: Tensor, base: int) -> Tensor:
    """`Ops.pack_digits`."""
    weights = torch.tensor(coding.weights(base), dtype=torch.uint8, device=codes.device)
    several = blocks(codes.to(torch.uint8), len(weights))
    return (several * weights).sum(1, dtype=torch.uint8)


def unpack_digits(rows: Tensor, count: int, base: int) -> Tensor:
    """`Ops.unpack_digits`: by a table of all bytes."""
    weights = torch.tensor(coding.weights(base), device=rows.device)
    digits = torch.arange(256, device=rows.device)[:, None] // weights
    digits[:, :-1] %= base
    several = digits.index_select(0, rows.reshape(-1).to(torch.int64))
    return several.view(rows.shape[0], -1)[:, :count]


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest, through float32, and saturate."""
    if values.dtype == dtype or dtype == torch.float64:
        return values.to(dtype)
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).float().to(dtype)


def unpack_values(rows: Tensor, count: int, kind: str, dtype: torch.dtype) -> Tensor:
    """`Ops.unpack_values`."""
    if count == 0:  # empty rows cannot be viewed as wider dtypes
        return rows.to(dtype)
    if kind in _FLOATS:
        return _fresh(rows).view(_FLOATS[kind]).to(dtype)
    at = coding.SCALE_BYTES * coding.scales(kind, count)
    scale = _widened(_fresh(rows[:, :at]).view(torch.int16))
    if kind in coding.MAGNITUDES:
        return _magnitudes(scale, rows[:, at:], count, kind).to(dtype)
    multiple = _multiples(rows[:, at:], count, kind)
    return (multiple * scale.repeat_interleave(coding.BLOCK[kind], 1)[:, :count]).to(dtype)


def pack_index(index: Tensor, numel: int, kind: str) -> Tensor:
    """`Ops.pack_index`."""
    if kind in _PLAIN:
        return _as_bytes(index.to(_PLAIN[kind]))
    k, low = index.numel(), coding.low_bits(numel, index.numel())
    position = torch.arange(k, device=index.device)
    x = index - position
    lower = x[:, None] >> torch.arange(low, device=index.device) & 1
    upper = torch.zeros(coding.high_bits(numel, k), dtype=torch.bool, device=index.device)
    upper[(x >> low) + position] = True
    return torch.cat([_packed_bits(lower.reshape(-1)), _packed_bits(upper)])


def unpack_index(rows: Tensor, count: int, numel: int, kind: str) -> tuple[Tensor, Tensor]:
    """`Ops.unpack_index`."""
    if kind in _PLAIN:
        plain = _fresh(rows).view(_PLAIN[kind]).to(torch.int64)
        return _checked(plain.bitwise_and_(_MASK[kind]), numel)
    low, at = coding.low_bits(numel, count), coding.low_bytes(numel, count)
    weights = 2 ** torch.arange(low, device=rows.device)
    lower = _bits(rows[:, :at])[:, : count * low].reshape(rows.shape[0], count, low)
    lower = lower.to(torch.int64)
    found = _bits(rows[:, at:])[:, : coding.high_bits(numel, count)].cumsum(1, dtype=torch.int32)
    position = torch.arange(count, device=rows.device)
    wanted = (position + 1).to(torch.int32).expand(rows.shape[0], count).contiguous()
    place = torch.searchsorted(found, wanted)
    x = ((place - position) << low) + (lower * weights).sum(2)
    index, sound = _checked(x + position, numel)
    return index, sound & (found[:, -1] == count)


def _checked(index: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Indices clipped to the tensor, and whether each row was valid."""
    ascends = (index[:, 1:] > index[:, :-1]).all(1)
    return index.clamp(0, numel - 1), ascends & (index[:, -1] < numel)


def _scale_above(least: Tensor) -> Tensor:
    """The smallest bfloat16 that is not below a float32, as int16 bits."""
    return ((least.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16)


def _nearest_scale(scale: Tensor) -> Tensor:
    """The nearest bfloat16, ties to even, as int16 bits."""
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to(torch.int16)


def _widened(scale: Tensor) -> Tensor:
    """Convert int16 bits of a bfloat16 to float32."""
    return (scale.to(torch.int32) << 16).view(torch.float32)


def _packed_magnitudes(values: Tensor, blocks: Tensor, largest: Tensor, kind: str) -> Tensor:
    """Encode signs and regions of magnitudes; sums of integers are exact in any order."""
    count, width = values.numel(), coding.VALUE_BITS[kind]
    unit = _widened(_scale_above(largest)).double()
    divisor = torch.where(unit > 0, unit, torch.ones_like(unit))[:, None]
    parts = (blocks.abs().double() / divisor * coding.UNIT).long()
    first = torch.arange(blocks.shape[0], device=blocks.device) * blocks.shape[1]
    filled = (count - first).clamp(max=blocks.shape[1])

    def above(limit: Tensor) -> coding.Counted:
        exceeds = parts > limit[:, None]
        return exceeds.sum(1), (parts * exceeds).sum(1)

    limits, regions = coding.regions((filled, parts.sum(1)), width, above)
    found = [unit * (total / (coding.UNIT * n.clamp(min=1)).double()) for n, total in regions]
    scale = _nearest_scale(torch.stack(found, 1).float().view(-1))
    codes = (blocks < 0).long() << width - 1
    for limit in limits:
        codes += parts > limit[:, None]
    return torch.cat([_as_bytes(scale), pack_bits(codes.view(-1)[:count], width)])


def _packed_multiples(blocks: Tensor, scale: Tensor, kind: str) -> Tensor:
    """Encode int8 or int4 multiples of each block's scale as bytes."""
    most = coding.LARGEST[kind]
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))[:, None]
    multiple = (blocks / divisor).round().clamp(-most, most).reshape(-1).to(torch.int8)
    if coding.VALUE_BITS[kind] == 8:
        return multiple.view(torch.uint8)
    half = (multiple & 0xF).view(torch.uint8).view(-1, 2)
    return half[:, 0] | half[:, 1] << 4


def _multiples(rows: Tensor, count: int, kind: str) -> Tensor:
    """Decode the multiple of the scale for each value: [P, count] float32."""
    if coding.VALUE_BITS[kind] == 8:
        return _fresh(rows).view(torch.int8).float()
    halves = torch.stack([rows & 0xF, rows >> 4], 2).reshape(rows.shape[0], -1)[:, :count]
    return ((halves.to(torch.int16) ^ 8) - 8).float()


def _magnitudes(scales: Tensor, rows: Tensor, count: int, kind: str) -> Tensor:
    """Decode values, each of which is plus or minus one of its block's scales: [P, count]."""
    codes, half = unpack_bits(rows, count, coding.VALUE_BITS[kind]), coding.MAGNITUDES[kind]
    block = torch.arange(count, device=rows.device) // coding.BLOCK[kind]
    scale = scales.gather(1, block * half + (codes & half - 1))
    return scale * (1 - 2 * (codes // half)).float()


def _as_bytes(array: Tensor) -> Tensor:
    return array.contiguous().view(torch.uint8)


def _fresh(rows: Tensor) -> Tensor:
    """A contiguous copy, since a view as a wider dtype needs aligned rows."""
    return rows.clone(memory_format=torch.contiguous_format)


def _padded(array: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(array, (0, -array.numel() % multiple))


def _packed_bits(bits: Tensor) -> Tensor:
    """Pack bits into bytes, the first bit lowest."""
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (_padded(bits.to(torch.uint8), 8).view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _bits(rows: Tensor) -> Tensor:
    """Unpack [P, n] bytes to [P, 8 n] bits, 0 or 1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
    return (rows[:, :, None] >> shifts & 1).reshape(rows.shape[0], -1)
