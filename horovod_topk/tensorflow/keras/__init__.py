"""Horovod's distributed optimizer and callbacks for Keras 3, with any compressor.

    import horovod.tensorflow as hvd
    import horovod_topk.tensorflow.keras as hvd_keras
    from horovod_topk.tensorflow import TopKEF

    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=TopKEF)
    model.compile(optimizer=optimizer, loss=..., jit_compile=False)
    model.fit(..., callbacks=[hvd_keras.callbacks.BroadcastGlobalVariablesCallback()])

Under Keras 3, Horovod 0.28.1's own optimizer trains without synchronising, and its callbacks fail.
Use these instead, also with one of Horovod's compressors or with none. With tf-keras use Horovod's.
"""

import keras

from horovod_topk.errors import UnsupportedOperationError

if int(keras.__version__.partition(".")[0]) < 3 or keras.config.backend() != "tensorflow":
    raise UnsupportedOperationError(
        f"this is Keras {keras.__version__}, not Keras 3 on TensorFlow",
        cure="Use horovod.tensorflow.keras with tf-keras, or set KERAS_BACKEND=tensorflow",
    )

from horovod_topk.tensorflow.keras import callbacks
from horovod_topk.tensorflow.keras.local_steps import LocalSteps
from horovod_topk.tensorflow.keras.optimizer import DistributedOptimizer, load_model

__all__ = ["DistributedOptimizer", "LocalSteps", "callbacks", "load_model"]
