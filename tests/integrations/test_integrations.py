"""Accelerate, Transformers' Trainer and Lightning on real ranks, in the releases of conftest.py.

Each case of a library is a launch of its script under torchrun, with Gloo. `make
test-integrations` runs them: they install the libraries into an environment of their own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from launcher import REPOSITORY, TORCHRUN, run

HERE = Path(__file__).parent
LIMIT = 150.0  # seconds a launch; about 15 on two idle cores
LIBRARIES = ["accelerate", "transformers", "lightning"]
FIRST = "TopKEF(min_numel=0) compresses 12,481 elements of a"
ALONE = "TopKEF compresses nothing: world size 1"

pytestmark = [pytest.mark.tiers("integrations"), pytest.mark.timeout(3 * LIMIT + 600)]


class Trained:
    """A launch of a library's script, and what its ranks have reported."""

    def __init__(self, python: Path, folder: Path, name: str, ranks: int, *words: str) -> None:
        folder.mkdir(exist_ok=True)
        command = [str(python), *TORCHRUN[1:], f"--nproc-per-node={ranks}"]
        resume = words or ("-",)
        files = str(HERE / f"train_{name}.py"), str(folder / "report"), str(folder / "saved")
        paths = f"{REPOSITORY}:{HERE}"
        settings = {"PYTHONPATH": paths, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.launch = run([*command, *files, *resume], folder, LIMIT, settings)
        self.failed, self.output = self.launch.returncode != 0, self.launch.output
        self.saved = folder / "saved"
        reports = [folder / f"report.{rank}" for rank in range(ranks)]
        self.ranks: list[Any] = [json.loads(p.read_text()) for p in reports if p.exists()]

    def check(self) -> None:
        """The ranks have trained, ended with equal weights, and sent much less than dense."""
        assert not self.failed, self.output[-4000:]
        assert not self.launch.immortal
        assert all(rank["weights"] == self.ranks[0]["weights"] for rank in self.ranks)
        for rank in self.ranks:
            assert rank["active"] and rank["residual_norm"] > 0
            assert rank["sent_bytes"] * 15 < rank["dense_bytes"]  # ten times as much in warm-up

    @property
    def checkpoint(self) -> Path:
        """The one that was saved in the middle of the run."""
        middle = "checkpoint-4", "at-step=6.ckpt"
        return next((p for p in self.saved.glob("*") if p.name in middle), self.saved)


@pytest.mark.parametrize("name", LIBRARIES)
def test_ranks_are_equal_and_a_resumed_run_is_as_one_that_never_stopped(
    python: Path, tmp_path: Path, name: str
) -> None:
    whole = Trained(python, tmp_path / "whole", name, 2)
    whole.check()
    assert whole.output.count(FIRST) == 1  # rank 0 alone
    again = tmp_path / "again"
    shutil.copytree(whole.saved, again / "saved")
    shutil.rmtree(again / "saved/checkpoint-8", ignore_errors=True)  # of Trainer
    middle = again / whole.checkpoint.relative_to(tmp_path / "whole")
    resumed = Trained(python, again, name, 2, str(middle))
    resumed.check()
    assert resumed.ranks[0]["steps"] < whole.ranks[0]["steps"]
    assert resumed.ranks[0]["weights"] == whole.ranks[0]["weights"]
    residuals = [rank["residual_norm"] for rank in whole.ranks]
    assert [rank["residual_norm"] for rank in resumed.ranks] == residuals


@pytest.mark.parametrize("name", LIBRARIES)
def test_one_process_says_that_nothing_is_compressed(
    python: Path, tmp_path: Path, name: str
) -> None:
    found = Trained(python, tmp_path, name, 1, "-", "alone")
    assert not found.failed, found.output[-4000:]
    assert found.output.count(ALONE) == 1
    assert not found.ranks[0]["active"] and "world size 1" in found.ranks[0]["skipped"]["*"]


@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_a_checkpoint_without_residuals_is_an_error(
    python: Path, tmp_path: Path, name: str
) -> None:
    dense = Trained(python, tmp_path, name, 2, "-", "dense")
    assert not dense.failed, dense.output[-4000:]
    found = Trained(python, tmp_path, name, 2, str(dense.checkpoint))
    assert found.failed
    assert "has no residuals. Pass strict=False to begin with zeros" in found.output


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("unwrapped", "the optimizer steps, and no model in DDP was called"),
        ("forgotten", "the library has no optimizer of this DistributedDataParallel's parameters"),
        ("hooked", "the model has a hook, "),
    ],
)
def test_accelerate_does_not_train_dense_without_a_word(
    python: Path, tmp_path: Path, word: str, error: str
) -> None:
    found = Trained(python, tmp_path, "accelerate", 2, "-", word)
    assert found.failed and f"ConfigError: {error}" in found.output


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_compiled_models(python: Path, tmp_path: Path, name: str) -> None:
    found = Trained(python, tmp_path, name, 2, "-", "compiled")
    found.check()
    assert found.output.count(FIRST) == 1


def test_the_example_of_trainer(python: Path, tmp_path: Path) -> None:
    script = str(REPOSITORY / "examples/trainer_bytelm.py")
    command = [str(python), *TORCHRUN[1:], "--nproc-per-node=2", script, "--steps", "40"]
    launch = run(command, tmp_path, LIMIT, {"PYTHONPATH": str(REPOSITORY)})
    assert launch.returncode == 0, launch.describe()
    assert "TopKEF: " in launch.output and "bits a byte after 40 steps" in launch.output
    assert "compresses 2" in launch.output  # hundred thousands of elements


def test_lightning_with_fsdp2_on_two_nodes_of_two_ranks(python: Path, tmp_path: Path) -> None:
    whole = Trained(python, tmp_path / "whole", "lightning", 4, "-", "sharded")
    whole.check()
    middle = str(whole.checkpoint)
    resumed = Trained(python, tmp_path / "again", "lightning", 4, middle, "sharded")
    resumed.check()
    assert resumed.ranks[0]["weights"] == whole.ranks[0]["weights"]
