"""Simulated ranks: their loopback network, what a run is, and the pool that trains cells."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from horovod_topk.cli.compare import session
from horovod_topk.cli.compare.records import DIVERGED, DONE, FAILED, LATE, Cell, Record, Store
from horovod_topk.cli.compare.settings import of_file
from horovod_topk.cli.compare.simulated.local import LocalJob
from horovod_topk.cli.compare.simulated.training import Task, job_of, train
from horovod_topk.cli.compare.simulated.workload import load
from horovod_topk.core.exchange.loopback import Loopback
from horovod_topk.local.call import parse
from horovod_topk.ops.torch import TorchOps
from study import loops, optimizers
from study.workloads import workload

pytestmark = pytest.mark.tools

WORKLOADS = Path(workload.__code__.co_filename)
OPTIONS = {"task": "digits", "optimizer": "sgd", "shards": "equal", "lr": 0.1, "steps": 5}


def run(compressor: str, ranks: int = 2, limit: float = 100.0, **options: Any) -> Record:
    cell = Cell(compressor, 0, (), (), ())
    return train(Task(cell, WORKLOADS, ranks, tuple((OPTIONS | options).items()), limit))


def scores(record: Record) -> list[float | None]:
    return [point.metrics["accuracy"] for point in record.points]


VERBS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], list[list[float]]]] = {
    "allgather": (lambda c, mine: c.allgather(mine, "a"), [[1, 2, 10, 20]] * 2),
    "alltoall": (lambda c, mine: c.alltoall(mine, "a"), [[1, 10], [2, 20]]),
    "reduce_scatter": (lambda c, mine: c.reduce_scatter(mine, [0, 2], "a"), [[], [11, 22]]),
    "allreduce": (lambda c, mine: c.allreduce(mine, "a"), [[11, 22]] * 2),
}


@pytest.mark.parametrize("verb", VERBS)
def test_collectives_among_all_ranks_and_in_groups(verb: str) -> None:
    """Return gradients in rank order, step after step. The second pair is 100 times larger."""
    start, expected = VERBS[verb]
    network = Loopback(4, TorchOps())
    everyone = [network.collective(rank) for rank in range(4)]
    pairs = [next(filter(None, each.split([(0, 1), (2, 3)]))) for each in everyone]
    for _ in range(2):
        handed = [torch.tensor([1.0, 2.0]) * 10**rank for rank in range(4)]
        pending = [start(each, mine) for each, mine in zip(pairs, handed, strict=True)]
        found = [each.wait().tolist() for each in pending]
        assert found[:2] == expected and found[2:] == [[100 * n for n in e] for e in expected]
    assert not network.group((0, 1))._posted


def test_a_collective_that_a_rank_never_started_is_an_error() -> None:
    pending = Loopback(2, TorchOps()).collective(0).allgather(torch.zeros(1), "a")
    with pytest.raises(TimeoutError, match=r"only ranks \[0\] of 2"):
        pending.wait()


def test_a_run_is_scored_at_even_distances_and_repeats_to_the_bit() -> None:
    first = run("TopKEF(ratio=0.01, values='int4', exchange='sharded')")
    again = run("TopKEF(ratio=0.01, values='int4', exchange='sharded')")
    assert [point.step for point in first.points] == [1, 2, 3, 4, 5]
    assert scores(first) == scores(again)
    assert first.sent_bytes is not None and first.dense_bytes is not None
    assert 0 < 20 * first.sent_bytes < first.dense_bytes


@pytest.mark.parametrize("more", [", warmup=None", ", warmup=None, momentum=0"])
def test_ratios_by_hand_count(more: str) -> None:
    usual = run(f"TopKEF(ratio=0.01{more})").sent_bytes
    larger = run(f"TopKEF(ratio={{'*.weight': 0.1, '*': 0.01}}{more})").sent_bytes
    assert usual is not None and larger is not None and larger > 2 * usual


@pytest.mark.parametrize("exchange", ["allgather", "sharded", "hierarchical", "auto"])
def test_an_exchange_of_everything_trains_as_dense_does(exchange: str) -> None:
    whole = run(f"TopKEF(ratio=1.0, exchange={exchange!r})", ranks=4)
    assert scores(whole) == scores(run("none", ranks=4))


def test_fp16_sends_half_and_trains_alike() -> None:
    half, full = run("fp16"), run("none")
    assert half.sent_bytes == full.sent_bytes / 2 and half.dense_bytes == full.dense_bytes
    assert scores(half)[-1] == pytest.approx(scores(full)[-1], abs=0.02)


LOCAL = "TopKEF(ratio=0.05, values='int4', momentum=0, warmup=None)"


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [("decay=0.9", 3), ("fragments=2, delay=1, outer=Outer(lr=0.7, momentum=0.5)", 4)],
)
def test_local_steps_repeat_to_the_bit_and_send_a_round_at_a_time(
    settings: str, rounds: int
) -> None:
    """With a delay the last round is under way when the ranks synchronise, in one more."""
    call = f"LocalSteps({LOCAL}, every=2, {settings})"
    first, again = (run(call, ranks=3, steps=6) for _ in range(2))
    assert scores(first) == scores(again)
    each = run(LOCAL, ranks=3)  # of a step
    assert first.sent_bytes == pytest.approx(each.sent_bytes * rounds / 6, rel=0.1)
    assert first.dense_bytes == each.dense_bytes


def test_local_steps_of_one_step_train_as_dense_does() -> None:
    local = run("LocalSteps(Dense, every=1, outer=Outer())", lr=0.05)
    assert scores(local) == pytest.approx(scores(run("none", lr=0.05)), abs=0.01)


def test_ranks_that_take_local_steps_end_with_equal_weights_and_buffers() -> None:
    made = loops.workload(model="residual", optimizer="momentum", lr=0.05, steps=3)
    job = job_of(made, parse(f"LocalSteps({LOCAL}, every=2)"), 3, seed=0)
    assert isinstance(job, LocalJob)
    for _ in range(3):
        job.step()
    states = [replica.model.state_dict() for replica in job.replicas]
    assert not torch.equal(states[0]["stem.1.running_mean"], states[1]["stem.1.running_mean"])
    sent = job.traffic["sent"]
    job.finish()
    assert job.traffic["sent"] == 2 * sent
    for other in states[1:]:
        assert all(torch.equal(states[0][name], other[name]) for name in other)


def test_each_optimizer_of_a_model_takes_local_steps() -> None:
    options = {"model": "transformer", "optimizer": "Muon and AdamW", "lr": 0.01, "steps": 4}
    call = f"LocalSteps({LOCAL}, every=2)"
    script = Path(optimizers.__file__)
    record = train(Task(Cell(call, 0, (), (), ()), script, 2, tuple(options.items()), 100.0))
    assert record.status == DONE and record.sent_bytes > 0


def test_a_run_that_diverges_ends_at_once() -> None:
    record = run("TopKEF(ratio=0.01)", lr=1e30)
    assert record.outcome("accuracy") == DIVERGED
    assert record.points[-1].step < OPTIONS["steps"]


def test_a_run_that_takes_too_long_is_cut_off() -> None:
    assert run("none", limit=0.0, steps=50).status == LATE


def test_skewed_shards_give_each_rank_few_labels_and_lose_no_row() -> None:
    seen = {}
    for shards in ("equal", "skewed"):
        study = workload(**OPTIONS | {"shards": shards})
        sources = [study.batches(rank, 4, 0) for rank in range(4)]
        seen[shards] = [
            set(torch.cat([next(source)[1] for _ in range(10)]).tolist()) for source in sources
        ]
    assert all(len(labels) == 10 for labels in seen["equal"])
    assert all(len(labels) <= 4 for labels in seen["skewed"])
    assert set().union(*seen["skewed"]) == set(range(10))


def test_a_script_without_a_workload_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text("x = 1")
    with pytest.raises(ValueError, match="no function workload"):
        load(tmp_path / "nothing.py")


TOML = f"""
script = "{WORKLOADS}"
simulated = true
seeds = 2
metric = "accuracy"
baselines = {{ dense = "none" }}
compressors = {{ small = "TopKEF(ratio=0.01)" }}
[options]
task = "digits"
optimizer = "sgd"
shards = "equal"
steps = 2
[grid]
lr = [0.1, 1e-3]
"""


@pytest.mark.slow
def test_a_grid_is_trained_in_processes_and_kept_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(TOML)
    settings, store = of_file(path), Store(tmp_path / "kept.jsonl")
    assert session.run_all(settings, store)
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 8
    assert session.run_all(settings, Store(tmp_path / "kept.jsonl"))
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 8
    found = session.results(settings[0], Store(tmp_path / "kept.jsonl"))
    assert [dict(each.variant) for each in found] == [{"lr": 0.1}, {"lr": 0.001}]
    for each in found:
        assert [row.name for row in each.rows] == ["dense", "small"]
        assert each.rows[1].verdict is not None and each.budget is None
        assert {run.status for runs in each.runs.values() for run in runs.values()} == {DONE}


@pytest.mark.slow
def test_a_cell_that_fails_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(TOML.replace('task = "digits"', 'task = "figits"'))
    store = Store(tmp_path / "kept.jsonl")
    assert not session.run_all(of_file(path), store)
    (line,) = (tmp_path / "kept.jsonl").read_text().splitlines()
    assert FAILED in line and "figits" in line


SLEEPING = """
import os, pathlib, time
def workload():
    pathlib.Path({!r}).write_text(str(os.getpid()))
    time.sleep(600)
"""
POOL = """
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from horovod_topk.cli.compare.records import Cell
from horovod_topk.cli.compare.simulated.pool import results
list(results([(Cell("none", 0, (), (), ()), Path({!r}), 2, (), 1.0)], 1))
"""


@pytest.mark.timeout(60)
def test_a_worker_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script, noted = tmp_path / "sleeping.py", tmp_path / "pid"
    script.write_text(SLEEPING.format(str(noted)))
    parent = subprocess.Popen([sys.executable, "-c", POOL.format(str(script))])
    while not (noted.exists() and noted.read_text()):
        time.sleep(0.1)
    worker = psutil.Process(int(noted.read_text()))
    parent.kill()
    parent.wait()
    worker.wait(timeout=20)
    assert not worker.is_running()


@pytest.mark.parametrize("model", [name for name in loops.LOOPS if name != "wide"])
def test_loops_of_the_study_train_and_clip(model: str) -> None:
    options = {"model": model, "optimizer": "nesterov", "lr": 0.1, "steps": 2, "shards": "skewed"}
    ends = []
    for clip_norm in (0, 1e-6):
        given = (options | {"clip_norm": clip_norm}).items()
        call = "TopKEF(momentum='auto', follow_lr='auto')"
        task = Task(Cell(call, 0, (), (), ()), Path(loops.__file__), 2, tuple(given), 100.0)
        record = train(task)
        assert record.status == DONE
        ends.append(record.points[-1].metrics)
    assert ends[0] != ends[1] and None not in ends[0].values()
