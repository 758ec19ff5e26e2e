"""Files that a command writes, checked before it measures anything."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from horovod_topk.cli import canvas
from horovod_topk.reporting import launched_rank


def prints() -> bool:
    """Whether this rank prints and writes files: rank 0, or the only process."""
    return launched_rank() in (None, 0)


def check_writable(option: str, path: Path) -> None:
    """Check that a file can be written, on the rank that will write it."""
    if not prints():
        return
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}. Create it first")
    if path.is_dir():
        raise ValueError(f"{option} {path}: that is a folder. Name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: no permission to write it. Name a file elsewhere")


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn and written, as `check_writable` does."""
    if not prints():
        return
    check_writable("--picture", path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--picture needs matplotlib: pip install matplotlib")
    known = canvas.kinds()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"--picture {path}: end its name in one of {', '.join(sorted(known))}")
