"""Errors about what a file holds, raised where the file is not known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from horovod_topk.errors import CheckpointError, StateDictError


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have errors of the block name a file or folder, if they do not."""
    try:
        yield
    except (CheckpointError, StateDictError) as error:
        if path.name in error.problem:
            raise
        problem = f"{path}: {error.problem}"
        raise type(error)(problem, cure=error.cure, tensor=error.tensor) from error
