"""Elastic Horovod on one machine, with hosts that are only names.

Horovod's driver takes one host off a job whenever a process of it fails, so a job on one machine
has to have many. A stand-in for ssh runs their ranks here; a file says which hosts there are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

SSH = '#!/bin/sh\nfor command; do :; done\nexec sh -c "$command"\n'  # what its last argument says
WITH_PATH = 'PATH=$1:$PATH; shift; exec "$@"'


class Hosts:
    """The hosts of one job, each with room for one rank."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._file = folder / "hosts"
        self._programs, self._discovery = folder / "bin", folder / "discover"
        self.are(names)
        self._programs.mkdir()
        _script(self._programs / "ssh", SSH)
        _script(self._discovery, f"#!/bin/sh\ncat '{self._file}'\n")

    def are(self, names: Sequence[str]) -> None:
        """From now on; Horovod looks once a second."""
        draft = self._file.with_suffix(".new")
        draft.write_text("".join(f"{name}:1\n" for name in names))
        draft.replace(self._file)

    def command(
        self, ranks: int, most: int, *script: str, options: Sequence[str] = ()
    ) -> list[str]:
        """What starts a job."""
        horovodrun = str(Path(sys.executable).with_name("horovodrun"))
        elastic = ["--min-np", "1", "--max-np", str(most), "--host-discovery-script"]
        places = [*elastic, str(self._discovery), "--network-interface", "lo"]
        job = [horovodrun, "--gloo", "-np", str(ranks), *places, *options, sys.executable, *script]
        return ["sh", "-c", WITH_PATH, "sh", str(self._programs), *job]


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
