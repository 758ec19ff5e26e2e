"""`horovod-topk doctor` says what is there, what is amiss, and what cures it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from horovod_topk import cli
from horovod_topk.cli import launcher
from horovod_topk.cli.doctor import exchange, kernels, software, system
from horovod_topk.cli.doctor.exchange import MARK
from horovod_topk.cli.doctor.finding import Finding, version
from horovod_topk.cli.doctor.software import Build
from horovod_topk.kernels import native, triton
from horovod_topk.reporting import RANKS

pytestmark = pytest.mark.tools

BOTH = Build(("torch", "tensorflow"), ("gloo", "mpi"))
BROKEN = Build(("torch",), error="undefined symbol")


def lines(*, isolated: bool = False, **variables: str) -> dict[str, str]:
    """What it prints in a fresh interpreter, by its first column; starts no ranks.

    isolated: without any installed package, frameworks among them.
    """
    package = str(Path(cli.__file__).parents[2])
    flags = ["-S"] if isolated else []
    done = subprocess.run(
        [sys.executable, *flags, "-m", "horovod_topk.cli", "doctor", "--no-exchange"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": package, **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert " tensorflow/" not in done.stderr  # where TensorFlow's log lines come from
    return {line[:22].strip(): line[22:] for line in done.stdout.splitlines()}


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="no kernels were built")
def test_what_it_says_here() -> None:
    found = lines(HOROVOD_TOPK_NATIVE="1", HOROVOD_TOPK_ISA="portable")
    assert found["kernels for the CPU"].startswith("portable (")
    assert found["in TensorFlow graphs"] == "the same, as operations of a graph"
    assert found["kernels for the GPU"] == "PyTorch sees no GPU"
    assert found["Horovod"] == "0.28.1"
    assert "gloo" in found["controllers"]
    assert found["FSDP2"] == "horovod_topk.fsdp, over a mesh with gloo"
    assert "two ranks exchange" not in found


@pytest.mark.slow
def test_what_it_says_without_kernels() -> None:
    found = lines(HOROVOD_TOPK_NATIVE="0")
    reason = "none, framework operations do the work: HOROVOD_TOPK_NATIVE=0"
    assert found["kernels for the CPU"] == reason
    assert found["in TensorFlow graphs"].startswith("none, TensorFlow's own operations")


def test_what_it_says_where_nothing_is_installed() -> None:
    found = lines(isolated=True)
    assert found["Horovod"].startswith("not installed")
    assert not {"controllers", "NCCL", "mpirun", "ssh"} & {*found}
    assert found["PyTorch"] == found["TensorFlow"] == found["Keras"] == "not installed"
    assert "lo 127.0.0.1" in found["network interfaces"]


def test_a_finding_has_its_cure_below_it() -> None:
    assert Finding("a", "fine").lines() == [f"{'a':<22}fine"]
    assert Finding("a", "bad", "mend it").lines()[1] == f"{'':<22}cure: mend it"


# Software


@pytest.mark.parametrize("spelling", ["a_framework_cpu", "a-framework-cpu", "a_nightly"])
def test_a_version_is_found_however_the_distribution_is_spelt(
    spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the module's name is known."""
    folder = tmp_path / f"{spelling.replace('-', '_')}-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {spelling}\nVersion: 9.9\n")
    (folder / "top_level.txt").write_text("a_framework\n")
    (tmp_path / "a_framework.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert version("a-framework-cpu", "none", module="a_framework") == "9.9"
    assert version("none") is None
    assert version("none", module="no_framework") is None
    (tmp_path / "a_stray.py").touch()
    assert version("none", module="a_stray") == "of unknown version"


MPIRUN, VENV = "/venv/bin/mpirun", Path("/venv")
LOCAL, CARD = {"lo": ["127.0.0.1"]}, {"eth0": ["10.0.0.1"]}
DOCKER = {"docker0": ["172.17.0.1"]}
USES = "torch's gloo uses {}, as the host name's address decides"
TORCH = "torch", "HOROVOD_WITH_PYTORCH"
OWN = "horovod_topk.tensorflow.keras"
FINDINGS = [  # a finding, the end of what it says, and a part of its cure
    (software.horovod("0.28.1", BOTH), "0.28.1", ""),
    (software.horovod("0.27.0", BOTH), "0.27.0, not tested", "0.28.1 is: `make setup` builds it"),
    (software.horovod(None, None), "not installed", "make setup"),
    (software.horovod("0.28.1", BROKEN), "cannot be used: undefined symbol", "make setup"),
    (software.controllers(BOTH), "gloo, mpi", ""),
    (software.controllers(Build(())), "cannot find each other", "HOROVOD_WITH_GLOO=1"),
    (software.nccl(BOTH, gpu=False), "not built in", ""),
    (software.nccl(BOTH, gpu=True), "through the host", "HOROVOD_GPU_OPERATIONS=NCCL"),
    (software.nccl(Build((), (), nccl=True), gpu=True), "built in", ""),
    (software.framework("PyTorch", "2.13.0", *TORCH, BOTH), "2.13.0", ""),
    (software.framework("PyTorch", None, *TORCH, BOTH), "not installed", ""),
    (software.framework("PyTorch", "2", *TORCH, Build(())), "not built for", "WITH_PYTORCH=1"),
    (software.keras("3.15.1", "2.20.1", legacy=False), "with Keras 3", OWN),
    (software.keras("3.15.1", None, legacy=False), "with Keras 3", "pip install tf-keras"),
    (software.keras("3.15.1", "2.20.1", legacy=True), "by TF_USE_LEGACY_KERAS=1", ""),
    (software.keras("3.15.1", None, legacy=True), "without tf-keras", "pip install tf-keras"),
    (software.keras("2.15.0", None, legacy=False), "2.15.0", ""),
    (software.keras(None, None, legacy=False), "not installed", ""),
    (software.data_parallel(["gloo", "mpi"]), "horovod_topk.ddp, over gloo, mpi", ""),
    (software.data_parallel(None), "not available", ""),
    (software.fsdp2(["mpi"]), "not available", ""),
    (system.mpirun("/bin/mpirun", lambda _: "Open MPI"), "Open MPI (/bin/mpirun)", ""),
    (system.mpirun(None, lambda _: None), "not found", "--gloo"),
    (system.mpirun("/bin/mpirun", lambda _: None), "does not run", "--gloo"),
    (system.mpirun(MPIRUN, str, wheel=True), "", "export OPAL_PREFIX=/venv, because"),
    (system.mpirun(MPIRUN, str, wheel=True, environment={"OPAL_PREFIX": "/venv"}), "", ""),
    (system.without_launcher(VENV, {}), "aborts in hvd.init()", "-np 1 python train.py; or export"),
    (system.without_launcher(VENV, {"OPAL_PREFIX": "/venv"}), "as a single rank", ""),
    (system.without_launcher(None, {}), "as a single rank", ""),
    (system.ssh(None), "on this host only", "openssh-client"),
    (system.ssh("/usr/bin/ssh"), "/usr/bin/ssh", ""),
    (system.host_name("lonely", None), "Gloo needs it", "/etc/hosts"),
    (system.host_name("here", "10.0.0.1"), "here, 10.0.0.1", ""),
    (  # as Debian's /etc/hosts has it; see docs/across-nodes.md
        system.host_name("debian", "127.0.1.1"),
        "debian, 127.0.1.1, which other hosts cannot reach",
        "in /etc/hosts an address that the others can reach",
    ),
    (system.interfaces(LOCAL), "no other host can be reached", "connect this one"),
    (system.interfaces(LOCAL | CARD), "among several eth0", ""),
    (system.interfaces(LOCAL | DOCKER | CARD), "of docker0, eth0", "--network-interfaces eth0"),
    (system.gloo_interface(LOCAL, "127.0.0.1"), "no other host can be reached", "connect this one"),
    (system.gloo_interface(LOCAL | DOCKER | CARD, "10.0.0.1"), USES.format("eth0"), ""),
    (system.gloo_interface(LOCAL | CARD, "127.0.1.1"), USES.format("lo"), "SOCKET_IFNAME=eth0"),
    (system.gloo_interface(LOCAL | CARD, None), USES.format("lo"), "SOCKET_IFNAME=eth0"),
]


@pytest.mark.parametrize(("finding", "said", "cure"), FINDINGS)
def test_what_is_found_and_its_cure(finding: Finding, said: str, cure: str) -> None:
    assert finding.found.endswith(said)
    assert cure in finding.cure and bool(cure) == bool(finding.cure)


# Kernels for the GPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if PyTorch saw one, and Triton were there."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton, "unavailable", lambda device: None)


def test_which_settings_have_kernels_on_a_gpu(gpu: None) -> None:
    served, without = (finding.found for finding in kernels.gpu_kernels())
    values = "values float32, float16, bfloat16, int8, int4, int3, int2, sign"
    assert served == f"Triton, for {values} with every exchange"
    assert "values" not in without
    assert "float64 gradients" in without


def test_the_list_follows_the_code_that_chooses(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no kernel is listed, too: here float16."""
    monkeypatch.setattr(triton, "unsupported", lambda recipe, device: recipe[2] == 1 or None)
    served, without = (finding.found for finding in kernels.gpu_kernels())
    listed = "float32, bfloat16, int8, int4, int3, int2, sign"
    assert served == f"Triton, for values {listed} with every exchange"
    assert "values float16" in without


def test_a_gpu_without_triton(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "unavailable", lambda device: "Triton is not installed")
    (finding,) = kernels.gpu_kernels()
    assert finding.found == "none, PyTorch's operations do the work: Triton is not installed"
    assert "Triton 3.6 or newer" in finding.cure


# The machine


@pytest.mark.parametrize("mpi", [True, False])
@pytest.mark.parametrize("variable", [None, "OPAL_PREFIX", *RANKS])
def test_what_a_script_says_before_it_would_abort(
    mpi: bool, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPAL_PREFIX", *RANKS):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "0")
    monkeypatch.setattr(launcher, "wheel_prefix", lambda: Path("/venv"))
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "1"])
    hvd = SimpleNamespace(mpi_built=lambda: mpi)
    found = launcher.problem(hvd)
    assert (found is not None) == (mpi and variable is None)
    if found:
        assert "Run horovodrun -np 1 python train.py --lr 1; or export OPAL_PREFIX=/venv" in found


@pytest.mark.skipif(launcher.wheel_prefix() is None, reason="Open MPI is not from its wheel")
def test_hvd_init_aborts_and_an_example_says_so() -> None:
    """Plain `python`: the cure in place of Open MPI's page, where hvd.init() would abort."""
    hvd = pytest.importorskip("horovod.torch")
    if not hvd.mpi_built():
        pytest.skip("Horovod without MPI starts without a launcher")
    examples = Path(__file__).parents[2] / "examples"
    gone = {"OPAL_PREFIX", *RANKS}
    environment = {name: value for name, value in os.environ.items() if name not in gone}
    done = subprocess.run(
        [sys.executable, "pytorch_synthetic_benchmark.py"],
        cwd=examples,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("No launcher started this script, so hvd.init() would abort.")
    assert "MPI_Init" not in done.stderr


def test_the_status_says_whether_ranks_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "find_build", lambda: Build(()))  # without a controller
    for module in (software, kernels, system):
        monkeypatch.setattr(module, "findings", lambda *_: iter(()))
    assert cli.main(["doctor"]) == 1
    assert cli.main(["doctor", "--no-exchange"]) == 0


# The exchange


def test_how_a_launch_is_read() -> None:
    good = exchange.read(0, f"[0]<stdout>:{MARK} an allgather in 1 ms\n", "gloo", 9.0)
    assert good == Finding(exchange.NAME, "an allgather in 1 ms, on gloo")
    assert "not over after 9 s" in exchange.read(None, "", "gloo", 9.0).found
    bad = exchange.read(1, "a\nb\nc\nd\n", "mpi", 9.0)
    assert bad.found == "failed: exit status 1: b | c | d"
    assert "mpirun" in bad.cure
    assert exchange.read(0, "silence", "gloo", 9.0).cure


def test_no_launch_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "activate" in exchange.meet(["gloo"]).cure


def test_without_horovod_torchs_own_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    met = Finding(exchange.NAME, "met")
    monkeypatch.setattr(software, "find_build", lambda: None)
    monkeypatch.setattr(exchange, "meet_without_horovod", lambda: met)
    for module in (software, kernels, system):
        monkeypatch.setattr(module, "findings", lambda *_: iter(()))
    assert cli.main(["doctor"]) == 0


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_of_torchrun() -> None:
    found = exchange.meet_without_horovod()
    assert found.found.endswith("on torch's gloo")
    assert not found.cure


def test_a_launch_that_takes_too_long_is_ended() -> None:
    began = time.monotonic()
    code = "import time; print('begun', flush=True); time.sleep(600)"
    assert exchange.run([sys.executable, "-c", code], 1.0) == (None, "")
    assert time.monotonic() - began < 30
