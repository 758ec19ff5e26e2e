"""The laws where tensors have ratios of their own, for each exchange and kind of values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.backends import NUMPY, Backend, each_backend
from oracle.examples import examples
from oracle.jobs import Job, jobs, steps
from oracle.loopback import Loopback, on_every_rank
from oracle.world import World, same_bits

from horovod_topk.core.exchange.agreement import agree
from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.errors import PlanMismatchError
from horovod_topk.methods.topk import TopK
from horovod_topk.ratios import checked_rules

OWN = (0.02, 0.3, "dense")
ALONE = st.just(1)


def is_long(name: str, shape: tuple[int, ...]) -> bool:
    return max(shape, default=1) > 40


RULES = (lambda own: {"t0": own}, lambda own: {"t*": own}, lambda own: {is_long: own, "t0*": 0.1})


@st.composite
def grouped(draw: st.DrawFn, **choices: Any) -> Job:
    """Jobs in which some tensors have ratios of their own."""
    job = draw(jobs(**{"dtypes": ["float32", "float64"], **choices}))
    rules = draw(st.sampled_from(RULES))(draw(st.sampled_from(OWN)))
    config = replace(
        job.config, ratios=checked_rules(rules), min_numel=draw(st.sampled_from([0, 8]))
    )
    return replace(job, config=config)


@each_backend
@examples(20)
@given(data=st.data())
def test_what_is_dense_is_as_if_it_were_small(backend: Backend, data: st.DataObject) -> None:
    """To the bit: residuals and results of a job that sends all tensors dense by their size."""
    job = data.draw(grouped())
    config = replace(job.config, ratios=checked_rules({"*": "dense"}))
    world = World(replace(job, config=config).plan, job.ranks, backend)
    config = replace(job.config, ratios=None, min_numel=10**6)
    other = World(replace(job, config=config).plan, job.ranks, backend)
    for gradients in data.draw(steps(job, 2)):
        exchanged = world.step(gradients)
        assert same_bits(exchanged, other.step(gradients))
        assert same_bits(exchanged, [exchanged[0]] * job.ranks)
        assert same_bits(world.owed(), other.owed())


@each_backend
@examples(15)
@given(data=st.data())
def test_at_a_level_a_tensor_sends_that_or_its_own(backend: Backend, data: st.DataObject) -> None:
    """To the bit, as settings that say so for each tensor; then it goes on as before."""
    job = data.draw(grouped(gather_ratios=[None], values=["float32", "int8"]))
    level = data.draw(st.sampled_from([0.05, 0.25]))
    warming = World(
        replace(job, config=replace(job.config, warmup=((1, level),))).plan, job.ranks, backend
    )
    own = {s.name: job.plan.config.own.get(s.name, job.config.ratio) for s in job.specs}
    ratios = {
        name: level if name not in job.plan.config.own else max(level, own[name]) for name in own
    }
    first, second = data.draw(steps(job, 2))
    config = replace(job.config, ratios=checked_rules(ratios))
    if level == job.config.ratio:
        config = job.config
    held = World(replace(job, config=config).plan, job.ranks, backend)
    assert same_bits(warming.step(first), held.step(first))
    assert same_bits(warming.owed(), held.owed())
    after = World(job.plan, job.ranks, backend)
    after.load(held)
    assert same_bits(warming.step(second), after.step(second))
    assert same_bits(warming.owed(), after.owed())


# Ranks agree on the ratio of each tensor, whatever they derived it from.

SPECS = [TensorSpec("w", (100,), "float32"), TensorSpec("b", (10,), "float32")]


def plan_of(ratios: object = None, **settings: Any) -> Plan:
    given = {"ratio": 0.01, "values": "float32", **settings}
    config = TopK(min_numel=0, ratios=checked_rules(ratios), **given)
    return make_plan(SPECS, config)


def answers(*plans: Plan) -> list[Any]:
    network = Loopback(len(plans), NUMPY.ops)
    return on_every_rank(network, lambda here: agree(plans[here.rank], 0, NUMPY.ops, here))


@pytest.mark.parametrize(
    ("ours", "theirs", "here", "there"),
    [
        ({"b": 0.5}, None, '["b", 0.5]', '["b", 0.01]'),
        ({"*": "dense"}, {"b": "dense"}, '["w", 1.0]', '["w", 0.01]'),
        ({"w": 0.5, "b": 0.1}, {"w": 0.5, "b": 0.2}, '["b", 0.1]', '["b", 0.2]'),
    ],
)
def test_a_mismatch_names_the_tensor(ours: Any, theirs: Any, here: str, there: str) -> None:
    first, second = answers(plan_of(ours), plan_of(theirs))
    assert isinstance(first.exception(), PlanMismatchError)
    head = "ranks disagree on ratios: "
    assert str(first.exception()).startswith(f"{head}{there} on rank 1, {here} on rank 0 (this")
    assert str(second.exception()).startswith(f"{head}{here} on rank 0, {there} on rank 1 (this")


def test_a_mismatch_of_what_owners_send_back() -> None:
    back = {"exchange": "sharded", "gather_ratio": 0.1}
    first, _ = answers(plan_of({"w": 0.01}, **back), plan_of(**back))
    expected = 'ratios: ["w", 0.01, 0.1] on rank 1, ["w", 0.01] on rank 0'
    assert expected in str(first.exception())
