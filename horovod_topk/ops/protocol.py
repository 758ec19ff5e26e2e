"""The protocol of array operations that a framework's implementation offers to the core.

Rules for implementations:
- Arrays called `residual`, `candidate`, `values` are one-dimensional, except those that `load` and
  `unpack_...` return and `accumulate` takes: they have a row for each rank. A `gradient` may have
  any shape and strides; its elements are taken in row-major (logical) order.
- dtypes are named by strings: float16, bfloat16, float32, float64, int16, int32, int64, uint8.
- Arrays of one dtype and size have Python's `+`, `-`, `*`, `//`, `%` and `>>`, element by element,
  with each other and with Python's numbers. The result is a new array of that dtype; each operation
  is rounded. `//`, `%` and `>>` are for integers that are not negative. Arrays also have `<` and
  `>`, which give bools for `cast`, and Python's `abs`.
- A block of a flat array is `size` consecutive elements; the last one may be shorter.
- `out` and `candidate` are written in place; other arguments are never written.
- No operation waits for a device, except `to_host`, `validate` and `norm`, and `select` where its
  docstring says so.
- If an implementation builds a graph, `validate` and all that follows run with the graph.
- Operations are deterministic: equal arguments give equal bits, also for `random_bits`.

`tests/oracle/numpy_ops.py` is the reference in tests, in the shortest correct code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

from horovod_topk.ops.philox import Stream

Array = TypeVar("Array")
Pick = tuple[int, int, int]  # a sample of a tensor: see `Ops.blocks`
# A sampled tensor: its first element in the residuals and in phi, its elements, and the sample.
Place = tuple[int, int, int, int, int, int]
HEAD, EACH = 9, 10  # numbers in a recipe for the bucket, and for each tensor
Taken = TypeVar("Taken", contravariant=True)  # arrays, in a protocol that returns none


class Fused(Protocol[Taken]):
    """A kernel that encodes and decodes a whole bucket at once, with the same bits as `Ops`.

    It is made from a recipe, which has all that a kernel needs of a plan. The first numbers of a
    recipe describe the bucket:

        0   T, the number of tensors
        1   bytes of a residual element: 4 (float32) or 8 (float64)
        2   kind of its values: 0 float32 (float64 where 1 says 8), 1 float16, 2 bfloat16,
            3 int8, 4 int4, 5 sign, 6 int2, 7 int3; these send all elements of each tensor: 8 as
            ByteGrad, 9 as OneBit, 10 as QSGD with the norm "max", 11 with "l2", 12 as TernGrad,
            unclipped
        3   flags_at: byte of the non-finite flags in a payload
        4   payload_bytes
        5   1 to select by a sampled threshold (`Ops.sample`), 0 to select exactly (`Ops.select`)
        6   parts: number of shards that gradients are split into, if tensors are shards; else 1

        7   1 to leave in `candidate` what is not sent; 0 (kinds 8 to 12 only) for zeros
        8   bits of a code, 2 to 8, for the kinds 10 and 11; else 0

    and 10 numbers follow for each tensor:

        0   numel
        1   k, the number of entries that it sends; numel if it has no index
        2   start: its first element in the arenas
        3   kind of its indices: 1 packed, 2 int16, 4 int32; if all elements are sent, in order,
            0, or 3 to send them in the residual's dtype, whatever the kind of values
        4   value_at: byte of its first value in a payload
        5   index_at: byte of its first index in a payload
        6   dtype of its gradient: 0 float16, 1 bfloat16, 2 float32, 3 float64
        7   first: element i is element (i // 512 * parts + first) * 512 + i % 512 of its gradient
        8   position of its gradient among the gradients
        9   elements of a block, or of a column, for the kinds 8 to 12; else 0
    """

    def encode(
        self,
        residual: Taken,
        candidate: Taken,
        gradients: Sequence[Taken],
        payload: Taken,
        streams: Sequence[Stream] = (),
        squares: Sequence[Taken | None] = (),
    ) -> None:
        """Fill flags, values and indices of a payload; leave in `candidate` what is not sent.

        residual, candidate: the bucket's arenas. Other bytes of the payload do not change.
        streams: random numbers, one stream for each tensor, for kinds of values that draw some.
        squares: for each gradient, the squares to select by, as `Ops.weighted` does, or None.
            Empty: by magnitude.
        """

    def decode(
        self, gathered: Taken, scale: float, flags: Sequence[bool], gradients: Sequence[Taken]
    ) -> tuple[int, int] | None:
        """gradient[...] = scale times the sum over payloads in their order; all NaN if flagged.

        flags: the result of `Ops.validate`, one for each tensor of the recipe. Indices that do not
            ascend or are outside a tensor are never used; if they are found at once, this returns
            (rank, position of the tensor), and no gradient has changed.
        """


class TernaryKernel(Protocol[Array]):
    """A kernel for `TernGrad`'s moments and encoding, with the same bits as `Ops`."""

    def moments(self, values: Array) -> tuple[Array, Array, Array]:
        """The largest magnitude, the sum and the sum of squares of `Ops.finite(values)`, [1] each.

        The first result is float32. The sums are float64, in the order of `Ops.sums`.
        """

    def pack(self, values: Array, limit: Array, scale: Array, stream: Stream) -> Array:
        """Encode `Ops.finite(values)`, with magnitudes clipped to `limit`; both [1] float32."""


@dataclass(frozen=True)
class Velocities(Generic[Array]):
    """Momentum correction of a bucket's gradients; see `core.codec.momentum`.

    Sequences have one element for each gradient. Arrays are flat, in the dtype of gradients and
    residuals.
    """

    before: Sequence[Array]  # u
    after: Sequence[Array]  # set to factor * u + g, and to 0 where elements are sent, if not whole
    factor: float
    nesterov: bool  # whether factor * after + g is sent; else `after` is


@runtime_checkable
class SupportsOnePass(Protocol[Array]):
    """A `Fused` that can also apply momentum and rescaling, in one pass over the gradients."""

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
        squares: Sequence[Array | None] = (),
    ) -> None:
        """As `Fused.encode` of each of `kernels`, of which this one is the first.

        The kernels encode shards of the same gradients, or a single bucket.

        factors: for each kernel, the factor of each tensor's residual; empty: all are 1.
        velocities: momentum correction, with the bits of `update_velocity`.
        streams: as in `Fused.encode`, shard by shard.
        squares: as in `Fused.encode`.
        """


@runtime_checkable
class EncodesTogether(Protocol[Taken]):
    """A `Fused` that can encode the shards of a bucket at once."""

    def encode_all(
        self,
        kernels: Sequence[Self],
        residuals: Sequence[Taken],
        candidates: Sequence[Taken],
        gradients: Sequence[Taken],
        payloads: Sequence[Taken],
        streams: Sequence[Stream] = (),
        squares: Sequence[Taken | None] = (),
    ) -> None:
        """Encode all shards of some gradients, as `Fused.encode` of each kernel does.

        streams: as in `Fused.encode`, shard by shard.
        """
        ...


@dataclass(frozen=True)
class Arrived(Generic[Array]):
    """Payloads of a bucket that wait to be decoded, with the arguments of `Fused.decode`."""

    kernel: Fused[Array]
    gathered: Array
    scale: float
    gradients: Sequence[Array]


@runtime_checkable
class DecodesTogether(Protocol[Array]):
    """A `Fused` that can decode several buckets at once, and reads their flags by itself."""

    def heads(
        self, arrived: Sequence[Arrived[Array]], widths: Sequence[int], counts: Sequence[int]
    ) -> list[list[bytes]]:
        """Return the first bytes of each payload, for each bucket. Waits once for each device.

        Args:
            arrived: buckets as for `decode_all`.
            widths: bytes of a payload of each bucket.
            counts: how many of its bytes are returned.
        """

    def decode_all(self, arrived: Sequence[Arrived[Array]]) -> None:
        """As `Fused.decode` of each bucket; all have kernels of this one's class."""


@dataclass(frozen=True)
class TrackerKernels:
    """Optional kernels for the sums that `updates.tracker` computes after an exchange.

    They have the results of `updates.formulas`. Gradients are of any shape. `arrivals` are codes of
    phi of all elements, uint8, and `places` say where tensors and their samples are.

    energy_withheld(gradients, residuals, arrivals, places, states): computes the energy that error
        feedback takes from each gradient. residuals: those of one shard of each tensor before the
        step, and after it, flat. states: arrays with two numbers for each gradient: what sums over
        samples are multiplied by, first those of one class; then of both classes in turn, what D
        fades by, D, and D' to be written.
    energy_of_owner(exchanged, residuals, arrivals, places, states, numbers): adds to D' what an
        owner's error feedback takes away. residuals: the owner's. states: what sums are multiplied
        by, and D'. numbers: what gradients are multiplied by to be sums, and what sums and
        residuals are multiplied by to be means.
    energies(gradients, arrivals, places, states, sent, numbers): computes each gradient's energy E'
        and damping c. states: as above, of E; then the largest share of E that counts as gained,
        and c to be written. sent: rows of bytes: D' of each rank, float32. numbers: what gradients
        are multiplied by, the number of ranks, and the least c.
    spikes(gradients, places, scales, gain, means, factors, numbers): finds gradients that are
        suddenly large, and limits them. Other arrays have a number for each: what sums of squares
        of samples are multiplied by, means of norms before the step and after it, and the factors
        to be written. gain: what gradients are divided by. numbers: weight of the present step in
        the means, and the largest norm over the mean.
    """

    energy_withheld: Callable[..., None] | None = None
    energy_of_owner: Callable[..., None] | None = None
    energies: Callable[..., None] | None = None
    spikes: Callable[..., None] | None = None


class Arrays(Protocol[Array]):
    """Operations that any method or exchange may use."""

    def zeros(self, numel: int, dtype: str, device: str) -> Array:
        """A new array of `numel` zeros."""

    def arrays(self, numels: Sequence[int], dtype: str, device: str) -> list[Array]:
        """New arrays of zeros, one after another in memory where kernels can make use of it."""

    def numbers(self, numbers: Sequence[float], dtype: str, device: str) -> Array:
        """A new array of numbers, which are rounded to float32 first."""

    def arange(self, count: int, device: str) -> Array:
        """int64 indices 0, 1, ... count - 1."""

    def random_bits(self, stream: Stream, count: int, bits: int, device: str) -> Array:
        """[count] int64, uniform in [0, 2^bits): the high bits of words of Philox4x32-10.

        bits: 1 to 32. Results are the same on every device and in every framework; see
            `horovod_topk.ops.philox`.
        """

    def view(self, array: Array, start: int, stop: int) -> Array:
        """Elements [start, stop) of a one-dimensional array, sharing its memory."""

    def row(self, array: Array, position: int) -> Array:
        """One row of the result of `load`."""

    def columns(self, rows: Array, start: int, stop: int | None) -> Array:
        """Return columns [start, stop) of [P, count]; None as `stop`: to the end."""

    def rows(self, gathered: Array, width: int) -> int:
        """The number of payloads of `width` bytes; in a graph it may be a tensor."""

    def numel(self, array: Array) -> int:
        """The number of elements of an array."""

    def dtype(self, array: Array) -> str:
        """Return the name of an array's dtype, as `zeros` takes it."""

    def device(self, array: Array) -> str:
        """Return the device of an array, as `zeros` takes it."""

    def joined(self, parts: Sequence[Array]) -> Array:
        """Concatenate flat arrays of one dtype into a new array."""

    def clone(self, array: Array) -> Array:
        """A copy: writing to one does not change the other."""

    def assign(self, out: Array, source: Array) -> None:
        """out[:] = source, element by element, cast to out's dtype."""

    def take(self, array: Array, index: Array) -> Array:
        """The elements of `array` in row-major order at `index`, a new array."""

    def cast(self, array: Array, dtype: str) -> Array:
        """Return a new array of another dtype; floats become integers rounded towards zero."""

    def spread(self, array: Array, size: int, count: int) -> Array:
        """Repeat each number `size` times along the last dimension, cut off at `count`."""

    def transposed(self, array: Array, rows: int) -> Array:
        """Return the transpose of a flat matrix of `rows` rows as a new flat array."""

    def divided(self, array: Array, by: Array) -> Array:
        """array / by, a new array; `by` has one element, or as many. 0 where `by` is 0."""

    def root(self, array: Array) -> Array:
        """Square roots of non-negative float64, a new array.

        Results may be off by one unit in the last place, as in torch: round them to float32.
        """

    def finite(self, values: Array) -> Array:
        """Cast to float32: NaN and infinities become 0, others saturate at +-`coding.LIMIT`."""

    def largest(self, array: Array, size: int) -> Array:
        """Return the largest number of each block of a flat array without NaN."""

    def column_largest(self, rows: Array) -> Array:
        """Return the largest number of each column of [P, count]; NaN if the column has one."""

    def sums(self, array: Array, size: int) -> Array:
        """Return the sum of each block of a flat array of int64 or float64.

        float64 are added in a fixed order: a block is cut into tiles of `coding.TILE`; the last
        tile is padded with zeros, to a power of two if it is the only one. The second half of a
        tile is added to the first, element by element, until one number is left. Neighbouring
        sums are added in pairs, an odd one to 0, until one is left.
        """

    def segment_sums(self, array: Array, sizes: Sequence[int]) -> Array:
        """Sums of consecutive stretches of a flat array, in its dtype and the library's order.

        sizes: number of elements of each stretch; they add up to the array's.
        """

    def count_above(self, array: Array, limit: Array) -> Array:
        """Count elements of a magnitude above `limit`, [1] of their dtype: [1] float32.

        Counts above 2^24 are rounded.
        """

    def square(self, array: Array) -> Array:
        """[1] float32: the sum of squares, in the library's order. Does not wait for a device.

        array: array of any shape; the result is 0 if it has no elements.
        """

    def norm(self, array: Array) -> float:
        """Euclidean norm, summed in float64; in a graph a scalar. Waits for the device."""

    def matmul(self, left: Array, right: Array, shape: tuple[int, int, int]) -> Array:
        """Multiply [m * k] by [k * n], flat and in row-major order, given (m, k, n): [m * n].

        The order of additions is the library's: bits are equal if library, processor and number of
        threads are equal.
        """

    def orthonormal(self, rows: Array, count: int) -> Array:
        """Make the rows of a flat matrix orthonormal; linearly dependent rows become 0.

        Gram-Schmidt, row after row, with the same bits in every framework; see `ops.orthonormal`.
        The result is flat and a new array; `rows` has `count` rows, at least one.
        """

    def global_index(self, index: Array, parts: int, first: int) -> Array:
        """Indices in the tensor of a shard's elements: (i // 512 * parts + first) * 512 + i % 512.

        index: int64, into the shard; the result is into its tensor.
        """

    def shard(self, gradient: Array, parts: int, first: int) -> Array:
        """The flat shard whose first block is `first`, of `parts` shards of a gradient.

        Element i of it is element `global_index(i, parts, first)` of the gradient.
        """

    def scale(self, arrays: Sequence[Array], factors: Sequence[float]) -> None:
        """Multiply each array in place by its factor."""

    def shards(
        self, tensors: Sequence[Array], parts: int, firsts: Sequence[int]
    ) -> Sequence[Array]:
        """`shard` of each tensor, in memory that may be written again by the next call."""

    def split_shards(self, gradient: Array, firsts: Sequence[int], outs: Sequence[Array]) -> None:
        """Write `shard(gradient, len(firsts), firsts[p])` to outs[p], cast to its dtype.

        outs: arrays as long as the shards.
        """

    def blocks(self, tensors: Sequence[Array], picks: Sequence[Pick], dtype: str) -> Array:
        """Join samples of some tensors of any shape into a flat array, and cast it to `dtype`.

        picks: for each tensor (shards, first, parts): of the shard with the block `first` among
            `shards` shards, every block whose number is a multiple of `parts`.
        """

    def to_host(self, payload: Array) -> bytes:
        """The bytes of a uint8 array. Waits for the device."""


class Packing(Protocol[Array]):
    """Operations that payloads and residuals are made of: select, encode, add up, write."""

    def random_index(self, stream: Stream, numel: int, k: int, device: str) -> Array:
        """Draw one index from each of k stretches of `numel` elements, 1 <= k <= numel: [k] int64.

        Stretch i begins at i * numel // k. Its index is (r length >> 31) more than that, with r
        from `random_bits` of 31 bits.
        """

    def compensate(self, residual: Array, gradient: Array, out: Array) -> Array:
        """out = residual + gradient, in the residual's dtype.

        Returns an array that has a NaN or an infinity if and only if `out` has one.
        """

    def withheld(
        self, residual: Array, gradient: Array, most: float, alone: float
    ) -> tuple[Array, Array] | None:
        """Split residual + gradient where its magnitude is above a limit.

        Args:
            residual: flat.
            gradient: of any shape.
            most: the limit where the residual is not 0, if the gradient is not larger than that.
            alone: the limit where it is 0, and of larger gradients.

        Returns:
            A residual whose sum with the gradient has the limit as its magnitude there, and what is
            left of the sum; elsewhere the residual itself, and -0.0, which changes no sum.
            None: no magnitude is above; only where that is known without waiting for a device.
            The sum of the gradient and the new residual has a NaN or an infinity if the gradient
            has one.
        """

    def update_velocity(self, velocity: Array, factor: float, gradient: Array, out: Array) -> None:
        """out = factor * velocity + gradient, all of one dtype; rounded twice."""

    def weighted(self, values: Array, squares: Array) -> Array:
        """Multiply values by weights of about squares^(-1/4); the k largest products are sent.

        A weight has the bits (5/4 of those of 1) - b // 4, with b the square's bits, but at least
        those of a power of 2 that is 1/256 to 1/128 of a sample's mean. The squares are divided
        into rows of s elements, s = max(n // 64, 16) | 1, without the rest. The sample is the first
        16 elements of each row. If it is empty or all 0, all elements weigh alike.

        Args:
            values: [n], float32 or float64.
            squares: n elements of any float dtype, not negative.
        """

    def select(self, candidate: Array, k: int) -> Array:
        """Ascending int64 indices of the k largest magnitudes, 1 <= k <= n.

        Of equal magnitudes the lower index is selected. NaN counts as the largest magnitude, so
        that a non-finite element is always selected.
        """

    def sample(self, candidate: Array, k: int) -> Array:
        """Ascending int64 indices of k elements, approximately the largest, 1 <= k <= n.

        The tensor is divided into rows of s elements, s = max(n // 1024, 2048) | 1, without the
        rest. The sample is the first 16 elements of each row, c in all; x = k c / n of the k
        largest are expected in it. Its r-th largest magnitude is the threshold, with
        r = floor(x - 2 sqrt(x)). If at least k / 2 and at most k elements of the tensor reach the
        threshold, they are selected, with as many of the lowest other indices as k lacks.
        Otherwise, and if r < 32, this is `select`.
        """

    def pack_values(self, values: Array, kind: str) -> Array:
        """Encode one value or more to `coding.value_bytes(kind, n)` uint8.

        Floats are rounded to nearest and saturate at the largest finite magnitude; float64 is
        rounded to float32 before float16 or bfloat16, as in every framework. The other kinds
        replace non-finite values by 0, saturate at `coding.LIMIT`, compute in float32, and have
        blocks, with m the largest magnitude of a block:

            int8, int4, stable8
                         scale = the least bfloat16 >= m / D, with D = `coding.DIVISOR`, and
                         j = value / scale, rounded to even, within -L ... L, with
                         L = `coding.LARGEST`; 0 if the scale is 0
            sign, int2, int3
                         the block's magnitudes are divided into 1, 2 or 4 regions. Each has a
                         scale, its mean magnitude, rounded to float32 and then bfloat16, or 0 if it
                         is empty. A code is the number of the value's region, from that of the
                         smallest magnitudes on, with the highest bit set if the value is below 0.
                         Magnitudes are rounded down to multiples of u / 65536 first, with u the
                         least bfloat16 >= m

        A region has the magnitudes above its lower limit and at most its upper limit. At first
        there is one. Once for int2, twice for int3, each region is halved at its mean, and then
        twice all limits are moved to the middle between the means of their two regions. Means and
        middles are rounded down to such multiples; an empty region's mean is its lower limit.
        """

    def unpack_values(self, rows: Array, count: int, kind: str, dtype: str) -> Array:
        """Decode [P, `coding.value_bytes`] bytes to [P, count] values of `dtype`."""

    def are_scales(self, rows: Array) -> Array:
        """Whether every number of a row of [P, c] is finite and not negative, [P] bool."""

    def pack_bits(self, codes: Array, bits: int) -> Array:
        """Pack whole numbers into uint8, with 1 to 8 bits each and no gaps.

        codes: int64, in [0, 2^bits). The lowest bit of the first code is bit 0 of the first byte.
            Bits after the last code are 0.
        """

    def unpack_bits(self, rows: Array, count: int, bits: int) -> Array:
        """Unpack [P, ceil(count * bits / 8)] bytes to [P, count] int64."""

    def pack_digits(self, codes: Array, base: int) -> Array:
        """Pack whole numbers below `base` into uint8, `coding.digits(base)` to a byte.

        codes: int64, in [0, base). The first digit of a byte has weight 1, the next one `base`,
            then its square and so on. Digits after the last code are 0.
        """

    def unpack_digits(self, rows: Array, count: int, base: int) -> Array:
        """Unpack [P, ceil(count / `coding.digits`)] bytes to [P, count] int64.

        In a byte that `pack_digits` cannot have written, the last digit may be `base` or more.
        """

    def pack_index(self, index: Array, numel: int, kind: str) -> Array:
        """Encode ascending int64 indices into `numel` elements as bytes; see `methods.topk`.

        kind: int16, int32 or packed.
        """

    def unpack_index(self, rows: Array, count: int, numel: int, kind: str) -> tuple[Array, Array]:
        """Decode bytes to [P, count] int64 indices below `numel`, and [P] whether rows are valid.

        A row is valid if it has `count` indices that ascend strictly and are below `numel`. The
        indices of other rows are arbitrary, but below `numel`.
        """

    def subtract_at(self, candidate: Array, index: Array | None, sent: Array) -> None:
        """candidate[index] -= sent; index None means all elements, indices are unique.

        If `index` is None, `sent` may be the candidate itself.
        """

    def write_product(
        self,
        left: Array,
        right: Array,
        shape: tuple[int, int, int],
        scale: float,
        gradient: Array,
        poisoned: bool,
    ) -> None:
        """`write_scaled` of the product of `matmul`, k > 0, without memory for the product.

        Kernels on the CPU add in order of k, each product and sum rounded, with any processor and
        number of threads. Otherwise bits are those of `matmul`.
        """

    def subtract_product(
        self, candidate: Array, left: Array, right: Array, shape: tuple[int, int, int]
    ) -> None:
        """candidate -= left times right, a product as in `write_product`."""

    def limit(self, arrays: Sequence[Array], factors: Array) -> None:
        """Multiply each array by its factor, in place, if that is less than 1."""

    def above(self, array: Array) -> Array:
        """Round each number up to a bfloat16, returned as float32.

        array: float32, not negative, at most `coding.LIMIT`.
        """

    def store(self, payload: Array, at: int, part: Array) -> None:
        """Write a uint8 array at byte `at` of a payload."""

    def load(self, gathered: Array, width: int, at: int, count: int) -> Array:
        """[P, count] bytes, from byte `at` of each of P payloads of `width` bytes."""

    def store_bytes(self, payload: Array, at: int, data: bytes) -> None:
        """Write host bytes at byte `at`."""

    def store_nonfinite(self, payload: Array, at: int, parts: Sequence[Array]) -> None:
        """Write a bitmap, bit i set if parts[i] has a NaN or an infinity (bit 0 lowest)."""

    def poison(self, array: Array, checked: Array) -> None:
        """Fill an array with NaN if `checked` has a NaN or an infinity, without waiting."""

    def store_flags(self, payload: Array, at: int, flags: Sequence[bool]) -> None:
        """Set bit i of such a bitmap if flags[i], a result of `validate`; keep other bits."""

    def validate(
        self,
        gathered: Array,
        width: int,
        count: int,
        sound: Sequence[Array],
        check: Callable[[list[bytes], list[list[bool]]], list[bool]],
        tensors: int,
    ) -> Sequence[bool]:
        """Call `check` with the first `count` bytes of each of P payloads; return its flags.

        sound: checks of decoded data, [P] bool each, which `check` gets too as lists. Waits for
            the device. `check` returns a bool for each of `tensors`, for `write_scaled`; in a graph
            they are tensors.
        """

    def either(self, left: Sequence[bool], right: Sequence[bool]) -> Sequence[bool]:
        """The logical or of two results of `validate`, position by position."""

    def accumulator(self, gradient: Array, dtype: str) -> Array:
        """A flat array of zeros to sum into: the gradient's own memory if possible."""

    def accumulate(self, out: Array, index: Array | None, values: Array) -> None:
        """out[index] += values for each row of [P, k] index and values, one after another.

        `index` None means all elements; indices are unique within a row.
        """

    def write_scaled(self, total: Array, scale: float, gradient: Array, poisoned: bool) -> None:
        """gradient[...] = total * scale, cast to its dtype; all NaN if `poisoned`.

        `poisoned` is one of the results of `validate`.
        """

    def write_placed(
        self, values: Array, index: Array, scale: float, gradient: Array, poisoned: bool
    ) -> None:
        """`write_scaled` of `place(values, index, n)`: zeros except at the indices."""


class Kernels(Protocol[Array]):
    """Optional kernels of a library. A kernel is None where the library has none."""

    def fused(self, recipe: Sequence[int], device: str) -> Fused[Array] | None:
        """A kernel for buckets of this recipe on this device, or None to use these operations."""

    def ternary(self, device: str) -> TernaryKernel[Array] | None:
        """A kernel for `TernGrad` on this device, or None to use these operations."""

    def tracker_kernels(
        self, gradients: Sequence[Array], others: Sequence[Array], factors: Sequence[float] = ()
    ) -> TrackerKernels:
        """Kernels for these arrays.

        factors: what each tensor's residual is still to be multiplied by. Empty: all are 1.
        """

    def kernel_kind(self, device: str) -> str:
        """Name what computes energies, spikes and the optimizer's momenta on a device.

        Results have the same bits on ranks with the same kind, if they have the same version of the
        framework.
        """

    def energies_of(
        self, arrays: Sequence[Array], arrivals: Array | None, places: tuple[Place, ...], dtype: str
    ) -> Array:
        """Sums of squares of samples of arrays, [n] of `dtype`, or [2 n] with arrivals.

        Args:
            arrays: of any shape, of one dtype.
            arrivals: codes of phi of all elements, uint8; the first n sums are of elements that
                arrive often, the others of the rest. None: all elements are of one class.
            places: where the arrays and their samples are.
            dtype: of the sums, float32 or float64.
        """


class Ops(Arrays[Array], Packing[Array], Kernels[Array], Protocol[Array]):
    """Array operations of one framework; see the module's docstring for the rules."""
