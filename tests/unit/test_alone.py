"""With PyTorch alone, or TensorFlow alone, everything works but Horovod's adapters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import horovod_topk

BLOCK = """\
import sys


class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in {absent}
        return None if hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""
OTHERS = ["horovod", "mpi4py", "psutil", "scipy", "matplotlib", "tqdm", "safetensors"]
WITH = {
    "torch": ["tensorflow", "keras", "numpy", *OTHERS],
    "tensorflow": ["torch", *OTHERS],
    "nothing": ["torch", "tensorflow", "keras", "numpy", *OTHERS],
}


def run(folder: Path, present: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that finds one framework alone, as do its children."""
    (folder / "sitecustomize.py").write_text(BLOCK.format(absent=set(WITH[present])))
    package = Path(horovod_topk.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{folder}:{package}", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.tools
@pytest.mark.parametrize("present", WITH)
def test_commands(present: str, tmp_path: Path) -> None:
    code = """
from horovod_topk import cli
assert cli.main(["plan", "--model", "resnet18", "--ranks", "4", "--compute", "9ms",
                 "--bandwidth", "1gbit"]) == 0
assert cli.main(["bytes", "--model", "resnet18", "--ranks", "4"]) == 0
assert cli.main(["doctor", "--no-exchange"]) == 0
"""
    done = run(tmp_path, present, code)
    assert done.returncode == 0, done.stderr
    assert "Horovod               not installed" in done.stdout
    for absent in ("controllers", "NCCL ", "mpirun"):
        assert absent not in done.stdout
    needs = "Horovod               not installed; horovod_topk.ddp needs none"
    assert (needs in done.stdout) == (present == "torch")


@pytest.mark.parametrize(
    ("present", "module", "cure"),
    [
        ("torch", "torch", "from horovod_topk.ddp import TopKEF"),
        ("torch", "torch.elastic", "from horovod_topk.ddp import TopKEF"),
        ("torch", "tensorflow", "horovod_topk.ddp"),
        ("nothing", "ddp", "pip install torch"),
        ("nothing", "tensorflow.keras", "horovod-topk doctor"),
        ("nothing", "tensorflow.elastic", "horovod-topk doctor"),
    ],
)
def test_an_adapter_whose_host_is_absent(
    present: str, module: str, cure: str, tmp_path: Path
) -> None:
    done = run(tmp_path, present, f"from horovod_topk.{module} import TopKEF")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("horovod_topk.errors.AdapterImportError: ")
    assert "No module named" in last
    assert cure in last


@pytest.mark.tools
@pytest.mark.distributed
def test_bench_and_a_ddp_model_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text('{"a": [64, 64], "b": [64]}')
    code = f"""
import subprocess, sys
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
bench = ["-m", "horovod_topk.cli", "bench", "--model", {str(tmp_path / "shapes.json")!r}]
sys.exit(subprocess.call([*torchrun, *bench, "--rounds", "2"]))
"""
    done = run(tmp_path, "torch", code)
    assert done.returncode == 0, done.stderr
    for method in ("ddp ", "ddp-fp16", "topk ", "topk-int8-sharded"):
        assert f"\n{method}" in done.stdout
    assert "verdict" in done.stdout
