"""The laws of compression methods, for every method over every exchange that it allows.

A new method joins by adding a row to `ROWS`. Ranks are simulated, and what they send is read here
with NumPy, whatever framework they compute in.

    1   What is not sent stays: the new residual is fl(a - decode(p)) to the bit, a = fl(e + g).
        Without error feedback it is 0.
        Of a method of rounds the mean over ranks is conserved, within rounding.
    2   All ranks have the same bits after every step.
    4   Sizes of messages follow from the plan, never from the data.
    5   A non-finite gradient on one rank is NaN on all, and the step leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from oracle.backends import NATIVE, NUMPY, TENSORFLOW, TORCH, Backend
from oracle.schedules import ByGradient
from oracle.two_rounds import TwoRounds
from oracle.world import Gradients, World, same_bits

from horovod_topk.core.exchange.announcing import announced_bytes
from horovod_topk.core.exchange.reduce import round_plans
from horovod_topk.core.plan.buckets import BucketPlan, Plan, TensorSpec, make_plan
from horovod_topk.core.plan.shards import shard
from horovod_topk.errors import ConfigError
from horovod_topk.methods import (
    METHODS,
    QSGD,
    ByteGrad,
    Codec,
    Dense,
    Method,
    OneBit,
    Piece,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
)
from horovod_topk.methods.protocol import Context
from horovod_topk.ops import Ops, coding

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Halves(Codec):
    """Every element as a float16: as little as a codec may define."""

    id: ClassVar[int] = 251

    def data_bytes(self, piece: Piece) -> int:
        return coding.value_bytes("float16", piece.numel)

    def pack(self, ops: Ops[Any], piece: Piece, values: Any, context: Context[Any]) -> Any:
        return ops.pack_values(values, "float16")

    def unpack(
        self, ops: Ops[Any], piece: Piece, rows: Any, dtype: str, context: Context[Any]
    ) -> Any:
        return ops.unpack_values(rows, piece.numel, "float16", dtype)


ROWS: dict[str, Method] = {
    "top-k": TopK(0.1, min_numel=8),
    "top-k of a second ratio": TopK(
        0.2, gather_ratio=0.05, values="int4", indices="plain", exchange="sharded", min_numel=8
    ),
    "top-k int8": TopK(0.05, values="int8", indices="plain", min_numel=8),
    "top-k int3": TopK(0.1, values="int3", exchange="hierarchical", min_numel=8),
    "top-k int2": TopK(
        0.1, gather_ratio=0.05, values="int2", indices="plain", exchange="sharded", min_numel=8
    ),
    "top-k signs, sampled": TopK(0.3, values="sign", selection="sampled", min_numel=8),
    "top-k at ratio 1": TopK(1.0, values="bfloat16", min_numel=8),
    "dense": Dense(min_numel=8),
    "dense float16": Dense(values="float16", min_numel=8),
    "dense bfloat16": Dense(values="bfloat16", min_numel=8),
    "halves": Halves(min_numel=8),
    "random-k": RandomK(ratio=0.1, min_numel=8),
    "random-k, scaled": RandomK(ratio=0.3, error_feedback=False, min_numel=8),
    "qsgd": QSGD(min_numel=8, block=16),
    "qsgd of norms": QSGD(bits=3, norm="l2", exchange="sharded", min_numel=8),
    "signs": SignSGD(min_numel=8),
    "majority": SignSGD(majority=True, min_numel=8),
    "one bit": OneBit(min_numel=8),
    "bytes": ByteGrad(min_numel=8, block=32),
    "terngrad": TernGrad(min_numel=8),
    # More elements are above the threshold than fit, so that no step has another level.
    "threshold": Threshold(threshold=0.5, max_ratio=0.04, min_numel=8),
    "powersgd": PowerSGD(rank=2, min_numel=8),
    "two rounds": TwoRounds(),
}
FEATURES: dict[str, Method] = {  # for the laws of whole steps alone, as levels change their plans
    "momentum": TopK(0.1, momentum=0.9, nesterov=True, min_numel=8),
    "warm-up": TopK(0.02, warmup=((2, 1.0), (4, 0.25), (7, 0.1)), min_numel=8),
    "a schedule": TopK(0.05, schedule=ByGradient(), min_numel=8),
    "threshold's levels": Threshold(threshold=2.0, max_ratio=0.2, min_numel=8),
    "residuals in bfloat16": TopK(0.1, residuals="bfloat16", min_numel=8),
    "residuals in int8": TopK(0.1, residuals="int8", values="float32", min_numel=8),
    "residuals in int4": QSGD(residuals="int4", min_numel=8),
}
EXCHANGES = ("allgather", "sharded", "hierarchical", "reduce", "allreduce")
REDUCTIONS = {2: "sum", 3: "average"}  # by the number of ranks
BAD = (np.nan, np.inf, -np.inf)

SPECS = [
    TensorSpec("empty", (0,), "float32"),
    TensorSpec("number", (), "float32"),
    TensorSpec("few", (5,), "float32"),  # below every row's min_numel
    TensorSpec("odd", (11, 13), "float32"),
    TensorSpec("blocks", (17, 8, 9), "float32"),  # of several owners
    TensorSpec("nothing", (3, 0), "float64"),
    TensorSpec("half", (40, 8), "float16"),
    TensorSpec("brain", (24, 8), "bfloat16"),
    TensorSpec("double", (80, 8), "float64"),
    TensorSpec("wide", (3,), "float64"),
]
PRECISION = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}


@dataclass(frozen=True)
class Case:
    """A method over an exchange, on simulated ranks."""

    name: str
    method: Method
    ranks: int
    backend: Backend

    @property
    def is_of_another_exchange(self) -> bool:
        """Whether another exchange than owners carries a method's rounds."""
        return self.method.in_rounds and self.method.exchange != "reduce"

    def plan(self) -> Plan:
        """All tensors that the backend has dtypes for."""
        dtypes = ("float32", "float64") if self.method.momentum else self.backend.gradient_dtypes
        specs = [spec for spec in SPECS if spec.dtype in dtypes]
        return make_plan(specs, self.method, REDUCTIONS[self.ranks])

    def world(self) -> World:
        """Ranks before their first step."""
        return World(self.plan(), self.ranks, self.backend)

    def __str__(self) -> str:
        return f"{self.name}-{self.method.exchange}-{self.ranks}-{self.backend.name}"


def over(method: Method, exchange: str) -> Method | None:
    """The method over another exchange, if it allows that."""
    try:
        return replace(method, exchange=exchange)
    except ConfigError:
        return None


def cases(
    *exchanges: str,
    of: Callable[[Method], bool] = lambda method: True,
    graphs: bool = True,
    rows: Mapping[str, Method] = ROWS,
) -> Any:
    """A test for each row, exchange, number of ranks and framework.

    The fast tier has none of PyTorch's without kernels, and one of TensorFlow's, as each builds
    several graphs; none without `graphs`, as TensorFlow's bits are compared with NumPy's once. Of
    rounds by other exchanges than their own it has PowerSGD's.
    """
    found = [
        Case(name, method, ranks, backend)
        for name, row in rows.items()
        for method in (over(row, exchange) for exchange in exchanges or EXCHANGES)
        if method is not None and of(method)
        for ranks in REDUCTIONS
        for backend in (NUMPY, TORCH, NATIVE, TENSORFLOW)
    ]
    slow = [
        c.backend is TORCH
        or (c.backend is TENSORFLOW and (i // 4 % 23 != 1 or not graphs))
        or (c.is_of_another_exchange and not (c.name == "powersgd" and c.backend is NATIVE))
        for i, c in enumerate(found)
    ]
    marked = [
        pytest.param(case, marks=[pytest.mark.slow] * late, id=str(case))
        for case, late in zip(found, slow, strict=True)
    ]
    return pytest.mark.parametrize("case", marked)


def gradients_of(case: Case, seed: int = 0, texture: str = "normal") -> Iterator[list[Gradients]]:
    """Gradients of every rank, step after step, exact in their dtypes."""
    random = np.random.default_rng(seed)
    while True:
        yield [
            {spec.name: _gradient(random, spec, texture) for spec in SPECS}
            for _ in range(case.ranks)
        ]


def _gradient(random: np.random.Generator, spec: TensorSpec, texture: str) -> Array:
    values = np.asarray(random.standard_normal(spec.shape))
    if texture == "spikes":
        values = np.where(values > 1.5, 1000.0 * values, 0.0)
    if spec.dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    return values.astype(spec.dtype)


def run(world: World, steps: Iterator[list[Gradients]], count: int) -> list[list[Gradients]]:
    """What each rank applied in each of some steps."""
    return [world.step(next(steps)) for _ in range(count)]


def test_every_method_has_a_row() -> None:
    assert {type(row) for row in ROWS.values()} >= set(METHODS.values())


def test_ids_of_methods_tell_them_apart() -> None:
    classes = {type(row) for row in ROWS.values()} | set(METHODS.values())
    assert len({each.id for each in classes}) == len(classes)
    assert all(0 < each.id < 256 for each in classes)


REFUSED: list[tuple[type[Method], str, list[dict[str, Any]]]] = [  # class, message, settings
    (OneBit, "sharded", [{"exchange": "sharded"}]),
    (ByteGrad, "block=", [{"block": each} for each in (0, 15, 16.0, True, 1 << 20)]),
    (QSGD, "bits=", [{"bits": each} for each in (1, 9, 4.0)]),
    (QSGD, "block=", [{"block": 8}]),
    (QSGD, "norm=", [{"norm": "l1"}]),
    (QSGD, "seed=", [{"seed": each} for each in (-1, 0.5, True, None)]),
    (TernGrad, "clip=", [{"clip": x} for x in (0, -1.0, np.inf, np.nan, "2.5", True)]),
    (SignSGD, "sharded", [{"majority": True, "exchange": "sharded"}]),
    (SignSGD, "clipping changes no sign", [{"majority": True, "clip_norm": 1.0}]),
    (SignSGD, "majority=1 is neither", [{"majority": 1}]),
    (SignSGD, r"ratio 0\.1 was asked of SignSGD", [{"warmup": ((10, 0.1),)}]),
    (SignSGD, "0.1 was asked of SignSGD, which has none", [{"ratios": {"w": 0.1}}]),
    (SignSGD, r"ratio 0\.5 was asked of SignSGD", [{"warmup": ((10, 0.5),)}]),
    (SignSGD, "warmup=10 was given to SignSGD", [{"warmup": 10}]),
    (RandomK, "ratio", [{"ratio": each} for each in (0, -0.1, 1.5, float("nan"), "0.1")]),
    (RandomK, "error_feedback=1 is neither True nor False", [{"error_feedback": 1}]),
    (PowerSGD, "rank=", [{"rank": each} for each in (0, -1, 2.0, True, 4096)]),
    (Threshold, "threshold=", [{"threshold": each} for each in (0, "3", float("inf"))]),
    (Threshold, "relative", [{"relative": 1}]),
    (Threshold, "max_ratio", [{"max_ratio": each} for each in (0.0, 1.5)]),
    (Threshold, "values", [{"values": "int5"}]),
    (Threshold, "values", [{"indices": "none"}]),
    (Threshold, "schedule", [{"schedule": 3}]),
]


@pytest.mark.parametrize(
    ("method", "message", "settings"),
    [(method, message, each) for method, message, given in REFUSED for each in given],
    ids=str,
)
def test_what_is_out_of_range_is_refused(
    method: type[Method], message: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=message):
        method(**settings)


# Law 1.


def flat(gradients: Mapping[str, Array], bucket: BucketPlan, name: str) -> Array:
    """One gradient as it is added to its residual."""
    return np.ravel(gradients[name]).astype(bucket.residual_dtype)


def read(plans: tuple[BucketPlan, ...], payloads: bytes, whole: BucketPlan) -> Gradients:
    """What payloads, one for each shard, have of each gradient, dense; read with NumPy."""
    values = {t.spec.name: np.zeros(t.numel, whole.residual_dtype) for t in whole.tensors}
    size = len(payloads) // len(plans)
    for position, plan in enumerate(plans):
        method: Any = plan.config
        row = np.frombuffer(payloads[position * size : (position + 1) * size], np.uint8)
        for piece in plan.tensors:
            if piece.numel:
                got = method.decode(NUMPY.ops, plan, piece, row, Context())
                assert all(fact.all() for fact in got.sound)
                index = np.arange(piece.numel) if got.index is None else got.index[0]
                places = NUMPY.ops.global_index(index, plan.parts, piece.first)
                values[piece.spec.name][index if plan.parts == 1 else places] = got.values[0]
    return values


def assert_same(left: Array, right: Array) -> None:
    assert left.dtype == right.dtype
    assert left.tobytes() == right.tobytes()


@pytest.mark.one_in(11)
@cases("allgather", of=lambda method: isinstance(method, Codec), graphs=False)
def test_what_is_not_gathered_stays_in_the_residual(case: Case) -> None:
    world, steps = case.world(), gradients_of(case)
    for _ in range(3):
        before, gradients = world.residuals(), next(steps)
        applied, after = world.step(gradients), world.residuals()
        for bucket in world.plan.buckets:
            name = f"job.0.{bucket.ordinal}"
            sent = [
                read((bucket,), dict(world.payloads(r))[name], bucket) for r in range(case.ranks)
            ]
            for tensor in bucket.tensors:
                key = tensor.spec.name
                for rank in range(case.ranks):
                    a = before[rank][key] + flat(gradients[rank], bucket, key)
                    assert_same(after[rank][key], left_of(case, a, sent[rank][key]))
                expected = _reduced(bucket, tensor, [one[key] for one in sent])
                assert_applied(applied, tensor, expected)


@pytest.mark.one_in(11)
@cases("sharded", of=lambda method: isinstance(method, Codec), graphs=False)
def test_what_is_not_sent_to_owners_or_back_stays_in_residuals(case: Case) -> None:
    world, steps = case.world(), gradients_of(case)
    for _ in range(3):
        before, owned, gradients = world.residuals(), world.owned(), next(steps)
        applied, after, left = world.step(gradients), world.residuals(), world.owned()
        for bucket in world.plan.buckets:
            split, name = shard(bucket, case.ranks), f"job.0.{bucket.ordinal}"
            sent, returned = [], []
            for rank in range(case.ranks):
                latest = dict(world.payloads(rank))
                sent.append(read(split.scatter, latest[f"{name}.scatter"], bucket))
                returned.append(latest[f"{name}.gather"])
            back = read(split.back, b"".join(returned), bucket)
            for position, tensor in enumerate(bucket.tensors):
                key = tensor.spec.name
                for rank in range(case.ranks):
                    a = before[rank][key] + flat(gradients[rank], bucket, key)
                    assert_same(after[rank][key], left_of(case, a, sent[rank][key]))
                mean = _reduced(bucket, tensor, [one[key] for one in sent])
                for rank, plan in enumerate(split.back):
                    own = plan.tensors[position]
                    at = NUMPY.ops.global_index(np.arange(own.numel), case.ranks, own.first)
                    a = owned[rank][key] + mean[at]
                    assert_same(left[rank][key], left_of(case, a, back[key][at]))
                assert_applied(applied, tensor, back[key])


def left_of(case: Case, a: Array, sent: Array) -> Array:
    """Return the expected residual, which is zero without error feedback."""
    return a - sent if getattr(case.method, "error_feedback", True) else a - a


def _reduced(bucket: BucketPlan, tensor: Piece, values: list[Array]) -> Array:
    """Return the expected gradient: sum or mean in rank order, or the method's `settle`."""
    total, method = np.zeros_like(values[0]), bucket.config
    for each in values:
        total = total + each
    if isinstance(method, Codec) and not tensor.whole:
        settled = method.settle(NUMPY.ops, total)
        if settled is not None:
            return settled * (1.0 if bucket.reduction == "average" else len(values))
    scale = 1 / len(values) if bucket.reduction == "average" else 1.0
    return np.asarray(total * total.dtype.type(scale))


def assert_applied(applied: list[Gradients], tensor: Piece, expected: Array) -> None:
    """What ranks apply is `expected`, rounded to the gradient's dtype."""
    for one in applied:
        got = np.ravel(one[tensor.spec.name])
        if tensor.spec.dtype == "bfloat16":  # NumPy has none
            np.testing.assert_allclose(got, expected, rtol=2**-8)
        else:
            assert_same(got, expected.astype(tensor.spec.dtype))


@pytest.mark.one_in(11)
@cases(
    "reduce",
    "allreduce",
    "allgather",
    of=lambda method: (
        (method.in_rounds or method.exchange == "allreduce")
        and getattr(method, "error_feedback", True)
    ),
)
def test_rounds_conserve_what_ranks_have_together(case: Case) -> None:
    """What all ranks apply, and the residuals that it leaves, are what they began with."""
    world, steps = case.world(), gradients_of(case)
    share = 1 / case.ranks if world.plan.reduction == "average" else 1.0
    for _ in range(4):
        before, gradients = _all_kept(world), next(steps)
        applied, after = world.step(gradients)[0], _all_kept(world)
        for tensor in world.plan.tensors():
            key = tensor.spec.name
            given = sum(np.ravel(one[key]).astype(np.float64) for one in gradients)
            amount = share * (before[key] + given - after[key])
            largest = max((np.abs(one[key]).max(initial=0) for one in gradients), default=0)
            limit = 64 * PRECISION[tensor.spec.dtype] * (largest + np.abs(amount).max(initial=0))
            np.testing.assert_allclose(np.ravel(applied[key]), amount, rtol=0, atol=limit)


def _all_kept(world: World) -> Gradients:
    """Sums of the ranks' residuals; zeros where an exchange keeps none."""
    sums = {t.spec.name: np.zeros(t.numel) for t in world.plan.tensors()}
    if world.ranks[0].exchange.holders(world.plan.buckets[0]):
        for one in world.residuals():
            sums = {key: sums[key] + each for key, each in one.items()}
    return sums


@pytest.mark.one_in(11)
@cases(graphs=False)
def test_a_tensor_that_travels_whole_is_exact(case: Case) -> None:
    """It leaves no residual; float16 values add up in float32."""
    world, steps = case.world(), gradients_of(case)
    gradients = next(steps)
    applied = world.step(gradients)
    for bucket in world.plan.buckets:
        for tensor in bucket.tensors:
            if tensor.whole:
                key = tensor.spec.name
                expected = _reduced(bucket, tensor, [flat(one, bucket, key) for one in gradients])
                if case.method.exchange != "hierarchical":  # which adds up within nodes first
                    assert_applied(applied, tensor, expected)
                assert not any(one.get(key, np.zeros(1)).any() for one in _residuals(world))
    names = world.plan.sent_dense()
    assert {"number", "few"} <= set(names) or type(case.method) is Dense


def _residuals(world: World) -> list[Gradients]:
    """Those of ranks and owners, of exchanges that have them."""
    states = [compressor.state_dict() for compressor in world.ranks]
    parts = [part for state in states for part in (state, state.get("owned", state))]
    numpy = world.backend.numpy
    return [{name: numpy(e) for name, e in part["residuals"].items()} for part in parts]


# Law 2.


@pytest.mark.one_in(11)
@cases(graphs=False)
def test_all_ranks_have_the_same_bits(case: Case) -> None:
    for applied in run(case.world(), gradients_of(case), 4):
        assert same_bits(applied, [applied[0]] * case.ranks)
        assert all(np.isfinite(g).all() for g in applied[0].values())


@pytest.mark.one_in(11)
@cases(graphs=False)
def test_two_runs_have_the_same_bits(case: Case) -> None:
    first, second = case.world(), case.world()
    for one, other in zip(*(run(w, gradients_of(case), 3) for w in (first, second)), strict=True):
        assert same_bits(one, other)
    assert first.kept() == second.kept()


@pytest.mark.one_in(11)
@cases(
    of=lambda method: (
        type(method) not in (PowerSGD, TwoRounds) and not isinstance(method.schedule, ByGradient)
    ),
    rows={**ROWS, **FEATURES},
)
def test_frameworks_send_and_apply_the_same_bits(case: Case) -> None:
    """But for products of matrices and norms of gradients, which libraries add up in any order."""
    plan = replace(case, backend=NUMPY).plan()
    worlds = [World(plan, case.ranks, each) for each in (case.backend, NUMPY)]
    runs = [run(world, gradients_of(case), 4) for world in worlds]
    assert all(same_bits(one, other) for one, other in zip(*runs, strict=True))
    assert worlds[0].payloads(0) == worlds[1].payloads(0)


# Law 4.


@pytest.mark.one_in(11)
@cases(graphs=False)
def test_sizes_follow_from_the_plan(case: Case) -> None:
    worlds = [case.world() for _ in range(2)]
    for world, texture in zip(worlds, ("normal", "spikes"), strict=True):
        run(world, gradients_of(case, texture=texture), 2)
    for rank in range(case.ranks):
        sizes = [[(name, len(data)) for name, data in w.payloads(rank)] for w in worlds]
        assert sizes[0] == sizes[1]
    if case.method.exchange == "allgather":
        carried = {f"job.0.{b.ordinal}": b for b in worlds[0].plan.buckets}
        if case.method.in_rounds:
            plans = {name: round_plans(bucket) for name, bucket in carried.items()}
            carried = {f"{n}.{i}": each for n, own in plans.items() for i, each in enumerate(own)}
        planned = {name: each.layout.payload_bytes for name, each in carried.items()}
        told = {f"{name}.announce": announced_bytes([each]) for name, each in carried.items()}
        planned |= {name: size for name, size in told.items() if size}
        assert dict(sizes[0]) == planned
        assert all(size % 16 == 0 for size in planned.values())


# Law 5.


VICTIMS = ("number", "few", "odd", "blocks", "half", "double")


@pytest.mark.one_in(17)
@cases(graphs=False, rows={**ROWS, **FEATURES})
def test_a_bad_gradient_on_one_rank_leaves_no_trace(case: Case) -> None:
    troubled, untroubled = case.world(), case.world()
    for world in (troubled, untroubled):
        run(world, gradients_of(case), 2)
    before, others = troubled.kept(), gradients_of(case, seed=1)
    names = {tensor.spec.name for tensor in troubled.plan.tensors()}
    for i, victim in enumerate(each for each in VICTIMS if each in names):
        gradients = next(others)
        gradients[i % case.ranks][victim].reshape(-1)[-1] = BAD[i % len(BAD)]
        applied = troubled.exchange(gradients)
        assert troubled.commit() == [False] * case.ranks
        assert same_bits(applied, [applied[0]] * case.ranks)
        for name, gradient in applied[0].items():
            assert np.isnan(gradient).all() if name == victim else np.isfinite(gradient).all()
        assert troubled.kept() == before
    steps = [run(world, gradients_of(case, seed=2), 2) for world in (troubled, untroubled)]
    assert all(same_bits(one, other) for one, other in zip(*steps, strict=True))
    assert troubled.kept() == untroubled.kept()


# State dicts.


@pytest.mark.one_in(17)
@cases(graphs=False, rows={**ROWS, **FEATURES})
def test_a_job_goes_on_from_its_state_dicts(case: Case) -> None:
    first, second, steps = case.world(), case.world(), gradients_of(case)
    run(first, steps, 3)
    run(second, gradients_of(case, seed=1), 1)  # what is loaded replaces it
    second.load(first)
    assert second.kept() == first.kept()
    for _ in range(3):
        gradients = next(steps)
        assert same_bits(first.step(gradients), second.step(gradients))
    assert second.kept() == first.kept()
