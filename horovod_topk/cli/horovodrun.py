"""`horovodrun` itself, except that it asks no framework what Horovod was built with.

To ask, it would import PyTorch or TensorFlow in a process of its own before it starts a rank, which
takes seconds. A controller that Horovod was built without fails when the ranks start.
"""

from __future__ import annotations

import sys
from typing import Any

from horovod.common import util


def built(*args: Any, **kwargs: Any) -> bool:
    """Whether Horovod has a controller."""
    return True


util.gloo_built = util.mpi_built = built

from horovod.runner.launch import run_commandline  # noqa: E402 - binds the two functions

if __name__ == "__main__":
    sys.exit(run_commandline())
