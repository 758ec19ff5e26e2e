"""Top-K compression with error feedback for `horovod.torch`.

    import horovod.torch as hvd
    from horovod_topk.torch import TopKEF

    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=TopKEF
    )

Importing this package changes these things of Horovod, in memory and not on disk. Each behaves as
before for any other compressor. Five functions are wrapped, by `horovod_topk.torch.seam`:

    horovod.torch.optimizer._DistributedOptimizer.__init__
    horovod.torch.optimizer._DistributedOptimizer._allreduce_grad_async
    horovod.torch.optimizer._DistributedOptimizer.synchronize
    horovod.torch.optimizer._DistributedAdasumOptimizer.__init__
    horovod.torch.join

and `horovod_topk.torch.elastic` adds `TopKEF` to one registry:

    horovod.torch.elastic.state._handler_registry   the types that an elastic TorchState accepts
"""

from horovod_topk.errors import AdapterImportError

try:
    import horovod.torch  # noqa: F401  # so that its absence has a cure
except ImportError as error:
    raise AdapterImportError(
        f"horovod_topk.torch is for Horovod with PyTorch, which cannot be imported: {error}",
        cure="For torch DistributedDataParallel write from horovod_topk.ddp import TopKEF, which "
        "needs PyTorch alone; README.md says how to build Horovod, and `horovod-topk doctor` what "
        "is missing",
    ) from error

from horovod_topk.guard import Guard
from horovod_topk.local import Outer
from horovod_topk.torch import elastic, seam
from horovod_topk.torch.compressor import Compressor, TopKEF
from horovod_topk.torch.local_steps import LocalSteps
from horovod_topk.torch.state import OptimizerState
from horovod_topk.torch_training.onebit_adam import OneBitAdam
from horovod_topk.torch_training.onebit_lamb import OneBitLamb

seam.install()
elastic.install()

__all__ = ["Guard", "LocalSteps", "OneBitAdam", "OneBitLamb", "OptimizerState", "Outer", "TopKEF"]

__getattr__, __dir__ = Compressor.module_functions(globals())  # for other compressor classes
