"""Law 1: what is sent and what is kept add up to what was there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle.backends import NATIVE, NUMPY, TENSORFLOW, TORCH, Backend, each_backend
from oracle.examples import examples
from oracle.jobs import gradient, jobs, steps, within_float16
from oracle.world import World, same_bits

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.state.reshard import pending
from horovod_topk.methods.bytegrad import ByteGrad
from horovod_topk.methods.onebit import OneBit
from horovod_topk.methods.powersgd import PowerSGD
from horovod_topk.methods.qsgd import QSGD
from horovod_topk.methods.randomk import RandomK
from horovod_topk.methods.signsgd import SignSGD
from horovod_topk.methods.threshold import Threshold
from horovod_topk.methods.topk import VALUES, TopK
from horovod_topk.ops import coding
from horovod_topk.updates.tracker import SGD, Rule

ALONE, GATHERED = st.just(1), ["allgather"]


def assert_conserved(world: World, before: dict[str, Any], gradients: dict[str, Any]) -> None:
    """decode(p) + e_new == e_old + g, the sign of zero aside.

    Very unequal values may share a magnitude that is no part of either: the sum is rounded then.
    """
    after, sent = world.residuals()[0], world.decoded(0).dense
    exact = world.plan.config.values not in coding.MAGNITUDES
    for name, old in before.items():
        owed = old + gradients[name].reshape(-1).astype(old.dtype)
        decoded = sent[name].astype(old.dtype)
        assert np.array_equal(after[name], owed - decoded), name
        if exact:
            assert np.array_equal(decoded + after[name], owed), name
        else:
            error = np.abs(decoded + after[name] - owed)
            assert (error <= np.spacing(np.maximum(np.abs(decoded), np.abs(owed)))).all(), name


@each_backend
@examples(20)
@given(data=st.data())
def test_nothing_is_lost_or_invented(backend: Backend, data: st.DataObject) -> None:
    job = data.draw(jobs(ranks=ALONE, exchanges=GATHERED))
    world = World(job.plan, 1, backend)
    for gradients in data.draw(steps(job, 3)):
        before = world.residuals()[0]
        world.step(gradients)
        assert_conserved(world, before, gradients[0])


@each_backend
@pytest.mark.parametrize("numel", [2**16 - 1, 2**16, 2**16 + 1])
@pytest.mark.parametrize("indices", ["packed", "plain"])
@pytest.mark.parametrize("values", VALUES)
def test_where_indices_outgrow_sixteen_bits(
    backend: Backend, numel: int, values: str, indices: str
) -> None:
    settings = TopK(values=values, indices=indices)
    plan = make_plan([TensorSpec("w", (numel,), "float32")], settings)
    world = World(plan, 1, backend)
    random = np.random.default_rng(numel)
    for texture in ("normal", "ties"):
        g = gradient(random, texture, plan.buckets[0].tensors[0].spec)
        g[[0, -1]] = 50.0, -60.0
        before = world.residuals()[0]
        world.step([{"w": g}])
        assert_conserved(world, before, {"w": g})
        assert {0, numel - 1} <= set(world.decoded(0).chosen["w"].tolist())


@each_backend
@given(data=st.data())
def test_the_largest_magnitudes_are_sent_and_ties_go_to_the_lower_index(
    backend: Backend, data: st.DataObject
) -> None:
    job = data.draw(jobs(ranks=ALONE, values=["float32"], exchanges=GATHERED))
    world = World(job.plan, 1, backend)
    for gradients in map(within_float16, data.draw(steps(job, 2))):
        owed = _owed(world, gradients[0])
        world.step(gradients)
        for tensor in job.plan.tensors():
            magnitude = np.abs(owed[tensor.spec.name])
            best = np.lexsort((np.arange(magnitude.size), -magnitude))[: tensor.k]
            chosen = world.decoded(0).chosen[tensor.spec.name]
            assert chosen.tolist() == sorted(best.tolist())


def _owed(world: World, gradients: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    residual = world.residuals()[0]
    return {n: e + gradients[n].reshape(-1).astype(e.dtype) for n, e in residual.items()}


HALVES = [TensorSpec("w", (40, 30), "float16"), TensorSpec("f", (50,), "float32")]
WAIT = [
    *(TopK(0.1, min_numel=0, values=values) for values in VALUES),
    *(TopK(0.1, min_numel=0, exchange=each) for each in ("sharded", "hierarchical")),
    TopK(1.0),
    QSGD(min_numel=0),
    QSGD(min_numel=0, norm="l2", bits=8, block=64),
    SignSGD(min_numel=0),
    OneBit(min_numel=0),
    ByteGrad(min_numel=0),
    Threshold(min_numel=0),
    RandomK(ratio=0.1, min_numel=0),
    PowerSGD(min_numel=0),
]


def shown(method: Any) -> str:
    own = ("values", "exchange", "ratio")
    return "-".join([type(method).__name__, *(str(getattr(method, each, "")) for each in own)])


SPARSE = TopK(0.1, min_numel=0)
CASES = [
    *[(each, method, None) for each in (NUMPY, NATIVE, TORCH) for method in WAIT],
    *[(each, SPARSE, SGD) for each in (NUMPY, NATIVE)],
    (TENSORFLOW, SPARSE, None),
]


@pytest.mark.parametrize("reduction", ["average", "sum"])
@pytest.mark.parametrize(
    ("backend", "method", "update_rule"),
    CASES,
    ids=[f"{backend.name}-{shown(method)}{'-sgd' * bool(rule)}" for backend, method, rule in CASES],
)
def test_what_float16_cannot_hold_waits(
    backend: Backend, method: Any, update_rule: Rule | None, reduction: str
) -> None:
    """What has waited is float32, and may be more than a float16 gradient can hold.

    Four steps on residuals of up to 300,000, with gradients of 2,000.
    """
    size, random = 3, np.random.default_rng(0)
    world = World(make_plan(HALVES, method, reduction, update_rule=update_rule), size, backend)
    for rank in world.ranks:
        state = rank.state_dict()
        waited = (random.choice([-1, 1], 1200) * random.uniform(0, 3e5, 1200)).astype("f4")
        kept = state if "w" in state["residuals"] else state.get("owned", {"residuals": {}})
        if "w" in kept["residuals"]:  # else this rank owns no shard
            waited = waited[: backend.ops.numel(kept["residuals"]["w"])]
            kept["residuals"] |= {"w": backend.array(waited, "float32")}
        rank.load_state_dict(state)
    applied, given = np.zeros(1200), np.zeros(1200)
    before = waiting(world)
    for _ in range(4):
        g = [
            {
                "w": (2000 * random.choice([-1, 1], (40, 30))).astype("f2"),
                "f": random.standard_normal(50).astype("f4"),
            }
            for _ in range(size)
        ]
        total = np.sum([each["w"].astype("f8").ravel() for each in g], 0)
        given += total / size if reduction == "average" else total
        exchanged = world.exchange(g)
        assert not world.ranks[0].step.flagged
        for each in exchanged:
            assert np.isfinite(each["w"]).all()
            assert each["w"].tobytes() == exchanged[0]["w"].tobytes()
        applied += exchanged[0]["w"].astype("f8").ravel()
        world.commit()
    assert np.abs(before + given - waiting(world) - applied).max() < 130  # four times a float16's


def waiting(world: World) -> NDArray[Any]:
    """All that waits of "w", in units of the applied gradient."""
    states = (rank.state_dict() for rank in world.ranks)
    total = pending(states, world.size, world.plan.reduction, world.backend.ops)
    return world.backend.numpy(total["w"]).astype("f8")


@each_backend
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_what_is_not_finite_in_float16_still_flags(
    backend: Backend, value: float, exchange: str
) -> None:
    world = World(make_plan(HALVES, TopK(0.1, min_numel=0, exchange=exchange)), 2, backend)
    for rank, waited in zip(world.ranks, (1e5, 0.0), strict=True):
        state = rank.state_dict()
        state["residuals"] |= {"w": backend.array(np.full(1200, waited, "f4"), "float32")}
        rank.load_state_dict(state)
    before = world.residuals()
    bad = np.full((40, 30), 2000.0, "f2")
    bad[3, 4] = value
    world.exchange([{"w": bad, "f": np.zeros(50, "f4")}] * 2)
    assert world.ranks[1].step.flagged == ("w",)
    world.rollback()
    assert same_bits(world.residuals(), before)
