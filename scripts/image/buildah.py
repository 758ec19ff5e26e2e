"""Image by buildah, which needs no engine that runs; hosts of `cluster` run its files.

A container is a host, that is namespaces of its own for mounts, processes and the network, whose
root is the image's files with a layer over them that goes with the host. No capability is taken
from it and no limit is put on it: this is a check of the image, and no way to run what one does not
trust.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import Cluster, ClusterError, missing
from image.pip import PipSettings
from setup.run import Runner, SetupError

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
IMAGE = "localhost/horovod-topk:latest"
SUITE = "bookworm"
BOOTSTRAPPED = f"localhost/debian-{SUITE}:debootstrap"
SETTINGS = {"BUILDAH_ISOLATION": "chroot"}  # no other works in a container that is not privileged
PULL_SECONDS = 90
ROOT_OF_HOST = "/run/image/root"
FURNISH = """
set -eu
mkdir -p /run/image
mount -t tmpfs image /run/image
cd /run/image
mkdir upper work root
mount -t overlay -o "lowerdir=$1,upperdir=upper,workdir=work" image root
for folder in proc sys dev; do mount --rbind /$folder root/$folder; done
mount -t tmpfs -o mode=1777 shm root/dev/shm
cp /etc/hosts root/etc/hosts
install -d -o "$3" -g "$3" -m 700 /run/keys
mount --bind /run/keys "root/$2/.ssh"
"""


class ImageError(SetupError):
    """The image cannot be built or does not work; the message says what failed, and the cure."""


def unfit() -> str | None:
    """Why images cannot be built and run here, with the cure; None where they can."""
    if os.geteuid() != 0:
        return "buildah and namespaces need root: use sudo"
    if not shutil.which("buildah"):
        return "buildah is not installed. On Debian and Ubuntu: apt-get install buildah"
    return missing()


@dataclass(frozen=True)
class Configuration:
    """What an image says of how it is run."""

    user: str
    uid: int
    home: str
    folder: str
    variables: tuple[str, ...]  # NAME=value
    entrypoint: tuple[str, ...]

    @classmethod
    def of(cls, inspected: str, tree: Path) -> Configuration:
        """From `buildah inspect` and the image's files, where users have their homes."""
        config = json.loads(inspected)["OCIv1"]["config"]
        user = config["User"]
        for line in (tree / "etc" / "passwd").read_text().splitlines():
            name, _, uid, _, _, home, _ = line.split(":")
            if user in (name, uid):
                return cls(
                    *(user, int(uid), home, config["WorkingDir"]),
                    *(tuple(config["Env"]), tuple(config["Entrypoint"])),
                )
        raise ImageError(f"the image's user {user!r} is not in its /etc/passwd")

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What an engine runs in a container."""
        inside = ["env", "--ignore-environment", f"--chdir={self.folder}", f"HOME={self.home}"]
        chroot = ["chroot", f"--userspec={self.user}", ROOT_OF_HOST]
        return [*chroot, *inside, *self.variables, *self.entrypoint, *arguments]


class Buildah:
    """buildah with a storage of its own.

    Args:
        runner: of its commands.
        base: another base image than the Dockerfile's.
        storage: a folder that is kept, with the layers; else a temporary one.
    """

    def __init__(
        self, runner: Runner, base: str | None = None, storage: Path | None = None
    ) -> None:
        self._runner, self._base, self._kept = runner, base, storage
        self._tree: Path | None = None

    def __enter__(self) -> Buildah:
        # Not on a small /tmp in memory: without overlayfs every layer is kept whole.
        self._storage = self._kept or Path(tempfile.mkdtemp(prefix="check-image-", dir="/var/tmp"))
        self._storage.mkdir(parents=True, exist_ok=True)
        self._storage = self._storage.resolve()
        self._images = ["buildah", "--root", f"{self._storage}/root", "--runroot"]
        self._images += [f"{self._storage}/run"]
        self._env = os.environ | SETTINGS
        return self

    def __exit__(self, *_: object) -> None:
        end_processes_below(self._storage)
        if self._kept:
            subprocess.run([*self._images, "rm", "--all"], env=self._env, capture_output=True)
        unmount_below(self._storage)
        if not self._kept:
            shutil.rmtree(self._storage)

    def build(self, frameworks: Sequence[str], settings: PipSettings) -> None:
        """Build the image."""
        command = ["bud", "--layers", "--format", "oci", "--file", DOCKERFILE, "--tag", IMAGE]
        command += ["--build-arg", f"BASE={self._base_image()}"]
        command += ["--build-arg", f"FRAMEWORKS={' '.join(frameworks)}"]
        for folder in settings.folders:
            command += ["--volume", f"{folder}:{folder}:ro"]
        self._runner.console.step(f"Building {DOCKERFILE.name} (log: {self._runner.log})")
        with tempfile.TemporaryDirectory() as place:
            secrets = settings.secrets(Path(place))
            self._check([*command, *secrets, ROOT], "the build failed")

    def _base_image(self) -> str:
        if self._base:
            return self._base
        wanted = base_of(DOCKERFILE)
        if BOOTSTRAPPED in self._check(["images", "--format", "{{.Name}}:{{.Tag}}"], "images"):
            return BOOTSTRAPPED
        self._runner.console.step(f"Fetching {wanted}")
        pull = ["timeout", "--foreground", str(PULL_SECONDS), *self._images, "pull", wanted]
        with contextlib.suppress(SetupError):
            self._runner.check(pull, "no registry", env=self._env)
            return wanted
        self._runner.console.step("No registry answers: making a base of Debian's packages")
        with tempfile.TemporaryDirectory(dir=self._storage) as folder:
            tree = Path(folder, "base")
            self._runner.check(bootstrap(tree), "debootstrap failed")
            container = self._check(["from", "scratch"], "no container").split()[-1]
            self._check(["add", "--quiet", container, tree, "/"], "the base cannot be copied")
            self._check(["commit", "--rm", container, BOOTSTRAPPED], "no base image")
        return BOOTSTRAPPED

    def _files(self) -> Path:
        """Of the image, in a container that is never run."""
        if self._tree is None:
            container = self._check(["from", "--pull-never", IMAGE], "no container").split()[-1]
            mounted = self._check(["mount", container], "no files").split()[-1]
            self._tree = Path(mounted)
        return self._tree

    def size(self) -> int:
        """Bytes of the image's files, compressed by nothing."""
        counted = subprocess.run(
            ["du", "--summarize", "--apparent-size", "--block-size=1", self._files()],
            stdout=subprocess.PIPE,
            check=True,
        )
        return int(counted.stdout.split()[0])

    @contextlib.contextmanager
    def containers(self, count: int) -> Iterator[HostContainers]:
        """So many, for as long as a `with` block lasts."""
        inspected = self._check(["inspect", "--type", "image", IMAGE], "no image")
        configuration = Configuration.of(inspected[inspected.index("\n{") :], self._files())
        try:
            with Cluster(count) as cluster:
                made = HostContainers(cluster, self._files(), configuration)
                made.start()
                yield made
        except ClusterError as error:
            raise ImageError(str(error)) from error

    def _check(self, command: Sequence[object], failure: str) -> str:
        command = [*self._images, *command]
        return self._runner.check(command, failure, env=self._env, error=ImageError)


class HostContainers:
    """Hosts of a cluster whose root is the image's: all but the first run sshd, with one key."""

    def __init__(self, cluster: Cluster, tree: Path, configuration: Configuration) -> None:
        self.names = [host.name for host in cluster.hosts]
        self._hosts, self._tree, self._configuration = cluster.hosts, tree, configuration

    def start(self) -> None:
        """Change their root, and start sshd on all but the first."""
        home, uid = self._configuration.home, str(self._configuration.uid)
        for host in self._hosts:
            host.check(["sh", "-c", FURNISH, "sh", str(self._tree), home, uid])
        quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        for host in self._hosts[1:]:
            host.start(self._configuration.command(["sshd"]), **quiet)

    def run(self, command: Sequence[str], *, limit_seconds: float) -> str:
        """Run a command in a container that is the first host; what it printed."""
        inside = self._configuration.command(command)
        try:
            return self._hosts[0].run(inside, limit_seconds=limit_seconds)
        except ClusterError as error:
            raise ImageError(str(error)) from error


def base_of(dockerfile: Path) -> str:
    """The one that a Dockerfile names as its default."""
    found = re.search(r"^ARG BASE=(\S+)$", dockerfile.read_text(), re.MULTILINE)
    if not found:
        raise ImageError(f"{dockerfile.name} names no default for BASE")
    return found[1]


def bootstrap(folder: Path) -> list[str]:
    """The command that makes Debian's smallest system in `folder`."""
    if not shutil.which("debootstrap"):
        raise ImageError(
            "no image registry answers, and debootstrap is not installed: "
            "apt-get install debootstrap, or name an image that is here: --base IMAGE"
        )
    return ["debootstrap", "--variant=minbase", SUITE, str(folder), "http://deb.debian.org/debian"]


def end_processes_below(folder: Path) -> None:
    """Kill what runs with a root below `folder`: a build that was interrupted leaves some."""
    deadline = time.monotonic() + 10
    while (found := _processes_below(folder)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _processes_below(folder: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "root").readlink().is_relative_to(folder):
                found.append(int(process.name))
    return found


def unmount_below(folder: Path) -> None:
    """What buildah has mounted in `folder`: deleting the folder would delete that too."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for place in sorted((m for m in mounts if Path(m).is_relative_to(folder)), reverse=True):
        if subprocess.run(["umount", place], capture_output=True).returncode:
            raise ImageError(f"{place} cannot be unmounted: {folder} is left behind")
