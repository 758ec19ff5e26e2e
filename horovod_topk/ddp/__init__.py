"""Compression for PyTorch's DistributedDataParallel; Horovod is not needed.

    from torch.nn.parallel import DistributedDataParallel
    from horovod_topk.ddp import TopKEF

    model = DistributedDataParallel(model)
    TopKEF().attach(model, optimizer)

or, as torch registers communication hooks,

    model.register_comm_hook(*TopKEF().hook(model, optimizer))

`TopKEF.of(model)` returns the state. Nothing of PyTorch is patched.
"""

from horovod_topk.errors import AdapterImportError

try:
    import torch.distributed  # noqa: F401  # so that its absence has a cure
except ImportError as error:
    raise AdapterImportError(
        f"horovod_topk.ddp is for PyTorch, which cannot be imported: {error}",
        cure="pip install torch, or, for TensorFlow with Horovod, import horovod_topk.tensorflow",
    ) from error

from horovod_topk.ddp.compressor import Compressor, TopKEF, exchange
from horovod_topk.ddp.local_steps import LocalSteps
from horovod_topk.ddp.state import DDPState
from horovod_topk.guard import Guard
from horovod_topk.local import Outer
from horovod_topk.torch_training.onebit_adam import OneBitAdam
from horovod_topk.torch_training.onebit_lamb import OneBitLamb

__all__ = [
    "DDPState",
    "Guard",
    "LocalSteps",
    "OneBitAdam",
    "OneBitLamb",
    "Outer",
    "TopKEF",
    "exchange",
]

__getattr__, __dir__ = Compressor.module_functions(globals())  # for other compressor classes
