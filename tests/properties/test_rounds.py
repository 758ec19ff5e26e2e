"""Laws of the reduce exchange: rounds depend on each other, and a rank that fails ends them all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from oracle.backends import NATIVE, NUMPY, TENSORFLOW, TORCH, Backend, each_of
from oracle.two_rounds import COLUMNS, TwoRounds
from oracle.world import Gradients, World, drawn, same_bits

from horovod_topk.core.exchange.reduce import round_plans
from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.errors import PayloadError
from horovod_topk.methods.protocol import Bucket, Piece, Rounds, Work
from horovod_topk.ops import Ops

RANKS = 3
SHAPES = {"w": (90, 8), "v": (12, 8), "b": (7,)}  # b is sent whole
each_backend = each_of(NUMPY, NATIVE, rest=[TORCH, TENSORFLOW])


@dataclass(frozen=True, kw_only=True)
class ThreeRounds(Rounds):
    """Sends a third of the values in each round; each sum is added to the next thing sent."""

    id: ClassVar[int] = 252
    rounds: ClassVar[int] = 3
    min_numel: int = 64

    def elements(self, piece: Piece, i: int) -> int:
        return piece.numel

    def send(self, ops: Ops[Any], bucket: Bucket, piece: Piece, i: int, work: Work[Any]) -> Any:
        out = ops.zeros(piece.numel, bucket.residual_dtype, bucket.device)
        ops.write_scaled(work.values, 1 / 4, out, False)
        if i:
            ops.compensate(work.reduced[-1], out, out)
        return out

    def finish(
        self, ops: Ops[Any], bucket: Bucket, piece: Piece, work: Work[Any]
    ) -> tuple[Any, Any]:
        return work.reduced[-1], work.sent[-1]


def plan_of(method: Rounds | None = None, **shapes: tuple[int, ...]) -> Plan:
    specs = [TensorSpec(name, shape, "float32") for name, shape in (shapes or SHAPES).items()]
    return make_plan(specs, TwoRounds() if method is None else method)


def gradients_of(seed: int, plan: Plan) -> list[Gradients]:
    return drawn([tensor.spec for tensor in plan.tensors()], RANKS, seed)


def started(method: Rounds | None = None, backend: Backend = NUMPY) -> World:
    """Ranks after a step, with residuals and state."""
    world = World(plan_of(method), RANKS, backend)
    world.step(gradients_of(0, world.plan))
    return world


def assert_goes_on(world: World, before: list[Any], rolled_back: list[int]) -> None:
    """Nothing has changed, and the next step is that of ranks that saw no failure."""
    assert world.kept() == before
    assert [compressor.rolled_back for compressor in world.ranks] == rolled_back
    other = started(world.plan.config, world.backend)  # type: ignore[arg-type]
    gradients = gradients_of(9, world.plan)
    assert same_bits(world.step(gradients), other.step(gradients))
    assert world.kept() == other.kept()


# What rounds are.


@each_backend
def test_two_rounds_are_power_iteration(backend: Backend) -> None:
    """As the paper's formulas give it, in float64."""
    world = World(plan_of(w=SHAPES["w"]), RANKS, backend)
    left, q = np.zeros((RANKS, 90, COLUMNS)), np.zeros(COLUMNS)
    for step in range(3):
        gradients = gradients_of(step, world.plan)
        matrices = [left[r] + gradients[r]["w"] for r in range(RANKS)]
        direction = np.arange(COLUMNS) - q
        p = np.mean([each @ direction for each in matrices], 0)
        own = [each.T @ p / (p @ p) for each in matrices]
        q = np.mean(own, 0)
        applied = world.step(gradients)
        np.testing.assert_allclose(applied[0]["w"], np.outer(p, q), atol=2e-5)
        left = np.array([m - np.outer(p, each) for m, each in zip(matrices, own, strict=True)])
        for rank in range(RANKS):
            residual = world.residuals()[rank]["w"].reshape(90, COLUMNS)
            np.testing.assert_allclose(residual, left[rank], atol=2e-5)
        states = [compressor.state_dict() for compressor in world.ranks]
        for state in states:
            found = backend.numpy(state["state.q"]["residuals"]["w"])
            np.testing.assert_allclose(found, q, atol=2e-5)
            steps = backend.numpy(state["state.steps"]["residuals"]["w"])
            assert steps.tolist() == [(step + 1) % 2]
        assert [state["state.q"]["shared"] for state in states] == [True] * RANKS
        assert [state["state.steps"]["shared"] for state in states] == [False] * RANKS


def test_bytes_are_those_that_are_counted() -> None:
    world = started()
    (bucket,) = world.plan.buckets
    for rank, compressor in enumerate(world.ranks):
        handed = sum(len(data) for _, data in world.payloads(rank))
        assert compressor.traffic().payload_bytes == handed
    names = [f"job.0.0.{i}.{direction}" for i in range(2) for direction in ("scatter", "gather")]
    assert [name for name, _ in world.payloads(0)] == names
    counts = [[tensor.numel for tensor in plan.tensors] for plan in round_plans(bucket)]
    assert counts == [[90, 12, 7], [COLUMNS, COLUMNS, 0]]


def test_rounds_of_buckets_are_under_way_together() -> None:
    """A round of each bucket is sent before any is waited for: latencies do not add up."""
    specs = [TensorSpec("a", (90, 8), "float32"), TensorSpec("b", (90, 8), "float64")]
    world = World(make_plan(specs, TwoRounds()), RANKS, NUMPY)
    world.step(drawn(specs, RANKS, 0))
    sent = [name.removeprefix("job.0.") for name, _ in world.payloads(0)]
    assert sent == [
        f"{b}.{i}.{direction}" for i in (0, 1) for direction in ("scatter", "gather") for b in "01"
    ]


# A rank that fails.


@pytest.mark.one_in(9)
@each_backend
@pytest.mark.parametrize("exchange", ["reduce", "allgather", "allreduce"])
@pytest.mark.parametrize("method", [TwoRounds(), ThreeRounds()], ids=["two", "three"])
def test_a_rank_that_abandons_a_step_ends_it_for_all(
    backend: Backend, exchange: str, method: Rounds
) -> None:
    method = replace(method, exchange=exchange)
    stages = method.rounds * (1 + (exchange == "reduce")) - 1
    for before_it in range(stages + 1):
        world = started(method, backend)
        assert world.ranks[0].step.stages == stages
        before = world.kept()
        world.launch(gradients_of(1, world.plan))
        for _ in range(before_it):
            world.advance()
        world.ranks[1].abandon()
        applied = world.end([0, 2])
        if before_it < stages:
            assert all(np.isnan(g).all() for g in applied)
        else:  # all that the others need has been sent
            assert all(np.isfinite(g).all() for g in applied)
        assert_goes_on(world, before, [1, 0, 1])


def test_two_ranks_that_abandon_a_step() -> None:
    world = started()
    before = world.kept()
    world.launch(gradients_of(1, world.plan))
    world.ranks[2].abandon()
    for compressor in world.ranks[:2]:
        compressor.step.advance()
    world.ranks[0].abandon()
    assert all(np.isnan(g).all() for g in world.end([1]))
    for compressor in world.ranks:
        assert not compressor.step.sent
    for saved, compressor in zip(started().ranks, world.ranks, strict=True):
        compressor.load_state_dict(saved.state_dict())
    assert_goes_on(world, before, [0, 1, 0])


@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize("method", [TwoRounds(), ThreeRounds()], ids=["two", "three"])
def test_an_owner_that_refuses_a_payload_tells_the_others(method: Rounds, i: int) -> None:
    world = started(method)
    before = world.kept()
    world.launch(gradients_of(1, world.plan))
    for _ in range(2 * i):
        world.advance()
    damage(world, f"job.0.0.{i}.scatter", of=2)
    with pytest.raises(PayloadError, match="bucket 0, rank 2: the bytes 00000000"):
        world.ranks[0].step.advance()
    for compressor in world.ranks[1:]:
        compressor.step.advance()
    assert all(np.isnan(g).all() for g in world.end([1, 2]))
    world.ranks[0].abandon()
    assert_goes_on(world, before, [0, 1, 1])


@pytest.mark.parametrize("i", [0, 1])
def test_sums_that_no_rank_can_read_are_refused_by_all(i: int) -> None:
    world = started()
    before = world.kept()
    world.launch(gradients_of(1, world.plan))
    for _ in range(2 * i + 1):
        world.advance()
    damage(world, f"job.0.0.{i}.gather", of=2)
    for rank, compressor in enumerate(world.ranks):
        with pytest.raises(PayloadError, match="bucket 0, rank 2: the bytes 00000000"):
            compressor.step.finish({0: world._of_bucket(rank, world.plan.buckets[0])})
    for compressor in world.ranks:
        compressor.abandon()
    assert_goes_on(world, before, [0, 0, 0])


def test_a_rank_that_cannot_read_the_sums_of_a_round_ends_the_step_for_all() -> None:
    """The others could, and would wait for it in the next round."""
    world = started()
    before = world.kept()
    world.launch(gradients_of(1, world.plan))
    world.advance()
    for compressor in world.ranks[1:]:
        compressor.step.advance()
    damage(world, "job.0.0.0.gather", of=2)
    with pytest.raises(PayloadError, match="bucket 0, rank 2: the bytes 00000000"):
        world.ranks[0].step.advance()
    world.ranks[0].abandon()
    assert all(np.isnan(g).all() for g in world.end([1, 2]))
    assert_goes_on(world, before, [0, 1, 1])


def damage(world: World, name: str, of: int) -> None:
    """Zeros instead of the magic in what a rank has sent last under a name."""
    last = max(key for key in world.network._posted if key[0] == name)
    world.network._posted[last][of][0:4] = 0
