"""What programs find in their environment on every host, logged in to or not."""

from __future__ import annotations

import shutil
from pathlib import Path

from cluster.needs import search_path

SCRATCH = "/run/tmp"  # goes with the room, and with it what killed programs leave there


def variables() -> dict[str, str]:
    """PATH as here and as root's, a folder for temporary files, and where Open MPI is.

    Open MPI's wheel does not know where it was installed: mpirun finds out, but ranks that it
    starts on other hosts are told half of it, and fail.
    """
    found = {"PATH": search_path(), "TMPDIR": SCRATCH}
    mpirun = shutil.which("mpirun", path=found["PATH"])
    if mpirun is not None:
        prefix = Path(mpirun).parent.parent
        if (prefix / "pyvenv.cfg").is_file():
            found["OPAL_PREFIX"] = str(prefix)
    return found
