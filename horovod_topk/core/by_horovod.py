"""The state that `TopKEF.of(optimizer)` returns if Horovod's own compression is substituted.

An environment variable selects it (`horovod_topk.core.substitute`). This package then compresses
nothing, and a script that reads statistics or saves residuals still has to run.
"""

from __future__ import annotations

from typing import Any

from horovod_topk.core.attached import Attached
from horovod_topk.core.substitute import VARIABLE


class ByHorovod(Attached[Any]):
    """The inactive state, without residuals, of an optimizer whose gradients Horovod exchanges.

    Args:
        name: Horovod's compression, "none" or "fp16".
        framework: "torch" or "tensorflow".
    """

    def __init__(self, name: str, framework: str) -> None:
        self.framework = framework
        reason = f"{VARIABLE}={name}: gradients are exchanged without this package"
        self._stand_for_nothing(f"the exchange {name!r}", reason)
