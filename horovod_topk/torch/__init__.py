"""Top-K compression with error feedback for `horovod.torch`.

    import horovod.torch as hvd
    from horovod_topk.torch import TopKEF

    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=TopKEF
    )

Importing this package puts the seam of `horovod_topk.torch.seam` into Horovod. Optimizers with
any other compressor behave exactly as before.
"""

from horovod_topk.torch import elastic, seam
from horovod_topk.torch.compressor import TopKEF
from horovod_topk.torch.state import OptimizerState

seam.install()
elastic.install()

__all__ = ["OptimizerState", "TopKEF"]
