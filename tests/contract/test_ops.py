"""Every verb of `horovod_topk.ops.Ops`, for every implementation.

Each test states a verb's promise in terms of NumPy's own functions, so that the oracle
(`NumpyOps`) is held to it too. A new implementation adds a row to `oracle.backends`.
"""

from __future__ import annotations

import importlib
import itertools
import math
import operator
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from oracle.backends import NUMPY, TORCH, Backend, each_way

from horovod_topk.methods.keys import uniform
from horovod_topk.ops import coding
from horovod_topk.ops.philox import Stream, philox

WIDE = ("float32", "float64")  # of residuals and candidates
INTEGERS = ("int16", "int32", "int64", "uint8")
SCALED = ("int8", "stable8", "int4", "int3", "int2", "sign")  # kinds with scales for each block
REGIONS = {"int3": 4, "int2": 2, "sign": 1}  # scales of a block, if a value is plus or minus one
INDICES = ("int16", "int32", "packed")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-45, 65504.0, 65519.9, 65520.0, 1e30, math.inf, math.nan)

Array = NDArray[Any]


def arrays(backend: Backend, dtype: str, min_size: int = 0) -> st.SearchStrategy[Array]:
    """Flat arrays with ties, zeros of both signs, denormals if kept, NaN and infinities."""
    width = np.dtype(dtype).itemsize * 8
    special = [float(np.asarray(x).astype(dtype)) for x in (*SPECIAL[:7], *SPECIAL[9:])]
    if not backend.denormals:
        special = [x for x in special if not 0 < abs(x) < np.finfo(dtype).tiny]
    elements = st.sampled_from(special) | st.floats(width=width, allow_subnormal=backend.denormals)
    return hnp.arrays(dtype, st.integers(min_size, 8), elements=elements)


@st.composite
def arrays_with_index(draw: st.DrawFn, backend: Backend, dtype: str) -> tuple[Array, Array]:
    """An array and ascending unique indices into it."""
    values = draw(arrays(backend, dtype, min_size=1))
    chosen = draw(st.sets(st.integers(0, values.size - 1)))
    return values, np.array(sorted(chosen), np.int64)


def bits(backend: Backend, array: Any) -> bytes:
    """The bytes of an array; see `canonical`."""
    return canonical(backend, backend.numpy(array))


def canonical(backend: Backend, values: Array) -> bytes:
    """The bytes of an array, all NaNs made one: their bits are nobody's promise.

    Denormal results are zeros where the backend makes them so.
    """
    if values.dtype.kind != "f":
        return values.tobytes()
    values = np.where(np.isnan(values), np.array(np.nan, values.dtype), values)
    if not backend.denormals and values.dtype != np.float16:
        values = np.where(np.abs(values) < np.finfo(values.dtype).tiny, np.abs(values) * 0, values)
    return values.tobytes()


def dtype_name(array: Any) -> str:
    """As the protocol names it, whatever the library."""
    dtype = array.dtype
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


# Memory.


@each_way
@pytest.mark.parametrize("numel", [0, 1, 5])
def test_zeros_and_arange(backend: Backend, numel: int) -> None:
    for dtype in (*backend.gradient_dtypes, *INTEGERS):
        zeros = backend.ops.zeros(numel, dtype, "cpu")
        assert dtype_name(zeros) == dtype
        assert backend.numpy(zeros).tolist() == [0] * numel
        assert backend.ops.numel(zeros) == numel
    indices = backend.ops.arange(numel, "cpu")
    assert dtype_name(indices) == "int64"
    assert backend.numpy(indices).tolist() == [*range(numel)]


@each_way
def test_numbers_are_rounded_to_float32(backend: Backend) -> None:
    for dtype in ("float32", "float64"):
        found = backend.ops.numbers([0.1, -2.0], dtype, "cpu")
        assert dtype_name(found) == dtype
        assert backend.numpy(found).tolist() == [float(np.float32(0.1)), -2.0]


@each_way
def test_a_view_shares_memory_and_a_clone_does_not(backend: Backend) -> None:
    array = backend.array(np.arange(5), "float32")
    copy, view = backend.ops.clone(array), backend.ops.view(array, 1, 3)
    backend.ops.assign(backend.ops.view(view, 0, 1), backend.array(np.array([9]), "float32"))
    assert backend.numpy(array).tolist() == [0, 9, 2, 3, 4]
    assert backend.numpy(copy).tolist() == [0, 1, 2, 3, 4]
    assert backend.ops.numel(backend.ops.view(array, 5, 5)) == 0


@each_way
def test_assign_casts(backend: Backend) -> None:
    out = backend.array(np.zeros(3), "float64")
    backend.ops.assign(out, backend.array(np.array([1, 2.5, np.inf]), "float16"))
    assert backend.numpy(out).tolist() == [1, 2.5, np.inf]


# Compress.


def test_a_scalar_of_tensorflow_keeps_the_sign_of_zero() -> None:
    """Eagerly, whichever of both zeros was a constant first."""
    tf = pytest.importorskip("tensorflow")
    scalar = importlib.import_module("horovod_topk.ops.tensorflow")._scalar
    for kind in (tf.float16, tf.float32, tf.float64):
        for first in (0.0, -0.0):
            tf.constant(first, kind)
            assert np.signbit(scalar(-0.0, kind).numpy())
            assert not np.signbit(scalar(0.0, kind).numpy())
            assert scalar(0.0, kind).shape == ()


@each_way
def test_what_is_above_a_limit_is_withheld(backend: Backend) -> None:
    residual = np.array([9e5, -9e5, 1e12, 0, 0, 3, -0.0, 5, 4], "f4")
    gradient = np.array([2000, -2000, 60000, 5000, 6000, 4, -0.0, np.nan, np.inf], "f2")
    pair = backend.array(residual, "float32"), backend.array(gradient, "float16")
    split = backend.ops.withheld(*pair, 4000.0, 5000.0)
    assert split is not None
    kept, rest = map(backend.numpy, split)
    assert kept[:6].tolist() == [2000, -2000, -55000, 0, -1000, 3]
    assert rest[:6].tolist() == [898000, -898000, 1000000061440, 0, 1000, 0]
    assert np.signbit(kept[6])
    assert np.signbit(rest[[3, 5, 6]]).all()
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(kept + gradient)[7:].any()


@each_way
@given(data=st.data(), wide=st.sampled_from(WIDE))
def test_compensate_adds_in_the_residuals_dtype(
    backend: Backend, data: st.DataObject, wide: str
) -> None:
    narrow = data.draw(st.sampled_from(["float16", "float32", wide]))
    gradient = data.draw(arrays(backend, narrow))
    residual = np.resize(data.draw(arrays(backend, wide, min_size=1)), gradient.size)
    out = backend.ops.zeros(gradient.size, wide, "cpu")
    with np.errstate(all="ignore"):
        backend.ops.compensate(backend.array(residual, wide), backend.array(gradient, narrow), out)
        assert bits(backend, out) == canonical(backend, residual + gradient.astype(wide))


@each_way
@given(data=st.data(), dtype=st.sampled_from(WIDE), factor=st.sampled_from([0.0, 0.9, 0.1]))
def test_velocities_are_rounded_twice(
    backend: Backend, data: st.DataObject, dtype: str, factor: float
) -> None:
    gradient = data.draw(arrays(backend, dtype))
    velocity = np.resize(data.draw(arrays(backend, dtype, min_size=1)), gradient.size)
    out = backend.ops.zeros(gradient.size, dtype, "cpu")
    given_ = backend.array(velocity, dtype), factor, backend.array(gradient, dtype)
    with np.errstate(all="ignore"):
        backend.ops.update_velocity(*given_, out)
        expected = velocity * velocity.dtype.type(factor) + gradient
        assert bits(backend, out) == canonical(backend, expected)


@each_way
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_samples_are_blocks_of_shards(backend: Backend, dtype: str) -> None:
    shapes, picks = [(70, 100), (300,), (40, 60)], [(3, 1, 3), (1, 0, 1), (1, 0, 3)]
    whole = [np.arange(np.prod(shape)).astype(dtype).reshape(shape) for shape in shapes]
    found = backend.ops.blocks([backend.array(each, dtype) for each in whole], picks, "float32")
    first = whole[0].reshape(-1)[512:1024], whole[0].reshape(-1)[512 * 10 : 512 * 11]
    last = whole[2].reshape(-1)[:512], whole[2].reshape(-1)[512 * 3 : 512 * 4]
    expected = np.concatenate([*first, whole[1], *last]).astype("f4")
    assert np.array_equal(backend.numpy(found), expected)


@each_way
def test_stretches_are_summed_one_by_one(backend: Backend) -> None:
    array = np.random.default_rng(0).standard_normal(600).astype("f4")
    sizes = [1, 0, 500, 99, 0]
    found = backend.numpy(backend.ops.segment_sums(backend.array(array, "float32"), sizes))
    stretches = np.split(array.astype("f8"), np.cumsum(sizes)[:-1])
    np.testing.assert_allclose(found, [each.sum() for each in stretches], 1e-4, 1e-4)


@each_way
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_operators_are_those_of_numpy(backend: Backend, dtype: str) -> None:
    one = np.arange(1, 8).astype(dtype) * (1 if dtype == "int64" else np.dtype(dtype).type(1.1))
    other = np.array([3, 1, 4, 1, 5, 9, 2], dtype)
    left, right = backend.array(one, dtype), backend.array(other, dtype)
    pairs = [(left + right, one + other), (left - right, one - other), (left * right, one * other)]
    pairs += [(left + 2, one + 2), (left - 2, one - 2), (left * 3, one * 3)]
    if dtype == "int64":
        large = backend.array(one * 2**40 + 5, dtype)
        pairs += [(left // right, one // other), (left // 2, one // 2), (large >> 31, one * 512)]
    for got, expected in pairs:
        assert bits(backend, got) == canonical(backend, expected)
        assert backend.numpy(got).dtype == expected.dtype
    assert backend.numpy(left).tolist() == one.tolist()


@each_way
def test_comparisons_give_bools_and_magnitudes_are_pythons(backend: Backend) -> None:
    for dtype in WIDE:
        one = backend.array(np.array([-2.0, -0.0, 3.0]), dtype)
        other = backend.array(np.array([-1.0, 0.0, 3.0]), dtype)
        cast = backend.ops.cast
        for array, expected in (
            (cast(one < other, "int64"), [1, 0, 0]),
            (cast(one > 0, dtype), [0, 0, 1]),
            (cast(one < 0, "int64"), [1, 0, 0]),
            (abs(one), [2, 0, 3]),
        ):
            assert backend.numpy(array).tolist() == expected
        assert backend.ops.dtype(one) == dtype


@each_way
@pytest.mark.parametrize("size", [1, 5, 512, 700, 2600])
def test_sums_of_float64_are_added_in_one_order(backend: Backend, size: int) -> None:
    """Tiles of 512 are folded in halves, and their sums added in pairs; all padded with zeros."""

    def halved(tile: list[float]) -> float:
        padded = tile + [0.0] * (2 ** (len(tile) - 1).bit_length() - len(tile))
        while len(padded) > 1:
            half = len(padded) // 2
            padded = [a + b for a, b in zip(padded[:half], padded[half:], strict=True)]
        return padded[0]

    def paired(sums: list[float]) -> float:
        while len(sums) > 1:
            sums = [sum(sums[i : i + 2]) for i in range(0, len(sums), 2)]
        return sums[0]

    numbers = np.random.default_rng(size).exponential(1e3, 3001).astype(np.float32).astype(float)
    expected = []
    for at in range(0, numbers.size, size):
        block = numbers[at : at + size].tolist()
        expected.append(paired([halved(block[i : i + 512]) for i in range(0, len(block), 512)]))
    found = backend.ops.sums(backend.array(numbers, "float64"), size)
    assert backend.numpy(found).tolist() == expected


@each_way
def test_what_was_compensated_says_whether_it_is_finite(backend: Backend) -> None:
    for bad in (0.0, np.nan, np.inf, -np.inf):
        gradient = np.ones(700, np.float32)
        gradient[650] = bad
        out = backend.ops.zeros(700, "float32", "cpu")
        for dtype in ("float32", "float64"):
            pair = backend.ops.zeros(700, "float32", "cpu"), backend.array(gradient, dtype)
            checked = backend.numpy(backend.ops.compensate(*pair, out))
            assert np.isfinite(checked).all() == np.isfinite(bad)
            np.testing.assert_array_equal(backend.numpy(out), gradient)


@each_way
@pytest.mark.parametrize(("numel", "k"), [(1, 1), (100, 7), (1000, 1000), (70_001, 5_003)])
def test_random_indices_are_one_of_each_stretch(backend: Backend, numel: int, k: int) -> None:
    stream = Stream((3, 2**32 - 1), 2**33 + 5)
    found = backend.numpy(backend.ops.random_index(stream, numel, k, "cpu"))
    ends = np.arange(k + 1) * numel // k
    begins, lengths = ends[:-1], np.diff(ends)
    drawn = NUMPY.ops.random_bits(stream, k, 31)
    assert found.tolist() == (begins + (drawn * lengths >> 31)).tolist()
    assert (np.diff(found) > 0).all()


@each_way
def test_what_is_placed_is_scaled_and_the_rest_is_zero(backend: Backend) -> None:
    values, index = backend.array(np.array([1.5, -2]), "float64"), np.array([4, 1])
    for dtype, poisoned in (("float64", False), ("float32", False), ("float64", True)):
        gradient = backend.array(np.full(6, 7.0), dtype)
        place = values, backend.array(index, "int64")
        backend.ops.write_placed(*place, 2.0, gradient, poisoned)
        expected = np.full(6, np.nan) if poisoned else np.array([0, -4, 0, 0, 3, 0.0])
        np.testing.assert_array_equal(backend.numpy(gradient), expected)


@each_way
def test_arrays_are_joined_where_they_live(backend: Backend) -> None:
    parts = [backend.array(np.array(each), "float64") for each in ([1.0], [], [2.0, 3.0])]
    joined = backend.ops.joined(parts)
    assert backend.numpy(joined).tolist() == [1, 2, 3]
    assert backend.ops.numel(backend.ops.zeros(2, "uint8", backend.ops.device(joined))) == 2


@each_way
@pytest.mark.parametrize("size", [1, 3, 7, 9])
def test_blocks_have_a_largest_number_and_a_sum(backend: Backend, size: int) -> None:
    numbers = np.array([3, -9, 4, -1, -2, -3, -4], np.int64)
    blocks = [numbers[at : at + size] for at in range(0, 7, size)]
    sums = backend.ops.sums(backend.array(numbers * 2**33, "int64"), size)
    assert backend.numpy(sums).tolist() == [int(each.sum()) << 33 for each in blocks]
    for dtype in WIDE:
        largest = backend.ops.largest(backend.array(numbers, dtype), size)
        assert backend.ops.dtype(largest) == dtype
        assert backend.numpy(largest).tolist() == [each.max() for each in blocks]
        back = backend.ops.spread(largest, size, 7)
        assert backend.numpy(back).tolist() == [each.max() for each in blocks for _ in each]
        rows = backend.ops.load(back, 7, 0, 7)
        rows = backend.ops.spread(backend.ops.columns(rows, 1, 3), 2, 3)
        first = [blocks[i // size].max() for i in (1, 2)]
        assert backend.numpy(rows).tolist() == [[first[0], first[0], first[1]]]


@each_way
def test_scales_are_the_next_bfloat16_and_roots_are_those_of_numpy(backend: Backend) -> None:
    numbers = np.array([0, 1, 1.0000001, 3.1415, 2.0**127, 1e-30], np.float32)
    above = backend.numpy(backend.ops.above(backend.array(numbers, "float32")))
    expected = [0, 1, 1.0078125, 3.15625, 2.0**127]
    assert above[:5].tolist() == expected
    assert numbers[5] <= above[5] < numbers[5] * 1.008
    squares = np.random.default_rng(0).exponential(1e9, 1000)
    roots = backend.ops.root(backend.array(squares, "float64"))
    np.testing.assert_array_max_ulp(backend.numpy(roots), np.sqrt(squares), 1)
    single = backend.ops.cast(roots, "float32")
    assert bits(backend, single) == np.sqrt(squares).astype(np.float32).tobytes()


@each_way
def test_what_is_not_finite_counts_as_zero_and_what_is_too_large_saturates(
    backend: Backend,
) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1.5, -0.0, 3e38, -1e300])
    finite = backend.ops.finite(backend.array(values, "float64"))
    assert backend.ops.dtype(finite) == "float32"
    assert backend.numpy(finite).tolist() == [0, 0, 0, 1.5, 0, 2.0**127, -(2.0**127)]


@each_way
@pytest.mark.parametrize("width", range(1, 9))
def test_numbers_of_few_bits_are_packed_without_gaps(backend: Backend, width: int) -> None:
    codes = np.random.default_rng(width).integers(0, 1 << width, 45)
    packed = backend.ops.pack_bits(backend.array(codes, "int64"), width)
    whole = sum(int(code) << (width * i) for i, code in enumerate(codes))
    assert backend.numpy(packed).tobytes() == whole.to_bytes(-(-45 * width // 8), "little")
    size = backend.ops.numel(packed)
    twice = backend.ops.joined([packed, packed])
    read = backend.ops.unpack_bits(backend.ops.load(twice, size, 0, size), 45, width)
    assert backend.numpy(read).tolist() == [codes.tolist()] * 2


@each_way
@pytest.mark.parametrize(("base", "digits"), [(3, 5), (2, 8), (6, 3), (16, 2), (200, 1)])
def test_numbers_of_a_base_are_packed_as_digits(backend: Backend, base: int, digits: int) -> None:
    codes = np.random.default_rng(base).integers(0, base, 43)
    packed = backend.ops.pack_digits(backend.array(codes, "int64"), base)
    groups = [codes[at : at + digits].tolist() for at in range(0, 43, digits)]
    expected = [sum(code * base**i for i, code in enumerate(group)) for group in groups]
    assert backend.numpy(packed).tolist() == expected
    size = backend.ops.numel(packed)
    twice = backend.ops.joined([packed, packed])
    read = backend.ops.unpack_digits(backend.ops.load(twice, size, 0, size), 43, base)
    assert backend.numpy(read).tolist() == [codes.tolist()] * 2


@each_way
def test_a_byte_of_no_digits_shows_in_its_last_one(backend: Backend) -> None:
    row = backend.array(np.array([242, 243, 255]), "uint8")
    read = backend.ops.unpack_digits(backend.ops.load(row, 3, 0, 3), 15, 3)
    assert backend.numpy(read).tolist() == [[2, 2, 2, 2, 2, 0, 0, 0, 0, 3, 0, 1, 1, 0, 3]]


@each_way
def test_the_largest_number_of_each_column(backend: Backend) -> None:
    flat = backend.array(np.array([1, 5, -3, 4, 2, -7], np.float32), "float32")
    largest = backend.ops.column_largest(backend.ops.load(flat, 3, 0, 3))
    assert backend.numpy(largest).tolist() == [4, 5, -3]


@each_way
def test_arrays_are_cast(backend: Backend) -> None:
    numbers = backend.array(np.array([2, 0, 16_777_216]), "int64")
    for dtype in ("float32", "float64"):
        cast = backend.ops.cast(numbers, dtype)
        assert backend.numpy(cast).dtype == dtype
        assert backend.numpy(cast).tolist() == [2, 0, 16_777_216]
        back = backend.ops.cast(backend.array(np.array([2.7, 0.0, -1.5]), dtype), "int64")
        assert backend.numpy(back).tolist() == [2, 0, -1]


@each_way
@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
def test_what_is_not_finite_poisons_another_array(backend: Backend, bad: float | None) -> None:
    checked = np.ones(9, np.float32)
    checked[4] = 1 if bad is None else bad
    out = backend.array(np.array([1.0, 2.0]), "float64")
    backend.ops.poison(out, backend.array(checked, "float32"))
    assert np.isnan(backend.numpy(out)).all() if bad else backend.numpy(out).tolist() == [1, 2]


def gradients_of_any_layout(backend: Backend, dtype: str) -> list[tuple[Any, list[float]]]:
    """Gradients, and their elements in row-major order."""
    six, four = np.arange(6.0), np.arange(4.0)
    return [
        (backend.array(np.array(3.0), dtype), [3]),
        (backend.array(np.zeros((2, 0)), dtype), []),
        (backend.array(six.reshape(2, 3).T, dtype), [0, 3, 1, 4, 2, 5]),
        (backend.array(six[::2], dtype), [0, 2, 4]),
        (backend.array(four.reshape(2, 2)[:, 1], dtype), [1, 3]),
    ]


@each_way
def test_gradients_of_any_layout_are_read_in_row_major_order(backend: Backend) -> None:
    for dtype in backend.gradient_dtypes:
        for gradient, expected in gradients_of_any_layout(backend, dtype):
            out = backend.ops.zeros(len(expected), "float64", "cpu")
            ones = backend.array(np.ones(len(expected)), "float64")
            backend.ops.compensate(ones, gradient, out)
            assert backend.numpy(out).tolist() == [1 + x for x in expected]
            index = backend.ops.arange(len(expected), "cpu")
            taken = backend.ops.take(gradient, index)
            assert backend.numpy(taken).tolist() == expected
            assert dtype_name(taken) == dtype


@each_way
@given(data=st.data(), dtype=st.sampled_from(WIDE))
def test_select_takes_the_largest_magnitudes(
    backend: Backend, data: st.DataObject, dtype: str
) -> None:
    candidate = data.draw(arrays(backend, dtype, min_size=1))
    k = data.draw(st.integers(1, candidate.size))
    assert_selects_the_largest(backend, candidate, k)


TEXTURES = ("normal", "constant", "mostly zero", "sorted", "some NaN")


def textured(numel: int, texture: str, nonzero: int, seldom: int) -> Array:
    """nonzero: how many elements "mostly zero" leaves; of "some NaN", one in `seldom` is NaN."""
    candidate = np.random.default_rng(0).standard_normal(numel).astype(np.float32)
    match texture:
        case "constant":
            candidate[:] = -2.0
        case "mostly zero":
            candidate[nonzero:] = 0.0
        case "sorted":
            candidate.sort()
        case "some NaN":
            candidate[::seldom] = np.nan
    return candidate


@pytest.mark.one_in(3)
@each_way
@pytest.mark.parametrize("texture", TEXTURES)
def test_select_from_many(backend: Backend, texture: str) -> None:
    """Sizes at which an implementation may look at a sample first."""
    numel = 2**17 + 3
    candidate = textured(numel, texture, 5, 1000)
    assert_selects_the_largest(backend, candidate, 1, numel // 100, numel // 2, numel - 1, numel)


@each_way
@pytest.mark.parametrize("offset", [0, 1])
def test_select_finds_what_a_sample_misses(backend: Backend, offset: int) -> None:
    """All large values where a stride of 3 meets them, and all where it does not."""
    candidate = np.full(2**17, 1e-6, np.float32)
    candidate[offset : offset + 9000 : 3] = np.arange(1, 3001)
    assert_selects_the_largest(backend, candidate, 2000, 4000)


def assert_selects_the_largest(backend: Backend, candidate: Array, *ks: int) -> None:
    """By magnitude, NaN as infinity, ties to the lower index; ascending; nothing written."""
    magnitude = np.where(np.isnan(candidate), np.inf, np.abs(candidate))
    best_first = np.lexsort((np.arange(candidate.size), -magnitude))
    array = backend.array(candidate, str(candidate.dtype))
    for k in ks:
        index = backend.numpy(backend.ops.select(array, k))
        assert index.dtype == np.int64
        assert np.array_equal(index, np.sort(best_first[:k]))
    assert backend.numpy(array).tobytes() == candidate.tobytes()


@pytest.mark.one_in(3)
@each_way
@pytest.mark.parametrize("texture", TEXTURES)
@pytest.mark.parametrize("numel", [1, 5001, 2**17 + 3])
def test_sample(backend: Backend, numel: int, texture: str) -> None:
    candidate = textured(numel, texture, numel // 5, 50)
    array = backend.array(candidate, "float32")
    for k in {1, numel // 50, numel // 10, numel // 2} - {0}:
        index = backend.numpy(backend.ops.sample(array, k))
        assert index.dtype == np.int64
        assert index.tolist() == sampled(candidate, k)


@pytest.mark.one_in(3)
@each_way
def test_sample_of_longer_rows(backend: Backend) -> None:
    candidate = np.random.default_rng(2).standard_normal(2_200_000).astype(np.float32)
    index = backend.numpy(backend.ops.sample(backend.array(candidate, "float32"), 22_000))
    assert index.tolist() == sampled(candidate, 22_000)


def sampled(candidate: Array, k: int) -> list[int]:
    """What the docstring of `Ops.sample` says, element by element."""
    n = candidate.size
    magnitude = np.where(np.isnan(candidate), np.inf, np.abs(candidate))
    width = max(n // 1024, 2048) | 1
    rows = [magnitude[at : at + width][:16] for at in range(0, n - width + 1, width)]
    sample = sorted(np.concatenate([*rows, []]).tolist(), reverse=True)
    expected = k * len(sample) / n
    rank = math.floor(expected - 2 * math.sqrt(expected))
    reach = np.flatnonzero(magnitude >= sample[rank - 1]) if rank >= 32 else np.array([])
    if not k / 2 <= reach.size <= k:
        return sorted(np.lexsort((np.arange(n), -magnitude))[:k].tolist())
    is_free = np.ones(n, bool)
    is_free[reach] = False
    others = np.flatnonzero(is_free)[: k - reach.size]
    return sorted([*reach.tolist(), *others.tolist()])


def test_some_samples_are_used_and_some_are_not() -> None:
    """The test above tells `sample` from `select`."""
    candidate = np.random.default_rng(1).standard_normal(2**17).astype(np.float32)
    ops = TORCH.ops
    array = TORCH.array(candidate, "float32")
    assert ops.sample(array, 9000).tolist() != ops.select(array, 9000).tolist()
    assert ops.sample(array, 900).tolist() == ops.select(array, 900).tolist()


@each_way
@given(data=st.data())
def test_take(backend: Backend, data: st.DataObject) -> None:
    values, index = data.draw(arrays_with_index(backend, "float32"))
    array = backend.array(values, "float32")
    taken = backend.ops.take(array, backend.array(index, "int64"))
    assert backend.numpy(taken).tobytes() == values[index].tobytes()
    backend.ops.assign(taken, backend.ops.zeros(index.size, "float32", "cpu"))
    assert backend.numpy(array).tobytes() == values.tobytes()


@each_way
@given(data=st.data(), sent_dtype=st.sampled_from(["float16", "float32"]), everything=st.booleans())
def test_subtract_at_touches_the_index_alone(
    backend: Backend, data: st.DataObject, sent_dtype: str, everything: bool
) -> None:
    values, index = data.draw(arrays_with_index(backend, "float32"))
    index = np.arange(values.size) if everything else index
    amount = np.resize(data.draw(arrays(backend, sent_dtype, min_size=1)), index.size)
    given_index = None if everything else backend.array(index, "int64")
    with np.errstate(all="ignore"):
        out = backend.array(values, "float32")
        backend.ops.subtract_at(out, given_index, backend.array(amount, sent_dtype))
        expected = values.copy()
        expected[index] -= amount.astype(np.float32)
        assert bits(backend, out) == canonical(backend, expected)


@each_way
@given(data=st.data(), sent_dtype=st.sampled_from(["float16", "float32"]), everything=st.booleans())
def test_accumulate_adds_rank_after_rank(
    backend: Backend, data: st.DataObject, sent_dtype: str, everything: bool
) -> None:
    """Ranks share indices; sums of these values depend on their order."""
    values, index = data.draw(arrays_with_index(backend, "float32"))
    index = np.arange(values.size) if everything else index
    ranks = data.draw(st.integers(1, 4))
    amounts = np.resize(data.draw(arrays(backend, sent_dtype, min_size=1)), (ranks, index.size))
    shifts = np.array([np.roll(index, rank) for rank in range(ranks)])
    out, expected = backend.array(values, "float32"), values.copy()
    given_index = None if everything else backend.array(shifts, "int64")
    with np.errstate(all="ignore"):
        backend.ops.accumulate(out, given_index, backend.array(amounts, sent_dtype))
        for shift, amount in zip(shifts, amounts.astype(np.float32), strict=True):
            expected[index if everything else shift] += amount
        assert bits(backend, out) == canonical(backend, expected)


# Values as they are sent.


def amounts(backend: Backend, dtype: str) -> st.SearchStrategy[Array]:
    """One to a few blocks of some few numbers; none whose scale would be a denormal one."""
    limit = 2.0**-90 if not backend.denormals else 0.0
    numbers = arrays(backend, dtype, min_size=1).map(lambda a: np.where(np.abs(a) < limit, 0, a))
    sizes = st.sampled_from([1, 2, 127, 128, 129, 300, 1023, 1024, 1033, 2049])
    seeds = st.integers(0, 2**16).map(np.random.default_rng)
    return st.builds(lambda some, n, rng: rng.choice(some, n), numbers, sizes, seeds)


def bits_of(value: Any) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


def float_of(bits: int) -> Any:
    return np.float32(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


def bfloat16_above(value: Any) -> int:
    """Bits of the least bfloat16 that is not below a positive float32."""
    below = bits_of(value) >> 16
    return below if float_of(below << 16) == value else below + 1


def bfloat16_nearest(value: Any) -> int:
    """Bits of the bfloat16 next to a finite float32; the even one if there are two."""
    below = bits_of(value) >> 16
    away = [abs(float(float_of(each << 16)) - float(value)) for each in (below, below + 1)]
    return below + (away[1] < away[0] or (away[1] == away[0] and below % 2))


def narrowed(value: Any, kind: str) -> float:
    """A value as a float16 or bfloat16."""
    most = 65504.0 if kind == "float16" else 2.0**128 - 2.0**120
    if math.isnan(value):
        return math.nan
    near = np.float32(min(max(value, -most), most))
    return float(np.float16(near) if kind == "float16" else float_of(bfloat16_nearest(near) << 16))


def limited(value: Any) -> Any:
    """A value as blocks take it."""
    finite = value if math.isfinite(value) else 0.0
    return np.float32(min(max(finite, -(2.0**127)), 2.0**127))


def multiples(block: list[Any], most: int, divisor: float) -> tuple[list[int], list[int]]:
    """Bits of a block's scale, and how many of it each value is."""
    bits = bfloat16_above(max(map(abs, block)) / np.float32(divisor))
    scale = float_of(bits << 16)
    near = [round(float(value / scale)) if scale else 0 for value in block]
    return [bits], [min(max(j, -most), most) for j in near]


def magnitudes(block: list[Any], count: int) -> tuple[list[int], list[int]]:
    """Bits of the scales of a block's `count` regions, and codes."""
    unit = Fraction(float(float_of(bfloat16_above(max(map(abs, block))) << 16)))
    parts = [65536 * abs(Fraction(float(value))) // (unit or 1) for value in block]
    limits = list[int]()
    while len(limits) < count - 1:
        limits = sorted(limits + [mean for mean, _ in means(parts, limits)])
        for _ in range(2):
            found = [mean for mean, _ in means(parts, limits)]
            limits = [(low + high) // 2 for low, high in itertools.pairwise(found)]
    scales = [np.float32(float(unit * exact / 65536)) for _, exact in means(parts, limits)]
    codes = [sum(part > each for each in limits) for part in parts]
    pairs = zip(codes, block, strict=True)
    return list(map(bfloat16_nearest, scales)), [code + count * int(x < 0) for code, x in pairs]


def means(parts: list[int], limits: list[int]) -> list[tuple[int, Fraction]]:
    """Each region's mean rounded down, or if it is empty its lower limit; and the exact mean."""
    found = []
    for low, high in itertools.pairwise([-1, *limits, 65536]):
        some = [part for part in parts if low < part <= high]
        exact = Fraction(sum(some), len(some) or 1)
        found.append((math.floor(exact) if some else max(low, 0), exact))
    return found


def number(digits: list[int], width: int) -> bytes:
    """Digits of `width` bits, the first lowest."""
    value = sum((digit & (1 << width) - 1) << width * i for i, digit in enumerate(digits))
    return value.to_bytes((width * len(digits) + 7) // 8, "little")


def packed(values: Array, kind: str) -> bytes:
    """What the docstring of `Ops.pack_values` says of kinds with scales, element by element."""
    size, width, most, divisor = {
        "int8": (128, 8, 127, 127.0),
        "stable8": (128, 8, 127, 127.4921875),
        "int4": (128, 4, 7, 7.0),
        "int3": (1024, 3, 0, 0.0),
        "int2": (1024, 2, 0, 0.0),
        "sign": (1024, 1, 0, 0.0),
    }[kind]
    every = [limited(value) for value in values]
    blocks = [every[at : at + size] for at in range(0, len(every), size)]
    coded = [
        magnitudes(block, REGIONS[kind]) if kind in REGIONS else multiples(block, most, divisor)
        for block in blocks
    ]
    scales = [bits for each, _ in coded for bits in each]
    digits = [digit for _, each in coded for digit in each]
    return b"".join(struct.pack("<H", bits) for bits in scales) + number(digits, width)


def as_values(data: bytes, kind: str) -> Array:
    """Bytes of floats; bfloat16 as float32."""
    if kind == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, kind)


def pack(backend: Backend, values: Any, kind: str, wide: str = "float32") -> bytes:
    given_values = backend.array(np.array(values, wide), wide)
    data = backend.ops.pack_values(given_values, kind)
    assert dtype_name(data) == "uint8"
    assert backend.ops.numel(data) == coding.value_bytes(kind, len(values))
    return backend.numpy(data).tobytes()


def unpack(backend: Backend, rows: list[bytes], count: int, kind: str, wide: str) -> Array:
    """Rows that stand behind one byte each, as they would in payloads."""
    width = len(rows[0])
    data = np.frombuffer(b"".join(b"\xab" + row for row in rows), np.uint8)
    loaded = backend.ops.load(backend.array(data, "uint8"), 1 + width, 1, width)
    values = backend.ops.unpack_values(loaded, count, kind, wide)
    assert dtype_name(values) == wide
    return backend.numpy(values)


@each_way
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@given(data=st.data(), wide=st.sampled_from(WIDE))
def test_floats_are_rounded_to_nearest_and_saturate(
    backend: Backend, kind: str, data: st.DataObject, wide: str
) -> None:
    values = data.draw(arrays(backend, wide))
    sent = as_values(pack(backend, values, kind, wide), kind)
    expected = np.array([narrowed(value, kind) for value in values], sent.dtype)
    assert canonical(backend, sent) == canonical(backend, expected)


@each_way
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize(
    ("kind", "value", "nearest"),
    [
        ("float16", 65519.0, 65504.0),
        ("float16", 65520.0, 65504.0),
        ("float16", -1e30, -65504.0),
        ("float16", math.inf, 65504.0),
        ("float16", 2**-25, 0.0),  # half of the least; the even one is 0
        ("float16", 3 * 2**-25, 2**-23),
        ("float16", math.nan, math.nan),
        ("bfloat16", 2.0**128 - 2.0**119 - 2.0**104, 2.0**128 - 2.0**120),  # would go up to 2**128
        ("bfloat16", -math.inf, -(2.0**128 - 2.0**120)),
        ("bfloat16", 1 + 2**-8, 1.0),
        ("bfloat16", 1 + 3 * 2**-8, 1 + 2**-6),
        ("bfloat16", math.nan, math.nan),
    ],
)
def test_floats_at_the_limits(
    backend: Backend, wide: str, kind: str, value: float, nearest: float
) -> None:
    sent = as_values(pack(backend, [value], kind, wide), kind)
    assert sent.tolist() == pytest.approx([nearest], abs=0, rel=0, nan_ok=True)


@each_way
@pytest.mark.parametrize("kind", SCALED)
@given(data=st.data(), wide=st.sampled_from(WIDE))
def test_values_share_the_scale_of_their_block(
    backend: Backend, kind: str, data: st.DataObject, wide: str
) -> None:
    values = data.draw(amounts(backend, wide))
    with np.errstate(all="ignore"):
        assert pack(backend, values, kind, wide).hex() == packed(values, kind).hex()


@each_way
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("int8", [127, 0.5, 1.5, 2.5, -0.5, -2.5], "803f  7f 00 02 02 00 fe"),  # ties to even
        ("int4", [7, 2.5, 3.5, -6.5, -7], "803f  27 a4 09"),
        ("int8", [0, -0.0, 0], "0000  00 00 00"),
        ("int4", [0, -0.0, 0], "0000  00 00"),
        ("sign", [0, -0.0, 0], "0000  00"),
        ("int8", [math.nan, 127, math.inf, -math.inf], "803f  00 7f 00 00"),
        ("int4", [math.nan, math.inf], "0000  00"),
        ("sign", [math.nan, -math.inf, -1.5, 1.5], "403f  04"),  # (0 + 0 + 1.5 + 1.5) / 4
        ("sign", [1, -3], "0040  02"),  # 21845 + 65536 of 3 / 65536: hardly less than 2
        ("int8", [3e38], "827b  7e"),  # 130 / 128 * 2**120 is no less than 2**127 / 127
        ("int4", [-3e38], "937d  09"),  # 147 / 128 * 2**124 is no less than 2**127 / 7
        ("sign", [-3e38, 3e38, 3e38], "007f  01"),  # 2**127
        ("int2", [0, -0.0, 0], "0000 0000  00"),
        ("int2", [-2.5, 2.5], "2040 0000  02"),  # all are equal: the upper region is empty
        ("int2", [1, 2, -7, 8, -3], "0040 f040  7002"),  # 1, 2, 3 and 7, 8
        ("int2", [math.nan, math.inf, -4, 4], "0000 8040  70"),
        ("int2", [-3e38], "007f 0000  02"),
        ("int3", [0, -0.0, 0], "0000 0000 0000 0000  0000"),
        ("int3", [1, -1.5, 4, 16, -64], "0b40 8041 8042 0000  2062"),
    ],
)
def test_blocks_at_the_limits(
    backend: Backend, wide: str, kind: str, values: list[float], expected: str
) -> None:
    assert pack(backend, values, kind, wide) == bytes.fromhex(expected)


@each_way
@pytest.mark.parametrize("kind", ["bfloat16", "stable8", "int4"])
def test_encoding_what_is_decoded_changes_nothing(backend: Backend, kind: str) -> None:
    """For any largest element of a block: here next to every scale's edges."""
    edges = np.arange(1, 2, 2**-8, np.float32)[:, None] * coding.DIVISOR.get(kind, 1.0)
    largest = (edges * np.array([1 - 1e-6, 1, 1 + 1e-6])).reshape(-1, 1)
    values = largest * np.random.default_rng(0).uniform(-1, 1, (largest.size, 128))
    values[:, :1] = largest
    sent = pack(backend, values.ravel(), kind)
    read = unpack(backend, [sent], values.size, kind, "float32")[0]
    assert pack(backend, read, kind) == sent


@each_way
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", *SCALED])
@given(data=st.data(), count=st.sampled_from([1, 3, 128, 129, 1025]), wide=st.sampled_from(WIDE))
def test_each_row_is_read_for_itself(
    backend: Backend, kind: str, data: st.DataObject, count: int, wide: str
) -> None:
    """Any bytes behind scales that are not denormal: a reader takes j = -128 and -8 too."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    rows = []
    for _ in range(data.draw(st.integers(1, 4))):
        scales = rng.integers(100 << 7, 140 << 7, coding.scales(kind, count)).astype("<u2")
        width = coding.value_bytes(kind, count) - scales.nbytes
        exact = kind in SCALED
        body = rng.bytes(width) if exact else pack(backend, rng.normal(size=count), kind)
        rows.append(scales.tobytes() + body)
    expected = np.array([read_values(row, count, kind) for row in rows]).astype(wide)
    assert np.array_equal(unpack(backend, rows, count, kind, wide), expected)


def read_values(row: bytes, count: int, kind: str) -> Array:
    """Values as `core.payload` has them, one after the other."""
    if kind not in SCALED:
        return as_values(row, kind)
    block, width, regions = coding.BLOCK[kind], coding.VALUE_BITS[kind], REGIONS.get(kind, 0)
    at = 2 * (regions or 1) * -(-count // block)
    scales, body = as_values(row[:at], "bfloat16"), int.from_bytes(row[at:], "little")
    digits = [body >> width * i & (1 << width) - 1 for i in range(count)]
    most = 1 << width - 1
    if regions:
        signs = [-1 if digit & most else 1 for digit in digits]
        places = [i // block * regions + digit % most for i, digit in enumerate(digits)]
        return np.array([scales[at] for at in places]) * np.array(signs, np.float32)
    signed = [(digit ^ most) - most for digit in digits]
    return np.array([np.float32(j) * scales[i // block] for i, j in enumerate(signed)], np.float32)


# Indices as they are sent.


@st.composite
def places(draw: st.DrawFn) -> tuple[Array, int]:
    """Ascending indices, and how many elements there are."""
    numel = draw(st.integers(1, 40) | st.integers(1, 3000))
    k = draw(st.sampled_from([1, numel]) | st.integers(1, numel))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    some = np.sort(rng.choice(numel, k, replace=False))
    return draw(st.sampled_from([some, np.arange(k), np.arange(numel - k, numel)])), numel


def packed_index(index: list[int], numel: int, kind: str) -> bytes:
    """What `core.payload` says, index by index."""
    k = len(index)
    if kind != "packed":
        return number(index, 16 if kind == "int16" else 32)
    low = least_low_bits(numel, k)
    x = [i - j for j, i in enumerate(index)]
    upper = sum(1 << (each >> low) + j for j, each in enumerate(x))
    return number(x, low) + upper.to_bytes((k + ((numel - k) >> low) + 7) // 8, "little")


def least_low_bits(numel: int, k: int) -> int:
    return min((k * low + (numel - k) // 2**low, low) for low in range(32))[1]


def read_index(row: bytes, k: int, numel: int, kind: str) -> list[int] | None:
    """The indices in a row; None if they are not k that ascend below `numel`."""
    if kind == "packed":
        low = least_low_bits(numel, k)
        at, upper_bits = (k * low + 7) // 8, k + (numel - k) // 2**low
        lower, upper = (int.from_bytes(part, "little") for part in (row[:at], row[at:]))
        found = [bit for bit in range(upper_bits) if upper >> bit & 1]
        if len(found) != k:
            return None
        digits = [lower >> low * j & (1 << low) - 1 for j in range(k)]
        index = [(bit - j << low) + digits[j] + j for j, bit in enumerate(found)]
    else:
        index = np.frombuffer(row, "<u2" if kind == "int16" else "<u4").tolist()
    ascend = all(i < j for i, j in itertools.pairwise(index))
    return index if ascend and index[-1] < numel else None


def unpack_index(
    backend: Backend, rows: list[bytes], k: int, numel: int, kind: str
) -> tuple[Array, list[bool]]:
    """Rows that stand behind one byte each."""
    width = coding.index_bytes(kind, numel, k)
    data = np.frombuffer(b"".join(b"\xab" + row for row in rows), np.uint8)
    loaded = backend.ops.load(backend.array(data, "uint8"), 1 + width, 1, width)
    index, sound = backend.ops.unpack_index(loaded, k, numel, kind)
    assert dtype_name(index) == "int64"
    assert dtype_name(sound) == "bool"
    return backend.numpy(index), backend.numpy(sound).tolist()


@each_way
@pytest.mark.parametrize("kind", INDICES)
@given(place=places())
def test_indices_there_and_back(backend: Backend, kind: str, place: tuple[Array, int]) -> None:
    index, numel = place
    data = backend.ops.pack_index(backend.array(index, "int64"), numel, kind)
    assert dtype_name(data) == "uint8"
    assert backend.ops.numel(data) == coding.index_bytes(kind, numel, index.size)
    sent = backend.numpy(data).tobytes()
    assert sent == packed_index(index.tolist(), numel, kind)
    assert read_index(sent, index.size, numel, kind) == index.tolist()
    found, sound = unpack_index(backend, [sent] * 3, index.size, numel, kind)
    assert found.tolist() == [index.tolist()] * 3
    assert sound == [True] * 3


@each_way
@pytest.mark.parametrize(
    ("index", "numel", "kind"),
    [
        ([0, 32767, 32768, 65535], 2**16, "int16"),
        ([0, 2**31 - 1, 2**31, 2**32 - 1], 2**32, "int32"),
        ([2**32 - 1], 2**32, "packed"),  # 31 low bits: the most there are
        ([0, 2**31 - 1, 2**31, 2**32 - 1], 2**32, "packed"),
        ([2**32 - 3, 2**32 - 2, 2**32 - 1], 2**32, "packed"),
    ],
)
def test_indices_are_unsigned(backend: Backend, index: list[int], numel: int, kind: str) -> None:
    data = backend.ops.pack_index(backend.array(np.array(index), "int64"), numel, kind)
    sent = backend.numpy(data).tobytes()
    assert sent == packed_index(index, numel, kind)
    found, sound = unpack_index(backend, [sent], len(index), numel, kind)
    assert (found.tolist(), sound) == ([index], [True])


@each_way
@pytest.mark.parametrize("kind", INDICES)
@given(place=places(), data=st.data())
def test_damaged_indices_are_noticed_and_never_lead_outside(
    backend: Backend, kind: str, place: tuple[Array, int], data: st.DataObject
) -> None:
    """A row is sound if and only if it can be read; others are none the worse for it."""
    index, numel = place
    k, good = index.size, packed_index(index.tolist(), numel, kind)
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(
            st.sampled_from([1, 0x80]) | st.integers(1, 255)
        )
    found, sound = unpack_index(backend, [good, bytes(bad), good], k, numel, kind)
    expected = read_index(bytes(bad), k, numel, kind)
    assert sound == [True, expected is not None, True]
    assert found[[0, 2]].tolist() == [index.tolist()] * 2
    assert found[1].tolist() == expected or expected is None
    assert found.min() >= 0
    assert found.max() < numel


# Bytes.


@each_way
@pytest.mark.parametrize(("at", "count"), [(0, 7), (1, 3), (6, 1), (2, 0)])
def test_load_reads_a_row_of_each_payload(backend: Backend, at: int, count: int) -> None:
    """Payloads arrive one behind the other."""
    gathered = backend.array(np.arange(21), "uint8")
    loaded = backend.ops.load(gathered, 7, at, count)
    assert dtype_name(loaded) == "uint8"
    rows = np.arange(21).reshape(3, 7)[:, at : at + count]
    assert backend.numpy(loaded).tolist() == rows.tolist()


@each_way
def test_validate_hands_every_head_and_answer_to_the_host(backend: Backend) -> None:
    gathered = backend.array(np.arange(8), "uint8")
    sound = [
        backend.ops.unpack_index(backend.ops.load(gathered, 4, 0, 2), 1, numel, "int16")[1]
        for numel in (2000, 1000)  # bytes 0, 1 and 4, 5 are the indices 256 and 1284
    ]
    seen = []

    def check(heads: list[bytes], answers: list[list[bool]]) -> list[bool]:
        seen.extend([heads, answers])
        return [True, False, True]

    flags = backend.ops.validate(gathered, 4, 3, sound, check, 3)
    assert seen == [[bytes([0, 1, 2]), bytes([4, 5, 6])], [[True, True], [True, False]]]
    gradients = [backend.array(np.zeros(2), "float32") for _ in range(3)]
    for position, gradient in enumerate(gradients):
        backend.ops.write_scaled(
            backend.array(np.ones(2), "float32"), 1.0, gradient, flags[position]
        )
    assert [backend.numpy(g)[0] for g in gradients] == pytest.approx(
        [math.nan, 1, math.nan], nan_ok=True
    )


@each_way
@given(data=st.binary(max_size=20), at=st.integers(0, 5))
def test_bytes_are_stored_in_their_place_alone(backend: Backend, data: bytes, at: int) -> None:
    ops, array = backend.ops, backend.array(np.frombuffer(data, np.uint8), "uint8")
    for store, stored in ((ops.store, array), (ops.store_bytes, data)):
        if stored is data and not data:
            continue
        payload = backend.array(np.full(26, 7), "uint8")
        store(payload, at, stored)
        expected = b"\7" * at + data + b"\7" * (26 - at - len(data))
        assert ops.to_host(payload) == backend.numpy(payload).tobytes() == expected


@each_way
@given(data=st.data(), count=st.sampled_from([1, 8, 9, 17]))
def test_store_nonfinite_sets_one_bit_a_part(
    backend: Backend, data: st.DataObject, count: int
) -> None:
    bad = data.draw(
        st.lists(
            st.sampled_from([None, math.nan, math.inf, -math.inf]), min_size=count, max_size=count
        )
    )
    parts = [np.array([1.0, 2.0 if value is None else value], np.float32) for value in bad]
    length = -(-count // 8)
    payload = backend.array(np.full(length + 2, 0xFF), "uint8")
    backend.ops.store_nonfinite(payload, 1, [backend.array(part, "float32") for part in parts])
    flags = sum(1 << i for i, value in enumerate(bad) if value is not None)
    expected = b"\xff" + flags.to_bytes(length, "little") + b"\xff"
    assert backend.ops.to_host(payload) == expected


# Receive.


@each_way
def test_accumulator_and_deliver_fill_gradients_of_any_layout(backend: Backend) -> None:
    for dtype in backend.gradient_dtypes:
        for gradient, before in gradients_of_any_layout(backend, dtype):
            total = backend.ops.accumulator(gradient, "float64")
            assert backend.numpy(total).tolist() == [0.0] * len(before)
            values = np.arange(10.0, 10.0 + len(before))
            backend.ops.accumulate(total, None, backend.array(values[None], "float64"))
            backend.ops.write_scaled(total, 0.5, gradient, False)
            assert backend.numpy(gradient).reshape(-1).tolist() == (values / 2).tolist()
            backend.ops.write_scaled(total, 0.5, gradient, True)  # poisoned
            poisoned = backend.numpy(gradient)
            assert np.isnan(poisoned).all() and poisoned.size == len(before)


@each_way
@given(
    data=st.data(),
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
    dtypes=st.sampled_from([("float32", "float16"), *((wide, wide) for wide in WIDE)]),
)
def test_write_scaled_scales_in_the_wide_dtype_and_rounds_once(
    backend: Backend, data: st.DataObject, scale: float, dtypes: tuple[str, str]
) -> None:
    (wide, dtype), values = dtypes, data.draw(arrays(backend, dtypes[0]))
    gradient = backend.ops.zeros(values.size, dtype, "cpu")
    with np.errstate(all="ignore"):
        backend.ops.write_scaled(backend.array(values, wide), scale, gradient, False)
        expected = (values * values.dtype.type(scale)).astype(dtype)
        assert bits(backend, gradient) == canonical(backend, expected)


# Compare.


@each_way
@pytest.mark.parametrize("dtype", WIDE)
def test_norm_sums_in_float64(backend: Backend, dtype: str) -> None:
    """The squares of 1e30 overflow float32; ones beside 1e8 are lost in it."""
    assert backend.ops.norm(backend.array(np.array([3e30, 4e30]), dtype)) == pytest.approx(5e30)
    small = np.array([1e4, *[1.0] * 100])
    assert backend.ops.norm(backend.array(small, dtype)) == pytest.approx(
        math.sqrt(1e8 + 100), 1e-12
    )
    assert backend.ops.norm(backend.ops.zeros(0, dtype, "cpu")) == 0.0


@each_way
@pytest.mark.parametrize("dtype", [*WIDE, "float16"])
def test_square(backend: Backend, dtype: str) -> None:
    """Of any shape; nothing of no elements, and no number of what is not finite."""
    values = np.random.default_rng(0).standard_normal((40, 33))
    array = backend.array(values, dtype)
    expected = np.sum(np.square(backend.numpy(array).astype(np.float64)))
    found = backend.numpy(backend.ops.square(array))
    assert (found.dtype, found.shape) == (np.float32, (1,))
    assert found[0] == pytest.approx(expected, 1e-5)
    assert backend.numpy(backend.ops.square(backend.ops.zeros(0, dtype, "cpu"))) == 0.0
    for wrong in (np.nan, np.inf):
        square = backend.ops.square(backend.array(np.array([1.0, wrong]), dtype))
        assert not np.isfinite(backend.numpy(square)[0])


# Methods of several rounds.


@each_way
@given(data=st.data(), wide=st.sampled_from(WIDE))
def test_scales_are_finite_and_not_negative(
    backend: Backend, data: st.DataObject, wide: str
) -> None:
    count = data.draw(st.integers(1, 5))
    scales = st.sampled_from([0.0, -0.0, 1.0, 1e30, -1.0, -1e30, math.inf, -math.inf, math.nan])
    row = st.lists(scales, min_size=count, max_size=count)
    rows = data.draw(st.lists(row | st.just([1.0] * count), min_size=1, max_size=4))
    answers = backend.ops.are_scales(backend.array(np.array(rows), wide))
    expected = [all(math.isfinite(scale) and scale >= 0 for scale in row) for row in rows]
    assert backend.numpy(answers).tolist() == expected


@each_way
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 5), (7, 1, 2), (1, 40, 1), (64, 33, 4)])
def test_matmul_of_flat_matrices(backend: Backend, wide: str, shape: tuple[int, int, int]) -> None:
    """Whole numbers have sums that no order of additions changes; others come close."""
    m, k, n = shape
    random = np.random.default_rng(m)
    for exact in (True, False):
        left, right = (random.standard_normal(size) for size in ((m, k), (k, n)))
        if exact:
            left, right = np.round(4 * left), np.round(4 * right)
        given_ = [backend.array(each.reshape(-1), wide) for each in (left, right)]
        product = backend.ops.matmul(*given_, shape)
        assert dtype_name(product) == wide
        found, expected = backend.numpy(product), (left @ right).reshape(-1)
        if exact:
            assert found.tolist() == expected.tolist()
        limit = 4 * k * np.finfo(wide).eps * np.abs(left).max() * np.abs(right).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


@each_way
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 5), (64, 3, 130)])
def test_products_are_written_scaled_and_subtracted(
    backend: Backend, wide: str, shape: tuple[int, int, int]
) -> None:
    """Whole numbers have sums that no order of additions changes."""
    m, k, n = shape
    random = np.random.default_rng(m)
    left, right, before = (
        np.round(4 * random.standard_normal(size)).astype(wide) for size in ((m, k), (k, n), (m, n))
    )
    factors = [backend.array(each.reshape(-1), wide) for each in (left, right)]
    for dtype in (wide, "float16"):
        gradient = backend.array(np.zeros((m, n)), dtype)
        for poisoned in (True, False):
            backend.ops.write_product(*factors, shape, 0.5, gradient, poisoned)
            found = backend.numpy(gradient)
            expected = np.full((m, n), np.nan) if poisoned else left @ right / 2
            np.testing.assert_array_equal(found, expected)
    candidate = backend.array(before.reshape(-1), wide)
    backend.ops.subtract_product(candidate, *factors, shape)
    assert backend.numpy(candidate).tolist() == (before - left @ right).reshape(-1).tolist()


@pytest.mark.one_in(3)
@each_way
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 2), (4, 37), (4, 1100)])
def test_orthonormal_rows_have_the_same_bits_everywhere(
    backend: Backend, wide: str, count: int, size: int
) -> None:
    """A row that depends on others, or is 0, becomes 0."""
    rows = np.random.default_rng(size).standard_normal((count, size)).astype(wide)
    rows[2:3] = 3 * rows[0]
    rows[3:4] = 0
    found = backend.ops.orthonormal(backend.array(rows.reshape(-1), wide), count)
    basis = backend.numpy(found).reshape(count, size)
    with np.errstate(all="ignore"):
        expected = NUMPY.ops.orthonormal(rows.reshape(-1), count)
    assert bits(backend, found) == canonical(backend, expected)
    gram, eps = basis.astype("float64") @ basis.T.astype("float64"), np.finfo(wide).eps
    are_new = np.array([True, size > 1, False, False])[:count]
    np.testing.assert_allclose(gram, np.diag(are_new.astype("float64")), atol=8 * eps)


@each_way
def test_matmul_takes_views_and_gives_a_new_array(backend: Backend) -> None:
    """What is not finite is handed on: a flagged tensor's rounds run on."""
    array = backend.array(np.arange(6), "float32")
    views = backend.ops.view(array, 0, 2), backend.ops.view(array, 2, 6)
    product = backend.ops.matmul(*views, (1, 2, 2))
    backend.ops.assign(array, backend.array(np.zeros(6), "float32"))
    assert backend.numpy(product).tolist() == [4, 5]  # [0, 1] times [[2, 3], [4, 5]]
    left = backend.array(np.array([1, np.nan, 2, 3]), "float32")
    found = backend.numpy(backend.ops.matmul(left, backend.array(np.ones(2), "float32"), (2, 2, 1)))
    assert np.isnan(found[0]) and found[1] == 5


@each_way
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 5), (5, 1), (3, 4), (40, 8)])
def test_transposed(backend: Backend, wide: str, rows: int, columns: int) -> None:
    values = np.random.default_rng(rows).standard_normal((rows, columns)).astype(wide)
    array = backend.array(values.reshape(-1), wide)
    result = backend.ops.transposed(array, rows)
    backend.ops.assign(array, backend.array(np.zeros(rows * columns), wide))  # it is a new array
    assert dtype_name(result) == wide
    assert backend.numpy(result).tolist() == values.T.reshape(-1).tolist()
    back = backend.numpy(backend.ops.transposed(result, columns))
    assert back.tolist() == values.reshape(-1).tolist()


@each_way
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("numel", [1, 16, 17, 1000, 70_001])
@pytest.mark.parametrize("zeros", [1, 3, 0], ids=["zeros", "some zeros", "no zeros"])
def test_weights_are_near_the_inverse_fourth_root(
    backend: Backend, wide: str, numel: int, zeros: int
) -> None:
    rng = np.random.default_rng(numel)
    values = rng.standard_normal(numel).astype(wide)
    squares = (rng.standard_normal(numel) ** 8 * 1e-9).astype(wide)
    squares[:: zeros or numel + 1] = 0.0 if zeros else squares[0]
    given_ = backend.array(values, wide), backend.array(squares, wide)
    found, stride = backend.ops.weighted(*given_), max(numel // 64, 16) | 1
    weights = backend.numpy(found).astype("f8") / values
    rows = squares[: numel // stride * stride].reshape(-1, stride)[:, :16]
    if rows.any():
        least = 2.0 ** (np.floor(np.log2(rows.astype("f8").mean())) - 7)
        ratio = weights * np.maximum(squares, least) ** 0.25
        assert ratio.min() > 0.99
        assert ratio.max() < 1.19
    else:
        np.testing.assert_allclose(weights, weights[0], rtol=1e-6)
    theirs = NUMPY.ops.weighted(NUMPY.array(values, wide), NUMPY.array(squares, wide))
    assert bits(backend, found) == canonical(backend, NUMPY.numpy(theirs))


@each_way
@given(data=st.data(), wide=st.sampled_from(WIDE))
def test_divided_by_one_number(backend: Backend, data: st.DataObject, wide: str) -> None:
    array = data.draw(arrays(backend, wide, min_size=1))
    by = data.draw(st.sampled_from([0.0, -0.0, 1.0, -3.0, 0.1, 1e30, math.inf, math.nan]))
    divisor = np.array([by], wide)
    given_ = backend.array(array, wide), backend.array(divisor, wide)
    found = backend.ops.divided(*given_)
    with np.errstate(all="ignore"):
        expected = np.zeros_like(array) if by == 0 else array / divisor
        assert bits(backend, found) == canonical(backend, expected)
        assert bits(backend, given_[0]) == canonical(backend, array)
    assert dtype_name(found) == wide


@each_way
def test_either_of_two_answers(backend: Backend) -> None:
    """Of `validate`, which may give tensors; `write_scaled` takes what comes of them."""
    ops, gathered = backend.ops, backend.array(np.zeros(4), "uint8")
    pairs = list(itertools.product([False, True], repeat=2))
    left, right = (
        ops.validate(gathered, 4, 4, [], lambda heads, answers, flags=flags: flags, 4)
        for flags in ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    )
    found = ops.either(left, right)
    assert [bool(flag) for flag in found] == [False, True, True, True]
    target = backend.array(np.ones(2), "float32")
    total = backend.array(np.full(2, 3.0), "float32")
    for position, (one, other) in enumerate(pairs):
        ops.write_scaled(total, 1.0, target, found[position])
        assert np.isnan(backend.numpy(target)).all() == (one or other)


@each_way
@given(
    flags=st.lists(st.booleans(), min_size=1, max_size=20), data=st.binary(min_size=6, max_size=6)
)
def test_flags_are_added_to_a_bitmap(backend: Backend, flags: list[bool], data: bytes) -> None:
    payload = backend.array(np.frombuffer(data, np.uint8), "uint8")
    backend.ops.store_flags(payload, 2, flags)
    before, after = (int.from_bytes(each, "little") for each in (data, backend.numpy(payload)))
    assert after == before | sum(flag << 16 + bit for bit, flag in enumerate(flags))


# Random numbers.

# Counter, key and output of Philox4x32-10: kat_vectors of Random123, the authors' own code.
PUBLISHED = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_philox_gives_the_published_numbers(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    assert list(philox(tuple(counter), tuple(key), operator.rshift)) == expected
    arrays = tuple(np.full(3, word) for word in counter)
    found = philox(arrays, tuple(key), operator.rshift)
    assert np.array(found).T.tolist() == [expected] * 3


WORDS = st.integers(0, 2**32 - 1)


@each_way
@given(
    key=st.tuples(WORDS, WORDS),
    committed=st.integers(0, 2**62),
    count=st.integers(0, 21),
    bits=st.integers(1, 32),
)
def test_random_bits_are_words_of_philox(
    backend: Backend, key: tuple[int, int], committed: int, count: int, bits: int
) -> None:
    stream = Stream(key, committed)
    found = backend.ops.random_bits(stream, count, bits, "cpu")
    assert dtype_name(found) == "int64"
    steps = committed % 2**32, committed >> 32
    blocks = [philox((b, 0, *steps), key, operator.rshift) for b in range(-(-count // 4))]
    expected = [word >> (32 - bits) for block in blocks for word in block][:count]
    assert backend.numpy(found).tolist() == expected


@each_way
def test_uniform_numbers_fill_the_interval(backend: Backend) -> None:
    found = backend.numpy(uniform(backend.ops, Stream((1, 2), 3), 4000, "float32", "cpu"))
    assert found.dtype == np.float32
    assert 0 <= found.min() < 1e-3
    assert 1 - 1e-3 < found.max() < 1
    assert abs(found.mean() - 0.5) < 3 * math.sqrt(1 / 12 / found.size)
    assert np.array_equal(found * 2**24, np.round(found * 2**24))


# Rules for all.


@each_way
@given(numel=st.integers(0, 5000), parts=st.integers(1, 5), data=st.data())
def test_global_index_finds_the_elements_of_every_part_th_block(
    backend: Backend, numel: int, parts: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, parts - 1))
    blocks = [np.arange(at, at + 512) for at in range(512 * first, 512 * parts * 11, 512 * parts)]
    expected = np.concatenate(blocks)[:numel]
    spots = backend.ops.global_index(backend.ops.arange(numel, "cpu"), parts, first)
    assert dtype_name(spots) == "int64"
    assert backend.numpy(spots).tolist() == expected.tolist()


@each_way
@given(numel=st.integers(1, 200_000), dtype=st.sampled_from(["float32", "float64"]))
def test_count_above_counts_magnitudes_above_a_limit(
    backend: Backend, numel: int, dtype: str
) -> None:
    values = np.random.default_rng(numel).integers(-4, 5, numel).astype(dtype)
    values[::7] = np.nan
    limit = backend.array(np.array([2.0], dtype), dtype)
    count = backend.ops.count_above(backend.array(values, dtype), limit)
    assert dtype_name(count) == "float32"
    assert backend.numpy(count).tolist() == [float(np.count_nonzero(abs(values) > 2))]


@each_way
@given(numel=st.integers(0, 5000), parts=st.integers(1, 5), data=st.data())
def test_split_shards_gives_each_shard_every_part_th_block(
    backend: Backend, numel: int, parts: int, data: st.DataObject
) -> None:
    firsts = data.draw(st.permutations(range(parts)))
    dtype = data.draw(st.sampled_from(["float16", "float32"]))
    values = np.random.default_rng(numel).standard_normal(numel).astype(dtype)
    if numel % 7 == 0:
        values = values.reshape(7, -1).T  # elements are taken in row-major order
    flat = values.reshape(-1)
    blocks = [flat[at : at + 512] for at in range(0, numel, 512)]
    empty = np.zeros(0, dtype)
    shards = [np.concatenate([*blocks[first::parts], empty]) for first in firsts]
    whole = backend.ops.zeros(numel, "float32", "cpu")
    ends = list(itertools.accumulate(map(len, shards)))
    outs = [backend.ops.view(whole, e - len(s), e) for e, s in zip(ends, shards, strict=True)]
    backend.ops.split_shards(backend.array(values, dtype), firsts, outs)
    assert backend.numpy(whole).tolist() == np.concatenate(shards).tolist()
    for first, shard in zip(firsts, shards, strict=True):
        found = backend.ops.shard(backend.array(values, dtype), parts, first)
        assert dtype_name(found) == dtype
        assert backend.numpy(found).tolist() == shard.tolist()
