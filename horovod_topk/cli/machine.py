"""What a reader of figures needs to know of the machine."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata

from horovod_topk.cli.processor import cpu_model


def machine() -> dict[str, object]:
    """Of this host, and what runs on it."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],  # processes that wanted a core, in the last minute
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "horovod": metadata.version("horovod"),
        "cycle": os.environ.get("HOROVOD_CYCLE_TIME"),  # milliseconds; None: Horovod's default
        "date": time.strftime("%Y-%m-%d"),
    }
