"""The laws of the sharded exchange: what owners keep counts, and bytes do not grow with ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle.backends import NUMPY, Backend, each_backend
from oracle.examples import examples
from oracle.jobs import Job, jobs, steps
from oracle.world import Gradients, World, same_bits

from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.core.plan.shards import first_block, shard, shard_numel
from horovod_topk.errors import PayloadError, StateDictError
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.coding import index_bytes

SHARDED = ["sharded"]
SIZES = {"conv": 9000, "bias": 70, "odd": 512 * 4 + 5}


def plan_of(ranks: int = 3, **settings: Any) -> Plan:
    specs = [TensorSpec(name, (n,), "float32") for name, n in SIZES.items()]
    return make_plan(
        specs, TopK(exchange="sharded", **{"ratio": 0.05, "min_numel": 100, **settings})
    )


def some_gradients(random: np.random.Generator, ranks: int) -> list[Gradients]:
    return [
        {name: random.standard_normal(n).astype(np.float32) for name, n in SIZES.items()}
        for _ in range(ranks)
    ]


def owed(world: World) -> dict[str, NDArray[Any]]:
    """Mean of the ranks' residuals, and the owners' where their elements lie."""
    total = {}
    for name in SIZES:
        total[name] = np.mean([one[name].astype(np.float64) for one in world.residuals()], 0)
        for rank, own in enumerate(world.owned()):
            first = first_block(name, world.size, rank)
            places = NUMPY.ops.global_index(np.arange(own[name].size), world.size, first)
            total[name][places] += own[name]
    return total


@pytest.mark.one_in(5)
@each_backend
@pytest.mark.parametrize("values", ["float32", "int8", "int4", "sign"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_applied_and_owed_are_the_sum_of_all_means(
    backend: Backend, ranks: int, values: str
) -> None:
    world = World(plan_of(values=values, gather_ratio=0.02), ranks, backend)
    random = np.random.default_rng(ranks)
    applied, given_ = ({name: np.zeros(n) for name, n in SIZES.items()} for _ in range(2))
    for _ in range(5):
        gradients = some_gradients(random, ranks)
        exchanged = world.step(gradients)[0]
        for name in SIZES:
            applied[name] += exchanged[name]
            given_[name] += np.mean([one[name].astype(np.float64) for one in gradients], 0)
    left = owed(world)
    for name in SIZES:
        np.testing.assert_allclose(applied[name] + left[name], given_[name], atol=2e-5)
    owned = [own[name] for own in world.owned() for name in ("conv", "odd")]
    assert all(e.any() for e in owned if e.size)  # eight ranks do not all own a block of "odd"


@each_backend
@examples(20)
@given(data=st.data())
def test_every_rank_has_the_same_bits(backend: Backend, data: st.DataObject) -> None:
    job = data.draw(jobs(exchanges=SHARDED))
    world = World(job.plan, job.ranks, backend)
    for gradients in data.draw(steps(job, 2, huge=True)):
        exchanged = world.step(gradients)
        assert same_bits(exchanged, [exchanged[0]] * job.ranks)


@given(data=st.data())
def test_two_collectives_a_bucket_of_sizes_that_the_plan_knows(data: st.DataObject) -> None:
    job: Job = data.draw(jobs(ranks=st.integers(1, 4), exchanges=SHARDED))
    world = World(job.plan, job.ranks, NUMPY, name="job.7")
    for gradients in data.draw(steps(job, 2)):
        world.step(gradients)
    split = [shard(bucket, job.ranks) for bucket in job.plan.buckets]
    for rank, compressor in enumerate(world.ranks):
        sent = [(name, len(payload)) for name, payload in world.payloads(rank)]
        there = [(f"job.7.{d.bucket.ordinal}.scatter", d.scatter_bytes * job.ranks) for d in split]
        back = [(f"job.7.{d.bucket.ordinal}.gather", d.gather_bytes) for d in split]
        assert sorted(sent) == sorted((there + back) * 2)
        assert compressor.traffic().payload_bytes == sum(size for _, size in there + back)


@given(numel=st.integers(0, 9000), parts=st.integers(1, 9), name=st.text(max_size=3))
def test_every_element_has_one_owner(numel: int, parts: int, name: str) -> None:
    places = [
        NUMPY.ops.global_index(np.arange(shard_numel(numel, parts, first)), parts, first)
        for first in (first_block(name, parts, part) for part in range(parts))
    ]
    assert np.array_equal(np.sort(np.concatenate(places)), np.arange(numel))
    assert max(map(len, places)) - min(map(len, places)) <= 512


def test_small_tensors_do_not_all_have_the_same_owner() -> None:
    specs = [TensorSpec(f"bn{i}.bias", (60,), "float32") for i in range(100)]
    (bucket,) = make_plan(specs, TopK(exchange="sharded")).buckets
    loads = [sum(tensor.numel for tensor in each.tensors) for each in shard(bucket, 4).scatter]
    assert max(loads) < 1.5 * sum(loads) / 4


def test_bytes_do_not_grow_with_the_ranks() -> None:
    plan = make_plan([TensorSpec("w", (10**5,), "float32")], TopK(exchange="sharded"))
    sent = [World(plan, ranks, NUMPY).ranks[0].traffic().sent_bytes for ranks in (2, 8)]
    assert sent[1] < 2 * sent[0]  # a ring allreduce of the dense gradients grows 1.75 times


@each_backend
def test_what_one_owner_finds_non_finite_is_so_on_every_rank(backend: Backend) -> None:
    """The NaN lies in one shard of one rank; the whole tensor is poisoned, and nothing commits."""
    world = World(plan_of(), 3, backend)
    random = np.random.default_rng(0)
    world.step(some_gradients(random, 3))
    before = [*world.residuals(), *world.owned()]
    gradients = some_gradients(random, 3)
    gradients[2]["odd"][70] = np.inf
    exchanged = world.exchange(gradients)
    for one in exchanged:
        assert np.isnan(one["odd"]).all()
        assert np.isfinite(one["conv"]).all()
    assert world.commit() == [False] * 3
    assert same_bits([*world.residuals(), *world.owned()], before)


@each_backend
def test_state_dicts_have_the_owners_residuals_too(backend: Backend) -> None:
    first, second = (World(plan_of(values="int8"), 3, backend) for _ in range(2))
    random = np.random.default_rng(0)
    for _ in range(3):
        first.step(some_gradients(random, 3))
    for one, other in zip(first.ranks, second.ranks, strict=True):
        other.load_state_dict(one.state_dict())
    assert same_bits(first.residuals(), second.residuals())
    assert same_bits(first.owned(), second.owned())
    gradients = some_gradients(random, 3)
    assert same_bits(first.step(gradients), second.step(gradients))


def test_another_ranks_state_is_refused() -> None:
    world = World(plan_of(), 2, NUMPY)
    random = np.random.default_rng(0)
    world.step(some_gradients(random, 2))
    before = [*world.residuals(), *world.owned()]
    message = "rank 1 of 2 that own shards, this is rank 0 of 2"
    with pytest.raises(StateDictError, match=message):
        world.ranks[0].load_state_dict(world.ranks[1].state_dict())
    gathered = World(make_plan([t.spec for t in world.plan.tensors()], TopK()), 2, NUMPY)
    with pytest.raises(StateDictError, match="this is an exchange without owners"):
        gathered.ranks[0].load_state_dict(world.ranks[0].state_dict())
    assert same_bits([*world.residuals(), *world.owned()], before)


@each_backend
@pytest.mark.parametrize("leg", ["scatter", "gather"])
def test_a_damaged_payload_names_the_rank_that_sent_it(backend: Backend, leg: str) -> None:
    world = World(plan_of(), 3, backend)
    gradients = some_gradients(np.random.default_rng(0), 3)
    world.launch(gradients)
    split = shard(world.plan.buckets[0], 3)
    if leg == "gather":
        for compressor in world.ranks:
            compressor.step.advance()
    posted = world.network._posted[(f"job.0.0.{leg}", 0)]
    # For rank 0 in a scatter: of rank 2's payloads the first.
    each = split.scatter[0] if leg == "scatter" else split.gather[2]
    conv = each.tensors[0]
    size = index_bytes("packed", conv.numel, conv.k)
    stretch = backend.ops.view(posted[2], conv.index_at, conv.index_at + size)
    backend.ops.assign(stretch, backend.array(np.full(size, 255), "uint8"))
    with pytest.raises(PayloadError, match=r"'conv': bucket 0, rank 2: its indices"):
        world.finish()
    assert all(
        np.array_equal(backend.numpy(world._arrays[rank][name]), gradients[rank][name])
        for rank in range(3)
        for name in SIZES
    )


def test_fewer_tensors_keep_what_they_owe() -> None:
    """A parameter whose gradients became sparse leaves the plan."""
    world = World(plan_of(), 2, NUMPY)
    random = np.random.default_rng(0)
    world.step(some_gradients(random, 2))
    before = [*world.residuals(), *world.owned()]
    for compressor in world.ranks:
        compressor.replan(world.plan.without("bias"))
    world.plan = world.plan.without("bias")
    after = [*world.residuals(), *world.owned()]
    assert same_bits(after, [{n: e for n, e in one.items() if n != "bias"} for one in before])


def test_an_owner_that_refuses_a_payload_tells_the_others() -> None:
    """Only the owner reads what came for it: the others would wait for its part of the gather."""
    world = World(plan_of(), 3, NUMPY)
    random = np.random.default_rng(0)
    world.step(some_gradients(random, 3))
    before = [*world.residuals(), *world.owned()]
    world.launch(some_gradients(random, 3))
    posted = world.network._posted[("job.0.0.scatter", 1)]
    posted[2][0:4] = 0  # of rank 2's payload for rank 0 the magic
    with pytest.raises(PayloadError, match="bucket 0, rank 2: the bytes 00000000"):
        world.ranks[0].step.advance()
    for compressor in world.ranks[1:]:
        compressor.step.advance()
    for rank in (1, 2):
        gradients = world._of_bucket(rank, world.plan.buckets[0])
        world.ranks[rank].step.finish(0, gradients)
        assert all(np.isnan(g).all() for g in gradients)
        assert not world.ranks[rank].commit()
    world.ranks[0].abandon()
    assert same_bits([*world.residuals(), *world.owned()], before)
    world.step(some_gradients(random, 3))


def test_a_rank_that_abandons_a_step_does_not_hold_up_the_others() -> None:
    world = World(plan_of(), 2, NUMPY)
    random = np.random.default_rng(0)
    world.launch(some_gradients(random, 2))
    world.ranks[1].step.advance()
    world.ranks[0].abandon()
    gradients = world._of_bucket(1, world.plan.buckets[0])
    world.ranks[1].step.finish(0, gradients)
    assert all(np.isnan(g).all() for g in gradients)
    assert not world.ranks[1].commit()
    exchanged = world.step(some_gradients(random, 2))
    assert same_bits(exchanged, [exchanged[0]] * 2)


def test_ranks_that_deal_otherwise_do_not_read_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    (bucket,) = plan_of().buckets
    here = shard(bucket, 2)
    monkeypatch.setattr("horovod_topk.core.plan.shards.SHARD_BLOCK", 64)
    there = shard(bucket, 2)
    assert {p.digest for p in here.scatter}.isdisjoint(p.digest for p in there.scatter)
    assert {p.digest for p in here.gather}.isdisjoint(p.digest for p in there.gather)


def test_norms_of_what_a_rank_keeps_and_of_what_it_owns_are_apart() -> None:
    world = World(plan_of(ratio=0.1), 3, NUMPY)
    world.step(some_gradients(np.random.default_rng(0), 3))
    for compressor in world.ranks:
        state = compressor.state_dict()
        parts = compressor.residual_norm(), compressor.owned_norm()
        for found, kept in zip(parts, (state, state["owned"]), strict=True):
            flat = np.concatenate([np.ravel(e) for e in kept["residuals"].values()])
            assert found == pytest.approx(np.linalg.norm(flat)) != 0


def test_what_a_rank_owes_includes_what_it_owns() -> None:
    """At ratio 1 the ranks keep nothing, the owners all that they did not send back."""
    world = World(plan_of(ratio=1.0, gather_ratio=0.01), 2, NUMPY)
    world.step(some_gradients(np.random.default_rng(0), 2))
    assert not any(one["conv"].any() for one in world.residuals())
    assert all(compressor.norm_of("conv") > 0 for compressor in world.ranks)
    assert all(compressor.residual_norm() == 0 for compressor in world.ranks)
    assert all(compressor.owned_norm() > 0 for compressor in world.ranks)
    assert world.ranks[0].norm_of("bias") == 0


def test_counters_are_of_both_directions() -> None:
    world = World(plan_of(), 2, NUMPY)
    split = shard(world.plan.buckets[0], 2)
    mine = [*split.scatter, split.gather[0]]
    assert world.ranks[0].traffic().selected == sum(plan.entries for plan in mine)
