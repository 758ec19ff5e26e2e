"""TensorFlow implementation of `Ops`, eagerly or while a graph is built.

Tensors are immutable, so an array here is a `Buffer`: a container whose tensor is replaced by
writes. A view is a stretch of a buffer, and a write through one view is visible in all others.

If the kernels of `horovod_topk.kernels` are available, they encode and decode a bucket as
operations of the graph; all other operations are TensorFlow's.

Selection is exact and avoids sorting, as in `horovod_topk.ops.torch`: a strided sample gives a
threshold a little below the k-th magnitude, one pass keeps the candidates above it, and the
smallest of them are dropped. If there are too few candidates, the full `top_k` is used.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from horovod_topk.kernels import native
from horovod_topk.ops import coding
from horovod_topk.ops import tensorflow_packing as packing
from horovod_topk.ops.coding import SHARD_BLOCK
from horovod_topk.ops.philox import Stream, words
from horovod_topk.ops.protocol import EACH, HEAD, Fused, Pick, Place, TrackerKernels
from horovod_topk.ops.verbs import SharedVerbs

log = logging.getLogger("horovod_topk")

Tensor = Any  # tf.Tensor: TensorFlow has no annotations
Stretch = tuple[int, int]

_NOT_FINITE = {  # integers of a dtype's size, and the bits of infinity and NaN
    "float16": (tf.int16, 0x7C00, 0x7E00),
    "bfloat16": (tf.int16, 0x7F80, 0x7FC0),
    "float32": (tf.int32, 0x7F800000, 0x7FC00000),
    "float64": (tf.int64, 0x7FF0000000000000, 0x7FF8000000000000),
}
_DTYPES = ("float16", "bfloat16", "float32", "float64")  # by their code in a recipe
_WRONG = re.compile(r"TopKEF: rank (\d+), tensor (\d+)")  # error of kernels/cpu/tensorflow_ops.cpp


def _operator(function: Callable[[Any, Any], Any]) -> Any:
    """Make a method that computes with two arrays, or an array and a number."""
    return lambda self, other: Buffer(function(self.value, _operand(other)))


class Arithmetic:
    """Python's operators, element by element, for objects with a `value`."""

    value: Any

    __add__, __sub__ = _operator(operator.add), _operator(operator.sub)
    __mul__, __floordiv__ = _operator(operator.mul), _operator(operator.floordiv)
    __mod__, __ge__ = _operator(operator.mod), _operator(operator.ge)
    __lt__, __gt__ = _operator(operator.lt), _operator(operator.gt)

    def __rsub__(self, other: Any) -> Buffer:
        return Buffer(other - self.value)

    def __abs__(self) -> Buffer:
        return Buffer(tf.abs(self.value))

    def __rshift__(self, bits: int) -> Buffer:
        return Buffer(tf.bitwise.right_shift(self.value, tf.constant(bits, self.value.dtype)))


def _operand(other: Any) -> Any:
    return other.value if isinstance(other, Arithmetic) else other


class Buffer(Arithmetic):
    """A mutable container of one tensor of known size, kept in consecutive flat pieces."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.numel = tensor.shape.num_elements()  # None: the first dimension is not known yet
        self._starts, self._pieces = [0], [tensor]

    @classmethod
    def joined(cls, parts: Sequence[Tensor]) -> Buffer:
        """One flat buffer of several flat tensors, which are not copied."""
        buffer = cls(parts[0])
        sizes = [part.shape.num_elements() for part in parts]
        buffer.numel, buffer.shape = sum(sizes), tf.TensorShape([sum(sizes)])
        kept = [(sum(sizes[:i]), part) for i, part in enumerate(parts) if sizes[i]]
        buffer._starts = [at for at, _ in kept] or [0]
        buffer._pieces = [part for _, part in kept] or [parts[0]]
        return buffer

    def copy(self) -> Buffer:
        """A buffer of the same pieces, which are not copied."""
        buffer = Buffer(self._pieces[0])
        buffer.shape, buffer.numel = self.shape, self.numel
        buffer._starts, buffer._pieces = [*self._starts], [*self._pieces]
        return buffer

    def become(self, other: Buffer) -> None:
        """Replace all elements by those of another buffer of this size."""
        self._starts, self._pieces = [*other._starts], [*other._pieces]

    def split(self, boundaries: Iterable[int]) -> Buffer:
        """A buffer of the same elements whose parts between boundaries take no operation to read.

        This buffer has to be flat. One of several pieces is not split further.
        """
        buffer, starts = self.copy(), sorted({0, *boundaries} - {self.numel})
        sizes = [stop - start for start, stop in itertools.pairwise([*starts, self.numel])]
        if len(self._pieces) == 1 and len(sizes) > 1:
            buffer._starts, buffer._pieces = starts, tf.split(self._pieces[0], sizes)
        return buffer

    @property
    def value(self) -> Tensor:
        """The tensor, in its own shape."""
        if len(self._pieces) > 1:
            self._starts, self._pieces = [0], [tf.concat(self._pieces, 0)]
        whole = self._pieces[0]
        return whole if whole.shape == self.shape else tf.reshape(whole, self.shape)

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) in row-major order, flat."""
        if start == stop:
            return tf.zeros([0], self.dtype)
        first = bisect.bisect_right(self._starts, start) - 1
        last = bisect.bisect_left(self._starts, stop)
        pieces = [self._flat(i) for i in range(first, last)]
        joined = pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)
        at = self._starts[first]
        if (start - at, stop - at) == (0, joined.shape[0]):
            return joined
        return joined[start - at : stop - at]

    def write(self, start: int, stop: int, tensor: Tensor) -> None:
        """Replace elements [start, stop)."""
        if start == stop:
            return
        first = bisect.bisect_right(self._starts, start) - 1
        last = bisect.bisect_left(self._starts, stop)
        begin, end = self._starts[first], self._end(last - 1)
        replaced = [(start, tensor)]
        if begin < start:
            replaced.insert(0, (begin, self.read(begin, start)))
        if stop < end:
            replaced.append((stop, self.read(stop, end)))
        self._starts[first:last] = [at for at, _ in replaced]
        self._pieces[first:last] = [piece for _, piece in replaced]

    def _flat(self, position: int) -> Tensor:
        piece = self._pieces[position]
        return piece if piece.shape.rank == 1 else tf.reshape(piece, [-1])

    def _end(self, position: int) -> int:
        following = position + 1
        end: int = self._starts[following] if following < len(self._starts) else self.numel
        return end


class Scaled(Buffer):
    """A flat buffer whose stretches are multiplied by factors when elements are first read.

    Kernels that can multiply read `array` and `factors` instead.

    Args:
        array: the tensor before.
        stretches: start and stop of each stretch.
        factors: one for each stretch, of the tensor's dtype.
    """

    def __init__(self, array: Tensor, stretches: Sequence[Stretch], factors: Tensor) -> None:
        super().__init__(array)
        self.array, self.stretches, self.factors = array, stretches, factors
        self._own: Buffer | None = None

    @property
    def value(self) -> Tensor:
        return self._whole().value

    def copy(self) -> Buffer:
        return self._whole().copy()

    def split(self, boundaries: Iterable[int]) -> Buffer:
        return self._whole().split(boundaries)

    def read(self, start: int, stop: int) -> Tensor:
        return self._whole().read(start, stop)

    def write(self, start: int, stop: int, tensor: Tensor) -> None:
        if stop - start < self.numel:
            self._own = self._whole()
            self._own.write(start, stop, tensor)
        else:
            self._own = Buffer(tensor)

    def _whole(self) -> Buffer:
        if self._own is not None:
            return self._own
        found = Buffer(TensorFlowOps().stretched(self.array, self.stretches, self.factors))
        graphs = [getattr(each, "graph", None) for each in (found.value, self.array)]
        if graphs[0] is graphs[1]:  # not in a branch, which others cannot read from
            self._own = found
        return found


class View(Arithmetic):
    """A stretch of a buffer; writes to either are visible in both."""

    def __init__(self, buffer: Buffer, start: int, stop: int) -> None:
        self.buffer, self.start, self.stop = buffer, start, stop
        self.dtype, self.numel = buffer.dtype, stop - start

    @property
    def value(self) -> Tensor:
        """The stretch as a flat tensor."""
        return self.buffer.read(self.start, self.stop)


Array = Buffer | View


def _verb(function: Callable[..., Any]) -> Any:
    """Make a verb of arrays from a function of tensors."""

    def verb(ops: object, *arguments: Any) -> Any:
        found = function(*map(_operand, arguments))
        return tuple(map(Buffer, found)) if isinstance(found, tuple) else Buffer(found)

    return verb


class TensorFlowOps(SharedVerbs):
    """`horovod_topk.ops.Ops` for buffers of tf.Tensor.

    Args:
        kernels: use this package's kernels if available; False: only TensorFlow's operations.
        defers: if `validate` fails while a graph runs, flag every tensor and keep the error in
            `raised` until the end of the step, as other ranks wait for this rank's remaining
            collectives.
    """

    pack_values = _verb(packing.pack_values)
    unpack_values = _verb(packing.unpack_values)
    pack_bits = _verb(packing.pack_bits)
    unpack_bits = _verb(packing.unpack_bits)
    pack_digits = _verb(packing.pack_digits)
    unpack_digits = _verb(packing.unpack_digits)
    pack_index = _verb(packing.pack_index)
    above = _verb(packing.above)
    finite = _verb(packing.finite)
    divided = _verb(tf.math.divide_no_nan)
    unpack_index = _verb(packing.unpack_index)
    cast, root = _verb(tf.cast), _verb(tf.sqrt)
    row, columns = _verb(lambda rows, at: rows[at]), _verb(lambda rows, a, b: rows[:, a:b])
    column_largest = _verb(lambda rows: tf.reduce_max(rows, 0))
    transposed = _verb(lambda a, n: tf.reshape(tf.transpose(tf.reshape(a, [n, -1])), [-1]))
    are_scales = _verb(lambda rows: tf.reduce_all(tf.math.is_finite(rows) & (rows >= 0), 1))
    spread = _verb(lambda array, size, count: tf.repeat(array, size, -1)[..., :count])

    def __init__(self, *, kernels: bool = True, defers: bool = False) -> None:
        self._use_kernels, self._defers = kernels, defers
        self.raised: Exception | None = None  # the error of `validate` in a graph

    def zeros(self, numel: int, dtype: str, device: str = "") -> Array:
        return Buffer(tf.zeros([numel], dtype))

    def numbers(self, numbers: Sequence[float], dtype: str, device: str = "") -> Array:
        return Buffer(tf.cast(tf.constant(numbers, tf.float32), dtype))

    def arange(self, count: int, device: str = "") -> Array:
        return Buffer(tf.range(count, dtype=tf.int64))

    def random_bits(self, stream: Stream, count: int, bits: int, device: str = "") -> Array:
        blocks = tf.range(-(-count // 4), dtype=tf.int64)
        drawn = _shifted(tf.stack(words(stream, blocks, _shifted), 1), 32 - bits)
        return Buffer(tf.reshape(drawn, [-1])[:count])

    def random_index(self, stream: Stream, numel: int, k: int, device: str = "") -> Array:
        drawn, numbers = self.random_bits(stream, k, 31).value, tf.range(k + 1, dtype=tf.int64)
        return Buffer(coding.random_index(drawn, numbers, numel, _shifted))

    def view(self, array: Array, start: int, stop: int) -> Array:
        if isinstance(array, View):
            return View(array.buffer, array.start + start, array.start + stop)
        return View(array, start, stop)

    def numel(self, array: Array) -> int:
        return array.numel

    def dtype(self, array: Array) -> str:
        name: str = array.dtype.name
        return name

    def device(self, array: Array) -> str:
        return ""

    def joined(self, parts: Sequence[Array]) -> Array:
        return Buffer(tf.concat([part.value for part in parts], 0))

    def clone(self, array: Array) -> Array:
        return array.copy() if isinstance(array, Buffer) else Buffer(array.value)

    def assign(self, out: Array, source: Array) -> None:
        _write(out, tf.cast(_flat(source), out.dtype))

    def compensate(self, residual: Array, gradient: Array, out: Array) -> Array:
        _write(out, residual.value + tf.cast(_flat(gradient), residual.dtype))
        return out

    def withheld(
        self, residual: Array, gradient: Array, most: float, alone: float
    ) -> tuple[Array, Array] | None:
        g = tf.cast(_flat(gradient), residual.dtype)
        total = residual.value + g
        largest = _scalar(alone, total.dtype)
        waited = tf.minimum(tf.maximum(tf.abs(g), _scalar(most, total.dtype)), largest)
        limit = tf.where(tf.equal(residual.value, 0), largest, waited)
        edge, exceeds = tf.where(total < 0, -limit, limit), tf.abs(total) > limit
        rest = tf.where(exceeds, total - edge, _scalar(-0.0, total.dtype))
        return Buffer(tf.where(exceeds, edge - g, residual.value)), Buffer(rest)

    def update_velocity(self, velocity: Array, factor: float, gradient: Array, out: Array) -> None:
        kept = velocity.value * _scalar(factor, velocity.dtype)
        _write(out, kept + _flat(gradient))

    def weighted(self, values: Array, squares: Array) -> Array:
        flat = tf.cast(_flat(squares), values.dtype)
        mantissa, one = coding.FLOAT_BITS[values.dtype.name]
        kind = tf.int32 if values.dtype == tf.float32 else tf.int64
        stride = max(flat.shape[0] // 64, 16) | 1
        rows = flat.shape[0] // stride
        sample = tf.cast(tf.reshape(flat[: rows * stride], [rows, stride])[:, :16], tf.float64)
        mean = tf.abs(tf.cast(tf.reduce_sum(sample) / max(16 * rows, 1), values.dtype))
        power = tf.bitwise.right_shift(tf.bitcast(mean, kind), mantissa)
        least = tf.bitwise.left_shift(tf.maximum(power - 7, 0), mantissa)
        least = tf.where(tf.not_equal(mean, 0), least, _bits(math.inf, values.dtype))
        bits = tf.maximum(tf.bitcast(tf.abs(flat), kind), least)
        return Buffer(tf.bitcast(one // 4 * 5 - bits // 4, values.dtype) * _flat(values))

    def select(self, candidate: Array, k: int) -> Array:
        values, numel = candidate.value, candidate.numel
        if k == numel:
            return self.arange(k)
        if numel <= coding.SAMPLE:
            return Buffer(_largest(_magnitude(values), k))
        magnitude = tf.abs(values)
        candidates = _at_least(magnitude, _guess_threshold(magnitude, k))

        few = _magnitude(tf.gather(values, candidates))
        chosen = tf.cond(
            tf.size(candidates) >= k,
            lambda: tf.gather(candidates, _all_but_smallest(few, k)),
            lambda: _largest(_magnitude(values), k),
        )
        return Buffer(tf.ensure_shape(chosen, [k]))

    def sample(self, candidate: Array, k: int) -> Array:
        count = candidate.numel
        stride, rank = coding.sample_rank(count, k)
        if not rank:
            return self.select(candidate, k)
        magnitude = _magnitude(candidate.value)
        rows = tf.reshape(magnitude[: count // stride * stride], [-1, stride])[:, :16]
        threshold = tf.math.top_k(tf.reshape(rows, [-1]), rank).values[-1]
        chosen = magnitude >= threshold
        missing = k - tf.math.count_nonzero(chosen, dtype=tf.int32)
        index = tf.cond(
            (missing >= 0) & (2 * missing <= k),
            lambda: tf.where(_with_first(chosen, missing))[:, 0],
            lambda: self.select(candidate, k).value,
        )
        return Buffer(tf.ensure_shape(index, [k]))

    def take(self, array: Array, index: Array) -> Array:
        return Buffer(tf.gather(_flat(array), index.value))

    def place(self, values: Array, index: Array, numel: int) -> Array:
        where = tf.cast(index.value, tf.int64)[:, tf.newaxis]
        return Buffer(tf.scatter_nd(where, values.value, tf.constant([numel], tf.int64)))

    def subtract_at(self, candidate: Array, index: Array | None, sent: Array) -> None:
        amount = tf.cast(sent.value, candidate.dtype)
        if index is None:
            _write(candidate, candidate.value - amount)
        else:
            where = index.value[:, tf.newaxis]
            _write(candidate, tf.tensor_scatter_nd_sub(candidate.value, where, amount))

    def matmul(self, left: Array, right: Array, shape: tuple[int, int, int]) -> Array:
        m, k, n = shape
        product = tf.matmul(tf.reshape(left.value, [m, k]), tf.reshape(right.value, [k, n]))
        return Buffer(tf.reshape(product, [-1]))

    def limit(self, arrays: Sequence[Array], factors: Array) -> None:
        values, own = [array.value for array in arrays], factors.value
        found = self.scaled(values, tf.where(own < 1.0, own, tf.ones_like(own)))
        for array, value in zip(arrays, found, strict=True):
            _write(array, value)

    def scaled(self, values: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
        """Multiply tensors by their factors: [n] of the first one's dtype."""
        operations = self._sampling(values)
        if operations is None:
            own = tf.unstack(factors, num=len(values))
            return [v * tf.cast(factor, v.dtype) for v, factor in zip(values, own, strict=True)]
        found = operations.topkef_scale(values, factors, stretches=[])
        return [_shaped(each, value.shape) for each, value in zip(found, values, strict=True)]

    def stretched(self, array: Tensor, stretches: Sequence[Stretch], factors: Tensor) -> Tensor:
        """Multiply stretches of a flat tensor by their factors: [n] of its dtype."""
        operations = self._sampling([array])
        if operations is None:
            parts = [array[start:stop] for start, stop in stretches]
            return joined(stretches, self.scaled(parts, factors), array.shape[0]).value
        pairs = [number for start, stop in stretches for number in (start, stop - start)]
        (found,) = operations.topkef_scale([array], factors, stretches=pairs)
        return _shaped(found, array.shape)

    def tracker_kernels(
        self, gradients: Sequence[Array], others: Sequence[Array], factors: Sequence[float] = ()
    ) -> TrackerKernels:
        operations = self._sampling([*gradients, others[0]])
        if operations is None:
            return TrackerKernels()
        return TrackerKernels(energy_withheld=functools.partial(self._energy_withheld, operations))

    def _energy_withheld(
        self,
        operations: Any,
        gradients: Sequence[Array],
        residuals: tuple[Array, Array],
        arrivals: Array,
        places: tuple[Place, ...],
        states: Sequence[Array],
    ) -> None:
        before, after = residuals
        if isinstance(before, Scaled) and len(before.stretches) > len(places):
            before = before.copy()  # some have no elements, and no place
        sums = operations.topkef_lost(
            [gradient.value for gradient in gradients],
            before.array if isinstance(before, Scaled) else before.value,
            after.value,
            _scales(before),
            arrivals.value,
            samples=[number for place in places for number in place],
            threads=threads(),
        )
        scales, fading, known, out = states
        found: Any = self.transposed(Buffer(_shaped(sums, [2 * len(places)])) * scales, 2)
        self.assign(out, self.finite(fading * known + found))

    def energies_of(
        self, arrays: Sequence[Array], arrivals: Array | None, places: tuple[Place, ...], dtype: str
    ) -> Array:
        operations = self._sampling(arrays)
        if operations is None or arrays[0].dtype.name != dtype:
            found: Array = super().energies_of(arrays, arrivals, places, dtype)
            return found
        sums = operations.topkef_energies(
            [array.value for array in arrays],
            tf.zeros([0], tf.uint8) if arrivals is None else _flat(arrivals),
            samples=[number for place in places for number in place],
            threads=threads(),
        )
        return Buffer(_shaped(sums, [len(arrays) * (1 if arrivals is None else 2)]))

    def kernel_kind(self, device: str) -> str:
        has_kernels = self._use_kernels and not _has_gpu() and find_operations() is not None
        return "cpu" if has_kernels else "framework"

    def _sampling(self, arrays: Sequence[Array | Tensor]) -> Any:
        """The operations on samples of arrays, if there are any for these arrays."""
        known = {array.dtype for array in arrays}
        if not self._use_kernels or known not in ({tf.float32}, {tf.float64}):
            return None
        return None if _has_gpu() else find_operations()

    def largest(self, array: Array, size: int) -> Array:
        return Buffer(tf.reduce_max(packing.blocks(array.value, size, array.dtype.min), 1))

    def sums(self, array: Array, size: int) -> Array:
        blocks = packing.blocks(array.value, size)
        if array.dtype == tf.int64:
            return Buffer(tf.reduce_sum(blocks, 1))
        count, tile = coding.tiles(size)
        padded = tf.pad(blocks, [[0, 0], [0, count * tile - size]])
        return Buffer(coding.added_up(tf.reshape(padded, [-1, count, tile])))

    def count_above(self, array: Array, limit: Array) -> Array:
        is_above = tf.abs(array.value) > limit.value
        count = tf.math.count_nonzero(is_above, dtype=tf.int64, keepdims=True)
        return Buffer(tf.cast(tf.reshape(count, [1]), tf.float32))

    def shard(self, gradient: Array, parts: int, first: int) -> Array:
        flat = _flat(gradient)
        rounds = gradient.numel // (SHARD_BLOCK * parts)
        whole = tf.reshape(flat[: rounds * parts * SHARD_BLOCK], [rounds, parts, SHARD_BLOCK])
        at = (rounds * parts + first) * SHARD_BLOCK
        own = tf.reshape(whole[:, first], [-1])
        return Buffer(tf.concat([own, flat[at : at + SHARD_BLOCK]], 0))

    def blocks(self, tensors: Sequence[Array], picks: Sequence[Pick], dtype: str) -> Array:
        found = []
        for tensor, (shards, first, parts) in zip(tensors, picks, strict=True):
            shard = tensor if shards == 1 else self.shard(tensor, shards, first)
            found.append(_flat(shard if parts == 1 else self.shard(shard, parts, 0)))
        return Buffer(tf.cast(tf.concat(found, 0), dtype))

    def segment_sums(self, array: Array, sizes: Sequence[int]) -> Array:
        stretches = tf.split(array.value, list(sizes))  # segment_sum is not deterministic on GPUs
        return Buffer(tf.stack([tf.reduce_sum(each) for each in stretches]))

    def rows(self, gathered: Array, width: int) -> int:
        if gathered.numel is not None:
            return gathered.numel // width
        rows: int = tf.cast(tf.size(gathered.value) // width, tf.float64)  # a divisor of floats
        return rows

    def store(self, payload: Array, at: int, part: Array) -> None:
        _write(self.view(payload, at, at + part.numel), part.value)

    def load(self, gathered: Array, width: int, at: int, count: int) -> Array:
        return Buffer(_rows(gathered, width)[:, at : at + count])

    def store_bytes(self, payload: Array, at: int, data: bytes) -> None:
        stretch = self.view(payload, at, at + len(data))
        _write(stretch, tf.constant(list(data), tf.uint8, [len(data)]))

    def store_nonfinite(self, payload: Array, at: int, parts: Sequence[Array]) -> None:
        finite = [tf.reduce_all(tf.math.is_finite(part.value)) for part in parts]
        bits = _bitmap(~tf.stack(finite))
        _write(self.view(payload, at, at + bits.shape[0]), bits)

    def poison(self, array: Array, checked: Array) -> None:
        is_finite = tf.reduce_all(tf.math.is_finite(checked.value))
        _write(array, _nan_where(~is_finite, array.value))

    def store_flags(self, payload: Array, at: int, flags: Sequence[bool]) -> None:
        bits = _bitmap(tf.convert_to_tensor(flags))
        stretch = self.view(payload, at, at + bits.shape[0])
        _write(stretch, tf.bitwise.bitwise_or(stretch.value, bits))

    def to_host(self, payload: Array) -> bytes:
        return bytes(payload.value.numpy())

    def validate(
        self,
        gathered: Array,
        width: int,
        count: int,
        sound: Sequence[Array],
        check: Callable[[list[bytes], list[list[bool]]], list[bool]],
        tensors: int,
    ) -> Sequence[bool]:
        heads = _rows(gathered, width)[:, :count]
        answers = tf.stack([each.value for each in sound]) if sound else tf.zeros([0, 1], tf.bool)

        def on_host(rows: Any, answers: Any) -> list[bool]:
            return check([bytes(row) for row in rows.numpy()], answers.numpy().tolist())

        def in_graph(rows: Any, answers: Any) -> Any:
            try:
                return tf.constant(on_host(rows, answers))
            except Exception as error:
                if not self._defers:
                    raise
                self.raised = self.raised or error
                return tf.fill([tensors], True)

        if tf.executing_eagerly():
            return on_host(heads, answers)
        flags = tf.py_function(in_graph, [heads, answers], tf.bool)
        flat: Sequence[bool] = tf.ensure_shape(flags, [tensors])
        return flat

    def either(self, left: Sequence[bool], right: Sequence[bool]) -> Sequence[bool]:
        if isinstance(left, list) and isinstance(right, list):
            return [a or b for a, b in zip(left, right, strict=True)]
        either: Sequence[bool] = tf.logical_or(left, right)
        return either

    def accumulator(self, gradient: Array, dtype: str) -> Array:
        return self.zeros(gradient.numel, dtype)

    def accumulate(self, out: Array, index: Array | None, values: Array) -> None:
        amounts = tf.cast(values.value, out.dtype)
        if index is None:
            _write(out, _add_rows(out.value, amounts))
        else:  # the kernel adds updates in their order
            where = tf.reshape(index.value, [-1, 1])
            _write(out, tf.tensor_scatter_nd_add(out.value, where, tf.reshape(amounts, [-1])))

    def write_scaled(self, total: Array, scale: float, gradient: Array, poisoned: bool) -> None:
        factor = _scalar(scale, total.dtype)
        if poisoned is not False:  # NaN times anything is NaN
            factor = _nan_where(poisoned, factor)
        _write(gradient, tf.cast(total.value * factor, gradient.dtype))

    def fused(self, recipe: Sequence[int], device: str) -> Fused[Array] | None:
        is_cpu = device in ("", "cpu") or "CPU" in device
        if not (self._use_kernels and is_cpu):
            return None
        operations = find_operations()
        return None if operations is None else BucketOperations(recipe, operations)

    def norm(self, array: Array) -> float:
        norm: Any = tf.norm(tf.cast(array.value, tf.float64))
        return float(norm) if tf.executing_eagerly() else norm

    def square(self, array: Array) -> Array:
        total = tf.reduce_sum(tf.square(tf.cast(array.value, tf.float64)))
        return Buffer(tf.reshape(tf.cast(total, tf.float32), [1]))


@functools.cache
def find_operations() -> Any:
    """The module of graph operations that run this package's kernels, or None."""
    if native.find().library is None:
        return None
    try:
        operations = tf.load_op_library(str(native.TENSORFLOW_LIBRARY))
    except (tf.errors.OpError, OSError) as error:
        log.warning("TopKEF compresses by TensorFlow's own operations: %s", error)
        return None
    if hasattr(operations, "topkef_scale"):
        return operations
    log.warning("TopKEF compresses by TensorFlow's own operations: this TensorFlow lacks functions")
    return None


class BucketOperations:
    """`horovod_topk.ops.Fused` as graph operations, which also run eagerly."""

    def __init__(self, recipe: Sequence[int], operations: Any) -> None:
        self._recipe, self._operations = list(recipe), operations
        # A recipe has one tensor for each gradient, or several (shards).
        count = max(recipe[HEAD + 8 :: EACH]) + 1
        self._dtypes = [_DTYPES[code] for code in recipe[HEAD + 6 :: EACH]][:count]

    def encode(
        self,
        residual: Array,
        candidate: Array,
        gradients: Sequence[Array],
        payload: Array,
        streams: Sequence[Stream] = (),
        squares: Sequence[Array | None] = (),
    ) -> None:
        keys = [_scalar(number, tf.int64) for each in streams for number in each.numbers()]
        none = tf.zeros([0], residual.dtype)
        left, filled = self._operations.topkef_encode(
            residual=residual.array if isinstance(residual, Scaled) else residual.value,
            scales=_scales(residual),
            gradients=[gradient.value for gradient in gradients],
            squares=[none if v is None else tf.cast(v.value, residual.dtype) for v in squares],
            template=payload.value,
            keys=tf.stack(keys) if keys else tf.zeros([0], tf.int64),
            recipe=self._recipe,
            threads=threads(),
        )
        _write(candidate, _shaped(left, [candidate.numel]))
        _write(payload, _shaped(filled, [payload.numel]))

    def decode(
        self, gathered: Array, scale: float, flags: Sequence[bool], gradients: Sequence[Array]
    ) -> tuple[int, int] | None:
        shapes = [each.shape if isinstance(each, Buffer) else (each.numel,) for each in gradients]
        try:
            totals = self._operations.topkef_decode(
                gathered=gathered.value,
                flags=flags,
                scale=_scalar(scale, tf.float64),
                G=self._dtypes,
                recipe=self._recipe,
                shapes=[number for shape in shapes for number in (len(shape), *shape)],
                threads=threads(),
            )
        except tf.errors.DataLossError as error:  # a graph raises it when it runs
            found = _WRONG.search(error.message)
            if found is None:
                raise
            return int(found[1]), int(found[2])
        shaped = [_shaped(total, shape) for total, shape in zip(totals, shapes, strict=True)]
        if (whole := _cut_up(gradients)) is not None:
            whole.become(Buffer.joined(shaped))
            return None
        for total, gradient in zip(shaped, gradients, strict=True):
            _write(gradient, total)
        return None


def _scales(array: Array) -> Tensor:
    """Factors of a bucket's residuals for a kernel, float64; none: all are 1."""
    return tf.cast(array.factors if isinstance(array, Scaled) else [], tf.float64)


def _cut_up(arrays: Sequence[Array]) -> Buffer | None:
    """The buffer that these views cut up, one after another, without a gap; None: there is none."""
    views, at = [each for each in arrays if isinstance(each, View)], 0
    for view in views:
        at = view.stop if view.start == at and view.buffer is views[0].buffer else -1
    is_cut = len(views) == len(arrays) and at == views[0].buffer.numel
    return views[0].buffer if is_cut else None


def joined(stretches: Sequence[Stretch], values: Sequence[Tensor], numel: int) -> Buffer:
    """A flat buffer of tensors in their stretches, with zeros between them, which align them."""
    parts, filled = list[Tensor](), 0
    for (start, stop), value in zip(stretches, values, strict=True):
        if start > filled:
            parts.append(tf.zeros([start - filled], value.dtype))
        parts.append(value)
        filled = stop
    if numel > filled:
        parts.append(tf.zeros([numel - filled], values[0].dtype))
    return Buffer.joined(parts)


def _shifted(word: Any, by: int) -> Any:
    """Shift a word, or an array of words, to the right."""
    return word >> by if isinstance(word, int) else tf.bitwise.right_shift(word, by)


def _bitmap(flags: Tensor) -> Tensor:
    """Pack flags into the bits of uint8, the first flag lowest."""
    numel = flags.shape[0]
    count = -(-numel // 8)
    padded = tf.pad(tf.cast(flags, tf.int32), [[0, count * 8 - numel]])
    weights = tf.constant([1 << bit for bit in range(8)])
    return tf.cast(tf.reduce_sum(tf.reshape(padded, [count, 8]) * weights, 1), tf.uint8)


def threads() -> int:
    """Number of threads: as many as TensorFlow uses for one operation."""
    return tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))


def _write(out: Array, tensor: Tensor) -> None:
    if isinstance(out, View):
        out.buffer.write(out.start, out.stop, tensor)
    else:
        out.write(0, out.numel, tensor)


def _shaped(tensor: Tensor, shape: Any) -> Tensor:
    """A kernel's result, whose shape TensorFlow does not know yet."""
    tensor.set_shape(shape)
    return tensor


@functools.cache
def _has_gpu() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))


def _scalar(number: Any, dtype: Any) -> Tensor:
    """A scalar tensor of a dtype; `tf.cast` alone would make Python floats float32 first.

    Eagerly, TensorFlow 2.20 keeps scalar constants, and takes 0.0 and -0.0 for the same one.
    """
    if tf.is_tensor(number):
        return tf.cast(number, dtype)
    return tf.constant(number, dtype) if number else tf.reshape(tf.constant([number], dtype), [])


def _flat(array: Array) -> Tensor:
    return array.value if isinstance(array, View) else array.read(0, array.numel)


def _with_first(chosen: Tensor, count: Tensor) -> Tensor:
    """Flags, with the first `count` unset ones set."""
    free = tf.cast(~chosen, tf.int32)
    return chosen | ((tf.cumsum(free) <= count) & ~chosen)


def _rows(gathered: Array, width: int) -> Tensor:
    """Reshape to [P, width]; P is static if the number of gathered bytes is."""
    ranks = -1 if gathered.numel is None else gathered.numel // width
    return tf.reshape(gathered.value, [ranks, width])


def _add_rows(total: Tensor, rows: Tensor) -> Tensor:
    """Add [P, n] to [n], one row after another."""
    if rows.shape[0] is None:
        return tf.foldl(tf.add, rows, total)
    for row in tf.unstack(rows):
        total = total + row
    return total


def _magnitude(values: Tensor) -> Tensor:
    """Absolute values, with NaN as infinity."""
    infinity = _bits(math.inf, values.dtype)
    bits = tf.bitcast(tf.abs(values), infinity.dtype)  # those of a NaN are above infinity's
    return tf.bitcast(tf.minimum(bits, infinity), values.dtype)


def _nan_where(condition: Any, values: Tensor) -> Tensor:
    """Values, with NaN where a condition holds."""
    nan = _bits(math.nan, values.dtype)
    return tf.bitcast(tf.where(condition, nan, tf.bitcast(values, nan.dtype)), values.dtype)


def _bits(number: float, dtype: tf.DType) -> Tensor:
    """The bits of an infinity or a NaN, as an integer.

    As a constant of a graph, the number itself would be an error for a user who has
    `tf.debugging.enable_check_numerics()`.
    """
    kind, infinity, nan = _NOT_FINITE[dtype.name]
    return tf.constant(nan if math.isnan(number) else infinity, kind)


def _guess_threshold(magnitude: Tensor, k: int) -> Tensor:
    """Estimate a magnitude that slightly more than k elements reach, by a strided sample."""
    stride, rank = coding.guess_rank(magnitude.shape[0], k)
    return tf.math.top_k(_magnitude(magnitude[::stride]), rank).values[-1]


def _at_least(magnitude: Tensor, threshold: Tensor) -> Tensor:
    """Ascending indices of magnitudes not below a threshold; NaN is never below.

    TensorFlow rewrites "not less" to "greater or equal", which NaN is not.
    """
    return tf.where(tf.equal(magnitude < threshold, False))[:, 0]


def _largest(magnitude: Tensor, k: int) -> Tensor:
    """Ascending positions of the k largest; of equal magnitudes the lower position."""
    positions = tf.math.top_k(magnitude, k, sorted=False).indices
    return tf.cast(tf.sort(positions), tf.int64)


def _all_but_smallest(magnitude: Tensor, k: int) -> Tensor:
    """`_largest` for k close to the size: drops the smallest, of equals the higher positions."""
    count = tf.size(magnitude)
    backwards = tf.math.top_k(-magnitude[::-1], count - k, sorted=False).indices
    dropped = count - 1 - backwards
    keep = tf.tensor_scatter_nd_update(
        tf.fill([count], True), dropped[:, tf.newaxis], tf.fill([count - k], False)
    )
    return tf.where(keep)[:, 0]
