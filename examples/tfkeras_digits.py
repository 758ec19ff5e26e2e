"""A small convolutional network on scikit-learn's handwritten digits, in `fit` of tf-keras.

    horovodrun -np 2 --gloo python examples/tfkeras_digits.py --compression topk

tf-keras is Keras 2, for which Horovod's own wrapper and callbacks were made. This is an ordinary
Horovod training script with one more import and one more argument. In short:

    from horovod_topk.tensorflow import TopKEF
    hvd.DistributedOptimizer(optimizer, compression=TopKEF)

It reports accuracy on 450 held-out images. 300 more images are kept for choosing settings.
"""

from __future__ import annotations

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # before TensorFlow is imported, by Horovod or by us

import harness
import horovod.tensorflow.keras as hvd
import tensorflow_harness
import tf_keras as keras
from digits_data import digits
from tf_keras import layers

# Horovod's callbacks take their backend from the package `keras`, which is Keras 3 where that is
# installed too, as it is beside any current TensorFlow; MetricAverageCallback would fail.
hvd.callbacks.K = keras.backend


def digits_cnn() -> keras.Model:
    """Two convolutions and two dense layers: [N, 8, 8] -> [N, 10], 284 thousand parameters."""
    return keras.Sequential(
        [
            keras.Input((8, 8)),
            layers.Reshape((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(10),
        ]
    )


def main() -> None:
    parser = harness.arguments(__doc__, steps=600, batch_size=32, lr=0.05)
    harness.add_evaluation(parser, every=20)
    args = harness.parse(parser)

    harness.check_launcher(hvd)
    hvd.init(process_sets=harness.process_sets(args))
    tensorflow_harness.use_cpu()
    keras.utils.set_random_seed(args.seed)

    compression = tensorflow_harness.compression(args)
    model = digits_cnn()
    model.compile(
        optimizer=hvd.DistributedOptimizer(
            tensorflow_harness.optimizer(args, keras), compression=compression
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        tensorflow_harness.batches(*digits("training"), batch_size=args.batch_size, seed=args.seed),
        **tensorflow_harness.epochs(args),
        validation_data=tensorflow_harness.share(*digits(args.evaluate_on)),
        validation_batch_size=256,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
            hvd.callbacks.MetricAverageCallback(),
            tensorflow_harness.record(args, keras, compression),
            hvd.callbacks.LearningRateScheduleCallback(**tensorflow_harness.schedule(args)),
        ],
        shuffle=False,  # the batches are
        verbose=0,  # the record has a progress bar
    )


if __name__ == "__main__":
    main()
