"""What cases need of their ranks, whoever launched them: `hvd`, `adapter`, `TopKEF`, `place`.

Under horovodrun and mpirun these are Horovod and `horovod_topk.torch`. Under torchrun they are
verbs of the same names over torch.distributed, and `horovod_topk.ddp`; no Horovod is loaded then.
"""

from __future__ import annotations

from meeting import CONTROLLER

if CONTROLLER == "torchrun":
    import horovod_topk.ddp as adapter
    import over_torch as hvd
    from over_torch import TopKEF, begin, place
else:
    import horovod.torch as hvd

    import horovod_topk.torch as adapter
    from horovod_topk.torch import TopKEF
    from over_horovod import begin, place

__all__ = ["CONTROLLER", "TopKEF", "adapter", "begin", "hvd", "place"]
