"""What `TopKEF.of(optimizer)` returns where the environment asks for Horovod's own compression.

Nothing is compressed by this package then (`horovod_topk.core.substitute`), and a script that asks
for statistics or saves residuals has to run all the same.
"""

from __future__ import annotations

from collections import Counter
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
        self.framework, self.label, self.active = framework, f"Horovod's {name}", False
        self._skipped = {"*": f"{VARIABLE}={name}: Horovod exchanges the gradients"}
        self._late, self.manager, self._reduction = Counter(), None, "average"
