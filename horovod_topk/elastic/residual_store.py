"""Committed residuals of each rank on disk, for another rank to take on if it is lost.

One file for each rank, in the format of `horovod_topk.checkpoint.shard`, whose state also has

    units      number of ranks for which its residuals are scaled
    clock      number of committed steps, and the requested ratio
    absorbed   files of lost ranks whose residuals are included in this file

Files are named by job and process, so that those of another job are never taken on. An absorbed
file is removed after the file that lists it is written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from horovod_topk.checkpoint import shard

SUFFIX = ".safetensors"

log = logging.getLogger("horovod_topk")


class ResidualStore:
    """The files of one job in a folder that all ranks can read."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, quote(name, safe="")

    def write(self, job: bytes, member: bytes, contents: Mapping[str, Any], framework: str) -> None:
        """Replace a member's file, and remove the files that are absorbed in it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / self._file(job, member)
        shard.write(path, shard.dump(contents, framework))
        for each in contents["absorbed"]:
            (self._folder / each).unlink(missing_ok=True)

    def of_lost(self, job: bytes, living: Iterable[bytes], committed: int) -> list[str]:
        """Files of lost members at this commit that no other file has absorbed."""
        prefix = f"{self._name}-{job.hex()}-"
        files = sorted(self._folder.iterdir()) if self._folder.is_dir() else ()
        ours = [f for f in files if f.name.startswith(prefix) and f.suffix == SUFFIX]
        facts = {file.name: shard.peek(file) for file in ours}
        absorbed = {each for fact in facts.values() for each in fact.get("absorbed", ())}
        living_files = {self._file(job, member) for member in living}
        lost = []
        for name, fact in facts.items():
            if name in absorbed or name in living_files:
                continue
            if fact.get("clock", [None])[0] == committed:
                lost.append(name)
            else:
                log.warning("TopKEF: %s is of another commit: it is not taken on", name)
        return lost

    def read(self, name: str, framework: str) -> dict[str, Any]:
        """Read the contents of a file.

        Raises:
            OSError, CheckpointError: the file is missing or damaged.
        """
        path = self._folder / name
        return shard.parse(path.read_bytes(), framework, str(path))

    def _file(self, job: bytes, member: bytes) -> str:
        return f"{self._name}-{job.hex()}-{member.hex()}{SUFFIX}"
