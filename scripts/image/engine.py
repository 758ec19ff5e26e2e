"""What builds images and runs containers of them: Docker, or buildah and namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from cluster import missing as cluster_missing
from image.errors import ImageError
from image.pip import PipSettings

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile.cpu"


class Containers(Protocol):
    """Containers on one network, with one key: all but the first run sshd."""

    @property
    def names(self) -> Sequence[str]:
        """Of the hosts."""

    def run(self, command: Sequence[str], *, limit_seconds: float) -> str:
        """Run a command in a container that is the first host; what it printed.

        Raises:
            ImageError: it failed, or took longer; with the end of what it printed.
        """


class Engine(Protocol):
    """Builds the image, once, and runs it."""

    def build(self, frameworks: str, settings: PipSettings) -> None:
        """Build the image.

        Raises:
            ImageError: it failed, with the cause.
        """

    def size(self) -> int:
        """Bytes of the image's files, compressed by nothing."""

    def containers(self, count: int) -> AbstractContextManager[Containers]:
        """So many, for as long as a `with` block lasts."""


def chosen(asked: str, docker_runs: Callable[[], bool], unfit: Callable[[], str | None]) -> str:
    """The name of the engine: the one asked for, or for "auto" Docker where it runs.

    Args:
        asked: "docker", "buildah" or "auto".
        docker_runs: whether Docker's engine answers.
        unfit: why buildah cannot be used; None where it can.

    Raises:
        ImageError: it is not to be had, with the cure.
    """
    if asked != "buildah" and docker_runs():
        return "docker"
    if asked == "docker":
        raise ImageError("no Docker engine answers `docker info`: start one, or --engine buildah")
    if reason := unfit():
        raise ImageError(reason)
    return "buildah"


def docker_runs() -> bool:
    """Whether there is an engine behind the command."""
    if not shutil.which("docker"):
        return False
    command = ["docker", "info", "--format", "{{.ServerVersion}}"]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def buildah_unfit() -> str | None:
    """Why images cannot be built and run by buildah here, with the cure."""
    if os.geteuid() != 0:
        return "without a Docker engine this needs root, for buildah and namespaces: use sudo"
    if not shutil.which("buildah"):
        return "neither a Docker engine nor buildah. On Debian and Ubuntu: apt-get install buildah"
    return cluster_missing()
