"""What each rank has committed, on disk, for another one to take on if it is lost.

One file a rank, a shard as `horovod_topk.checkpoint.shard` has it, whose state says besides

    units      how many ranks its residuals are of
    clock      how many steps were committed, and the ratio asked for
    absorbed   files of lost ranks whose residuals are in this one

Files are named by job and process, so that another job's are never taken on. One that is absorbed
is of no use any more: it is removed once the file that names it is written.
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
        """Replace a member's file, and remove those that are absorbed in it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / self._file(job, member)
        shard.write(path, shard.dump(contents, framework))
        for each in contents["absorbed"]:
            (self._folder / each).unlink(missing_ok=True)

    def of_lost(self, job: bytes, living: Iterable[bytes], committed: int) -> list[str]:
        """Files of members that are no more, of that commit, and in nobody else's file yet."""
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
        """The contents of a file.

        Raises:
            OSError, CheckpointError: it is not there, or damaged.
        """
        path = self._folder / name
        return shard.parse(path.read_bytes(), framework, str(path))

    def _file(self, job: bytes, member: bytes) -> str:
        return f"{self._name}-{job.hex()}-{member.hex()}{SUFFIX}"
