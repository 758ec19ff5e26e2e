"""A small convolutional network on scikit-learn's handwritten digits, in a TensorFlow loop.

    horovodrun -np 2 --gloo python examples/tensorflow_digits.py --compression topk

It is an ordinary Horovod training script with one more import, line and argument. In short:

    from horovod_topk.tensorflow import TopKEF
    compression = TopKEF().adapt(optimizer)  # once, outside of the training step
    tape = hvd.DistributedGradientTape(tape, compression=compression)

It reports accuracy on 450 held-out images. 300 more images are kept for choosing settings.
"""

from __future__ import annotations

import harness
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
import tensorflow_harness
from digits_data import digits


class DigitsCNN(tf.Module):
    """Two convolutions and two dense layers: [N, 8, 8] -> [N, 10], 284 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((3, 3, 1, 32), (3, 3, 32, 64), (64 * 4 * 4, 256), (256, 10))
        self.kernels = [tf.Variable(glorot(shape), name="kernel") for shape in shapes]
        self.biases = [tf.Variable(tf.zeros(shape[-1]), name="bias") for shape in shapes]

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        x = images[..., tf.newaxis]
        x = tf.nn.max_pool2d(tf.nn.relu(self._layer(0, x)), 2, 2, "VALID")
        x = tf.nn.relu(self._layer(1, x))
        x = tf.nn.relu(self._layer(2, tf.reshape(x, [-1, 64 * 4 * 4])))
        return self._layer(3, x)

    def _layer(self, number: int, x: tf.Tensor) -> tf.Tensor:
        kernel, bias = self.kernels[number], self.biases[number]
        return (tf.nn.conv2d(x, kernel, 1, "SAME") if number < 2 else x @ kernel) + bias


def glorot(shape: tuple[int, ...]) -> tf.Tensor:
    """Initial weights [..., inputs, outputs] after Glorot and Bengio 2010, uniform."""
    limit = np.sqrt(6 / (np.prod(shape[:-1]) + np.prod(shape) / shape[-2]))
    return tf.random.uniform(shape, -limit, limit)


def main() -> None:
    parser = harness.arguments(__doc__, steps=600, batch_size=32, lr=0.05)
    harness.add_evaluation(parser, every=20)
    args = harness.parse(parser)

    harness.check_launcher(hvd)
    hvd.init(process_sets=harness.process_sets(args))
    tensorflow_harness.use_cpu()
    tf.random.set_seed(args.seed)

    model = DigitsCNN()
    optimizer = tensorflow_harness.optimizer(args, keras)
    compression = tensorflow_harness.compression(args, optimizer)
    factor = harness.warmup_cosine(args.steps)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))
            loss = tf.reduce_mean(losses)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def correct(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return tf.argmax(model(images), axis=1) == labels

    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables([v.value for v in optimizer.variables], root_rank=0)

    unseen = digits(args.evaluate_on)
    run = tensorflow_harness.Run(args, keras, model.trainable_variables, compression)
    batches = tensorflow_harness.batches(
        *digits("training"), batch_size=args.batch_size, seed=args.seed
    )
    for step, (images, labels) in enumerate(run.steps(batches)):
        optimizer.learning_rate = args.lr * factor(step)
        loss = train_step(images, labels)
        if run.stepped(float(loss)):
            run.evaluated(accuracy=tensorflow_harness.mean_over_rows(correct, *unseen))
    run.finish()


if __name__ == "__main__":
    main()
