"""The arithmetic of a plan: k, buckets, positions and bytes."""

from __future__ import annotations

from dataclasses import replace
from decimal import ROUND_CEILING, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.jobs import Job, jobs

from horovod_topk.config import TopKConfig
from horovod_topk.core import plan as planning
from horovod_topk.core.exchange import ring_allreduce_bytes
from horovod_topk.core.plan import Plan, TensorSpec, entries, make_plan
from horovod_topk.errors import (
    ConfigError,
    DuplicateNameError,
    TensorTooLargeError,
    UnsupportedDtypeError,
)
from resnet50 import resnet50_specs


def spec(name: str, *shape: int, dtype: str = "float32", device: str = "cpu") -> TensorSpec:
    return TensorSpec(name, shape, dtype, device)


def only(plan: Plan) -> planning.BucketPlan:
    (bucket,) = plan.buckets
    return bucket


def names(plan: Plan) -> list[list[str]]:
    return [[t.spec.name for t in bucket.tensors] for bucket in plan.buckets]


# k


@pytest.mark.parametrize(
    ("numel", "ratio", "k"),
    [
        (100, 0.01, 1),
        (300, 0.01, 3),  # 300 * 0.01 is 3.0000000000000004 in binary
        (700, 0.01, 7),
        (2900, 0.01, 29),
        (1100, 0.07, 77),  # 1100 * 0.07 is 77.00000000000001
        (30, 0.1, 3),
        (101, 0.01, 2),
        (10**12, 1e-06, 10**6),
        (5, 1e-300, 1),
        (0, 0.5, 0),
        (7, 1.0, 7),
    ],
)
def test_k_reads_the_ratio_as_it_was_written(numel: int, ratio: float, k: int) -> None:
    assert entries(numel, ratio) == k


@given(numel=st.integers(0, 2**33), digits=st.integers(1, 10**6))
def test_k_is_the_decimal_ceiling(numel: int, digits: int) -> None:
    exact = (Decimal(digits).scaleb(-6) * numel).to_integral_value(ROUND_CEILING)
    k = entries(numel, digits / 10**6)
    assert k == int(exact)
    assert (numel > 0) <= k <= numel


# One tensor's share


@pytest.mark.parametrize(("numel", "k", "index"), [(99, 99, None), (100, 10, "int16")])
def test_tensors_below_min_numel_travel_dense(numel: int, k: int, index: str | None) -> None:
    tensor = only(make_plan([spec("w", numel)], TopKConfig(0.1, min_numel=100))).tensors[0]
    assert (tensor.k, tensor.index) == (k, index)


@pytest.mark.parametrize(("numel", "index"), [(2**16, "int16"), (2**16 + 1, "int32")])
def test_indices_are_as_narrow_as_they_can_be(numel: int, index: str) -> None:
    assert only(make_plan([spec("w", numel)], TopKConfig())).tensors[0].index == index


@pytest.mark.parametrize(
    ("ratio", "values", "dtype", "sparse"),
    [
        (0.66, "float32", "float32", True),  # 6 bytes an entry: 3.96 < 4
        (0.67, "float32", "float32", False),
        (0.49, "float16", "float32", True),  # 4 bytes an entry: 1.96 < 2
        (0.50, "float16", "float32", False),  # a tie: dense needs no selection
        (0.79, "float32", "float64", True),  # 10 bytes an entry: 7.9 < 8
        (0.80, "float32", "float64", False),
        (1.0, "float32", "float32", False),
    ],
)
def test_entries_that_cost_no_less_travel_dense(
    ratio: float, values: str, dtype: str, sparse: bool
) -> None:
    config = TopKConfig(ratio, values, min_numel=0)
    tensor = only(make_plan([spec("w", 100, dtype=dtype)], config)).tensors[0]
    assert (tensor.index is not None) is sparse
    assert tensor.k == (round(100 * ratio) if sparse else 100)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (1,), ()])
def test_tensors_of_no_or_one_element_travel_dense(shape: tuple[int, ...]) -> None:
    tensor = only(make_plan([spec("w", *shape)], TopKConfig(min_numel=0))).tensors[0]
    assert (tensor.k, tensor.index) == (tensor.spec.numel, None)


@pytest.mark.parametrize(
    ("dtype", "values", "residual", "sent"),
    [
        ("float16", "float32", "float32", "float32"),
        ("bfloat16", "float32", "float32", "float32"),
        ("float32", "float32", "float32", "float32"),
        ("float64", "float32", "float64", "float64"),
        ("bfloat16", "float16", "float32", "float16"),
        ("float64", "float16", "float64", "float16"),
    ],
)
def test_dtypes(dtype: str, values: str, residual: str, sent: str) -> None:
    bucket = only(make_plan([spec("w", 5, dtype=dtype)], TopKConfig(values=values)))
    assert (bucket.residual_dtype, bucket.value_dtype) == (residual, sent)


# Positions


@given(job=jobs())
def test_sections_follow_one_another_without_overlap(job: Job) -> None:
    for bucket in job.plan.buckets:
        value = planning.WIDTH[bucket.value_dtype]
        sections = [(0, 24), (bucket.layout.flags_at, bucket.layout.flags_bytes)]
        sections += [(t.value_at, t.k * value) for t in bucket.tensors]
        for width in ("int32", "int16"):
            sections += [
                (t.index_at, t.k * planning.WIDTH[width])
                for t in bucket.tensors
                if t.index == width
            ]
        for (at, size), (following, _) in zip(
            sections, [*sections[1:], (bucket.layout.payload_bytes, 0)], strict=True
        ):
            assert 0 <= following - (at + size) < 8
        assert bucket.layout.values_at % 8 == bucket.layout.payload_bytes % 8 == 0


@given(job=jobs())
def test_arenas_hold_every_element_once(job: Job) -> None:
    for bucket in job.plan.buckets:
        assert bucket.tensors[0].start == 0
        for tensor, following in zip(bucket.tensors, bucket.tensors[1:], strict=False):
            assert tensor.stop == following.start
        assert bucket.numel == sum(t.spec.numel for t in bucket.tensors)
        assert bucket.entries == sum(t.k for t in bucket.tensors)


# Buckets


def test_buckets_are_filled_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "BUCKET_ELEMENTS", 10)
    specs = [spec("a", 4), spec("b", 6), spec("c", 1), spec("d", 50), spec("e", 3), spec("f", 0)]
    assert names(make_plan(specs, TopKConfig())) == [["a", "b"], ["c"], ["d"], ["e", "f"]]


def test_a_default_bucket_is_25_mebibytes_of_float32() -> None:
    specs = [spec(str(i), 2**20) for i in range(14)]
    assert [len(names_) for names_ in names(make_plan(specs, TopKConfig()))] == [6, 6, 2]


def test_buckets_split_by_residual_dtype_and_device() -> None:
    specs = [
        spec("a", 2),
        spec("b", 2, dtype="float64"),
        spec("c", 2, device="cuda:0"),
        spec("d", 2, dtype="float16"),
        spec("e", 2, dtype="bfloat16"),
    ]
    plan = make_plan(specs, TopKConfig())
    assert names(plan) == [["a", "d", "e"], ["b"], ["c"]]
    assert [bucket.ordinal for bucket in plan.buckets] == [0, 1, 2]
    assert [bucket.device for bucket in plan.buckets] == ["cpu", "cpu", "cuda:0"]


def test_groups_are_buckets_and_the_rest_fill_default_ones() -> None:
    a, b, c, d, e = (spec(name, 2) for name in "abcde")
    wide = replace(e, dtype="float64")
    plan = make_plan([a, b, c, d, wide], TopKConfig(), groups=[[d, b], [], [wide, c]])
    assert names(plan) == [["d", "b"], ["e"], ["c"], ["a"]]


def test_a_tensor_in_two_groups_is_refused() -> None:
    """It would be sent twice and have two residuals under one name."""
    a, b = spec("a", 2), spec("b", 2)
    with pytest.raises(DuplicateNameError, match="'a'"):
        make_plan([a, b], TopKConfig(), groups=[[a], [a, b]])


def test_no_tensors_make_an_empty_plan() -> None:
    plan = make_plan([], TopKConfig())
    assert plan.buckets == ()
    assert len(plan.digest) == 8


# Without


def test_without_keeps_the_other_buckets_and_all_ordinals() -> None:
    a, b, c = spec("a", 2), spec("b", 3), spec("c", 4)
    plan = make_plan([a, b, c], TopKConfig(), groups=[[a, b], [c]])
    less = plan.without("a")
    assert names(less) == [["b"], ["c"]]
    assert less.buckets[1] is plan.buckets[1]
    assert less.buckets[0].tensors[0].start == 0
    assert less.buckets[0].digest == only(make_plan([b], TopKConfig())).digest
    assert less.digest != plan.digest


def test_a_bucket_left_empty_disappears() -> None:
    a, b = spec("a", 2), spec("b", 3)
    plan = make_plan([a, b], TopKConfig(), groups=[[a], [b]])
    assert [bucket.ordinal for bucket in plan.without("a").buckets] == [1]
    assert plan.without("a").without("b").buckets == ()
    assert plan.without("nobody") == plan


# Refusals


def test_duplicate_names_are_refused() -> None:
    with pytest.raises(DuplicateNameError, match=r"tensor 'w': .* more than one"):
        make_plan([spec("w", 2), spec("v", 2), spec("w", 3)], TopKConfig())


@pytest.mark.parametrize("dtype", ["int64", "complex64", "bool", "float8_e4m3fn"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(UnsupportedDtypeError) as caught:
        make_plan([spec("w", 2, dtype=dtype)], TopKConfig())
    message = f"tensor 'w': dtype {dtype} cannot be compressed. Use one of"
    assert str(caught.value).startswith(message)


def test_tensors_too_large_for_an_index_are_refused() -> None:
    assert only(make_plan([spec("w", 2**32)], TopKConfig())).tensors[0].index == "int32"
    with pytest.raises(TensorTooLargeError, match=r"'w': 4294967297 elements .* 4294967296"):
        make_plan([spec("w", 2**32 + 1)], TopKConfig())


def test_reductions() -> None:
    assert make_plan([], TopKConfig(), "sum").reduction == "sum"
    with pytest.raises(ConfigError, match=r"reduction='mean' is unknown. Pass one of average, sum"):
        make_plan([], TopKConfig(), "mean")


# Bytes


def test_dense_bytes_count_the_gradients_own_width() -> None:
    specs = [spec("a", 10, dtype="float16"), spec("b", 10)]
    assert only(make_plan(specs, TopKConfig())).dense_bytes == 20 + 40


@pytest.mark.parametrize(("ranks", "sent"), [(1, 0), (2, 1000), (4, 1500), (8, 1750)])
def test_bytes_of_a_ring_allreduce(ranks: int, sent: int) -> None:
    assert ring_allreduce_bytes(1000, ranks) == sent


def test_a_resnet50_sends_forty_times_less_on_two_ranks() -> None:
    """Against a ring allreduce, which at two ranks sends all gradients once."""
    plan = make_plan(resnet50_specs(), TopKConfig(ratio=0.01))
    elements = sum(tensor.spec.numel for tensor in plan.tensors())
    assert (sum(1 for _ in plan.tensors()), elements) == (161, 25_557_032)
    payload = sum(bucket.layout.payload_bytes for bucket in plan.buckets)
    assert ring_allreduce_bytes(4 * elements, ranks=2) / payload >= 40
