"""Top-K compression with error feedback for `horovod.tensorflow`.

    import horovod.tensorflow as hvd
    from horovod_topk.tensorflow import TopKEF

    compression = TopKEF(ratio=0.01).adapt(optimizer)  # once; of Keras 3 or tf-keras

    with tf.GradientTape() as tape:
        loss = ...
    tape = hvd.DistributedGradientTape(tape, compression=compression)

Residuals (the parts of gradients that are not sent yet) belong to variables and exist as long as
these. With tf-keras use `hvd.DistributedOptimizer(optimizer, compression=TopKEF)`. With Keras 3,
where Horovod's own wrapper trains without synchronising, use `horovod_topk.tensorflow.keras`.

Importing this package wraps three functions of Horovod, in memory and not on disk, which
`horovod_topk.tensorflow.seam` names. Each behaves as before for any other compressor.

No registry of Horovod is changed: elastic jobs use the state of `horovod_topk.tensorflow.elastic`.
"""

from horovod_topk.errors import AdapterImportError

try:
    import horovod.tensorflow  # noqa: F401  # so that its absence has a cure
except ImportError as error:
    raise AdapterImportError(
        "horovod_topk.tensorflow is for Horovod with TensorFlow, which cannot be imported: "
        f"{error}",
        cure="README.md says how to build Horovod, and `horovod-topk doctor` what is missing; "
        "torch DistributedDataParallel needs no Horovod: horovod_topk.ddp",
    ) from error

from horovod_topk.guard import Guard
from horovod_topk.local import Outer
from horovod_topk.tensorflow import seam
from horovod_topk.tensorflow.compressor import Compressor, TopKEF
from horovod_topk.tensorflow.local_steps import LocalSteps
from horovod_topk.tensorflow.state import OptimizerState

seam.install()

__all__ = ["Guard", "LocalSteps", "OptimizerState", "Outer", "TopKEF"]

__getattr__, __dir__ = Compressor.module_functions(globals())  # for other compressor classes
