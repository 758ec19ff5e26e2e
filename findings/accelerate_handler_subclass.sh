#!/usr/bin/env bash
# Accelerate refuses a subclass of its own kwargs handlers with a bare KeyError.
#
# accelerate 1.15.0, PyTorch 2.13.0, on a CPU, one process, no other package. Accelerator checks
# that a handler is an instance of KwargsHandler, which a subclass of DistributedDataParallelKwargs
# is, and then looks its class up in a table of exact classes. So a subclass that changes a default
# or a method ends in a KeyError whose text is the class, and not what is allowed.
#
# Output seen on 2026-11-28:
#     DistributedDataParallelKwargs                     accepted
#     a subclass that changes nothing                   KeyError
#
# Exit status 0: it is still so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet accelerate==1.15.0 torch==2.13.0 numpy
cat > "$folder/case.py" <<'PYTHON'
import sys

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, KwargsHandler


class Same(DistributedDataParallelKwargs):
    """Changes nothing."""


def outcome(handler):
    assert isinstance(handler, KwargsHandler)
    try:
        Accelerator(cpu=True, kwargs_handlers=[handler])
    except KeyError:
        return "KeyError"
    return "accepted"


found = {
    "DistributedDataParallelKwargs": outcome(DistributedDataParallelKwargs()),
    "a subclass that changes nothing": outcome(Same()),
}
for name, what in found.items():
    print(f"{name:<49} {what}")
sys.exit([*found.values()] != ["accepted", "KeyError"])
PYTHON
"$folder/venv/bin/python" "$folder/case.py"
