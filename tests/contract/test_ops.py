"""Every verb of `horovod_topk.ops.Ops`, for every implementation.

Each test states a verb's promise in terms of NumPy's own functions, so that the oracle
(`NumpyOps`) is held to it too. A new implementation adds a row to `oracle.backends`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from oracle.backends import TORCH, Backend, each_way

WIDE = ("float32", "float64")  # of residuals and candidates
INTEGERS = ("int16", "int32", "int64", "uint8")
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
def test_zeros(backend: Backend, numel: int) -> None:
    for dtype in (*backend.gradient_dtypes, *INTEGERS):
        zeros = backend.ops.zeros(numel, dtype, "cpu")
        assert dtype_name(zeros) == dtype
        assert backend.numpy(zeros).tolist() == [0] * numel
        assert backend.ops.numel(zeros) == numel


@each_way
def test_arange(backend: Backend) -> None:
    indices = backend.ops.arange(3, "cpu")
    assert dtype_name(indices) == "int64"
    assert backend.numpy(indices).tolist() == [0, 1, 2]
    assert backend.ops.numel(backend.ops.arange(0, "cpu")) == 0


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


@each_way
@pytest.mark.parametrize("texture", ["normal", "constant", "mostly zero", "sorted", "some NaN"])
def test_select_from_many(backend: Backend, texture: str) -> None:
    """Sizes at which an implementation may look at a sample first."""
    numel = 2**17 + 3
    candidate = np.random.default_rng(0).standard_normal(numel).astype(np.float32)
    match texture:
        case "constant":
            candidate[:] = -2.0
        case "mostly zero":
            candidate[5:] = 0.0
        case "sorted":
            candidate.sort()
        case "some NaN":
            candidate[::1000] = np.nan
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


@each_way
@pytest.mark.parametrize("texture", ["normal", "constant", "mostly zero", "sorted", "some NaN"])
@pytest.mark.parametrize("numel", [1, 5001, 2**17 + 3])
def test_sample(backend: Backend, numel: int, texture: str) -> None:
    candidate = np.random.default_rng(1).standard_normal(numel).astype(np.float32)
    match texture:
        case "constant":
            candidate[:] = -2.0
        case "mostly zero":
            candidate[numel // 5 :] = 0.0
        case "sorted":
            candidate.sort()
        case "some NaN":
            candidate[::50] = np.nan
    array = backend.array(candidate, "float32")
    for k in {1, numel // 50, numel // 10, numel // 2} - {0}:
        index = backend.numpy(backend.ops.sample(array, k))
        assert index.dtype == np.int64
        assert index.tolist() == sampled(candidate, k)


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
    others = np.setdiff1d(np.arange(n), reach)[: k - reach.size]
    return sorted([*reach.tolist(), *others.tolist()])


def test_some_samples_are_used_and_some_are_not() -> None:
    """The test above tells `sample` from `select`."""
    candidate = np.random.default_rng(1).standard_normal(2**17).astype(np.float32)
    ops = TORCH.ops
    array = TORCH.array(candidate, "float32")
    assert ops.sample(array, 9000).tolist() != ops.select(array, 9000).tolist()
    assert ops.sample(array, 900).tolist() == ops.select(array, 900).tolist()


@each_way
def test_row(backend: Backend) -> None:
    payloads = backend.array(np.array([9, 0, 1, 0, 2, 0, 9, 0, 9, 0, 3, 0, 4, 0, 9, 0]), "uint8")
    loaded = backend.ops.load(payloads, 8, 2, 2, "int16")
    for position, expected in enumerate(([1, 2], [3, 4])):
        row = backend.ops.row(loaded, position)
        assert backend.numpy(row).tolist() == expected
        assert backend.ops.numel(row) == 2


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
@given(data=st.data(), wide=st.sampled_from(WIDE))
def test_quantise_rounds_to_nearest_and_saturates(
    backend: Backend, data: st.DataObject, wide: str
) -> None:
    values = data.draw(arrays(backend, wide))
    sent = backend.ops.quantise(backend.array(values, wide), "float16")
    assert dtype_name(sent) == "float16"
    expected = np.clip(values, -65504, 65504).astype(np.float16)
    assert bits(backend, sent) == canonical(backend, expected)


@each_way
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize(
    ("value", "nearest"),
    [(65519.0, 65504.0), (65520.0, 65504.0), (-1e30, -65504.0), (math.inf, 65504.0), (2**-25, 0.0)],
)
def test_quantise_at_the_limits(backend: Backend, wide: str, value: float, nearest: float) -> None:
    sent = backend.ops.quantise(backend.array(np.array([value]), wide), "float16")
    assert backend.numpy(sent).tolist() == [nearest]


@each_way
def test_quantise_takes_a_float64_to_float16_by_way_of_float32(backend: Backend) -> None:
    """Just above half-way between 1 and the next float16; rounded once it would go up."""
    above_half = backend.array(np.array([1 + 2.0**-11 + 2.0**-40]), "float64")
    assert backend.numpy(backend.ops.quantise(above_half, "float16")).tolist() == [1.0]


@each_way
@given(data=st.data(), dtype=st.sampled_from(WIDE))
def test_quantise_to_the_same_dtype_changes_nothing(
    backend: Backend, data: st.DataObject, dtype: str
) -> None:
    values = data.draw(arrays(backend, dtype))
    sent = backend.ops.quantise(backend.array(values, dtype), dtype)
    assert backend.numpy(sent).tobytes() == values.tobytes()


@each_way
@given(data=st.data(), sent_dtype=st.sampled_from(["float16", "float32"]), everything=st.booleans())
def test_deduct_and_accumulate_touch_the_index_alone(
    backend: Backend, data: st.DataObject, sent_dtype: str, everything: bool
) -> None:
    values, index = data.draw(arrays_with_index(backend, "float32"))
    index = np.arange(values.size) if everything else index
    amount = np.resize(data.draw(arrays(backend, sent_dtype, min_size=1)), index.size)
    given_index = None if everything else backend.array(index, "int64")
    with np.errstate(all="ignore"):
        out = backend.array(values, "float32")
        backend.ops.deduct(out, given_index, backend.array(amount, sent_dtype))
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


@each_way
def test_deduct_allows_the_candidate_itself(backend: Backend) -> None:
    """A dense tensor at full width sends its candidate without a copy."""
    candidate = backend.array(np.array([1.5, -2.0]), "float32")
    backend.ops.deduct(candidate, None, backend.ops.quantise(candidate, "float32"))
    assert backend.numpy(candidate).tolist() == [0.0, 0.0]


# Bytes.


@each_way
@given(data=st.data(), dtype=st.sampled_from(["float16", "float32", "float64"]))
def test_store_and_load_floats(backend: Backend, data: st.DataObject, dtype: str) -> None:
    parts = data.draw(st.lists(arrays(backend, dtype), max_size=3))
    joined = np.concatenate([np.zeros(0, dtype), *parts])
    payload = backend.array(np.full(8 + joined.nbytes + 8, 0xAB), "uint8")
    backend.ops.store(payload, 8, [backend.array(part, dtype) for part in parts], dtype)
    stored = backend.numpy(payload).tobytes()
    little = joined.astype(joined.dtype.newbyteorder("<")).tobytes()
    assert stored == b"\xab" * 8 + little + b"\xab" * 8
    loaded = backend.ops.load(payload, 16 + joined.nbytes, 8, joined.size, dtype)
    assert backend.numpy(loaded).shape == (1, joined.size)
    assert backend.numpy(loaded).tobytes() == joined.tobytes()


@each_way
@pytest.mark.parametrize(("dtype", "width"), [("int16", 2), ("int32", 4)])
@given(data=st.data())
def test_store_and_load_unsigned_indices(
    backend: Backend, dtype: str, width: int, data: st.DataObject
) -> None:
    largest = 2 ** (8 * width) - 1
    edges = st.sampled_from([0, 1, largest // 2, largest // 2 + 1, largest])
    indices = data.draw(st.lists(edges | st.integers(0, largest), max_size=6))
    payload = backend.ops.zeros(16 + width * len(indices), "uint8", "cpu")
    backend.ops.store(payload, 16, [backend.array(np.array(indices, np.int64), "int64")], dtype)
    expected = b"".join(index.to_bytes(width, "little") for index in indices)
    assert backend.numpy(payload).tobytes() == bytes(16) + expected
    loaded = backend.ops.load(payload, 16 + width * len(indices), 16, len(indices), dtype)
    assert dtype_name(loaded) == "int64"
    assert backend.numpy(loaded).tolist() == [indices]


@each_way
@pytest.mark.parametrize("dtype", ["int16", "int32", "float16", "float32", "float64"])
def test_load_reads_a_row_of_each_payload(backend: Backend, dtype: str) -> None:
    """Payloads arrive one behind the other."""
    parts = [np.array([rank, 7], dtype) for rank in range(3)]
    size = parts[0].nbytes
    payloads = b"".join(bytes(8) + part.tobytes() + bytes(16 - size) for part in parts)
    gathered = backend.array(np.frombuffer(payloads, np.uint8), "uint8")
    loaded = backend.ops.load(gathered, 24, 8, 2, dtype)
    assert backend.numpy(loaded).tolist() == [[0, 7], [1, 7], [2, 7]]


@each_way
def test_examine_hands_every_head_to_the_host(backend: Backend) -> None:
    gathered = backend.array(np.arange(12), "uint8")
    seen = []

    def check(heads: list[bytes]) -> list[bool]:
        seen.extend(heads)
        return [True, False, True]

    flags = backend.ops.examine(gathered, 4, 3, check)
    assert seen == [bytes([0, 1, 2]), bytes([4, 5, 6]), bytes([8, 9, 10])]
    gradients = [backend.array(np.zeros(2), "float32") for _ in range(3)]
    for position, gradient in enumerate(gradients):
        backend.ops.deliver(backend.array(np.ones(2), "float32"), 1.0, gradient, flags[position])
    assert [backend.numpy(g)[0] for g in gradients] == pytest.approx(
        [math.nan, 1, math.nan], nan_ok=True
    )


@each_way
@given(data=st.binary(min_size=1, max_size=20), at=st.integers(0, 3))
def test_store_bytes_and_to_host(backend: Backend, data: bytes, at: int) -> None:
    payload = backend.array(np.full(24, 7), "uint8")
    backend.ops.store_bytes(payload, at, data)
    assert backend.ops.to_host(payload) == b"\7" * at + data + b"\7" * (24 - at - len(data))


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


@each_way
def test_an_empty_part_is_finite(backend: Backend) -> None:
    payload = backend.array(np.array([0xFF]), "uint8")
    backend.ops.store_nonfinite(payload, 0, [backend.ops.zeros(0, "float64", "cpu")])
    assert backend.ops.to_host(payload) == b"\0"


# Receive.


@each_way
def test_accumulator_and_deliver_fill_gradients_of_any_layout(backend: Backend) -> None:
    for dtype in backend.gradient_dtypes:
        for gradient, before in gradients_of_any_layout(backend, dtype):
            total = backend.ops.accumulator(gradient, "float64")
            assert backend.numpy(total).tolist() == [0.0] * len(before)
            values = np.arange(10.0, 10.0 + len(before))
            backend.ops.accumulate(total, None, backend.array(values[None], "float64"))
            backend.ops.deliver(total, 0.5, gradient, False)
            assert backend.numpy(gradient).reshape(-1).tolist() == (values / 2).tolist()


@each_way
@given(
    data=st.data(),
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
    dtype=st.sampled_from(["float16", "float32"]),
)
def test_deliver_scales_in_the_wide_dtype_and_rounds_once(
    backend: Backend, data: st.DataObject, scale: float, dtype: str
) -> None:
    values = data.draw(arrays(backend, "float32"))
    gradient = backend.ops.zeros(values.size, dtype, "cpu")
    with np.errstate(all="ignore"):
        backend.ops.deliver(backend.array(values, "float32"), scale, gradient, False)
        assert bits(backend, gradient) == canonical(
            backend, (values * np.float32(scale)).astype(dtype)
        )


@each_way
def test_a_poisoned_gradient_is_nan_throughout(backend: Backend) -> None:
    for dtype in backend.gradient_dtypes:
        for gradient, before in gradients_of_any_layout(backend, dtype):
            total = backend.array(np.array(before), "float64")
            backend.ops.deliver(total, 0.5, gradient, True)
            poisoned = backend.numpy(gradient)
            assert np.isnan(poisoned).all()
            assert poisoned.size == len(before)


# Compare.


@each_way
@given(data=st.data(), dtype=st.sampled_from(["float16", *WIDE]))
def test_same_means_equal_values_and_nan_equal_to_nan(
    backend: Backend, data: st.DataObject, dtype: str
) -> None:
    values = data.draw(arrays(backend, dtype))
    other = data.draw(
        st.just(values.copy()) | arrays(backend, dtype, values.size).map(lambda a: a[: values.size])
    )
    expected = all(x == y or (x != x and y != y) for x, y in zip(values, other, strict=True))
    assert backend.ops.same(backend.array(values, dtype), backend.array(other, dtype)) is expected


@each_way
@pytest.mark.parametrize(("left", "right"), [(0.0, -0.0), (math.nan, math.nan)])
def test_zeros_of_both_signs_are_the_same_and_so_are_nans(
    backend: Backend, left: float, right: float
) -> None:
    pair = [backend.array(np.array([1.0, value]), "float32") for value in (left, right)]
    assert backend.ops.same(*pair) is True


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


# Rules for all.


@each_way
def test_no_verb_draws_random_numbers(backend: Backend) -> None:
    candidate = np.random.default_rng(1).standard_normal(3 * 2**16).astype(np.float32)
    torch_before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].tobytes()
    chosen = [
        backend.numpy(backend.ops.select(backend.array(candidate, "float32"), 2000)).tobytes()
        for _ in range(2)
    ]
    assert chosen[0] == chosen[1]
    assert torch.equal(torch.random.get_rng_state(), torch_before)
    assert np.random.get_state()[1].tobytes() == numpy_before


@given(values=arrays(TORCH, "float32"))
def test_bfloat16_gradients_lose_nothing_but_their_own_rounding(values: Array) -> None:
    rounded = torch.from_numpy(values).to(torch.bfloat16)
    out = TORCH.ops.zeros(values.size, "float32", "cpu")
    TORCH.ops.compensate(torch.zeros(values.size), rounded, out)
    assert bits(TORCH, out) == bits(TORCH, rounded.float() + 0.0)
    back = torch.empty_like(rounded)
    TORCH.ops.deliver(out, 1.0, back, False)
    assert TORCH.ops.same(back, rounded)
