"""The arithmetic of a plan: k, buckets, positions and bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import ROUND_CEILING, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.jobs import Job, jobs

from horovod_topk.core.exchange.protocol import ring_allreduce_bytes
from horovod_topk.core.plan import buckets as planning
from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.cost.traffic import exchange_of, nodes_of
from horovod_topk.errors import DuplicateNameError, TensorTooLargeError, UnsupportedDtypeError
from horovod_topk.methods.topk import TopK, entries
from horovod_topk.ops import coding

PLAIN = TopK(ratio=0.01, values="float32")


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


@pytest.mark.parametrize(("numel", "k", "index"), [(99, 99, None), (100, 10, "packed")])
def test_tensors_below_min_numel_travel_dense(numel: int, k: int, index: str | None) -> None:
    tensor = only(
        make_plan([spec("w", numel)], TopK(0.1, min_numel=100, values="float32"))
    ).tensors[0]
    assert (tensor.k, tensor.index) == (k, index)


@pytest.mark.parametrize(("numel", "index"), [(2**16, "int16"), (2**16 + 1, "int32")])
def test_plain_indices_are_as_narrow_as_they_can_be(numel: int, index: str) -> None:
    config = replace(PLAIN, indices="plain")
    assert only(make_plan([spec("w", numel)], config)).tensors[0].index == index


@pytest.mark.parametrize("device", ["", "cpu", "cuda:0", "/job:localhost/task:0/device:GPU:0"])
def test_indices_are_packed_on_every_device(device: str) -> None:
    plan = make_plan([spec("w", 5000, device=device)], PLAIN)
    assert only(plan).tensors[0].index == "packed"


@pytest.mark.parametrize(
    ("indices", "ratio", "values", "dtype", "sparse"),
    [
        ("plain", 0.66, "float32", "float32", True),  # 6 bytes an entry: 3.96 < 4
        ("plain", 0.67, "float32", "float32", False),
        ("plain", 0.49, "float16", "float32", True),  # 4 bytes an entry: 1.96 < 2
        ("plain", 0.50, "float16", "float32", False),  # a tie: dense needs no selection
        ("plain", 0.79, "float32", "float64", True),  # 10 bytes an entry: 7.9 < 8
        ("plain", 0.80, "float32", "float64", False),
        ("plain", 1.0, "float32", "float32", False),
        ("packed", 0.96, "float32", "float32", True),  # a map of 100 bits: 4 * 96 + 13 < 400
        ("packed", 0.97, "float32", "float32", False),
        ("packed", 0.93, "bfloat16", "float32", True),  # 2 * 93 + 13 < 200
        ("packed", 0.94, "bfloat16", "float32", False),
        ("packed", 0.98, "float32", "float64", True),  # 8 * 98 + 13 < 800
        ("packed", 0.99, "float32", "float64", False),
        ("packed", 0.86, "int8", "float64", True),  # 2 + 86 + 13 < 2 + 100
        ("packed", 0.87, "int8", "float64", False),
        ("packed", 0.72, "int4", "float32", True),  # 2 + 36 + 13 < 2 + 50
        ("packed", 0.73, "int4", "float32", False),
        ("packed", 0.16, "sign", "float32", True),  # 2 + 2 + (4 + 5) < 2 + 13
        ("packed", 0.17, "sign", "float32", False),  # 2 + 3 + (5 + 5): a tie
    ],
)
def test_entries_that_cost_no_less_travel_dense(
    indices: str, ratio: float, values: str, dtype: str, sparse: bool
) -> None:
    config = TopK(ratio, values, indices, min_numel=0)
    tensor = only(make_plan([spec("w", 100, dtype=dtype)], config)).tensors[0]
    assert (tensor.index is not None) is sparse
    assert tensor.k == (round(100 * ratio) if sparse else 100)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (1,), ()])
def test_tensors_of_no_or_one_element_travel_dense(shape: tuple[int, ...]) -> None:
    tensor = only(make_plan([spec("w", *shape)], replace(PLAIN, min_numel=0))).tensors[0]
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
        ("float64", "bfloat16", "float64", "bfloat16"),
        ("float16", "int8", "float32", "int8"),
        ("float64", "int4", "float64", "int4"),
        ("bfloat16", "sign", "float32", "sign"),
    ],
)
def test_dtypes(dtype: str, values: str, residual: str, sent: str) -> None:
    bucket = only(make_plan([spec("w", 5, dtype=dtype)], TopK(values=values, ratio=0.01)))
    assert (bucket.residual_dtype, bucket.config.value_kind(bucket.residual_dtype)) == (
        residual,
        sent,
    )


# Positions


@given(job=jobs())
def test_sections_follow_one_another_without_overlap(job: Job) -> None:
    for bucket in job.plan.buckets:
        sections = [(0, 24), (bucket.layout.flags_at, bucket.layout.flags_bytes)]
        kind = bucket.config.value_kind(bucket.residual_dtype)
        sections += [(t.at, coding.value_bytes(kind, t.k)) for t in bucket.tensors]
        for kind in ("int32", "int16", "packed"):
            sections += [
                (t.index_at, coding.index_bytes(kind, t.spec.numel, t.k))
                for t in bucket.tensors
                if t.index == kind
            ]
        for (at, size), (following, _) in zip(
            sections, [*sections[1:], (bucket.layout.payload_bytes, 0)], strict=True
        ):
            assert 0 <= following - (at + size) < 16
        assert bucket.layout.body_at % 8 == bucket.layout.payload_bytes % 16 == 0


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
    assert names(make_plan(specs, PLAIN)) == [["a", "b"], ["c"], ["d"], ["e", "f"]]


def test_a_default_bucket_is_25_mebibytes_of_float32() -> None:
    specs = [spec(str(i), 2**20) for i in range(14)]
    assert [len(names_) for names_ in names(make_plan(specs, PLAIN))] == [6, 6, 2]


def test_buckets_split_by_residual_dtype_and_device() -> None:
    specs = [
        spec("a", 2),
        spec("b", 2, dtype="float64"),
        spec("c", 2, device="cuda:0"),
        spec("d", 2, dtype="float16"),
        spec("e", 2, dtype="bfloat16"),
    ]
    plan = make_plan(specs, PLAIN)
    assert names(plan) == [["a", "d", "e"], ["b"], ["c"]]
    assert [bucket.ordinal for bucket in plan.buckets] == [0, 1, 2]
    assert [bucket.device for bucket in plan.buckets] == ["cpu", "cpu", "cuda:0"]


def test_groups_are_buckets_and_the_rest_fill_default_ones() -> None:
    a, b, c, d, e = (spec(name, 2) for name in "abcde")
    wide = replace(e, dtype="float64")
    plan = make_plan([a, b, c, d, wide], PLAIN, groups=[[d, b], [], [wide, c]])
    assert names(plan) == [["d", "b"], ["e"], ["c"], ["a"]]


# Without


def test_without_keeps_the_other_buckets_and_all_ordinals() -> None:
    a, b, c = spec("a", 2), spec("b", 3), spec("c", 4)
    plan = make_plan([a, b, c], PLAIN, groups=[[a, b], [c]])
    less = plan.without("a")
    assert names(less) == [["b"], ["c"]]
    assert less.buckets[1] is plan.buckets[1]
    assert less.buckets[0].tensors[0].start == 0
    assert less.buckets[0].digest == only(make_plan([b], PLAIN)).digest
    assert less.digest != plan.digest


def test_a_bucket_left_empty_disappears() -> None:
    a, b = spec("a", 2), spec("b", 3)
    plan = make_plan([a, b], PLAIN, groups=[[a], [b]])
    assert [bucket.ordinal for bucket in plan.without("a").buckets] == [1]
    assert plan.without("a").without("b").buckets == ()
    assert plan.without("nobody") == plan


# Refusals


def test_duplicate_names_are_refused() -> None:
    with pytest.raises(DuplicateNameError, match=r"tensor 'w': .* more than one"):
        make_plan([spec("w", 2), spec("v", 2), spec("w", 3)], PLAIN)
    a, b = spec("a", 2), spec("b", 2)
    with pytest.raises(DuplicateNameError, match="'a'"):  # which would have two residuals
        make_plan([a, b], PLAIN, groups=[[a], [a, b]])


@pytest.mark.parametrize("dtype", ["int64", "complex64", "bool", "float8_e4m3fn"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(UnsupportedDtypeError) as caught:
        make_plan([spec("w", 2, dtype=dtype)], PLAIN)
    message = f"tensor 'w': dtype {dtype} cannot be compressed. Use one of"
    assert str(caught.value).startswith(message)


def test_tensors_too_large_for_an_index_are_refused() -> None:
    for indices, kind in (("packed", "packed"), ("plain", "int32")):
        plan = make_plan([spec("w", 2**32)], replace(PLAIN, indices=indices))
        assert only(plan).tensors[0].index == kind
    with pytest.raises(TensorTooLargeError, match=r"'w': 4294967297 elements .* 4294967296"):
        make_plan([spec("w", 2**32 + 1)], PLAIN)


# Bytes


@pytest.mark.parametrize(
    ("kind", "count", "expected"),
    [
        ("float64", 3, 24),
        ("float32", 3, 12),
        ("float16", 3, 6),
        ("bfloat16", 3, 6),
        ("int8", 1, 2 + 1),
        ("int8", 128, 2 + 128),
        ("int8", 129, 4 + 129),
        ("int4", 1, 2 + 1),
        ("int4", 129, 4 + 65),
        ("int3", 1, 8 + 1),
        ("int3", 1024, 8 + 384),
        ("int3", 1025, 16 + 385),
        ("int2", 5, 4 + 2),
        ("int2", 1025, 8 + 257),
        ("sign", 8, 2 + 1),
        ("sign", 1024, 2 + 128),
        ("sign", 1025, 4 + 129),
    ],
)
def test_bytes_of_values(kind: str, count: int, expected: int) -> None:
    assert coding.value_bytes(kind, count) == expected
    assert coding.value_bytes(kind, 0) == 0


@pytest.mark.parametrize(
    ("numel", "k", "low", "size"),
    [
        (10, 2, 1, 1 + 1),  # 2 + 4 and 4 + 2 bits are equals: the lower
        (40, 4, 3, 2 + 1),
        (1, 1, 0, 0 + 1),
        (1000, 999, 0, 0 + 125),
        (2**32, 1, 31, 4 + 1),  # more would be shorter, if there were more
        (2**32, 3, 30, 12 + 1),
    ],
)
def test_bytes_of_packed_indices(numel: int, k: int, low: int, size: int) -> None:
    assert coding.low_bits(numel, k) == low
    assert coding.index_bytes("packed", numel, k) == size
    assert coding.index_bytes("int16", numel, k) == 2 * k
    assert coding.index_bytes("int32", numel, k) == 4 * k
    assert coding.index_bytes(None, numel, k) == 0


def entropy(numel: int, k: int) -> float:
    """Bits that it takes to say which k of n elements: log2 of n over k."""
    return (math.lgamma(numel + 1) - math.lgamma(k + 1) - math.lgamma(numel - k + 1)) / math.log(2)


@pytest.mark.parametrize("ratio", [0.1, 0.05, 0.01, 0.001, 0.0001])
@pytest.mark.parametrize("values", ["int8", "int4", "int3", "int2", "sign"])
def test_entries_are_hardly_longer_than_they_must_be(values: str, ratio: float) -> None:
    """Scales and all: within 8% of the entropy of the places and the bits of the values."""
    numel = 10**8
    k = entries(numel, ratio)
    sent = 8 * (coding.index_bytes("packed", numel, k) + coding.value_bytes(values, k))
    assert sent <= 1.08 * (entropy(numel, k) + k * coding.VALUE_BITS[values])


@pytest.mark.parametrize("exponent", range(1, 81))
def test_a_packed_index_has_little_more_than_its_entropy(exponent: int) -> None:
    """At densities from 0.84 down to 1e-6."""
    numel = 10**9
    k = round(numel * 10 ** (-0.075 * exponent))
    assert 8 * coding.index_bytes("packed", numel, k) <= entropy(numel, k) + 0.6 * k


@pytest.mark.parametrize(("ranks", "sent"), [(1, 0), (2, 1000), (4, 1500), (8, 1750)])
def test_bytes_of_a_ring_allreduce(ranks: int, sent: int) -> None:
    assert ring_allreduce_bytes(1000, ranks) == sent


@pytest.mark.parametrize(
    ("exchange", "ratio"), [("sharded", 1.0), ("sharded", 0.5), ("hierarchical", 0.01)]
)
def test_what_no_collective_can_deal_out_is_refused(exchange: str, ratio: float) -> None:
    """Horovod's splits have 32 bits: of an alltoall they count bytes, of a sum elements."""
    plan = make_plan([TensorSpec("table", (2**31, 2), "float32")], TopK(ratio, values="float32"))
    kind = exchange_of(exchange, nodes_of(4, 2))
    with pytest.raises(
        TensorTooLargeError, match=r"'table': each owner gets .* at most 2147483647"
    ):
        kind.traffic(plan)
