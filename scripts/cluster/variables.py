"""What programs find in their environment on every host, logged in to or not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

SCRATCH = "/run/tmp"  # goes with the room, and with it what killed programs leave there


def variables() -> dict[str, str]:
    """PATH as here, a folder for temporary files, and where Open MPI is if it cannot know.

    Open MPI's wheel does not know where it was installed: mpirun finds out, but ranks that it
    starts on other hosts are told half of it, and fail.
    """
    found = {"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": SCRATCH}
    mpirun = shutil.which("mpirun", path=found["PATH"])
    if mpirun is not None:
        prefix = Path(mpirun).parent.parent
        if (prefix / "pyvenv.cfg").is_file():
            found["OPAL_PREFIX"] = str(prefix)
    return found
