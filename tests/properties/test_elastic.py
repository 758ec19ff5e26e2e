"""Ranks of an elastic job come, leave and are lost: what is owed stays, or is counted as lost."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import elastic
from oracle.elastic import Member

from horovod_topk.checkpoint import shard
from horovod_topk.core.control.guard import Memory
from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.core.run.stats import Stats
from horovod_topk.elastic import Manager
from horovod_topk.elastic.rank_status import Clock
from horovod_topk.errors import ConfigError, PlanMismatchError
from horovod_topk.methods.topk import TopK

SHAPES = {"w": [30, 7], "b": [5]}
GUARD = tuple(map(float, Memory(stage=3, since=5, trend=1)))


class Rank(Member):
    """One process: residuals, and their manager. It is its manager's `State` and `Talk`."""

    framework, active, part = "numpy", True, ""

    def __init__(self, commit_dir: Path | None, reduction: str) -> None:
        self.reduction = self.residual_reduction = reduction
        self.tensors = SHAPES
        self.residuals = {n: np.zeros(np.prod(s), "f4") for n, s in SHAPES.items()}
        self.clock = Clock(0)
        self.agreed: Plan | None = None
        self.manager = Manager(lambda: [self], self, "te[s]t/1", commit_dir)
        self.manager.save()

    # As a state.

    def state_dict(self) -> dict[str, Any]:
        copies = {name: e.copy() for name, e in self.residuals.items()}
        return {"version": 1, "ratio": 0.1, "shapes": SHAPES, "residuals": copies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.residuals = {name: e.copy() for name, e in state["residuals"].items()}

    def forget(self) -> None:
        self.residuals = {name: 0 * e for name, e in self.residuals.items()}

    def resume(self, clock: Clock, ranks: int) -> None:
        self.clock = clock

    def shared_state(self) -> dict[str, Any]:
        return {}

    def take_shared(self, state: Mapping[str, Any]) -> None:
        assert not state

    def stats(self) -> Stats:
        return self.manager.counted(Stats(residual_norm=float(np.linalg.norm(self.owed()))))

    def owed(self) -> np.ndarray[Any, Any]:
        return np.concatenate([self.residuals[name] for name in SHAPES]).astype("f8")

    # As a training script.

    def step(self, noise: np.random.Generator) -> None:
        for e in self.residuals.values():
            e += noise.normal(size=e.shape).astype("f4")
        late = self.clock[0] > 4
        asked, decision, guard = (0.25, (0.5, 1.0), GUARD) if late else (None, (), ())
        self.clock = Clock(self.clock[0] + 1, asked, decision, guard)


def sum_of(ranks: Sequence[Rank]) -> np.ndarray[Any, Any]:
    return np.sum([rank.owed() for rank in ranks], axis=0)


class Job(elastic.Job):
    """Ranks that step without an exchange."""

    def __init__(self, size: int, reduction: str, commit_dir: Path | None = None) -> None:
        self.reduction, self.commit_dir = reduction, commit_dir
        self.noise = np.random.default_rng(0)
        super().__init__(lambda: Rank(commit_dir, reduction), size)

    def step(self) -> None:
        for rank in self.ranks:
            rank.step(self.noise)

    @property
    def lost(self) -> set[int]:
        """How many ranks were lost, as each rank counts."""
        return {rank.stats().lost_ranks for rank in self.ranks}

    def mass(self) -> np.ndarray[Any, Any]:
        return sum_of(self.ranks) / (len(self.ranks) if self.reduction == "average" else 1)

    def assert_mass(self, expected: np.ndarray[Any, Any]) -> None:
        np.testing.assert_allclose(self.mass(), expected, rtol=2e-6, atol=2e-6)


def committed(size: int, reduction: str = "average", folder: Path | None = None) -> Job:
    """A job after a step and a commit."""
    job = Job(size, reduction, folder)
    job.step()
    job.commit()
    return job


reductions = pytest.mark.parametrize("reduction", ["average", "sum"])


@reductions
@pytest.mark.parametrize("joining", [0, 1, 3])
def test_who_joins_changes_nothing(reduction: str, joining: int) -> None:
    job = Job(3, reduction)
    job.step()
    before = job.mass()
    job.meet(joining=joining)
    job.assert_mass(before)
    assert all(np.all(e == 0) for rank in job.ranks[3:] for e in rank.residuals.values())


@reductions
@pytest.mark.parametrize("joining", [0, 1, 3])
@pytest.mark.parametrize("kept", [True, False], ids=["commit_dir", "in memory"])
def test_who_leaves_hands_over(reduction: str, joining: int, kept: bool, tmp_path: Path) -> None:
    job = Job(4, reduction, tmp_path if kept else None)
    for _ in range(3):
        job.step()
    before = job.mass()
    job.leave([1, 3], joining)
    job.assert_mass(before)
    assert all(rank.stats().lost_ranks == 0 for rank in job.ranks)


@reductions
def test_a_failure_after_handing_over_does_not_undo_it(reduction: str) -> None:
    job = committed(4, reduction)
    before = job.mass()
    job.leave([3])
    job.step()
    for rank in job.ranks:  # all of them live
        rank.manager.restore()
    job.meet()
    job.assert_mass(before)


@reductions
def test_what_the_lost_owed_is_kept_on_disk(reduction: str, tmp_path: Path) -> None:
    job = committed(4, reduction, tmp_path)
    before = job.mass()
    job.step()
    job.lose([0, 2], joining=1)
    job.assert_mass(before)
    assert job.lost == {0}


@reductions
def test_an_heir_lost_before_it_commits_inherits_nothing(reduction: str, tmp_path: Path) -> None:
    job = committed(5, reduction, tmp_path)
    before = job.mass()
    job.lose([4])
    job.assert_mass(before)
    job.lose([0])  # who took it on, and did not commit
    job.assert_mass(before)
    job.commit()
    after = job.mass()
    job.lose([1])  # now the files of the lost are gone, and nothing counts twice
    job.assert_mass(after)
    job.commit()
    assert len(list(tmp_path.glob("*.safetensors"))) == len(job.ranks)


def inherit_without_removing(job: Job, folder: Path) -> None:
    """Rank 3 is lost, and its heir too, before that has removed a file."""
    files = {file: file.read_bytes() for file in folder.iterdir()}
    job.lose([3])
    job.commit()
    for file, data in files.items():
        if not file.exists():
            file.write_bytes(data)


def test_an_heir_lost_between_writing_and_removing_counts_once(tmp_path: Path) -> None:
    job = committed(4, folder=tmp_path)
    before = job.mass()
    inherit_without_removing(job, tmp_path)
    job.lose([0])
    job.assert_mass(before)


def test_what_an_heir_had_absorbed_counts_once_for_its_heir(tmp_path: Path) -> None:
    job = committed(4, folder=tmp_path)
    before = job.mass()
    inherit_without_removing(job, tmp_path)
    job.lose([0])
    job.commit()
    job.lose([2])
    job.assert_mass(before)


def test_without_a_folder_the_loss_is_counted() -> None:
    job = committed(4)
    owed = sum(rank.stats().residual_norm ** 2 for rank in job.ranks[2:]) ** 0.5
    remains = sum_of(job.ranks[:2])
    job.lose([2, 3], joining=3)
    job.assert_mass(remains / 4)  # what the two who are left had a share of
    told = {(rank.stats().lost_ranks, rank.stats().lost_norm) for rank in job.ranks}
    assert len(told) == 1
    lost, norm = told.pop()
    assert lost == 2
    assert norm == pytest.approx(owed, rel=0.2)


def test_another_commit_is_not_taken_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = committed(3, folder=tmp_path)
    job.step()
    for rank in job.ranks[:2]:  # the third is lost before it commits, too
        rank.manager.save()
    job.lose([2])
    assert job.lost == {1}
    assert "is of another commit" in caplog.text


def test_a_damaged_file_is_counted_as_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = committed(3, folder=tmp_path)
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-3] + b"odd")
    job.lose([2])
    assert job.lost == {1}
    assert "is damaged or cut short" in caplog.text


def spoiled(job: Job, **facts: Any) -> Path:
    """The file of the job's last rank, with other facts and a digest that is right."""
    assert job.commit_dir is not None
    member = job.ranks[-1].manager._member.hex()
    (file,) = job.commit_dir.glob(f"*{member}.safetensors")
    state = shard.parse(file.read_bytes(), "numpy", "")
    file.write_bytes(shard.dump({**state, **facts}, "numpy"))
    return file


LISTED = ["../beside", "/tmp/beside", "beside", "", "x/../../beside", 7, None]


@pytest.mark.parametrize("name", LISTED, ids=repr)
def test_what_a_file_lists_is_this_jobs_own_or_it_is_refused(
    name: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Commits delete files that are listed as taken on."""
    (tmp_path / "beside").write_text("of somebody else")
    job = Job(3, "average", tmp_path / "commits")
    (tmp_path / "commits").mkdir(exist_ok=True)
    (tmp_path / "commits" / "beside").write_text("of somebody else")
    job.step()
    job.commit()
    listed = str(tmp_path / "beside") if name == "/tmp/beside" else name
    own = spoiled(job).name
    spoiled(job, absorbed=[own.replace(own[-20:-12], "0" * 8), listed])
    job.lose([2])
    job.step()
    job.commit()
    assert job.lost == {1}
    assert "lists" in caplog.text
    assert (tmp_path / "beside").exists()
    assert (tmp_path / "commits" / "beside").exists()


@pytest.mark.parametrize(
    "facts",
    [
        *({"units": wrong} for wrong in (0, -1, 2**40, 1.5, "3", None, True)),
        *({"clock": wrong} for wrong in ([], [1], 3, None, ["1", None], [-1, None], [1, 2.0])),
        *({"absorbed": wrong} for wrong in ("abc", 5, {"a": 1}, [["a"]])),
    ],
    ids=str,
)
def test_numbers_that_no_rank_writes_are_refused(
    facts: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = committed(3, folder=tmp_path)
    spoiled(job, **facts)
    job.lose([2], joining=1)
    assert job.lost == {1}
    assert "is no file as a rank of this job writes it" in caplog.text


def test_another_job_in_the_same_folder_is_left_alone(tmp_path: Path) -> None:
    other = Job(2, "average", tmp_path)
    other.step()
    other.commit()
    job = Job(2, "average", tmp_path)
    job.assert_mass(0 * job.mass())
    job.step()
    job.commit()
    job.lose([1])
    job.commit()
    assert len(list(tmp_path.iterdir())) == 3


def test_who_joins_learns_the_clock() -> None:
    job = Job(2, "average")
    for _ in range(6):
        job.step()
    job.meet(joining=2)
    assert {rank.clock for rank in job.ranks} == {(6, 0.25, (0.5, 1.0), GUARD)}


def test_what_a_joiner_has_loaded_is_the_others_already() -> None:
    job = Job(2, "average")
    job.step()
    before = job.mass()
    late = Rank(None, "average")
    late.step(job.noise)
    job.ranks.append(late)
    job.meet()
    job.assert_mass(before)


def test_a_rank_that_went_back_to_another_step_is_counted_as_lost() -> None:
    job = committed(3)
    job.step()
    for rank in job.ranks[:2]:
        rank.manager.save()
    job.lose([])
    assert job.lost == {1}
    assert not job.ranks[2].owed().any()


def test_a_loss_is_counted_once() -> None:
    job = committed(3)
    job.lose([2])
    job.lose([])  # before the next commit
    assert job.lost == {1}


@pytest.mark.parametrize("elder_knows", [True, False])
def test_a_joiner_with_another_plan_is_refused_on_every_rank(elder_knows: bool) -> None:
    job = Job(3, "average")
    ours, theirs = (make_plan([TensorSpec("w", (n, 7), "float32")], TopK()) for n in (30, 31))
    for rank in job.ranks[0 if elder_knows else 1 :]:
        rank.agreed = ours
    job.step()
    before = sum_of(job.ranks)
    joiner = Rank(None, "average")
    joiner.agreed = theirs
    job.ranks.append(joiner)
    refused: list[str] = []

    def settle(rank: Rank) -> None:
        with pytest.raises(PlanMismatchError) as raised:
            rank.manager.reconcile()
        refused.append(str(raised.value))

    job.together(settle)
    assert len(refused) == 4
    assert all("ranks disagree on shapes" in each and "on rank 3" in each for each in refused)
    assert (sum_of(job.ranks) == before).all()


def test_a_joiner_that_knows_no_plan_yet_is_welcome() -> None:
    job = Job(2, "average")
    for rank in job.ranks:
        rank.agreed = make_plan([TensorSpec("w", (30, 7), "float32")], TopK())
    job.meet(joining=1)
    assert job.ranks[2].manager.units == 3


def test_two_optimizers_behind_one_keeper_are_refused() -> None:
    rank = Rank(None, "average")
    manager = Manager(lambda: [rank, rank], rank, "test")
    with pytest.raises(ConfigError, match="2 optimizers share one TopKEF in an elastic job"):
        manager.save()


@reductions
@pytest.mark.parametrize("seed", range(5))
def test_a_long_life(reduction: str, seed: int, tmp_path: Path) -> None:
    job, draw = Job(3, reduction, tmp_path), random.Random(seed)
    for _ in range(12):
        for _ in range(draw.randint(0, 2)):
            job.step()
        job.commit()
        before, size = job.mass(), len(job.ranks)
        gone = draw.sample(range(size), draw.randint(0, size - 1))
        change = draw.choice([job.leave, job.lose])
        change(gone, joining=draw.randint(0, 3))
        job.assert_mass(before)
    assert all(rank.stats().lost_ranks == 0 for rank in job.ranks)
