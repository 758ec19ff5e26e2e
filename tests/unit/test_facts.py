"""What ranks must have in common: they find out with the next payloads that one of them differs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oracle.backends import NUMPY
from oracle.world import Gradients, World, drawn

from horovod_topk.core.exchange import meeting
from horovod_topk.core.plan import facts
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.plan.payload import facts_within, wrong_length
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.errors import ConfigError, MissingRanksError, PayloadError, PlanMismatchError
from horovod_topk.methods.powersgd import PowerSGD
from horovod_topk.methods.topk import TopK
from horovod_topk.updates.tracker import SGD

SPECS = [TensorSpec("a", (60, 40), "float32"), TensorSpec("b", (2000,), "float32")]
RANKS = 3
STATES = (
    "a state that was loaded or reset, a ratio or probe asked for, or gradients left out of a step"
)


def gradients(step: int) -> list[Gradients]:
    return drawn(SPECS, RANKS, step)


def refusals(world: World, step: int) -> list[str]:
    """What each rank raises in a step that begins on all of them."""
    world.launch(gradients(step))
    found = [""] * RANKS
    stages = world.ranks[0].step.stages

    def attempt(rank: int, act: Callable[[], object]) -> None:
        if found[rank]:
            return
        try:
            with np.errstate(all="ignore"):
                act()
        except PlanMismatchError as error:
            found[rank] = str(error)

    for _ in range(stages):
        for rank, compressor in enumerate(world.ranks):
            attempt(rank, compressor.step.advance)
    for rank, compressor in enumerate(world.ranks):
        for bucket in world.plan.buckets:
            arrays = world._of_bucket(rank, bucket)
            attempt(rank, lambda c=compressor, b=bucket, a=arrays: c.step.finish({b.ordinal: a}))
    return found


def load_other_arrivals(rank: StepRunner[Any], saved: dict[str, Any]) -> None:
    state = rank.state_dict()
    arrivals = state["state.arrivals"]["residuals"]
    arrivals["a"] = arrivals["a"] * 0.5
    rank.load_state_dict(state)


def skip_a_step(rank: StepRunner[Any], saved: dict[str, Any]) -> None:
    rank.counter.committed -= 1  # as after a step() that was left out


STEPS = r"the number of committed steps \(modulo 1,024\): 2 on {others}, 1 on {odd}"
PARTED = STATES + ": one on {others}, one on {odd}"
LEVEL = "the ratio of this step: that of the settings on {others}, 1 level above on {odd}"
ACTS: dict[str, tuple[Callable[[StepRunner[Any], dict[str, Any]], None], str]] = {
    "set_ratio": (lambda rank, _: rank.set_ratio(1.0), LEVEL),
    "probe": (lambda rank, _: rank.probe_every(5), PARTED),
    "load": (lambda rank, saved: rank.load_state_dict(saved), STEPS),
    "other arrivals": (load_other_arrivals, PARTED),
    "reset": (lambda rank, _: rank.reset(), PARTED),
    "no step": (skip_a_step, STEPS),
}


def world_of(exchange: str) -> World:
    config = TopK(ratio=0.05, values="int8", min_numel=0, exchange=exchange)
    update_rule = None if exchange == "hierarchical" else SGD
    return World(make_plan(SPECS, config, update_rule=update_rule), RANKS, NUMPY)


def residuals(world: World) -> list[bytes]:
    return [array.tobytes() for one in world.residuals() for array in one.values()]


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
@pytest.mark.parametrize("act", ACTS)
def test_one_rank_that_changes_alone_is_an_error_on_every_rank(act: str, exchange: str) -> None:
    world, (does, text) = world_of(exchange), ACTS[act]
    world.step(gradients(0))
    saved = world.ranks[1].state_dict()
    world.step(gradients(1))
    does(world.ranks[1], saved)
    before = residuals(world)
    expected = f"ranks disagree on {text.format(others='ranks 0, 2', odd='rank 1')}"
    for refusal in refusals(world, 2):
        assert re.match(expected, refusal)
    assert residuals(world) == before


@pytest.mark.parametrize(("odd", "refusing"), [(2, [0, 1, 2]), (1, [1])])
def test_a_rank_without_a_shard_finds_out_alone(odd: int, refusing: list[int]) -> None:
    """Nodes of two ranks and of one: rank 1 sends nothing between nodes."""
    world = world_of("hierarchical")
    world.step(gradients(0))
    world.ranks[odd].reset()
    found = refusals(world, 1)
    assert [rank for rank, refusal in enumerate(found) if refusal] == refusing
    assert all(f"one on rank {odd}" in found[rank] for rank in refusing)


def test_methods_of_rounds_compare_facts_too() -> None:
    config = PowerSGD(rank=1, min_numel=0)
    world = World(make_plan(SPECS, config), RANKS, NUMPY)
    world.step(gradients(0))
    world.ranks[2].reset()
    assert all("one on rank 2" in each for each in refusals(world, 1))


def test_all_ranks_that_do_the_same_go_on() -> None:
    world = World(make_plan(SPECS, TopK(ratio=0.05), update_rule=SGD), RANKS, NUMPY)
    world.step(gradients(0))
    saved = [rank.state_dict() for rank in world.ranks]
    world.step(gradients(1))
    for rank, state in zip(world.ranks, saved, strict=True):
        rank.load_state_dict(state)
        rank.set_ratio(1.0)
    assert refusals(world, 2) == [""] * RANKS


def test_what_a_commit_leaves_out_is_compared() -> None:
    world = World(make_plan(SPECS, TopK(ratio=0.05)), RANKS, NUMPY)
    world.exchange(gradients(0))
    for rank, compressor in enumerate(world.ranks):
        compressor.commit(without=["a"] if rank == 0 else [])
    assert all(f"{STATES}: one on ranks 1, 2, one on rank 0" in e for e in refusals(world, 1))


@pytest.mark.parametrize("seed", range(20))
def test_facts_fit_and_tell_states_apart(seed: int) -> None:
    random = np.random.default_rng(seed)
    committed, state, other = (int(random.integers(0, 2**31 - 1)) for _ in range(3))
    steps = [[facts.pack(committed + i, -3, each, 5) for each in (state, other)] for i in range(9)]
    assert all(0 <= number < 2**32 for pair in steps for number in pair)
    assert sum(here == there for here, there in steps) <= 1  # one chance in 512 a step


def test_nothing_is_stated_before_anything_has_happened() -> None:
    assert facts.pack(0, 0, facts.with_ratio(facts.START, -1)) == 0
    assert facts.digest_of([b"a", b"b"]) != facts.digest_of([b"b", b"a"])


def test_payloads_of_other_lengths_are_told_apart_by_their_facts() -> None:
    plan = make_plan(SPECS, TopK(ratio=0.05))
    head = bytearray(plan.buckets[0].header)
    rows = []
    for number, length in ((0, 160), (5, 480)):
        head[20:24] = number.to_bytes(4, "little")
        rows.append(bytes(head).ljust(length, b"\0"))
    assert facts_within(b"".join(rows)) == [0, 5]
    assert "committed steps" in str(wrong_length(b"".join(rows), 160, 2, 0))
    assert isinstance(wrong_length(bytes(100), 160, 2, 0), PayloadError)


# Meetings.


def test_a_rank_that_nobody_meets_raises_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(meeting.VARIABLE, "0.05")
    monkeypatch.setattr(meeting, "SAID", 0.01)
    with pytest.raises(MissingRanksError, match=r"rank 0 waited 0.05 s in 'x', .* ranks 1, 2"):
        meeting.wait_until(lambda: False, "x", 0, lambda: [1, 2])
    assert "rank 0 has waited" in caplog.text


def test_a_meeting_that_is_over_waits_for_nothing() -> None:
    looks = iter([False, False, True])
    meeting.wait_until(lambda: next(looks), "x", 0)
    assert next(looks, None) is None


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", ""])
def test_limits_that_are_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(meeting.VARIABLE, text)
    with pytest.raises(ConfigError, match="number of seconds above 0"):
        meeting.limit()
