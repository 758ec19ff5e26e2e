"""Text files for training, and their split into training, validation and held-out files.

Whole files are held out, so that no file is used both to train and to test. The split is the same
on every machine, for every seed and every number of ranks.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from pathlib import Path

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))

# Folders that are no part of the library, or that not every machine has.
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def of_split(split: str, folder: Path, suffix: str = ".py") -> list[Path]:
    """The files below `folder` of a split: a fifth is held out, a fifth is for validation."""
    names = sorted(_below(folder, suffix), key=lambda name: (zlib.crc32(name.encode()), name))
    fifth = len(names) // 5
    part = {
        "held-out": names[:fifth],
        "validation": names[fifth : 2 * fifth],
        "training": names[2 * fifth :],
    }
    return [folder / name for name in part[split]]


def _below(folder: Path, suffix: str) -> list[str]:
    """Names, relative to `folder`, of the files below it."""
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = set(folders) - LEFT_OUT
        files += [Path(parent, name) for name in names if name.endswith(suffix)]
    # _sysconfigdata_* records how this very interpreter was built.
    return [
        path.relative_to(folder).as_posix()
        for path in files
        if not path.name.startswith("_sysconfigdata")
    ]
