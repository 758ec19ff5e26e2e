"""Code that the TensorFlow and Keras examples share, so that each reads as an ordinary script.

Functions take Keras as an argument, `keras` or `tf_keras`, as the examples use one or the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import harness
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf


def use_cpu() -> None:
    """Give this rank its share of the cores, and no GPU: the networks are too small for one."""
    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(harness.threads(hvd.local_size()))


def compression(args: argparse.Namespace, optimizer: Any = None) -> Any:
    """Return the `compression` for Horovod. Call it once: TopKEF holds the residuals.

    optimizer: the one that applies a tape's gradients; None: without a tape.
    """
    if args.compression == "topk":
        # Imported here and not above, so that the other two run a Horovod nobody has touched.
        from horovod_topk.tensorflow import TopKEF

        made = TopKEF(**harness.topk_settings(args))
        return made if optimizer is None else made.adapt(optimizer)
    return getattr(hvd.Compression, args.compression)


def local_compression(args: argparse.Namespace) -> Any:
    """Return the compressor of `LocalSteps`. "none" and "fp16" are dense exchanges."""
    from horovod_topk.tensorflow import Dense

    dense = {"none": Dense(), "fp16": Dense(values="float16")}
    return dense.get(args.compression) or compression(args)


def optimizer(args: argparse.Namespace, keras: Any) -> Any:
    """Return the optimizer that the arguments name, before Horovod wraps it."""
    momentum = harness.own_momentum(args)
    if args.optimizer == "adamw":  # with PyTorch's defaults, as in the other examples
        rest = {"weight_decay": 0.01, "epsilon": 1e-8}
        return keras.optimizers.AdamW(args.lr, beta_1=momentum, **rest)
    return keras.optimizers.SGD(args.lr, momentum=momentum)


def batches(*columns: np.ndarray, batch_size: int, seed: int) -> tf.data.Dataset:
    """Return endless batches of this rank's share of the rows, shuffled in each epoch.

    The order depends on the seed and the number of ranks alone.
    """
    count = len(columns[0])
    share = count // hvd.size()
    if share < batch_size:
        raise SystemExit(f"--batch-size {batch_size}: a rank has only {share} examples")
    rows = tf.data.Dataset.from_tensor_slices(columns).shuffle(count, seed=seed)
    mine = rows.take(share * hvd.size()).shard(hvd.size(), hvd.rank())
    return mine.batch(batch_size, drop_remainder=True).repeat()


def share(*columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return this rank's part of the rows, to evaluate; parts differ by one row at most."""
    return tuple(column[hvd.rank() :: hvd.size()] for column in columns)


def mean_over_rows(score: Callable[..., tf.Tensor], *columns: np.ndarray) -> float:
    """The mean of `score(*columns)`, one value a row, with the rows shared out among the ranks."""
    total = np.zeros(2)
    for batch in tf.data.Dataset.from_tensor_slices(share(*columns)).batch(256):
        scores = score(*batch)
        total += [tf.reduce_sum(tf.cast(scores, tf.float64)).numpy(), len(scores)]
    total = hvd.allreduce(tf.constant(total), op=hvd.Sum, name="mean_over_rows").numpy()
    return float(total[0] / total[1])


def mean_over_ranks(values: list[float]) -> float:
    """The mean of every rank's values, as many on each."""
    mean = tf.constant(np.mean(values))
    return float(hvd.allreduce(mean, op=hvd.Average, name="losses"))


def allreduce_bytes(variables: Sequence[Any], compression: str) -> int:
    """Bytes a rank sends in a ring allreduce of the variables' gradients."""
    size = sum(
        v.shape.num_elements() * (2 if compression == "fp16" else tf.as_dtype(v.dtype).size)
        for v in variables
    )
    return harness.ring_bytes(size, hvd.size())


def describe(
    args: argparse.Namespace, keras: Any, variables: Sequence[Any], compression: Any
) -> dict[str, Any]:
    """The run's settings and the bytes it sends, for its JSON file."""
    every = getattr(args, "local_steps", None) or 1
    counted = args.compression == "topk" or every > 1
    return harness.describe(
        args,
        ranks=hvd.size(),
        parameters=sum(v.shape.num_elements() for v in variables),
        sent_bytes=(
            compression.stats().sent_bytes // every
            if counted
            else allreduce_bytes(variables, args.compression)
        ),
        dense_bytes=allreduce_bytes(variables, "none"),
        versions={"tensorflow": tf.version.VERSION, keras.__name__: keras.__version__},
    )


class Run(harness.Loop):
    """The record of one training run that is written out; see `harness.Loop`."""

    def __init__(
        self, args: argparse.Namespace, keras: Any, variables: Sequence[Any], compression: Any
    ) -> None:
        of_this = partial(describe, args, keras, variables, compression)
        super().__init__(args, hvd.rank(), of_this, mean_over_ranks)


def record(args: argparse.Namespace, keras: Any, compression: Any) -> Any:
    """A callback that keeps the record of `model.fit`, and ends it after so many steps.

    An epoch is the steps between two evaluations. Put it after MetricAverageCallback, so that it
    notes means over all ranks.
    """

    class Record(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            variables = self.model.trainable_variables
            of_this = partial(describe, args, keras, variables, compression)
            self.run = harness.Run(args, hvd.rank(), of_this)

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.run.begin_step()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.run.end_step()
            self.model.stop_training = self.run.done

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.run.add(loss=float(logs["loss"]), accuracy=float(logs["val_accuracy"]))

        def on_train_end(self, logs: Any = None) -> None:
            self.run.finish()

    return Record()


def epochs(args: argparse.Namespace) -> dict[str, int]:
    """Arguments of `model.fit`: an evaluation ends an epoch."""
    return {
        "epochs": -(-args.steps // args.evaluate_every),
        "steps_per_epoch": min(args.steps, args.evaluate_every),
    }


def schedule(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of Horovod's LearningRateScheduleCallback, which counts in epochs."""
    factor = harness.warmup_cosine(args.steps)
    every = epochs(args)["steps_per_epoch"]
    return {
        "initial_lr": args.lr,
        "multiplier": lambda epoch: factor(round(epoch * every)),
        "staircase": False,  # with every step
        "momentum_correction": False,
    }
