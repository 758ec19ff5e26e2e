"""Top-K compression with error feedback for `horovod.tensorflow`.

    import horovod.tensorflow as hvd
    from horovod_topk.tensorflow import TopKEF

    compression = TopKEF(ratio=0.01)

    with tf.GradientTape() as tape:
        loss = ...
    tape = hvd.DistributedGradientTape(tape, compression=compression)

What has not been sent yet is kept for each variable, as long as it lives. For tf-keras there is
`hvd.DistributedOptimizer(optimizer, compression=TopKEF)`; for Keras 3, where Horovod's own wrapper
does not synchronise, `horovod_topk.tensorflow.keras`.

Importing this package puts the seam of `horovod_topk.tensorflow.seam` into Horovod. Anything with
another compressor behaves exactly as before.
"""

from horovod_topk.tensorflow import seam
from horovod_topk.tensorflow.compressor import TopKEF
from horovod_topk.tensorflow.state import OptimizerState

seam.install()

__all__ = ["OptimizerState", "TopKEF"]
