"""The image by Docker."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from image.engine import DOCKERFILE, ROOT, ImageError
from image.pip import PipSettings
from setup.run import Runner

KEYS = "/home/horovod/.ssh"


class Docker:
    """Docker's engine. What it makes has a name with our process's id, and is removed."""

    def __init__(self, runner: Runner, base: str | None = None) -> None:
        self._runner, self._base = runner, base
        self._prefix = f"check-image-{os.getpid()}"
        self._image = f"{self._prefix}:latest"

    def __enter__(self) -> Docker:
        return self

    def __exit__(self, *_: object) -> None:
        quietly("image", "rm", "--force", self._image)

    def build(self, frameworks: Sequence[str], settings: PipSettings) -> None:
        """See `Buildah.build`."""
        if settings.folders:
            names = ", ".join(map(str, settings.folders))
            raise ImageError(
                f"pip takes packages from {names}, which Docker cannot mount into a build: set "
                "PIP_CONFIG_FILE to settings with an index that is served, or --engine buildah"
            )
        with tempfile.TemporaryDirectory() as folder:
            command = ["docker", "build", "--file", DOCKERFILE, "--tag", self._image]
            command += ["--build-arg", f"FRAMEWORKS={' '.join(frameworks)}"]
            command += ["--build-arg", f"BASE={self._base}"] if self._base else []
            self._check([*command, *settings.secrets(Path(folder)), ROOT], "the build failed")

    def size(self) -> int:
        """Bytes of the image's files, compressed by nothing."""
        inspect = ["docker", "image", "inspect", "--format", "{{.Size}}", self._image]
        return int(self._check(inspect, "the image cannot be read").split()[-1])

    @contextlib.contextmanager
    def containers(self, count: int) -> Iterator[DockerContainers]:
        """So many, for as long as a `with` block lasts."""
        made = DockerContainers(self._prefix, self._image, count)
        try:
            made.start()
            yield made
        finally:
            made.remove()

    def _check(self, command: Sequence[object], failure: str) -> str:
        return self._runner.check(command, failure, error=ImageError)


class DockerContainers:
    """Containers of one image that share an ssh key. All but the first run sshd."""

    def __init__(self, prefix: str, image: str, count: int) -> None:
        self.names = [f"node{number}" for number in range(1, count + 1)]
        self._prefix, self._image = prefix, image

    def start(self) -> None:
        """The network, the folder with the key, and sshd in all containers but the first."""
        said("network", "create", self._prefix)
        said("volume", "create", self._prefix)
        for name in self.names[1:]:
            said("run", "--detach", *self._options(name), self._image, "sshd")

    def run(self, command: Sequence[str], *, limit_seconds: float) -> str:
        """See `HostContainers.run`."""
        options = ["--rm", *self._options(self.names[0])]
        return said("run", *options, self._image, *command, limit_seconds=limit_seconds)

    def remove(self) -> None:
        """All of it; idempotent."""
        for name in self.names:
            quietly("rm", "--force", f"{self._prefix}-{name}")
        quietly("volume", "rm", "--force", self._prefix)
        quietly("network", "rm", self._prefix)

    def _options(self, name: str) -> list[str]:
        return [
            *("--init", "--name", f"{self._prefix}-{name}", "--hostname", name),
            *("--network", self._prefix, "--network-alias", name),
            *("--volume", f"{self._prefix}:{KEYS}"),
        ]


def said(*arguments: str, limit_seconds: float = 60) -> str:
    """What a command of Docker printed."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = ["docker", *arguments]
    try:
        done = subprocess.run(command, **output, text=True, timeout=limit_seconds)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired as late:
        raise ImageError(f"{' '.join(command)}: took longer than {limit_seconds:g} s") from late
    if done.returncode:
        raise ImageError(f"{' '.join(command)}: failed\n{done.stdout[-4000:]}")
    return str(done.stdout)


def quietly(*arguments: str) -> None:
    """For what may be gone already."""
    subprocess.run(["docker", *arguments], capture_output=True)
