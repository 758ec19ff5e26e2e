"""What `TopKEF.of(optimizer)` returns where the environment asks for Horovod's own compression.

Nothing is compressed by this package then (`horovod_topk.core.substitute`), and a script that asks
for statistics or saves residuals has to run all the same.
"""

from __future__ import annotations

from typing import Any

from horovod_topk.core.attached import Attached
from horovod_topk.core.substitute import VARIABLE


class ByHorovod(Attached[Any]):
    """The state behind an optimizer that Horovod serves by itself: inactive, and without residuals.

    Args:
        name: Horovod's compression, "none" or "fp16".
        framework: "torch" or "tensorflow".
    """

    def __init__(self, name: str, framework: str) -> None:
        self.framework = framework
        reason = f"{VARIABLE}={name}: Horovod exchanges the gradients"
        self._stand_for_nothing(f"Horovod's {name}", reason)
