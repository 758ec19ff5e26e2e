"""Law 8: ranks agree before they exchange; each payload carries the digest all the same."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.backends import NUMPY, Backend, each_backend
from oracle.examples import examples
from oracle.jobs import Job, jobs, steps
from oracle.loopback import Loopback, on_every_rank
from oracle.world import World

from horovod_topk.core.exchange.agreement import agree
from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.errors import PlanMismatchError
from horovod_topk.methods.topk import TopK
from horovod_topk.updates.tracker import SGD

W = TensorSpec("w", (100,), "float32")
B = TensorSpec("b", (10,), "float32")
CONFIG = TopK(ratio=0.01, values="float32")
AGREED = make_plan([W, B], CONFIG)


@dataclass(frozen=True)
class NextFormat(Plan):
    """A plan as a later version of the format would make it."""

    def fields(self) -> dict[str, list[object]]:
        return super().fields() | {"format": [3]}


# field -> a plan that differs in it, what the others have, what this one has
CLIPPED = make_plan([W, B], replace(CONFIG, clip_norm=0.5))
DIFFERENT = {
    "format": (NextFormat(CONFIG, "average", AGREED.buckets), "2", "3"),
    "settings": (CLIPPED, '["clip_norm", null]', '["clip_norm", 0.5]'),
    "reduction": (make_plan([W, B], CONFIG, "sum"), '"average"', '"sum"'),
    "names": (make_plan([W, replace(B, name="c")], CONFIG), '"b"', '"c"'),
    "shapes": (make_plan([W, replace(B, shape=(2, 5))], CONFIG), '["b", [10]]', '["b", [2, 5]]'),
    "dtypes": (
        make_plan([W, replace(B, dtype="float16")], CONFIG),
        '["b", "float32"]',
        '["b", "float16"]',
    ),
    "buckets": (make_plan([W, B], CONFIG, groups=[[W]]), '["w", "b"]', '["w"]'),
}


def proposals(
    *plans: Plan, backend: Backend = NUMPY, ordinals: Sequence[int] = (0,) * 4, **facts: Any
) -> list[Future[int]]:
    """What each rank gets from `agree`; facts: those of each rank."""

    def propose(here: Any) -> int:
        own = {name: each[here.rank] for name, each in facts.items()}
        return agree(plans[here.rank], ordinals[here.rank], backend.ops, here, **own)

    return on_every_rank(Loopback(len(plans), backend.ops), propose)


@each_backend
def test_ranks_with_one_plan_take_the_highest_ordinal(backend: Backend) -> None:
    answers = proposals(*[AGREED] * 4, backend=backend, ordinals=[0, 3, 1, 3])
    assert [answer.result() for answer in answers] == [3, 3, 3, 3]


@pytest.mark.parametrize("field", DIFFERENT)
@pytest.mark.parametrize("odd", [0, 2])
def test_a_mismatch_names_rank_and_field_on_every_rank(field: str, odd: int) -> None:
    plan, usual, unusual = DIFFERENT[field]
    plans = [plan if rank == odd else AGREED for rank in range(3)]
    for rank, answer in enumerate(proposals(*plans)):
        other = odd if rank != odd else (1 if odd == 0 else 0)
        here, there = (unusual, usual) if rank == odd else (usual, unusual)
        message = str(answer.exception())
        assert isinstance(answer.exception(), PlanMismatchError)
        assert message.startswith(
            f"ranks disagree on {field}: {there} on rank {other}, {here} on rank {rank} (this one)"
        )


def test_ranks_need_kernels_of_one_kind_where_momenta_depend_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What all ranks compute alike would have other last bits on one of them."""
    kinds = iter(("others", "Triton") * 2)
    monkeypatch.setattr(type(NUMPY.ops), "kernel_kind", lambda ops, device: next(kinds))
    adapted = make_plan([W, B], CONFIG, update_rule=SGD)
    messages = [str(answer.exception()) for answer in proposals(adapted, adapted)]
    assert all(each.startswith("ranks disagree on kernels: ") for each in messages)
    assert all("with one version of Triton" in each for each in messages)
    assert [answer.result() for answer in proposals(AGREED, AGREED)] == [0, 0]


def test_other_fields_are_a_mismatch_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between versions of this package."""
    older = copy.copy(AGREED)
    fields = AGREED.fields()
    fewer = {name: fields[name] for name in list(fields)[:-1]}
    usual = Plan.fields
    monkeypatch.setattr(Plan, "fields", lambda self: fewer if self is older else usual(self))
    for answer in proposals(AGREED, older, AGREED):
        assert isinstance(answer.exception(), PlanMismatchError)
        assert "Install one version of horovod_topk" in str(answer.exception())


@given(mine=jobs(ranks=st.just(2)), theirs=jobs(ranks=st.just(2)))
def test_digests_are_equal_where_plans_are(mine: Job, theirs: Job) -> None:
    ours, other = mine.plan, theirs.plan
    assert (ours.digest == other.digest) == (ours.fields() == other.fields())
    assert mine.plan.digest == ours.digest


@examples(15)
@given(data=st.data())
def test_a_foreign_payload_is_refused_before_anything_changed(data: st.DataObject) -> None:
    """Two ranks that skipped `agree`: the payload's digest still tells them apart."""
    job = data.draw(jobs(ranks=st.just(2), exchanges=["allgather", "sharded"]))
    renamed = tuple(TensorSpec(f"{s.name}x", s.shape, s.dtype) for s in job.specs)
    foreign = make_plan(renamed, job.config, job.reduction).buckets[0]
    world = World(job.plan, 2, NUMPY)
    gradients = data.draw(steps(job, 1))[0]
    world.launch(gradients)
    bucket = job.plan.buckets[0]
    posted = world.network.sent[1][0].payload
    NUMPY.ops.store_bytes(posted, 0, foreign.header)
    arrays = [world._arrays[0][t.spec.name] for t in bucket.tensors]
    before = [array.tobytes() for array in arrays]
    with pytest.raises(PlanMismatchError, match=f"bucket 0, rank 1: .*{foreign.digest.hex()}"):
        world.ranks[0].step.finish({bucket.ordinal: arrays})
    assert [array.tobytes() for array in arrays] == before
    assert world.commit() == [False, False]


def test_ranks_need_optimizers_of_one_class() -> None:
    """Also where the exchange does not depend on them: equal gradients would move weights apart."""
    first, _ = proposals(AGREED, AGREED, optimizer=("SGD", "AdamW"))
    told = 'ranks disagree on optimizer: "AdamW" on rank 1, "SGD" on rank 0 (this one). Give all'
    assert str(first.exception()).startswith(told)


def test_an_optimizer_that_is_not_known_is_not_compared() -> None:
    """A tape, which does not know it, meets a rank of PyTorch."""
    alike = proposals(*[AGREED] * 3, ordinals=range(3), optimizer=("SGD", None, "SGD"))
    assert [answer.result() for answer in alike] == [2, 2, 2]
    for answer in proposals(*[AGREED] * 3, optimizer=("SGD", None, "AdamW")):
        assert str(answer.exception()).startswith('ranks disagree on optimizer: "')


def test_ranks_need_a_grad_scaler_all_or_none() -> None:
    """Residuals with a scale, and others without it, would add up to other weights."""
    first, _ = proposals(AGREED, AGREED, has_scaler=(False, True))
    told = "ranks disagree on grad_scaler: true on rank 1, false on rank 0"
    assert str(first.exception()).startswith(told)
