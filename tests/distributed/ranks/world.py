"""What cases need of their ranks, whoever launched them: `hvd`, `adapter`, `TopKEF`, `place`.

Under horovodrun and mpirun these are Horovod and `horovod_topk.torch`. Under torchrun they are
verbs of the same names over torch.distributed, and `horovod_topk.ddp` or `horovod_topk.fsdp`; no
Horovod is loaded then.
"""

from __future__ import annotations

import os

from meeting import CONTROLLER

FSDP = os.environ.get("TEST_ADAPTER") == "fsdp"  # under torchrun

if FSDP:
    import horovod_topk.fsdp as adapter
    import over_fsdp as hvd
    from over_fsdp import TopKEF, begin, place
elif CONTROLLER == "torchrun":
    import horovod_topk.ddp as adapter
    import over_torch as hvd
    from over_torch import TopKEF, begin, place
else:
    import horovod.torch as hvd

    import horovod_topk.torch as adapter
    from horovod_topk.torch import TopKEF
    from over_horovod import begin, place

__all__ = ["CONTROLLER", "FSDP", "TopKEF", "adapter", "begin", "hvd", "place"]
