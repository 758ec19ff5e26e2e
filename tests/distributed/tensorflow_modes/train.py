"""Trains under modes of TensorFlow that a process cannot leave: determinism, checks of numerics."""

from __future__ import annotations

import sys

sys.path[:] = [path for path in sys.path if not path.endswith("without_tensorflow")]

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import horovod_topk.tensorflow.keras as hvd_keras
from horovod_topk.tensorflow import QSGD, TopKEF

hvd.init()
keras.utils.set_random_seed(0)
tf.config.experimental.enable_op_determinism()
tf.debugging.enable_check_numerics()
OPTIMIZERS = {
    "SGD": (lambda: keras.optimizers.SGD(0.1, momentum=0.9), TopKEF),
    "AdamW": (lambda: keras.optimizers.AdamW(0.01), TopKEF),
    "QSGD": (lambda: keras.optimizers.SGD(0.1), QSGD),
    "none": (lambda: keras.optimizers.SGD(0.1), hvd.Compression.none),
}
for name, (make, compression) in OPTIMIZERS.items():
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(40)])
    optimizer = hvd_keras.DistributedOptimizer(make(), compression=compression)
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.random.default_rng(hvd.rank()).normal(size=(32, 40)).astype("float32")
    before = model.layers[0].kernel.numpy()
    model.fit(x, x, batch_size=8, verbose=0)
    kernel = model.layers[0].kernel.numpy()
    assert np.isfinite(kernel).all() and (kernel != before).any(), name
    assert len({each.tobytes() for each in hvd.allgather_object(kernel, name=name)}) == 1, name
print("all trained", flush=True)
