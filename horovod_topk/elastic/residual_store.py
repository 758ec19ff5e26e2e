"""Committed residuals of each rank on disk, for another rank to take on if it is lost.

One file for each rank, in the format of `horovod_topk.checkpoint.shard`, whose state also has

    units      number of ranks for which its residuals are scaled
    clock      number of committed steps, and the requested ratio
    absorbed   files of lost ranks whose residuals are included in this file

Files are named by job and process, so that those of another job are never taken on. An absorbed
file is removed after the file that lists it is written. So what a file lists has to be names of
files of this job in this folder, or it is refused, and so are numbers that no job writes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from horovod_topk.checkpoint import shard
from horovod_topk.checkpoint.contents import is_count
from horovod_topk.core.state.state_dict import ASKED, COMMITTED, asked_of, committed_of
from horovod_topk.errors import CheckpointError, StateDictError

SUFFIX = ".safetensors"

MOST_RANKS = 2**32  # as the status of a rank counts them

log = logging.getLogger("horovod_topk")


class ResidualStore:
    """The files of one job in a folder that all ranks can read."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, quote(name, safe="")

    def write(self, job: bytes, member: bytes, contents: Mapping[str, Any], framework: str) -> None:
        """Replace a member's file, and remove the files that are absorbed in it."""
        shard.make_folder(self._folder)
        path = self._folder / self._file(job, member)
        shard.write(path, shard.dump(contents, framework))
        for each in contents["absorbed"]:
            if self._is_ours(job, each):
                (self._folder / each).unlink(missing_ok=True)

    def of_lost(self, job: bytes, living: Iterable[bytes], committed: int) -> list[str]:
        """Files of lost members at this commit that no other file has absorbed."""
        files = sorted(self._folder.iterdir()) if self._folder.is_dir() else ()
        ours = [file for file in files if self._is_ours(job, file.name)]
        facts = dict[str, dict[str, Any]]()
        for file in ours:
            try:
                facts[file.name] = self._checked(shard.peek(file), job, str(file))
            except CheckpointError as error:
                log.error("TopKEF: %s", error)
        absorbed = {each for fact in facts.values() for each in fact["absorbed"]}
        living_files = {self._file(job, member) for member in living}
        lost = []
        for name, fact in facts.items():
            if name in absorbed or name in living_files:
                continue
            if fact["clock"][0] == committed:
                lost.append(name)
            else:
                log.warning("TopKEF: %s is of another commit: it is not taken on", name)
        return lost

    def read(self, job: bytes, name: str, framework: str) -> dict[str, Any]:
        """Read the contents of a file."""
        path = self._folder / name
        if not self._is_ours(job, name):
            raise _foreign(str(path), "its name is not one of this job's")
        return self._checked(shard.parse(path.read_bytes(), framework, str(path)), job, str(path))

    def _checked(self, facts: dict[str, Any], job: bytes, where: str) -> dict[str, Any]:
        """Refuse facts of a file that no member of this job has written."""
        units, clock, absorbed = (facts.get(key) for key in ("units", "clock", "absorbed"))
        if not (isinstance(units, int) and is_count(units) and 0 < units < MOST_RANKS):
            raise _foreign(where, f"its residuals are scaled for {units!r:.60} ranks")
        if not (isinstance(clock, list) and len(clock) >= 2):
            raise _foreign(where, f"its clock is {clock!r:.60}")
        try:
            committed_of({COMMITTED: clock[0]}, 0)
            asked_of({ASKED: clock[1]})
        except StateDictError as error:
            raise _foreign(where, error.problem) from error
        names = absorbed if isinstance(absorbed, list) else [absorbed]
        if wrong := [each for each in names if not self._is_ours(job, each)]:
            raise _foreign(where, f"it lists {wrong[0]!r:.60} as taken on, which is no such file")
        return facts

    def _is_ours(self, job: bytes, name: object) -> bool:
        """Whether a name is that of a file of this job, in this folder."""
        pattern = rf"{re.escape(self._name)}-{job.hex()}-[0-9a-f]{{32}}{re.escape(SUFFIX)}"
        return isinstance(name, str) and re.fullmatch(pattern, name) is not None

    def _file(self, job: bytes, member: bytes) -> str:
        return f"{self._name}-{job.hex()}-{member.hex()}{SUFFIX}"


def _foreign(where: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is no file as a rank of this job writes it: {problem}",
        cure="Give each job a commit_dir of its own, into which nobody else writes",
    )
