"""Laws 2, 3, 4 and 6: equal bits on every rank, dense at ratio 1, fixed sizes, fixed names."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle import wire
from oracle.backends import Backend, each_backend
from oracle.examples import examples
from oracle.jobs import Job, jobs, steps, within_float16
from oracle.world import Gradients, World, same_bits

from horovod_topk.methods.topk import Entries


def added_in_rank_order(job: Job, tensor: Entries, sent: list[wire.Decoded]) -> NDArray[Any]:
    """The exchanged gradient, from what each rank put on the wire."""
    residual_dtype = np.float64 if tensor.spec.dtype == "float64" else np.float32
    total = np.zeros(tensor.spec.numel, residual_dtype)
    with np.errstate(all="ignore"):
        for one in sent:
            total = total + one.dense[tensor.spec.name].astype(residual_dtype)
        scale = 1 / job.ranks if job.reduction == "average" else 1.0
        scaled = total * residual_dtype(scale)
        return scaled.astype(tensor.spec.dtype).reshape(tensor.spec.shape)


@each_backend
@examples(20)
@given(data=st.data())
def test_every_rank_has_the_same_bits_added_in_rank_order(
    backend: Backend, data: st.DataObject
) -> None:
    job = data.draw(jobs(exchanges=["allgather"]))
    world = World(job.plan, job.ranks, backend)
    for gradients in data.draw(steps(job, 2, huge=True)):
        exchanged = world.step(gradients)
        assert same_bits(exchanged, [exchanged[0]] * job.ranks)
        sent = [world.decoded(rank) for rank in range(job.ranks)]
        for tensor in job.plan.tensors():
            expected = added_in_rank_order(job, tensor, sent)
            assert np.array_equal(exchanged[0][tensor.spec.name], expected, equal_nan=True)


@each_backend
@given(data=st.data())
def test_the_order_in_which_ranks_send_means_nothing(backend: Backend, data: st.DataObject) -> None:
    job = data.draw(jobs(ranks=st.integers(2, 4)))
    order = st.permutations(range(len(job.plan.buckets)))
    orders = [data.draw(order) for _ in range(job.ranks)]
    orderly, disorderly = (World(job.plan, job.ranks, backend) for _ in range(2))
    for gradients in data.draw(steps(job, 2)):
        expected = orderly.step(gradients)
        disorderly.launch(gradients, orders)
        assert same_bits(disorderly.finish(), expected)
        disorderly.commit()
    assert same_bits(disorderly.owed(), orderly.owed())


@each_backend
@given(data=st.data())
def test_ratio_one_is_the_dense_mean(backend: Backend, data: st.DataObject) -> None:
    """Two ranks: exactly, and there is nothing left to owe."""
    job = data.draw(jobs(ranks=st.just(2), values=["float32"], ratios=[1.0], gather_ratios=[None]))
    world = World(job.plan, 2, backend)
    for gradients in map(within_float16, data.draw(steps(job, 2))):
        exchanged = world.step(gradients)
        for spec in job.specs:
            assert np.array_equal(exchanged[0][spec.name], _dense(job, gradients, spec.name))
        owed = world.owed()
        assert not any(e.any() for one in owed for e in one.values())


def _dense(job: Job, gradients: list[Gradients], name: str) -> NDArray[Any]:
    """Sum or mean of two ranks, rounded to the gradient's dtype once."""
    wide = [g[name].astype(np.promote_types(g[name].dtype, np.float32)) for g in gradients]
    total = wide[0] + wide[1]
    with np.errstate(over="ignore"):
        return (total / 2 if job.reduction == "average" else total).astype(gradients[0][name].dtype)
