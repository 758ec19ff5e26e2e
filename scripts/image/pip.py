"""This machine's pip settings, handed to the build and to nothing that is kept of it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

CERTIFICATES = "/etc/pip_cert.pem"  # where the Dockerfile mounts them
PLACES = ("index-url", "extra-index-url", "find-links")
KEPT = (*PLACES, "cert", "proxy", "trusted-host", "timeout", "retries")


@dataclass(frozen=True)
class PipSettings:
    """What the build's pip is told."""

    text: str = ""  # of its pip.conf
    certificates: Path | None = None  # of this machine; the build finds them in CERTIFICATES
    folders: tuple[Path, ...] = ()  # of this machine, that have packages

    @classmethod
    def of(cls, listing: str) -> PipSettings:
        """From what `pip config list` prints; the environment's settings come before a file's."""
        found: dict[str, str] = {}
        for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):
            match = re.fullmatch(r"(?::env:|\w+)\.([\w-]+)=('.*'|\".*\")", line)
            if match and match[1] in KEPT:
                found[match[1]] = str(ast.literal_eval(match[2]))
        certificates = Path(found["cert"]) if "cert" in found else None
        folders = [
            folder
            for name in PLACES
            for place in found.get(name, "").split()
            if (folder := _folder(place))
        ]
        if certificates:
            found["cert"] = CERTIFICATES
        lines = [f"{name} = {' '.join(value.split())}\n" for name, value in found.items()]
        return cls("[global]\n" + "".join(lines), certificates, tuple(dict.fromkeys(folders)))

    @classmethod
    def of_this_machine(cls) -> PipSettings:
        """As pip itself finds them."""
        command = [sys.executable, "-m", "pip", "config", "list"]
        listed = subprocess.run(command, capture_output=True, text=True)
        return cls.of(listed.stdout) if listed.returncode == 0 else cls()

    def secrets(self, folder: Path) -> list[str]:
        """The options that hand them to the build, after their file was written to `folder`."""
        file = folder / "pip.conf"
        file.write_text(self.text)
        options = ["--secret", f"id=pip_conf,src={file}"]
        if self.certificates:
            options += ["--secret", f"id=pip_cert,src={self.certificates}"]
        return options


def _folder(place: str) -> Path | None:
    """The folder that a place is in, with the packages its index names beside it; None for URLs."""
    if place.startswith("/"):
        return Path(place)
    if not place.startswith("file:"):
        return None
    path = Path(unquote(urlparse(place).path))
    return path.parent if path.name == "simple" else path
