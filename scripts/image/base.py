"""The base image: from its registry or, where none answers, Debian's packages by debootstrap."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from image.errors import ImageError

SUITE = "bookworm"
BOOTSTRAPPED = f"localhost/debian-{SUITE}:debootstrap"


def of(dockerfile: Path) -> str:
    """The one that a Dockerfile names as its default."""
    found = re.search(r"^ARG BASE=(\S+)$", dockerfile.read_text(), re.MULTILINE)
    if not found:
        raise ImageError(f"{dockerfile.name} names no default for BASE")
    return found[1]


def bootstrap(folder: Path) -> list[str]:
    """The command that makes Debian's smallest system in `folder`.

    Raises:
        ImageError: the program is missing.
    """
    if not shutil.which("debootstrap"):
        raise ImageError(
            "no image registry answers, and debootstrap is not installed: "
            "apt-get install debootstrap, or name an image that is here: --base IMAGE"
        )
    return ["debootstrap", "--variant=minbase", SUITE, str(folder), "http://deb.debian.org/debian"]
