"""Which engine builds images and runs containers of them: Docker, or buildah and namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from cluster import missing as cluster_missing
from setup.run import SetupError

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"


class ImageError(SetupError):
    """The image cannot be built or does not work; the message says what failed, and the cure."""


def chosen(asked: str, docker_runs: Callable[[], bool], unfit: Callable[[], str | None]) -> str:
    """The name of the engine: the one asked for, or for "auto" Docker where it runs."""
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
