"""The facts about a machine that readers of measurements need."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from importlib import metadata
from pathlib import Path

LIBRARIES = ("torch", "tensorflow", "tensorflow-cpu", "keras", "horovod")


def machine() -> dict[str, object]:
    """Hardware and software of this host."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],  # mean number of runnable processes in the last minute
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        **_versions(),
        "cycle": os.environ.get("HOROVOD_CYCLE_TIME"),  # milliseconds; None: Horovod's default
        "date": time.strftime("%Y-%m-%d"),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def cpu_model() -> str:
    """The processor's name from the kernel, or else the kind of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
