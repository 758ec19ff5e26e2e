"""Adds a file's path to errors that are raised where the path is not known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from horovod_topk.errors import CheckpointError, StateDictError


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add a path to the errors of the block, if they do not name it."""
    try:
        yield
    except (CheckpointError, StateDictError) as error:
        if path.name in error.problem:
            raise
        problem = f"{path}: {error.problem}"
        raise type(error)(problem, cure=error.cure, tensor=error.tensor) from error
