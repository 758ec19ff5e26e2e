"""Law 5: a step commits or rolls back as a whole, to the bit, and on every rank alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.backends import NUMPY, Backend, each_backend
from oracle.examples import examples
from oracle.jobs import NONFINITE, Job, jobs, steps
from oracle.world import Gradients, World, same_bits

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.run.stats import StepCounters
from horovod_topk.methods.topk import TopK

ENDINGS = ("commit", "roll back", "poison", "forget", "send again")


def poison(data: st.DataObject, job: Job, gradients: list[Gradients]) -> str | None:
    """Put one NaN or infinity somewhere on one rank; returns the tensor's name."""
    nonempty = [spec.name for spec in job.specs if spec.numel]
    if not nonempty:
        return None
    victim = data.draw(st.sampled_from(nonempty))
    g = gradients[data.draw(st.integers(0, job.ranks - 1))][victim].reshape(-1)
    g[data.draw(st.integers(0, g.size - 1))] = data.draw(st.sampled_from(NONFINITE))
    return victim


@each_backend
@examples(20)
@given(data=st.data())
def test_steps_that_do_not_count_leave_no_trace(backend: Backend, data: st.DataObject) -> None:
    """A job with skipped steps ends equal, to the bit, to one that never saw them."""
    job = data.draw(jobs(ranks=st.integers(1, 3)))
    endings = data.draw(st.lists(st.sampled_from(ENDINGS), min_size=4, max_size=4))
    troubled, untroubled = (World(job.plan, job.ranks, backend) for _ in range(2))
    for ending, gradients in zip(endings, data.draw(steps(job, 4)), strict=True):
        before = troubled.owed()
        counts = _play(data, job, troubled, ending, gradients)
        if counts:
            assert same_bits(troubled.step(gradients), untroubled.step(gradients))
        else:
            assert same_bits(troubled.owed(), before)
    assert same_bits(troubled.owed(), untroubled.owed())
    assert all(c.steps == untroubled.ranks[0].steps for c in troubled.ranks)


def _play(
    data: st.DataObject, job: Job, world: World, ending: str, gradients: list[Gradients]
) -> bool:
    """Do to a step what `ending` says, short of a commit; returns whether one is to follow."""
    match ending:
        case "commit":
            return True
        case "send again":  # a second backward before the first was received
            world.launch([{name: -g for name, g in one.items()} for one in gradients])
            return True
        case "poison":
            if poison(data, job, gradients) is None:
                return True
            world.exchange(gradients)
            assert world.commit() == [False] * job.ranks
        case "roll back":
            world.exchange(gradients)
            world.rollback()
        case "forget":  # the next launch finds a step that nobody ended
            world.exchange(gradients)
    return False


@each_backend
def test_an_overflow_in_the_residual_is_flagged(backend: Backend) -> None:
    """e and g are finite, e + g is not: that step is refused like any other."""
    spec = TensorSpec("w", (64,), "float32")
    world = World(make_plan([spec], TopK(ratio=0.01, min_numel=0)), 2, backend)
    g = np.full(64, 3e38, np.float32)
    still = np.zeros(64, np.float32)
    world.step([{"w": g}, {"w": still}])
    before = world.residuals()
    exchanged = world.exchange([{"w": g}, {"w": still}])
    assert world.commit() == [False, False]
    assert all(np.isnan(one["w"]).all() for one in exchanged)
    assert same_bits(world.residuals(), before)
    assert before[0]["w"].max() == np.float32(3e38)


def two_buckets() -> World:
    """Two ranks; a float32 and a float64 bucket."""
    specs = [TensorSpec("a", (50,), "float32"), TensorSpec("b", (50,), "float64")]
    return World(make_plan(specs, TopK(ratio=0.1, min_numel=0)), 2, NUMPY)


def ones(**changed: float) -> list[Gradients]:
    """Gradients of ones on two ranks; `changed` sets a tensor's first element on rank 1."""
    result = [{"a": np.ones(50, np.float32), "b": np.ones(50)} for _ in range(2)]
    for name, value in changed.items():
        result[1][name][0] = value
    return result


def test_a_step_that_nobody_ended_is_rolled_back_by_the_next() -> None:
    """All of it: also a bucket that the next step does not send."""
    world = two_buckets()
    world.exchange(ones())
    again = [one["a"] for one in ones()]
    for compressor, gradient in zip(world.ranks, again, strict=True):
        compressor.launch(0, [gradient])
    for compressor, gradient in zip(world.ranks, again, strict=True):
        compressor.step.finish({0: [gradient]})
    assert world.commit() == [True, True]
    assert [(c.steps, c.rolled_back) for c in world.ranks] == [(1, 1), (1, 1)]
    assert all(one["a"].any() and not one["b"].any() for one in world.residuals())


def test_one_flagged_bucket_rolls_back_the_others() -> None:
    world = two_buckets()
    world.step(ones())
    before = world.residuals()
    world.exchange(ones(b=np.inf))
    assert world.commit() == [False, False]
    assert same_bits(world.residuals(), before)
    assert before[0]["a"].any()


def test_commit_and_rollback_without_a_finished_step_do_nothing() -> None:
    world = two_buckets()
    assert world.commit() == [False, False]
    world.launch(ones())
    assert world.commit() == [False, False]
    world.rollback()
    assert world.ranks[0].step.sent == {0, 1}
    world.finish()
    assert world.commit() == [True, True]
    after = world.residuals()
    assert world.commit() == [False, False]
    world.rollback()
    assert same_bits(world.residuals(), after)


def test_a_step_does_not_commit_in_part() -> None:
    """One bucket received and another still under way: not a whole step."""
    world = two_buckets()
    world.launch(ones(b=np.nan))
    for compressor, arrays in zip(world.ranks, world._arrays, strict=True):
        compressor.step.finish({0: [arrays["a"]]})
    before = world.residuals()
    assert world.commit() == [False, False]
    assert same_bits(world.residuals(), before)


def test_abandon_ends_a_step_in_any_phase() -> None:
    world = two_buckets()
    world.launch(ones())
    for compressor in world.ranks:
        compressor.abandon()
    assert not world.ranks[0].step.sent
    assert world.network.awaited == [["job.0.0", "job.0.1"]] * 2
    assert world.commit() == [False, False]
    assert not any(e.any() for one in world.residuals() for e in one.values())


@pytest.mark.parametrize("ending", ["commit", "rollback", "flagged"])
def test_callbacks_hear_of_every_step_once(ending: str) -> None:
    world, heard = two_buckets(), list[StepCounters]()
    world.ranks[0].on_step(heard.append)
    world.exchange(ones(b=np.inf) if ending == "flagged" else ones())
    if ending == "rollback":
        world.rollback()
    world.commit()
    compressor = world.ranks[0]
    assert heard == [
        StepCounters(
            step=1,
            committed=ending == "commit",
            selected=compressor.traffic().selected,
            payload_bytes=compressor.traffic().payload_bytes,
            sent_bytes=compressor.traffic().sent_bytes,
            dense_bytes=compressor.traffic().dense_bytes,
            between_bytes=compressor.traffic().between_bytes,
            node_bytes=compressor.traffic().node_bytes,
            flagged=("b",) if ending == "flagged" else (),
            level=0.1,
            memory_bytes=compressor.memory_bytes,
        )
    ]
    assert (compressor.steps, compressor.rolled_back) == ((1, 0) if ending == "commit" else (0, 1))
