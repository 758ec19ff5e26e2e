"""Top-K gradient compression with error feedback for Horovod.

`import horovod_topk` imports no framework. The adapters do:

    from horovod_topk.torch import TopKEF

    optimizer = hvd.DistributedOptimizer(optimizer, ..., compression=TopKEF)

and horovod_topk.ddp for torch DistributedDataParallel, horovod_topk.tensorflow for TensorFlow.
"""

from typing import NoReturn

from horovod_topk import errors
from horovod_topk.methods import METHODS
from horovod_topk.methods.topk import TopK as TopKConfig
from horovod_topk.reporting import report, seed

__version__ = "0.2.0"
__all__ = ["TopKConfig", "__version__", "errors", "report", "seed"]


def __getattr__(name: str) -> NoReturn:
    """Refuse the classes that each adapter has, and name the adapters.

    Raises:
        AdapterImportError: it is such a class.
        AttributeError: nothing has this name.
    """
    if name in {*METHODS, "Guard", "OneBitAdam", "OneBitLamb"}:
        raise errors.AdapterImportError(
            f"horovod_topk has no {name} of its own, as each framework has another",
            cure=f"Write from horovod_topk.torch import {name} for Horovod with PyTorch, from "
            f"horovod_topk.ddp for DistributedDataParallel, or from horovod_topk.tensorflow",
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
