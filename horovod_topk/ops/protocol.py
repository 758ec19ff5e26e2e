"""The verbs an array library must offer to the core.

Rules for implementations:
- Arrays called `residual`, `candidate`, `values` are one-dimensional, but for what `load` and
  `unpack_...` return and `accumulate` takes: a row a rank. A `gradient` may have any shape and
  strides; its elements are taken in row-major (logical) order.
- dtypes are named by strings: float16, bfloat16, float32, float64, int16, int32, int64, uint8.
- Arrays of one dtype and size have Python's `+`, `-`, `*`, `//` and `>>`, element by element, with
  each other and with Python's numbers. The result is a new array of that dtype; each operation is
  rounded. `//` and `>>` are for integers that are not negative. Arrays also have `<` and `>`, which
  give bools for `cast`, and Python's `abs`.
- A block of a flat array is `size` consecutive elements; the last one may be shorter.
- `out` and `candidate` are written in place; other arguments are never written.
- Nothing here waits for a device, save `to_host`, `validate` and `norm`, and `select` where
  its docstring says so.
- Where an implementation builds a graph, `validate` and all that follows run with the graph.
- No verb depends on more than its arguments: equal input, equal bits. `random_bits` too.

`horovod_topk.ops.numpy` is the oracle in tests: the shortest code that is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

from horovod_topk.ops.philox import Stream

Array = TypeVar("Array")
HEAD, EACH = 9, 10  # numbers of a recipe about the bucket, and about each tensor
Taken = TypeVar("Taken", contravariant=True)  # arrays, of a protocol that returns none


class Fused(Protocol[Taken]):
    """A kernel that encodes and decodes a whole bucket at once, to the same bits as the verbs.

    It is made from a recipe, which is all it has to know of a plan. The first numbers of a recipe
    are about the bucket:

        0   T, the number of tensors
        1   bytes of a residual element: 4 (float32) or 8 (float64)
        2   kind of its values: 0 float32 (float64 where 1 says 8), 1 float16, 2 bfloat16,
            3 int8, 4 int4, 5 sign; these send all elements of each tensor: 6 as ByteGrad, 7 as
            OneBit, 8 as QSGD with the norm "max", 9 with "l2", 10 as TernGrad, unclipped
        3   flags_at: byte of the non-finite flags in a payload
        4   payload_bytes
        5   1 to select by a sampled threshold (`Ops.sample`), 0 to select exactly (`Ops.select`)
        6   parts: of so many shards that gradients are split into, each tensor is one; else 1

        7   1 to leave in `candidate` what is not sent; 0, which the kinds 6 to 10 can: zeros
        8   bits of a code, 2 to 8, of the kinds 8 and 9; else 0

    and then come 10 for each tensor:

        0   numel
        1   k, the entries it sends; numel where it has no index
        2   start: its first element in the arenas
        3   kind of its indices: 1 packed, 2 int16, 4 int32; where all elements are sent, in order,
            0, or 3 if they are sent as the residual has them, whatever the kind of values
        4   value_at: byte of its first value in a payload
        5   index_at: byte of its first index in a payload
        6   dtype of its gradient: 0 float16, 1 bfloat16, 2 float32, 3 float64
        7   first: element i is element (i // 512 * parts + first) * 512 + i % 512 of its gradient
        8   which of the gradients it belongs to
        9   elements of a block, or of a column, of the kinds 6 to 10; else 0
    """

    def encode(
        self,
        residual: Taken,
        candidate: Taken,
        gradients: Sequence[Taken],
        payload: Taken,
        streams: Sequence[Stream] = (),
    ) -> None:
        """Fill flags, values and indices of a payload; leave in `candidate` what is not sent.

        residual, candidate: the bucket's arenas. What the payload has elsewhere stays.
        streams: of random numbers, one a tensor, where the kind of values draws some.
        """
        ...

    def decode(
        self, gathered: Taken, scale: float, flags: Sequence[bool], gradients: Sequence[Taken]
    ) -> tuple[int, int] | None:
        """gradient[...] = scale times the sum over payloads in their order; all NaN if flagged.

        flags: the answers of `Ops.validate`, one for each tensor of the recipe. Indices that do not
        ascend or lie outside a tensor are never followed; where they are noticed at once, this
        returns (rank, position of the tensor), and no gradient has changed.
        """
        ...


class TernaryKernel(Protocol[Array]):
    """A kernel for what `TernGrad` does before and after ranks agree on a scale; in its bits."""

    def moments(self, values: Array) -> tuple[Array, Array, Array]:
        """Of `Ops.finite(values)`, [1] each: the largest magnitude, the sum, the sum of squares.

        The first one is float32. The sums are float64, as `Ops.sums` adds them up.
        """
        ...

    def pack(self, values: Array, limit: Array, scale: Array, stream: Stream) -> Array:
        """Bytes of `Ops.finite(values)`, with magnitudes clipped to `limit`; both [1] float32."""
        ...


@dataclass(frozen=True)
class Velocities(Generic[Array]):
    """Momentum correction of a bucket's gradients; see `horovod_topk.core.momentum`.

    Each has one a gradient. Arrays are flat, of the gradients' dtype, which is the residual's.
    """

    before: Sequence[Array]  # u
    after: Sequence[Array]  # become factor * u + g
    factors: Sequence[float]
    nesterov: Sequence[bool]  # whether factor * after + g is sent; else it is `after`
    losses: Sequence[float]  # of `after` where an element was sent, but in tensors sent whole
    graded: bool  # whether an element loses less, the larger its residual was


@runtime_checkable
class SupportsOnePass(Protocol[Array]):
    """What a `Fused` may offer too: all that is done to a bucket's gradients, in one pass."""

    def encode_shards(
        self,
        kernels: Sequence[Self],
        residuals: Sequence[Array],
        candidates: Sequence[Array],
        gradients: Sequence[Array],
        payloads: Sequence[Array],
        factors: Sequence[Sequence[float]],
        velocities: Velocities[Array] | None,
        streams: Sequence[Stream] = (),
    ) -> None:
        """As `Fused.encode` of each of `kernels`, this one the first, with what has its position.

        They are shards of the same gradients, or a single bucket.

        factors: what each tensor's residual is multiplied by where it is read; for a shard whose
            residuals are read as they are, none.
        velocities: corrects the gradients; to the bits of `update_velocity` and `damp`.
        streams: as in `Fused.encode`, shard by shard.
        """
        ...


class Ops(Protocol[Array]):
    """Array verbs; see the module's docstring for the rules."""

    def zeros(self, numel: int, dtype: str, device: str) -> Array:
        """A new array of `numel` zeros."""
        ...

    def arange(self, count: int, device: str) -> Array:
        """int64 indices 0, 1, ... count - 1."""
        ...

    def random_bits(self, stream: Stream, count: int, bits: int, device: str) -> Array:
        """[count] int64, uniform in [0, 2^bits): the high bits of words of Philox4x32-10.

        bits: 1 to 32. The same on every device and in every framework; see
        `horovod_topk.ops.philox`.
        """
        ...

    def random_index(self, stream: Stream, numel: int, k: int, device: str) -> Array:
        """[k] int64, one index of each of k stretches of `numel` elements, 1 <= k <= numel.

        Stretch i begins at i * numel // k. Its index lies (r length >> 31) behind that, with r from
        `random_bits` of 31 bits.
        """
        ...

    def view(self, array: Array, start: int, stop: int) -> Array:
        """Elements [start, stop) of a one-dimensional array, sharing its memory."""
        ...

    def row(self, array: Array, position: int) -> Array:
        """One row of what `load` returned."""
        ...

    def numel(self, array: Array) -> int:
        """How many elements an array has."""
        ...

    def dtype(self, array: Array) -> str:
        """Return the name of an array's dtype, as `zeros` takes it."""
        ...

    def device(self, array: Array) -> str:
        """Return the device of an array, as `zeros` takes it."""
        ...

    def joined(self, parts: Sequence[Array]) -> Array:
        """Concatenate flat arrays of one dtype into a new array."""
        ...

    def clone(self, array: Array) -> Array:
        """A copy that shares no memory."""
        ...

    def assign(self, out: Array, source: Array) -> None:
        """out[:] = source, element by element, cast to out's dtype."""
        ...

    def compensate(self, residual: Array, gradient: Array, out: Array) -> Array:
        """out = residual + gradient, in the residual's dtype.

        Returns an array that has a NaN or an infinity if and only if `out` has one.
        """
        ...

    def update_velocity(self, velocity: Array, factor: float, gradient: Array, out: Array) -> None:
        """out = factor * velocity + gradient, all of one dtype; rounded twice."""
        ...

    def damp(self, velocity: Array, index: Array, sums: Array | None, loss: float) -> None:
        """u[index] -= (loss * r) u[index], with r = min(1, |u| / |a|), or 1 without `sums`.

        Each operation is rounded. Where |u| is not below |a|, r is 1, also if a is 0.

        velocity: u, flat.
        index: int64, unique.
        sums: a, what was sent before it was rounded, one for each index.
        loss: in [0, 1]; in a graph a scalar.
        """
        ...

    def select(self, candidate: Array, k: int) -> Array:
        """Ascending int64 indices of the k largest magnitudes, 1 <= k <= n.

        Ties go to the lower index. NaN counts as the largest magnitude, so that a
        non-finite element is always among those selected.
        """
        ...

    def sample(self, candidate: Array, k: int) -> Array:
        """Ascending int64 indices of k elements, most of them the largest, 1 <= k <= n.

        The tensor is looked at as rows of s elements, s = max(n // 1024, 2048) | 1, but for what is
        left over. The sample is the first 16 elements of each row, c in all; x = k c / n is how
        many of the k largest it should hold. Its r-th largest magnitude is the threshold, with
        r = floor(x - 2 sqrt(x)). If at least k / 2 and at most k elements of the tensor reach it
        they are selected, and then the lowest indices that are not, until they are k. If not, and
        if r < 32, it is `select`.
        """
        ...

    def take(self, array: Array, index: Array) -> Array:
        """array[index], a new array; the elements of `array` in row-major order."""
        ...

    def place(self, values: Array, index: Array, numel: int) -> Array:
        """A new array of `numel` zeros but for out[index] = values; indices are unique."""
        ...

    def cast(self, array: Array, dtype: str) -> Array:
        """Return a new array of another dtype; finite floats become integers towards zero."""
        ...

    def pack_values(self, values: Array, kind: str) -> Array:
        """One value or more as they are sent: uint8, `coding.value_bytes(kind, n)` of them.

        Floats are rounded to nearest and saturate at the largest finite magnitude; float64 goes to
        float16 and bfloat16 by way of float32, as in every framework. The other kinds take
        what is not finite for 0, saturate at `coding.LIMIT`, go on in float32, and work in blocks,
        with m the largest magnitude of one:

            int8, int4   scale = the least bfloat16 >= m / L, with L = `coding.LARGEST`, and
                         j = value / scale, rounded to even, within -L ... L; 0 if the scale is 0
            sign         scale = the mean magnitude as a bfloat16, by way of float32, where
                         magnitudes count as floor(65536 |value| / u) of u / 65536, u the least
                         bfloat16 >= m
        """
        ...

    def unpack_values(self, rows: Array, count: int, kind: str, dtype: str) -> Array:
        """[P, count] values of `dtype` from [P, `coding.value_bytes`] bytes."""
        ...

    def are_scales(self, rows: Array) -> Array:
        """[P] bool: whether every number of a row, [P, c], is finite and not negative."""
        ...

    def columns(self, rows: Array, start: int, stop: int | None) -> Array:
        """Return columns [start, stop) of [P, count]; None as `stop`: to the end."""
        ...

    def pack_bits(self, codes: Array, bits: int) -> Array:
        """Pack whole numbers into uint8, with 1 to 8 bits each and no gaps.

        codes: int64, in [0, 2^bits). The lowest bit of the first is bit 0 of the first byte. Bits
            after the last are 0.
        """
        ...

    def unpack_bits(self, rows: Array, count: int, bits: int) -> Array:
        """[P, count] int64 from [P, ceil(count * bits / 8)] bytes."""
        ...

    def pack_digits(self, codes: Array, base: int) -> Array:
        """Pack whole numbers below `base` into uint8, with as many to a byte as it holds.

        codes: int64, in [0, base). The first one of a byte counts 1, the next one `base`, then its
            square and so on. Digits after the last are 0.
        """
        ...

    def unpack_digits(self, rows: Array, count: int, base: int) -> Array:
        """[P, count] int64 from [P, ceil(count / `coding.digits`)] bytes.

        The last digit of a byte that `pack_digits` cannot have written may be `base` or more.
        """
        ...

    def pack_index(self, index: Array, numel: int, kind: str) -> Array:
        """Ascending int64 indices into `numel` elements as bytes; see `core.payload`.

        kind: int16, int32 or packed.
        """
        ...

    def unpack_index(self, rows: Array, count: int, numel: int, kind: str) -> tuple[Array, Array]:
        """[P, count] int64 indices below `numel` from bytes, and [P] whether they were sound.

        A row is sound if it has `count` indices that ascend strictly and lie below `numel`. Of
        others the indices are some or other below `numel`.
        """
        ...

    def subtract_at(self, candidate: Array, index: Array | None, sent: Array) -> None:
        """candidate[index] -= sent; index None means all elements, indices are unique.

        With None, `sent` may be the candidate.
        """
        ...

    def matmul(self, left: Array, right: Array, shape: tuple[int, int, int]) -> Array:
        """[m * n] of [m * k] times [k * n], flat and in row-major order, given (m, k, n).

        The order of additions is the library's: bits are equal where library, processor and number
        of threads are.
        """
        ...

    def write_product(
        self,
        left: Array,
        right: Array,
        shape: tuple[int, int, int],
        scale: float,
        gradient: Array,
        poisoned: bool,
    ) -> None:
        """`write_scaled` of a product as `matmul` has it, k > 0, without room for the product.

        Kernels on the CPU add in order of k, each product and sum rounded, whatever the processor
        and the number of threads. Elsewhere bits are those of `matmul`.
        """
        ...

    def subtract_product(
        self, candidate: Array, left: Array, right: Array, shape: tuple[int, int, int]
    ) -> None:
        """candidate -= left times right, a product as in `write_product`."""
        ...

    def orthonormal(self, rows: Array, count: int) -> Array:
        """Make the rows of a flat matrix orthonormal; those that depend on others become 0.

        It is Gram and Schmidt's way, each row in turn, as `ops.orthonormal` has it: the same bits
        everywhere. Flat, a new array; `rows` has `count` of them, one at least.
        """
        ...

    def transposed(self, array: Array, rows: int) -> Array:
        """A flat matrix of so many rows, transposed; flat, a new array."""
        ...

    def divided(self, array: Array, by: Array) -> Array:
        """array / by, a new array; `by` has one element, or as many. Zeros where that is 0."""
        ...

    def root(self, array: Array) -> Array:
        """Square roots of float64 that are not negative, a new array.

        They may be one unit in the last place off, as torch's are: round them to float32.
        """
        ...

    def finite(self, values: Array) -> Array:
        """Cast to float32: NaN and infinities become 0, others saturate at +-`coding.LIMIT`."""
        ...

    def above(self, array: Array) -> Array:
        """Round each number up to a bfloat16, returned as float32.

        array: float32, not negative, at most `coding.LIMIT`.
        """
        ...

    def largest(self, array: Array, size: int) -> Array:
        """Return the largest number of each block of a flat array without NaN."""
        ...

    def column_largest(self, rows: Array) -> Array:
        """Return the largest number of each column of [P, count]; NaN if a row has one there."""
        ...

    def sums(self, array: Array, size: int) -> Array:
        """Return the sum of each block of a flat array of int64 or float64.

        float64 are added in one order: a block is cut into tiles of `coding.TILE`; the last one is
        padded with zeros, to a power of two where it is the only one. The second half of a tile is
        added to the first, element by element, until one number is left. Neighbouring sums are
        added in pairs, an odd one to 0, until one is left.
        """
        ...

    def spread(self, array: Array, size: int, count: int) -> Array:
        """Repeat each number `size` times along the last dimension, cut off at `count`."""
        ...

    def global_index(self, index: Array, parts: int, first: int) -> Array:
        """Where elements of a shard lie: (i // 512 * parts + first) * 512 + i % 512.

        index: int64, into the shard; what comes back is into its tensor.
        """
        ...

    def split_shards(self, gradient: Array, firsts: Sequence[int], outs: Sequence[Array]) -> None:
        """outs[p] = the shard of a gradient whose first block is firsts[p], of len(firsts) shards.

        Its element i is element `global_index(i, len(firsts), firsts[p])` of the gradient, cast to
        the dtype of `outs`, which are as long as the shards.
        """
        ...

    def rows(self, gathered: Array, width: int) -> int:
        """How many payloads of `width` bytes; a graph may give a number that runs with it."""
        ...

    def store(self, payload: Array, at: int, part: Array) -> None:
        """Write a uint8 array from byte `at` of a payload."""
        ...

    def load(self, gathered: Array, width: int, at: int, count: int) -> Array:
        """[P, count] bytes, from byte `at` of each of P payloads of `width` bytes."""
        ...

    def store_bytes(self, payload: Array, at: int, data: bytes) -> None:
        """Write host bytes at byte `at`."""
        ...

    def store_nonfinite(self, payload: Array, at: int, parts: Sequence[Array]) -> None:
        """Write a bitmap, bit i set when parts[i] has a NaN or an infinity (bit 0 lowest)."""
        ...

    def poison(self, array: Array, checked: Array) -> None:
        """Fill an array with NaN if `checked` has a NaN or an infinity. Waits for no device."""
        ...

    def store_flags(self, payload: Array, at: int, flags: Sequence[bool]) -> None:
        """Set bit i of such a bitmap where flags[i], an answer of `validate`; leave the others."""
        ...

    def to_host(self, payload: Array) -> bytes:
        """The bytes of a uint8 array. Waits for the device."""
        ...

    def validate(
        self,
        gathered: Array,
        width: int,
        count: int,
        sound: Sequence[Array],
        check: Callable[[list[bytes], list[list[bool]]], list[bool]],
        tensors: int,
    ) -> Sequence[bool]:
        """What `check` says to the first `count` bytes of each of P payloads of `width` bytes.

        sound: answers of `unpack_index`, which `check` is given too, a list of P each. Waits for
        the device. What `check` returns, a bool for each of `tensors`, is for `write_scaled`; only
        an implementation that runs at once gives it as bools.
        """
        ...

    def either(self, left: Sequence[bool], right: Sequence[bool]) -> Sequence[bool]:
        """Which of two answers of `validate` are true, position by position."""
        ...

    def accumulator(self, gradient: Array, dtype: str) -> Array:
        """A flat array of zeros to sum into: the gradient's own memory where that is possible."""
        ...

    def accumulate(self, out: Array, index: Array | None, values: Array) -> None:
        """out[index] += values for each row of [P, k] index and values, one after the other.

        Index None means all elements; indices are unique within a row.
        """
        ...

    def write_scaled(self, total: Array, scale: float, gradient: Array, poisoned: bool) -> None:
        """gradient[...] = total * scale, cast to its dtype; all NaN if `poisoned`.

        `poisoned` is one of the answers of `validate`.
        """
        ...

    def write_placed(
        self, values: Array, index: Array, scale: float, gradient: Array, poisoned: bool
    ) -> None:
        """`write_scaled` of `place(values, index, n)`: zeros but at the indices."""
        ...

    def fused(self, recipe: Sequence[int], device: str) -> Fused[Array] | None:
        """A kernel for buckets of this recipe on this device, or None: the verbs will do."""
        ...

    def ternary(self, device: str) -> TernaryKernel[Array] | None:
        """A kernel for `TernGrad` on this device, or None: the verbs will do."""
        ...

    def norm(self, array: Array) -> float:
        """Euclidean norm, summed in float64; in a graph a scalar. Waits for the device."""
        ...

    def square(self, array: Array) -> Array:
        """[1] float32: the sum of squares, in an order of the library's. Waits for no device.

        array: of any shape; 0 if it has no elements.
        """
        ...
