"""Encoding of values and indices to bytes in TensorFlow; see `horovod_topk.ops.protocol.Ops`.

All functions take and return tensors. The number of rows may be unknown while a graph is built.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_topk.ops import coding

Tensor = Any  # tf.Tensor: TensorFlow has no annotations

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_PLAIN = {"int16": tf.uint16, "int32": tf.uint32}


def pack_values(values: Tensor, kind: str) -> Tensor:
    """`Ops.pack_values`."""
    if kind in _FLOATS:
        return _as_bytes(narrowed(values, tf.as_dtype(kind)))
    count, block = values.shape[0], coding.BLOCK[kind]
    limited = finite(values)
    parts = blocks(limited, block)
    largest = tf.reduce_max(tf.abs(parts), 1)
    if kind in coding.MAGNITUDES:
        return _packed_magnitudes(limited, parts, largest, kind)
    # A graph multiplies by 1 / a number, which float64 rounds too little to matter.
    exact = tf.cast(largest, tf.float64) / coding.DIVISOR[kind]
    scale = _scale_above(tf.cast(exact, tf.float32))
    body = _packed_multiples(parts, _widened(scale), kind)
    size = -(-count * coding.VALUE_BITS[kind] // 8)
    return tf.concat([_as_bytes(tf.cast(scale, tf.uint16)), body[:size]], 0)


def finite(values: Tensor) -> Tensor:
    """`Ops.finite`."""
    known = tf.where(tf.math.is_finite(values), values, tf.zeros_like(values))
    return tf.cast(tf.clip_by_value(known, -coding.LIMIT, coding.LIMIT), tf.float32)


def above(array: Tensor) -> Tensor:
    """`Ops.above`."""
    return _widened(_scale_above(array))


def blocks(array: Tensor, size: int, filler: float = 0) -> Tensor:
    """Reshape a flat array to [blocks, size]; the last block is padded with `filler`."""
    padding = [[0, -array.shape[0] % size]]
    return tf.reshape(tf.pad(array, padding, constant_values=filler), [-1, size])


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """`Ops.pack_bits`."""
    if 8 % bits == 0:  # a byte has a whole number of codes
        several = blocks(tf.cast(codes, tf.int32), 8 // bits)
        places = tf.constant([1 << bit for bit in range(0, 8, bits)])
        return tf.cast(tf.reduce_sum(several * places, 1), tf.uint8)
    single = tf.bitwise.right_shift(codes[:, tf.newaxis], tf.range(bits, dtype=tf.int64)) & 1
    return _packed_bits(tf.reshape(single, [codes.shape[0] * bits]))


def unpack_bits(rows: Tensor, count: int, bits: int) -> Tensor:
    """`Ops.unpack_bits`."""
    if 8 % bits == 0:
        wide = tf.cast(rows, tf.int32)[:, :, tf.newaxis]
        several = tf.bitwise.right_shift(wide, tf.range(0, 8, bits)) & (1 << bits) - 1
        flat = tf.reshape(several, [_count(rows), 8 // bits * rows.shape[1]])
        return tf.cast(flat[:, :count], tf.int64)
    single = tf.reshape(_bits(rows)[:, : count * bits], [_count(rows), count, bits])
    weights = tf.constant([1 << bit for bit in range(bits)], tf.int64)
    return tf.reduce_sum(tf.cast(single, tf.int64) * weights, 2)


def pack_digits(codes: Tensor, base: int) -> Tensor:
    """`Ops.pack_digits`."""
    weights = tf.constant(coding.weights(base))
    several = blocks(tf.cast(codes, tf.int32), coding.digits(base))
    return tf.cast(tf.reduce_sum(several * weights, 1), tf.uint8)


def unpack_digits(rows: Tensor, count: int, base: int) -> Tensor:
    """`Ops.unpack_digits`."""
    weights = coding.weights(base)
    several = tf.cast(rows, tf.int32)[:, :, tf.newaxis] // tf.constant(weights)
    several = tf.concat([several[:, :, :-1] % base, several[:, :, -1:]], 2)
    flat = tf.reshape(several, [_count(rows), len(weights) * rows.shape[1]])
    return tf.cast(flat[:, :count], tf.int64)


def narrowed(values: Tensor, dtype: Any) -> Tensor:
    """Round to nearest, through float32, and saturate."""
    if values.dtype == dtype or dtype == tf.float64:
        return tf.cast(values, dtype)
    largest = float(dtype.max)
    return tf.cast(tf.cast(tf.clip_by_value(values, -largest, largest), tf.float32), dtype)


def unpack_values(rows: Tensor, count: int, kind: str, dtype: str) -> Tensor:
    """`Ops.unpack_values`."""
    if kind in _FLOATS:
        each = tf.as_dtype(kind).size
        return tf.cast(tf.bitcast(tf.reshape(rows, [_count(rows), count, each]), kind), dtype)
    at = coding.SCALE_BYTES * coding.scales(kind, count)
    parts = tf.reshape(rows[:, :at], [_count(rows), coding.scales(kind, count), 2])
    scale = _widened(tf.cast(tf.bitcast(parts, tf.uint16), tf.int32))
    if kind in coding.MAGNITUDES:
        return tf.cast(_magnitudes(scale, rows[:, at:], count, kind), dtype)
    multiple = _multiples(rows[:, at:], count, kind)
    return tf.cast(multiple * tf.repeat(scale, coding.BLOCK[kind], 1)[:, :count], dtype)


def pack_index(index: Tensor, numel: int, kind: str) -> Tensor:
    """`Ops.pack_index`."""
    if kind in _PLAIN:
        return _as_bytes(tf.cast(index, _PLAIN[kind]))
    k = index.shape[0]
    low, position = coding.low_bits(numel, k), tf.range(k, dtype=tf.int64)
    x = index - position
    shifts = tf.range(low, dtype=tf.int64)
    lower = tf.bitwise.right_shift(x[:, tf.newaxis], shifts) & 1
    place = tf.bitwise.right_shift(x, tf.constant(low, tf.int64)) + position
    ones, size = tf.ones([k], tf.uint8), [coding.high_bits(numel, k)]
    upper = tf.scatter_nd(place[:, tf.newaxis], ones, tf.constant(size, tf.int64))
    return tf.concat([_packed_bits(tf.reshape(lower, [k * low])), _packed_bits(upper)], 0)


def unpack_index(rows: Tensor, count: int, numel: int, kind: str) -> tuple[Tensor, Tensor]:
    """`Ops.unpack_index`."""
    if kind in _PLAIN:
        parts = tf.reshape(rows, [_count(rows), count, _PLAIN[kind].size])
        return _checked(tf.cast(tf.bitcast(parts, _PLAIN[kind]), tf.int64), numel)
    low, at = coding.low_bits(numel, count), coding.low_bytes(numel, count)
    weights = tf.bitwise.left_shift(tf.ones([low], tf.int64), tf.range(low, dtype=tf.int64))
    bits = tf.reshape(_bits(rows[:, :at])[:, : count * low], [_count(rows), count, low])
    lower = tf.reduce_sum(tf.cast(bits, tf.int64) * weights, 2)
    upper = _bits(rows[:, at:])[:, : coding.high_bits(numel, count)]
    found = tf.cumsum(tf.cast(upper, tf.int32), 1)
    wanted = tf.broadcast_to(tf.range(1, count + 1), [_count(rows), count])
    place = tf.searchsorted(found, wanted, out_type=tf.int64)
    position = tf.range(count, dtype=tf.int64)
    x = tf.bitwise.left_shift(place - position, tf.constant(low, tf.int64)) + lower
    index, sound = _checked(x + position, numel)
    return index, sound & (found[:, -1] == count)


def _count(rows: Tensor) -> Any:
    """The number of rows, as an int if it is known."""
    return rows.shape[0] if rows.shape[0] is not None else tf.shape(rows)[0]


def _checked(index: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Indices clipped to the tensor, and whether each row was valid."""
    ascends = tf.reduce_all(index[:, 1:] > index[:, :-1], 1)
    limited = tf.clip_by_value(index, tf.zeros([], tf.int64), tf.constant(numel - 1, tf.int64))
    return limited, ascends & (index[:, -1] < numel)


def _scale_above(least: Tensor) -> Tensor:
    """The smallest bfloat16 that is not below a float32, as bits in int32."""
    return tf.bitwise.right_shift(tf.bitcast(least, tf.int32) + 0xFFFF, 16)


def _nearest_scale(scale: Tensor) -> Tensor:
    """The nearest bfloat16, ties to even, as bits in int32."""
    bits = tf.bitcast(scale, tf.int32)
    return tf.bitwise.right_shift(bits + 0x7FFF + (tf.bitwise.right_shift(bits, 16) & 1), 16)


def _widened(scale: Tensor) -> Tensor:
    """Convert bits of a bfloat16 to float32."""
    return tf.bitcast(tf.bitwise.left_shift(scale, 16), tf.float32)


def _packed_magnitudes(values: Tensor, blocks: Tensor, largest: Tensor, kind: str) -> Tensor:
    """Encode signs and regions of magnitudes; sums of integers are exact in any order."""
    count, block, width = values.shape[0], blocks.shape[1], coding.VALUE_BITS[kind]
    unit = tf.cast(_widened(_scale_above(largest)), tf.float64)
    divisor = tf.where(unit > 0, unit, tf.ones_like(unit))[:, tf.newaxis]
    exact = tf.cast(tf.abs(blocks), tf.float64) / divisor * coding.UNIT
    parts = tf.cast(exact, tf.int64)
    filled = tf.constant([min(block, count - at) for at in range(0, count, block)], tf.int64)

    def above(limit: Tensor) -> coding.Counted:
        exceeds = tf.cast(parts > limit[:, tf.newaxis], tf.int64)
        return tf.reduce_sum(exceeds, 1), tf.reduce_sum(parts * exceeds, 1)

    limits, regions = coding.regions((filled, tf.reduce_sum(parts, 1)), width, above)
    pairs = [(tf.cast(tf.maximum(n, 1), unit.dtype), tf.cast(s, unit.dtype)) for n, s in regions]
    found = tf.stack([unit * (total / (coding.UNIT * n)) for n, total in pairs], 1)
    scale = _nearest_scale(tf.cast(tf.reshape(found, [-1]), tf.float32))
    codes = tf.cast(blocks < 0, tf.int64) * (1 << width - 1)
    for limit in limits:
        codes += tf.cast(parts > limit[:, tf.newaxis], tf.int64)
    body = pack_bits(tf.reshape(codes, [-1])[:count], width)
    return tf.concat([_as_bytes(tf.cast(scale, tf.uint16)), body], 0)


def _packed_multiples(blocks: Tensor, scale: Tensor, kind: str) -> Tensor:
    """Encode int8 or int4 multiples of each block's scale as bytes."""
    most = coding.LARGEST[kind]
    divisor = tf.where(scale > 0, scale, tf.ones_like(scale))[:, tf.newaxis]
    rounded = tf.clip_by_value(tf.round(blocks / divisor), -most, most)
    multiple = tf.cast(tf.reshape(rounded, [-1]), tf.int32)
    if coding.VALUE_BITS[kind] == 8:
        return tf.cast(multiple & 0xFF, tf.uint8)
    half = tf.reshape(multiple & 0xF, [-1, 2])
    return tf.cast(half[:, 0] | tf.bitwise.left_shift(half[:, 1], 4), tf.uint8)


def _multiples(rows: Tensor, count: int, kind: str) -> Tensor:
    """Decode the multiple of the scale for each value: [P, count] float32."""
    if coding.VALUE_BITS[kind] == 8:
        return tf.cast(tf.bitcast(rows, tf.int8), tf.float32)
    wide = tf.cast(rows, tf.int32)
    halves = tf.stack([wide & 0xF, tf.bitwise.right_shift(wide, 4)], 2)
    flat = tf.reshape(halves, [_count(rows), 2 * rows.shape[1]])[:, :count]
    return tf.cast(tf.bitwise.bitwise_xor(flat, 8) - 8, tf.float32)


def _magnitudes(scales: Tensor, rows: Tensor, count: int, kind: str) -> Tensor:
    """Decode values, each of which is plus or minus one of its block's scales: [P, count]."""
    codes, half = unpack_bits(rows, count, coding.VALUE_BITS[kind]), coding.MAGNITUDES[kind]
    block = tf.constant([at // coding.BLOCK[kind] for at in range(count)], tf.int64)
    scale = tf.gather(scales, block * half + codes % half, axis=1, batch_dims=1)
    return scale * tf.cast(1 - 2 * (codes // half), tf.float32)


def _as_bytes(array: Tensor) -> Tensor:
    count = array.shape[0]  # None: not known while a graph is built
    size = -1 if count is None else count * array.dtype.size
    return tf.reshape(tf.bitcast(array, tf.uint8), [size])


def _padded(array: Tensor, multiple: int) -> Tensor:
    return tf.pad(array, [[0, -array.shape[0] % multiple]])


def _packed_bits(bits: Tensor) -> Tensor:
    """Pack bits into bytes, the first bit lowest."""
    groups = tf.reshape(_padded(tf.cast(bits, tf.int32), 8), [-1, 8])
    weights = tf.constant([1 << bit for bit in range(8)])
    return tf.cast(tf.reduce_sum(groups * weights, 1), tf.uint8)


def _bits(rows: Tensor) -> Tensor:
    """Unpack [P, n] bytes to [P, 8 n] bits, 0 or 1 in int32."""
    wide = tf.cast(rows, tf.int32)[:, :, tf.newaxis]
    bits = tf.bitwise.right_shift(wide, tf.range(8)) & 1
    return tf.reshape(bits, [_count(rows), 8 * rows.shape[1]])
