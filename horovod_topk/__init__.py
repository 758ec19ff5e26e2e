"""Top-K gradient compression with error feedback for Horovod.

`import horovod_topk` imports no framework. The adapters do:

    from horovod_topk.torch import TopKEF

    optimizer = hvd.DistributedOptimizer(optimizer, ..., compression=TopKEF)
"""

from horovod_topk import errors
from horovod_topk.methods.topk import TopK as TopKConfig
from horovod_topk.reporting import report, seed

__version__ = "0.1.0"
__all__ = ["TopKConfig", "__version__", "errors", "report", "seed"]
