"""`horovod-topk bench` on two real ranks, beside torch's own process group."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from launcher import HOROVODRUN, TORCHRUN, Launch, run

pytestmark = [pytest.mark.distributed, pytest.mark.tools]

LIMIT = 300.0  # seconds; it needs about 15 on two idle cores
METHODS = "dense,dense-waiting,fp16,ddp,powersgd,topk,topk-int8-sharded"
METHODS += ",topk:momentum=0.9,ddp-none,ddp-fp16,ddp+topk-int8,local+topk-int8"
SHAPES = {"a": [30, 40], "b": [40], "c": [16, 16, 3, 3], "d": [10]}


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.one_in(3)
@pytest.mark.parametrize(("controller", "idle"), [("gloo", 0), ("gloo", 2), ("mpi", 2)])
def test_methods_on_two_ranks(controller: str, idle: int, tmp_path: Path) -> None:
    """All of them; with idle parameters all but PowerSGD."""
    methods = METHODS.replace("powersgd,", "") if idle else METHODS
    shapes, written, picture = (tmp_path / name for name in ("shapes.json", "out.json", "out.png"))
    shapes.write_text(json.dumps(SHAPES))
    command = [*HOROVODRUN, "-np", "2", f"--{controller}", sys.executable, "-m"]
    command += ["horovod_topk.cli", "bench", "--model", str(shapes), "--methods", methods]
    command += ["--rounds", "2", "--compute", "sleep:0.01", "--idle-parameters", str(idle)]
    command += ["--json", str(written), "--picture", str(picture)]
    launch = run(command, tmp_path, LIMIT, {})
    assert launch.returncode == 0, launch.describe()
    assert not launch.left and not launch.immortal
    found = json.loads(written.read_text())
    assert [each["name"] for each in found["methods"]] == ["none", *methods.split(",")]
    assert (found["ranks"], found["hosts"], found["counter"]) == (2, 1, None)
    for each in found["methods"]:
        assert len(each["seconds"]) == 2
        assert all(seconds >= 0.01 for seconds in each["seconds"])
    assert "topk-int8-sharded" in launch.output
    assert picture.stat().st_size > 10_000


@pytest.mark.timeout(LIMIT + 60)
def test_fsdp2_beside_ddp_on_four_ranks(tmp_path: Path) -> None:
    shapes, written = tmp_path / "shapes.json", tmp_path / "out.json"
    shapes.write_text(json.dumps(SHAPES))
    methods = ["ddp", "topk", "fsdp", "fsdp-bf16", "fsdp+topk", "fsdp+QSGD"]
    command = [*TORCHRUN, "--nproc-per-node=4", "-m", "horovod_topk.cli", "bench", "--rounds", "2"]
    command += ["--model", str(shapes), "--methods", ",".join(methods), "--json", str(written)]
    launch = run(command, tmp_path, LIMIT, {})
    assert launch.returncode == 0, launch.describe()
    found = json.loads(written.read_text())["methods"]
    assert [each["name"] for each in found] == ["none", "fsdp-none", *methods]
    assert [each["what"] for each in found][-1] == "FSDP2, QSGD"
    assert all(len(each["seconds"]) == 2 and min(each["seconds"]) > 0 for each in found)
    assert "FSDP2 shards within the two halves of the ranks." in launch.output


SCRIPT = """\
import sys
import horovod.torch as hvd
import torch
from beside import WIDTH

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(WIDTH, 3)
plain = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), hvd.Compression.none)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(5, WIDTH)).square().mean().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    scheduler.step()
print("the script has ended")
"""


def run_script(folder: Path, steps: int) -> tuple[Launch, Path]:
    """A user's script, whose folder has another module, in three ways."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("WIDTH = 2000\n")
    written = folder / "out.json"
    command = [*HOROVODRUN, "-np", "2", "--gloo", sys.executable, "-m", "horovod_topk.cli"]
    command += ["bench", "--script", str(folder / "train.py"), "--rounds", "3", "--json"]
    command += [str(written), "--methods", "dense,fp16,topk-int8", "--", str(steps)]
    return run(command, folder, LIMIT, {}), written


@pytest.mark.timeout(LIMIT + 60)
def test_a_script_of_the_users_own(tmp_path: Path) -> None:
    launch, written = run_script(tmp_path, 1000)
    assert launch.returncode == 0, launch.describe()
    assert "the script has ended" not in launch.output
    found = json.loads(written.read_text())
    assert (found["model"], found["elements"], found["tensors"]) == ("train.py", 6003, 2)
    methods = {each["name"]: each["seconds"] for each in found["methods"]}
    assert list(methods) == ["none", "dense", "fp16", "topk-int8"]
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in methods.values())


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 60)
def test_a_script_that_ends_too_early(tmp_path: Path) -> None:
    launch, _ = run_script(tmp_path, 2)
    assert launch.returncode not in (0, None)
    assert (
        "ended after 2 steps of an hvd.DistributedOptimizer, of which it takes 9" in launch.output
    )


@pytest.mark.timeout(LIMIT + 60)
def test_one_rank_is_told_to_be_more(tmp_path: Path) -> None:
    command = [*HOROVODRUN, "-np", "1", "--gloo", sys.executable, "-m", "horovod_topk.cli"]
    launch = run([*command, "bench", "--model", "resnet18"], tmp_path, LIMIT, {})
    assert launch.returncode not in (0, None)
    assert "1 rank exchanges nothing: run it as `horovodrun -np 2" in launch.output


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 60)
def test_results_of_something_else_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    """A picture shows one model: not one more line after minutes of measurement."""
    shapes, earlier = tmp_path / "shapes.json", tmp_path / "earlier.json"
    shapes.write_text(json.dumps(SHAPES))
    numbers = {"elements": 10, "tensors": 1, "hosts": 1, "rate": None, "counter": "loopback"}
    others = {"model": "resnet18", "ranks": 2, "compute": None, "idle parameters": False}
    earlier.write_text(json.dumps({**numbers, **others, "methods": [], "machine": {}}))
    command = [*HOROVODRUN, "-np", "2", "--gloo", sys.executable, "-m", "horovod_topk.cli"]
    command += ["bench", "--model", str(shapes), "--beside", str(earlier)]
    launch = run([*command, "--picture", str(tmp_path / "out.png")], tmp_path, LIMIT, {})
    assert launch.returncode not in (0, None)
    assert "one picture of runs that differ in more than bandwidth" in launch.output
    assert "step, s" not in launch.output and not launch.left
