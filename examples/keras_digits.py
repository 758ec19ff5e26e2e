"""A small convolutional network on scikit-learn's handwritten digits, in `fit` of Keras 3.

    horovodrun -np 2 --gloo python examples/keras_digits.py --compression topk
    horovodrun -np 2 --gloo python examples/keras_digits.py --compression topk --local-steps 30

Under Keras 3, Horovod 0.28.1's own wrapper trains without synchronising. So the optimizer and the
callbacks come from horovod_topk here, with any compression or none. TopKEF is one more import and
one more argument. In short:

    from horovod_topk.tensorflow import TopKEF
    hvd_keras.DistributedOptimizer(optimizer, compression=TopKEF)

With `--local-steps 30` each rank trains alone with the plain optimizer, and a callback exchanges
every 30 steps how far ranks have moved.

It reports accuracy on 450 held-out images. 300 more images are kept for choosing settings.
"""

from __future__ import annotations

import harness
import horovod.tensorflow as hvd
import keras
import tensorflow_harness
from digits_data import digits
from keras import layers

import horovod_topk.tensorflow.keras as hvd_keras


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
    parser.add_argument(
        "--local-steps",
        type=harness.positive,
        metavar="STEPS",
        help="train each rank alone for so many steps, then exchange how far it has moved",
    )
    args = harness.parse(parser)

    harness.check_launcher(hvd)
    hvd.init(process_sets=harness.process_sets(args))
    tensorflow_harness.use_cpu()
    keras.utils.set_random_seed(args.seed)

    optimizer = tensorflow_harness.optimizer(args, keras)
    callbacks = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(root_rank=0)]
    if args.local_steps:
        compression = tensorflow_harness.local_compression(args)
        callbacks.append(hvd_keras.LocalSteps(every=args.local_steps, compression=compression))
    else:
        compression = tensorflow_harness.compression(args)
        optimizer = hvd_keras.DistributedOptimizer(optimizer, compression=compression)
    model = digits_cnn()
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,  # XLA has no kernel for Horovod's operations
    )
    model.fit(
        tensorflow_harness.batches(*digits("training"), batch_size=args.batch_size, seed=args.seed),
        **tensorflow_harness.epochs(args),
        validation_data=tensorflow_harness.share(*digits(args.evaluate_on)),
        validation_batch_size=256,
        callbacks=[
            *callbacks,
            hvd_keras.callbacks.MetricAverageCallback(),
            tensorflow_harness.record(args, keras, compression),
            hvd_keras.callbacks.LearningRateScheduleCallback(**tensorflow_harness.schedule(args)),
        ],
        shuffle=False,  # the batches are
        verbose=0,  # the record has a progress bar
    )


if __name__ == "__main__":
    main()
