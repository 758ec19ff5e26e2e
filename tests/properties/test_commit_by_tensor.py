"""Commit is a matter of each tensor: what a step does not use stays as it was, to the bit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.backends import NUMPY, Backend, each_backend
from oracle.examples import examples
from oracle.jobs import jobs, steps
from oracle.world import Gradients, World, drawn

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.methods import METHODS
from horovod_topk.methods.powersgd import PowerSGD
from horovod_topk.methods.protocol import Method
from horovod_topk.methods.topk import TopK
from horovod_topk.updates.tracker import ADAM, SGD, Rule

SPECS = [TensorSpec("a", (40, 32), "float32"), TensorSpec("b", (30, 20), "float32")]
SPARSE = TopK(ratio=0.05, min_numel=0, values="int8")
EXCHANGES = ("allgather", "sharded", "hierarchical")
STATEFUL: dict[str, Method] = {
    "velocity": replace(SPARSE, momentum=0.9),
    "adam": SPARSE,
    "sgd": SPARSE,
    "low rank": PowerSGD(rank=2, min_numel=0),
}
FOLLOWED = {"adam": ADAM, "sgd": SGD}


def state(world: World, name: str) -> dict[str, bytes]:
    """All that each rank keeps of a tensor."""
    return {
        f"{rank} {key}": world.backend.numpy(part.residual(name)).tobytes()
        for rank, compressor in enumerate(world.ranks)
        for key, part in compressor.parts.items()
    }


def commit(world: World, without: Collection[str] = (), frozen: Collection[str] = ()) -> None:
    assert all(each.commit(without, frozen) for each in world.ranks)


def of_two(ranks: int, seed: int) -> list[Gradients]:
    return drawn(SPECS, ranks, seed)


@each_backend
@examples(20)
@given(data=st.data())
def test_a_tensor_that_is_left_out_stays_and_the_others_commit(
    backend: Backend, data: st.DataObject
) -> None:
    job = data.draw(jobs(ranks=st.integers(1, 3)))
    names = [spec.name for spec in job.specs]
    some, all_of_them = (World(job.plan, job.ranks, backend) for _ in range(2))
    for each in data.draw(steps(job, 3)):
        out = data.draw(st.sets(st.sampled_from(names)))
        before = {name: state(some, name) for name in names}
        for name in names:  # the other world has seen the same steps of the other tensors
            for mine, theirs in zip(some.ranks, all_of_them.ranks, strict=True):
                for key, part in theirs.parts.items():
                    part.assign(name, mine.parts[key].residual(name))
        some.exchange(each)
        commit(some, without=out)
        all_of_them.step(each)
        for name in names:
            kept = before[name] if name in out else state(all_of_them, name)
            assert state(some, name) == kept


@each_backend
@pytest.mark.parametrize("kind", STATEFUL)
def test_so_do_velocities_and_other_states(backend: Backend, kind: str) -> None:
    plan = make_plan(SPECS, STATEFUL[kind], update_rule=FOLLOWED.get(kind))
    some, all_of_them = (World(plan, 2, backend) for _ in range(2))
    for world in (some, all_of_them):
        world.step(of_two(2, seed=0))
    before = state(some, "b")
    for world, out in ((some, ["b"]), (all_of_them, [])):
        world.exchange(of_two(2, seed=1))
        commit(world, without=out)
    assert state(some, "b") == before != state(all_of_them, "b")
    assert state(some, "a") == state(all_of_them, "a")


def frozen_world(
    backend: Backend, config: Method, *names: str, update_rule: Rule | None = None
) -> World:
    """Four ranks after two steps; these tensors have a learning rate of 0 from now on."""
    world = World(make_plan(SPECS, config, update_rule=update_rule), 4, backend)
    for seed in range(2):
        world.step(of_two(4, seed))
    for compressor in world.ranks:
        compressor.frozen = lambda: names
    return world


@each_backend
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("ending", ["commit", "left out", "roll back", "abandon", "poison"])
def test_a_frozen_tensor_sends_its_gradient_alone_and_its_residual_stays(
    backend: Backend, exchange: str, ending: str
) -> None:
    world = frozen_world(backend, replace(SPARSE, exchange=exchange), "b")
    fresh = World(world.plan, 4, backend)
    before = {name: state(world, name) for name in ("a", "b")}
    for seed in (2, 3):
        each = of_two(4, seed)
        if ending == "poison":
            each[1]["a"][0] = np.nan
        world.launch(each)
        assert state(world, "b") == before["b"]  # also for who asks during the step
        if ending == "abandon":
            for compressor in world.ranks:
                compressor.abandon()
            continue
        found, alone = world.finish(), fresh.exchange(of_two(4, seed))
        assert all(
            one["b"].tobytes() == two["b"].tobytes() for one, two in zip(found, alone, strict=True)
        )
        if ending == "poison":
            assert world.commit() == [False] * 4
        elif ending == "roll back":
            world.rollback()
        else:
            commit(world, **{"without" if ending == "left out" else "frozen": ["b"]})
        fresh.rollback()
        assert state(world, "b") == before["b"]
    assert (state(world, "a") == before["a"]) is (ending in ("abandon", "roll back", "poison"))
    assert world.residuals()[0]["b"].any() or exchange == "hierarchical"


@each_backend
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rate_that_rises_between_exchange_and_step_loses_nothing(
    backend: Backend, exchange: str
) -> None:
    """Sent at a rate of 0, applied at another: what was set aside and what was not sent wait."""
    config = TopK(ratio=0.05, min_numel=0, values="float32", exchange=exchange)
    world = frozen_world(backend, config, "b")
    before, each = waiting(world), of_two(4, seed=5)
    found = world.exchange(each)
    commit(world)
    applied, computed = found[0]["b"].sum(), sum(one["b"].sum() for one in each) / 4
    assert abs(before) > 0.2
    assert applied + waiting(world) == pytest.approx(computed + before, abs=1e-4)


def waiting(world: World) -> float:
    """The sum of tensor b's elements in the ranks' mean residual, and in those of its owners."""
    ranks, owned = (sum(o["b"].sum() for o in each) for each in (world.residuals(), world.owned()))
    return float(ranks / 4 + owned / (4 if world.plan.config.exchange == "hierarchical" else 1))


def test_velocities_of_a_frozen_tensor_go_on() -> None:
    """As the optimizer's own momenta do in dense training; mean norms wait for the residual."""
    velocity = frozen_world(NUMPY, STATEFUL["velocity"], "b")
    before = state(velocity, "b")
    velocity.exchange(of_two(4, seed=2))
    commit(velocity, frozen=["b"])
    changed = {key.split()[1] for key, now in state(velocity, "b").items() if now != before[key]}
    assert changed == {"velocity"}
    sgd = frozen_world(NUMPY, STATEFUL["sgd"], "b", update_rule=SGD)
    before = state(sgd, "b")
    sgd.exchange(of_two(4, seed=2))
    commit(sgd, frozen=["b"])
    changed = {key.split()[1] for key, now in state(sgd, "b").items() if now != before[key]}
    assert changed <= {"state.factors"}


@pytest.mark.parametrize("method", METHODS)
def test_residuals_of_a_frozen_tensor_stay_with_every_method(method: str) -> None:
    world = frozen_world(NUMPY, METHODS[method](min_numel=0), "b")
    before = [one["b"].tobytes() for one in world.residuals()]
    world.exchange(of_two(4, seed=2))
    commit(world, frozen=["b"])
    assert [one["b"].tobytes() for one in world.residuals()] == before
    for compressor in world.ranks:
        compressor.frozen = tuple
    found = world.step(of_two(4, seed=3))
    assert all(np.isfinite(one["b"]).all() for one in found)


def test_nothing_is_copied_where_no_tensor_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(make_plan(SPECS, SPARSE), 2, NUMPY)
    world.exchange(of_two(2, seed=0))
    monkeypatch.setattr(type(NUMPY.ops), "assign", None)
    monkeypatch.setattr(type(NUMPY.ops), "clone", None)
    commit(world)
