"""Checkpoint files: what was saved comes back to the bit, and nothing else is ever taken on."""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle.backends import NATIVE, NUMPY, TENSORFLOW, Backend, each_backend
from oracle.checkpoints import load, ranks, save
from oracle.schedules import ByGradient
from oracle.world import World, drawn

from horovod_topk import checkpoint
from horovod_topk.core.exchange.membership import ALONE
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.state.reshard import pending
from horovod_topk.errors import CheckpointError, StateDictError
from horovod_topk.guard import Guard
from horovod_topk.methods.dense import Dense
from horovod_topk.methods.qsgd import QSGD
from horovod_topk.methods.randomk import RandomK
from horovod_topk.methods.signsgd import SignSGD
from horovod_topk.methods.terngrad import TernGrad
from horovod_topk.methods.topk import TopK
from horovod_topk.updates.tracker import ADAM, SGD, Rule

SPECS = [TensorSpec("w", (37, 30), "float32"), TensorSpec("läyer/b", (3,), "float32")]
RANKS = 3


def trained(
    backend: Backend, exchange: str, steps: int = 3, specs: Any = SPECS, size: int = RANKS
) -> World:
    config = TopK(ratio=0.1, min_numel=0, exchange=exchange)
    world = World(make_plan(specs, config), size, backend)
    noise = np.random.default_rng(steps)
    for _ in range(steps):
        world.step(drawn(specs, size, noise))
    return world


def kept(world: World) -> list[bytes]:
    """All residuals of all ranks."""
    parts = world.owed()
    return [array.tobytes() for part in parts for array in part.values()]


def assert_refused(folder: Path, world: World, problem: str, *only: Any) -> None:
    """Every rank, or those given, refuses the checkpoint, and keeps what it has."""
    before = kept(world)
    for rank in only or ranks(world):
        with pytest.raises((CheckpointError, StateDictError), match=problem):
            checkpoint.load(folder, rank)
    assert kept(world) == before


EXCHANGES = pytest.mark.parametrize("exchange", ["allgather", "sharded", "hierarchical"])
FRAMEWORKS = pytest.mark.parametrize(
    ("backend", "framework"),
    [(NATIVE, "torch"), (TENSORFLOW, "tensorflow")],
    ids=["torch", "tensorflow"],
)
CHANGED = [SPECS[0], TensorSpec("läyer/b", (4,), "float32")]


@pytest.mark.one_in(2)
@EXCHANGES
@FRAMEWORKS
def test_what_was_saved_comes_back(
    tmp_path: Path, backend: Backend, framework: str, exchange: str
) -> None:
    saved, fresh = trained(backend, exchange, steps=1), trained(backend, exchange, steps=0)
    files = save(saved, tmp_path, framework)
    assert [f.name for f in files] == [f"topkef-0000{r}-of-00003.safetensors" for r in range(RANKS)]
    assert sorted(tmp_path.iterdir()) == files
    assert kept(fresh) != kept(saved)
    load(tmp_path, fresh, framework)
    assert kept(fresh) == kept(saved)


def test_a_file_holds_no_code_and_says_what_it_is(tmp_path: Path) -> None:
    from safetensors import safe_open

    with safe_open(save(trained(NATIVE, "sharded"), tmp_path)[1], framework="np") as file:
        facts = json.loads(file.metadata()["state"])
        assert sorted(file.keys()) == sorted(
            f"{p}/{s.name}" for p in ("residuals", "owned") for s in SPECS
        )
    assert facts["version"] == 1
    assert (facts["rank"], facts["ranks"], facts["ratio"]) == (1, 3, 0.1)
    assert facts["shapes"] == {"w": [37, 30], "läyer/b": [3]}


def test_whoever_may_read_the_users_files_may_read_a_shard(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        (path, *_) = save(trained(NATIVE, "allgather"), tmp_path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["job/gen", "", "a\\b", "/tmp/x"])
def test_a_name_that_begins_no_file_is_refused(name: str, tmp_path: Path) -> None:
    rank = ranks(trained(NATIVE, "allgather"))[0]
    for action in (checkpoint.save, checkpoint.load):
        with pytest.raises(CheckpointError, match="does not begin the name of a file"):
            action(tmp_path, rank, name=name)
    assert not list(tmp_path.iterdir())


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    world = trained(NATIVE, "allgather")
    before = [file.read_bytes() for file in save(world, tmp_path)]

    def crash(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(CheckpointError, match=r"cannot be written: No space.*free space"):
        save(trained(NATIVE, "allgather", steps=5), tmp_path)
    assert [file.read_bytes() for file in sorted(tmp_path.iterdir())] == before


def of_two_jobs(folder: Path) -> None:
    data = (folder / "topkef-00001-of-00003.safetensors").read_bytes()
    (folder / "topkef-00001-of-00002.safetensors").write_bytes(data)


def of_another_job(folder: Path) -> None:
    for file in list(folder.iterdir()):
        file.rename(folder / file.name.replace("of-00003", "of-00004"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [(of_two_jobs, "saved by rank 1 of 3"), (of_another_job, "saved by rank 0 of 3")],
)
def test_a_shard_of_another_job_is_refused(tmp_path: Path, change: Any, problem: str) -> None:
    save(trained(NATIVE, "allgather"), tmp_path)
    change(tmp_path)
    fresh = trained(NATIVE, "allgather", steps=1)
    assert_refused(tmp_path, fresh, problem, ranks(fresh)[1])


def test_a_tensor_that_does_not_fit_starts_at_zero_when_asked(tmp_path: Path, caplog: Any) -> None:
    saved = trained(NATIVE, "sharded")
    save(saved, tmp_path)
    fresh = trained(NATIVE, "sharded", steps=1, specs=CHANGED)
    with pytest.raises(StateDictError, match="läyer/b"):
        checkpoint.load(tmp_path, ranks(fresh)[1])
    with caplog.at_level(logging.WARNING):
        checkpoint.load(tmp_path, ranks(fresh)[1], strict=False)
    assert "läyer/b" in caplog.text
    assert "residual for w" not in caplog.text
    assert fresh.residuals()[1]["w"].tobytes() == saved.residuals()[1]["w"].tobytes()
    assert fresh.owned()[1]["w"].tobytes() == saved.owned()[1]["w"].tobytes()
    assert not fresh.residuals()[1]["läyer/b"].any()


@pytest.mark.one_in(3)
@FRAMEWORKS
@pytest.mark.parametrize(
    ("before", "after", "size"),
    [("allgather", "sharded", 4), ("sharded", "hierarchical", 4), ("sharded", "allgather", RANKS)],
)
def test_another_number_of_ranks_or_exchange_owes_the_same(
    tmp_path: Path, backend: Backend, framework: str, before: str, after: str, size: int
) -> None:
    old = trained(backend, before, steps=1)
    save(old, tmp_path, framework)
    new = trained(backend, after, steps=0, size=size)
    load(tmp_path, new, framework)
    kept, found = owed(old), owed(new)
    for name, mass in kept.items():
        np.testing.assert_allclose(found[name], mass, rtol=1e-6, atol=1e-6)


def owed(world: World) -> dict[str, Any]:
    states = (compressor.state_dict() for compressor in world.ranks)
    total = pending(states, world.size, "average", world.backend.ops)
    return {name: world.backend.numpy(array) for name, array in total.items()}


def released(world: World) -> World:
    """One whose last tensor has left the plan, as it does at its first sparse gradient."""
    for compressor in world.ranks:
        compressor.replan(compressor.plan.without("läyer/b"))
    world.plan = world.ranks[0].plan
    return world


def spared(exchange: str, steps: int, size: int = RANKS, *, keeps: bool) -> World:
    """Ranks that owe for one of two tensors; the other has left the plan, or is kept."""
    config = TopK(ratio=0.1, min_numel=0, exchange=exchange)
    world = World(make_plan(SPECS, config), size, NATIVE)
    noise = np.random.default_rng(steps)
    for _ in range(steps):
        weights = [{"w": noise.normal(size=(37, 30)).astype("f4")} for _ in range(size)]
        world.step([{**each, "läyer/b": np.zeros(3, "f4")} for each in weights])
    return world if keeps else released(world)


@pytest.mark.parametrize("size", [RANKS, 2])
@pytest.mark.parametrize("keeps", [True, False])
@EXCHANGES
def test_a_tensor_that_is_not_compressed_any_more(
    tmp_path: Path, exchange: str, keeps: bool, size: int
) -> None:
    """Whichever of the two runs has given it up, on as many ranks or on others."""
    old = spared(exchange, 3, keeps=keeps)
    new = spared(exchange, 1, size, keeps=not keeps)
    save(old, tmp_path)
    load(tmp_path, new)
    kept, found = owed(old), owed(new)
    np.testing.assert_allclose(found["w"], kept["w"], rtol=1e-6, atol=1e-6)
    assert all(not mass["läyer/b"].any() for mass in (kept, found) if "läyer/b" in mass)


@pytest.mark.parametrize("size", [RANKS, 2])
@EXCHANGES
def test_what_is_owed_for_it_is_not_lost(tmp_path: Path, exchange: str, size: int) -> None:
    save(trained(NATIVE, exchange), tmp_path)
    new = spared(exchange, 1, size, keeps=False)
    before = kept(new)
    with pytest.raises(StateDictError, match=r"'läyer/b'.*would be lost"):
        for rank in ranks(new):  # not all have a part of it
            checkpoint.load(tmp_path, rank)
    assert kept(new) == before


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
@pytest.mark.parametrize("size", [RANKS, 2])
def test_the_newest_whole_checkpoint_is_loaded(
    tmp_path: Path, exchange: str, size: int, caplog: Any
) -> None:
    """One rank's disk is full, or the job is killed, while ranks replace a checkpoint."""
    old, new = trained(NATIVE, exchange), trained(NATIVE, exchange, steps=5)
    save(old, tmp_path)
    for rank in ranks(new)[1:]:
        checkpoint.save(tmp_path, rank)
    loaded = trained(NATIVE, exchange, steps=1, size=size)
    load(tmp_path, loaded)
    np.testing.assert_allclose(owed(loaded)["w"], owed(old)["w"], rtol=1e-6, atol=1e-6)
    assert "goes back to step 3" in caplog.text
    checkpoint.save(tmp_path, ranks(new)[0])  # now it is whole
    load(tmp_path, loaded)
    np.testing.assert_allclose(owed(loaded)["w"], owed(new)["w"], rtol=1e-6, atol=1e-6)


def test_a_folder_of_checkpoints_has_a_newest_whole_one(tmp_path: Path, caplog: Any) -> None:
    jobs = {steps: trained(NATIVE, "allgather", steps=steps) for steps in (2, 10, 11)}
    for steps, job in jobs.items():
        for rank in ranks(job)[: 2 if steps == 11 else RANKS]:
            checkpoint.save(tmp_path / f"step-{steps}", rank)
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    loaded = trained(NATIVE, "allgather", steps=1)
    load(tmp_path, loaded)
    assert kept(loaded) == kept(jobs[10])
    assert "step-10, of step 10" in caplog.text
    for rank in ranks(loaded):  # also those whose own file is there
        with pytest.raises(CheckpointError, match=r"no whole checkpoint: topkef-00002-of-00003"):
            checkpoint.load(tmp_path / "step-11", rank)


@pytest.mark.parametrize("where", ["file", "file/within", "link/within"])
def test_a_folder_that_cannot_be_is_refused_by_name(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "file")
    (state,) = ranks(trained(NATIVE, "allgather"))[:1]
    with pytest.raises(CheckpointError, match=r"cannot be created.*every rank may create files"):
        checkpoint.save(tmp_path / where, state)
    (tmp_path / "topkef-00000-of-00003.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoint.save(tmp_path, state)


@pytest.mark.parametrize("size", [RANKS, 2])
def test_another_reduction_is_refused(tmp_path: Path, size: int) -> None:
    save(trained(NATIVE, "sharded"), tmp_path)
    fresh = trained(NATIVE, "sharded", steps=1, size=size)
    rank = ranks(fresh)[0]
    rank.reduction = "sum"
    assert_refused(tmp_path, fresh, "average, these are reduced to their sum", rank)


@EXCHANGES
def test_another_shape_is_refused(exchange: str, tmp_path: Path) -> None:
    """With as many elements; owners of a node's sums keep them flat."""
    save(trained(NATIVE, exchange), tmp_path)
    turned = [TensorSpec("w", (30, 37), "float32"), SPECS[1]]
    fresh = trained(NATIVE, exchange, steps=1, specs=turned)
    assert_refused(tmp_path, fresh, r"'w': .*topkef-0000.*\[37, 30\]")


@EXCHANGES
def test_what_fits_is_shared_out_when_asked(tmp_path: Path, exchange: str) -> None:
    """With another number of ranks, and one tensor that has changed."""
    old = trained(NATIVE, "sharded")
    save(old, tmp_path)
    new = trained(NATIVE, exchange, steps=1, specs=CHANGED, size=2)
    for rank in ranks(new):
        checkpoint.load(tmp_path, rank, strict=False)
    np.testing.assert_allclose(owed(new)["w"], owed(old)["w"], rtol=1e-6, atol=1e-6)
    assert not owed(new)["läyer/b"].any()


def inactive(reason: str) -> Any:
    rank = ranks(trained(NATIVE, "allgather", steps=0))[0]
    rank.active, rank.rank_and_ranks, rank.skipped = False, (0, 1), {"*": reason}
    return rank


def test_a_rank_that_does_not_exchange_takes_on_nothing_and_says_so(
    tmp_path: Path, caplog: Any
) -> None:
    save(trained(NATIVE, "allgather"), tmp_path)
    with caplog.at_level(logging.WARNING):
        checkpoint.load(tmp_path, inactive("not in the process set"))
    assert "compresses nothing here" in caplog.text


def test_a_job_of_one_rank_does_not_lose_what_several_owe(tmp_path: Path, caplog: Any) -> None:
    save(trained(NATIVE, "allgather"), tmp_path)
    with pytest.raises(CheckpointError, match=r"residuals of 3 ranks.*Start two ranks or more"):
        checkpoint.load(tmp_path, inactive(ALONE))
    with caplog.at_level(logging.WARNING):
        checkpoint.load(tmp_path, inactive(ALONE), strict=False)
        checkpoint.load(tmp_path / "nothing", inactive(ALONE))
    assert caplog.text.count("compresses nothing here") == 2


def test_another_optimizers_shard_of_the_same_step_is_not_replaced(tmp_path: Path) -> None:
    one, other = (ranks(trained(NATIVE, "allgather"))[0] for _ in range(2))
    path = checkpoint.save(tmp_path, one)
    checkpoint.save(tmp_path, one)  # once more
    assert path is not None
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"another optimizer of this job.*name="):
        checkpoint.save(tmp_path, other)
    assert path.read_bytes() == before
    checkpoint.save(tmp_path, other, name="other")
    other.steps += 1
    checkpoint.save(tmp_path, other)  # of a later step, as a run that goes on elsewhere writes it


def test_what_one_setting_of_momentum_saved_another_does_not_take_on(tmp_path: Path) -> None:
    """Whether or not the exchange is the same."""
    plan = make_plan(SPECS, TopK(ratio=0.1, min_numel=0, momentum=0.9))
    save(World(plan, RANKS, NATIVE), tmp_path)
    for size in (RANKS, 2):
        plain = make_plan(SPECS, TopK(ratio=0.1, min_numel=0))
        with pytest.raises(StateDictError, match="velocities of momentum correction"):
            checkpoint.load(tmp_path, ranks(World(plain, size, NATIVE))[0])


@pytest.mark.parametrize("size", [2, RANKS])
def test_a_ratio_that_was_asked_for_goes_on(size: int, tmp_path: Path, caplog: Any) -> None:
    def world(ranks: int, first: float) -> World:
        config = TopK(ratio=0.1, min_numel=0, warmup=[(1, first)])
        return World(make_plan(SPECS, config), ranks, NATIVE)

    saved, resumed, others = world(RANKS, 0.5), world(size, 0.5), world(size, 0.4)
    saved.set_ratio(0.5)
    saved.step([{s.name: np.ones(s.shape, "f4") for s in SPECS}] * RANKS)
    save(saved, tmp_path)
    for rank, compressor in zip(ranks(resumed), resumed.ranks, strict=True):
        checkpoint.load(tmp_path, rank)
        assert compressor.ratio == 0.5
    with caplog.at_level(logging.WARNING):
        checkpoint.load(tmp_path, ranks(others)[0])
    assert others.ranks[0].ratio == 0.1
    assert "set_ratio(0.5) is no ratio" in caplog.text


def test_an_inactive_rank_saves_nothing(tmp_path: Path) -> None:
    rank = ranks(trained(NATIVE, "allgather"))[0]
    rank.state_dict = dict
    assert checkpoint.save(tmp_path / "new", rank) is None
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("size", [2, RANKS])
def test_warm_up_goes_on_where_it_was_saved(size: int, strict: bool, tmp_path: Path) -> None:
    plan = make_plan(SPECS, TopK(ratio=0.1, min_numel=0, warmup=[(2, 0.5), (4, 0.2)]))
    saved, resumed = World(plan, RANKS, NATIVE), World(plan, size, NATIVE)
    for _ in range(3):
        saved.step([{s.name: np.ones(s.shape, "f4") for s in SPECS}] * RANKS)
    for rank in ranks(saved):
        checkpoint.save(tmp_path, rank)
    for rank, compressor in zip(ranks(resumed), resumed.ranks, strict=True):
        assert compressor.ratio == 0.5
        checkpoint.load(tmp_path, rank, strict=strict)
        assert compressor.ratio == 0.2
        assert compressor.state_dict()["committed"] == 3


# Values that are loaded.

KEEP_NONE = [
    TernGrad(min_numel=0),
    SignSGD(majority=True, min_numel=0),
    RandomK(ratio=0.1, error_feedback=False, min_numel=0),
    QSGD(bits=2, block=4096, error_feedback=False, min_numel=0),
]


@each_backend
@pytest.mark.parametrize("method", KEEP_NONE, ids=lambda method: type(method).__name__)
def test_residuals_are_refused_where_none_are_kept(backend: Backend, method: Any) -> None:
    """Such a method would send them once, altered."""
    world = World(make_plan(SPECS, method), 2, backend)
    state = world.ranks[0].state_dict()
    world.ranks[0].load_state_dict(state)  # its own are zero
    state["residuals"]["w"] = backend.array(np.full(37 * 30, 0.5, "f4"), "float32")
    with pytest.raises(StateDictError, match=r"'w'.*norm of 16.7.*keeps no residual.*set_ratio"):
        world.ranks[0].load_state_dict(state)
    assert not world.residuals()[0]["w"].any()
    keeping = World(make_plan(SPECS, Dense(min_numel=0, exchange="allgather")), 2, backend)
    keeping.ranks[0].load_state_dict({**state, "committed": 1})
    assert keeping.residuals()[0]["w"].all()


@each_backend
@pytest.mark.parametrize("value", [1e38, -1e30, 1e17, math.nan])
def test_residuals_that_would_overflow_are_refused(backend: Backend, value: float) -> None:
    world = trained(backend, "sharded", steps=0)
    state = world.ranks[0].state_dict()
    before = kept(world)
    for part in (state, state["owned"]):
        one = np.zeros(backend.ops.numel(part["residuals"]["w"]), "f4")
        one[:40] = value
        bad = {**part, "residuals": {**part["residuals"], "w": backend.array(one, "float32")}}
        bad = bad if part is state else {**state, "owned": bad}
        if value == 1e17:
            world.ranks[0].load_state_dict(bad)
            continue
        with pytest.raises(StateDictError, match=r"'w'.*(at most 1e\+18 can be added|has a NaN)"):
            world.ranks[0].load_state_dict(bad)
        assert kept(world) == before


WRONG = {
    "arrivals": (-0.25, 1.5, math.nan),
    "energy": (-1.0, math.inf),
    "factors": (-0.5, 2.5),
    "lost": (math.inf,),
    "norms": (-1e-3, math.nan),
}


@each_backend
@pytest.mark.parametrize("rule", [SGD, ADAM], ids=lambda rule: rule.name)
def test_values_that_a_state_cannot_have_are_refused(backend: Backend, rule: Rule) -> None:
    world = World(make_plan(SPECS, TopK(0.1, min_numel=0), update_rule=rule), 2, backend)
    state = world.ranks[0].state_dict()
    world.ranks[0].load_state_dict(state)
    states = {key.removeprefix("state."): part for key, part in state.items() if "state." in key}
    assert set(states) <= set(WRONG)
    for name, part in states.items():
        for value in WRONG[name]:
            values = np.zeros(backend.ops.numel(part["residuals"]["w"]), "f4")
            values[-1] = value
            residuals = {**part["residuals"], "w": backend.array(values, "float32")}
            bad = {**state, f"state.{name}": {**part, "residuals": residuals}}
            with pytest.raises(StateDictError, match=f"'w'.*{name} have .*can only be from"):
                world.ranks[0].load_state_dict(bad)
    lost = {"lost": -3.0, "arrivals": 1.0, "factors": 2.0, "energy": 1e30, "norms": 1e30}
    for name, part in states.items():
        values = np.full(backend.ops.numel(part["residuals"]["w"]), lost[name], "f4")
        residuals = {**part["residuals"], "w": backend.array(values, "float32")}
        world.ranks[0].load_state_dict({**state, f"state.{name}": {**part, "residuals": residuals}})
        if name == "arrivals":  # earlier versions have saved phi, and not its code
            codes = world.ranks[0].state_dict()["state.arrivals"]["residuals"]["w"]
            assert backend.numpy(codes).tobytes() == b"\xff" * backend.ops.numel(codes)


NO_NUMBERS: dict[str, tuple[str, list[Any]]] = {  # a key of a state dict -> the error, and values
    "committed": ("steps were committed, which is no whole", [-1, 2**63, 2.0, "3", True, None]),
    "guard": (
        "a guard remembers",
        [
            *("many", [1.0], [math.nan] * 19, [0] * 19),
            *([2.0, *[0.0] * 20], [0.5, *[0.0] * 20], [*[0.0] * 7, -1.0, *[0.0] * 19]),
        ],
    ),
    "decision": ("a schedule decided", ["many", [0.25, "two"], [0.25, math.inf], [0.25] * 40]),
    "allocation": ("tensors were allocated", [{"w": 99}, {"w": 1.0}, [1], {3: 1}]),
    "rates": (
        "learning rates",
        [*({"w": each} for each in (0.0, -0.1, math.nan, "0.1", 10**400)), [0.1], None],
    ),
}


@pytest.mark.parametrize("key", NO_NUMBERS)
def test_numbers_that_a_state_cannot_have_are_refused(key: str) -> None:
    own = {"allocation": "adaptive"} if key == "allocation" else {"schedule": ByGradient()}
    config = replace(TopK(0.1, min_numel=0, warmup=5, guard=Guard()), **own)
    rank = World(make_plan(SPECS, config), 2, NUMPY).ranks[0]
    message, values = NO_NUMBERS[key]
    for value in values:
        with pytest.raises(StateDictError, match=message):
            rank.load_state_dict({**rank.state_dict(), key: value})
        assert (rank.ratio, rank.allocation) == (0.25, ())


def test_a_rank_waits_for_files_that_others_still_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks save without a barrier, and a shared folder may show a file late."""
    job = trained(NATIVE, "allgather")
    *_, last = saved = save(job, tmp_path)
    late = last.rename(tmp_path / "late")
    looks = iter(range(3))

    def sleep(_: float) -> None:
        if next(looks) == 2:
            late.rename(last)

    monkeypatch.setattr(checkpoint, "PATIENCE", 60.0)
    monkeypatch.setattr("horovod_topk.checkpoint.time.sleep", sleep)
    checkpoint.load(tmp_path, ranks(trained(NATIVE, "allgather"))[0])
    assert next(looks, None) is None and all(path.exists() for path in saved)
