"""Horovod's callbacks for Keras 3, under Horovod's names."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_topk.errors import UnsupportedOperationError
from horovod_topk.tensorflow.adapting import exchanges
from horovod_topk.tensorflow.planning import unwrap

log = logging.getLogger("horovod_topk")

Logs = dict[str, Any] | None


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcast the model's weights and the optimizer's state from one rank to all others.

    The broadcast takes place before the first step, or right after it if that step builds the
    model. Metrics and the seeds of random layers are not broadcast, nor is the state of optimizers
    that `compile` does not know, as those of a GAN with a `train_step` of its own.

    Args:
        root_rank: the rank whose values are broadcast.
        process_set: the ranks that train.

    Raises:
        UnsupportedOperationError: the model was compiled with `jit_compile=True`, and its optimizer
            exchanges gradients.
    """

    def __init__(self, root_rank: int = 0, process_set: Any = hvd.global_process_set) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._process_set = process_set
        self._done = False

    def on_train_begin(self, logs: Logs = None) -> None:
        """Broadcast, if the model is built."""
        if self.model.jit_compile and exchanges(self.model.optimizer):
            raise UnsupportedOperationError(
                "the model was compiled for XLA, which has no kernel for Horovod's operations",
                cure="Pass jit_compile=False to model.compile",
            )
        if self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcast, if that was not done before the first step."""
        self._broadcast()

    def _broadcast(self) -> None:
        if self._done:
            return
        optimizer, known = self.model.optimizer, list(self.model.weights)
        if optimizer is not None:
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            known += optimizer.variables
        variables = [unwrap(v) for v in known]

        def broadcast() -> None:
            for position, variable in enumerate(variables):
                name = f"topkef.broadcast.{position}"
                options = {"name": name, "process_set": self._process_set}
                variable.assign(hvd.broadcast(variable, self._root_rank, **options))

        tf.function(broadcast, autograph=False).get_concrete_function()()
        self._done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Average an epoch's metrics over ranks.

    Put it before the callbacks that use metrics, such as ModelCheckpoint, EarlyStopping and
    ReduceLROnPlateau.

    Args:
        process_set: the ranks that train.
    """

    def __init__(self, process_set: Any = hvd.global_process_set) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Replace every metric in `logs` by its mean over ranks."""
        if not logs:
            return
        names = sorted(logs)
        values = tf.constant([float(logs[name]) for name in names], tf.float64)
        options = {"name": "topkef.metrics", "process_set": self._process_set}
        averaged = hvd.allreduce(values, op=hvd.Average, **options)
        logs.update(zip(names, averaged.numpy().tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Set the learning rate to `initial_lr` times a factor that depends on the epoch.

    Args:
        initial_lr: learning rate that the factor multiplies.
        multiplier: a function of the epoch that returns the factor, or a number m for the factor
            m ** (epoch - start_epoch). The epoch has a fraction unless `staircase` is True.
        start_epoch: first epoch in which the rate is set.
        end_epoch: first epoch in which it is no longer set. None: there is none.
        staircase: True: set the rate at the start of an epoch only; False: before every batch.
        momentum_correction: when the rate changes, rescale SGD's velocity by the same factor (Goyal
            et al. 2017, section 3). It is not the momentum correction of `TopKEF(momentum=...)`.
        steps_per_epoch: batches in an epoch, where Keras does not know.

    Raises:
        UnsupportedOperationError: `staircase` is False, and the batches in an epoch are not known.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self._initial_lr = initial_lr
        self._factor: Callable[[float], float] = (
            multiplier
            if callable(multiplier)
            else lambda epoch: math.pow(multiplier, epoch - start_epoch)
        )
        self._epochs = start_epoch, end_epoch
        self._staircase = staircase
        self._momentum_correction = momentum_correction
        self._steps = steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Find out how many batches an epoch has."""
        self._steps = self._steps or (self.params or {}).get("steps")
        if not self._staircase and not self._steps:
            raise UnsupportedOperationError(
                "the number of steps in an epoch is not known", cure="Pass steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the learning rate for this batch."""
        start, end = self._epochs
        if self._epoch < start or (end is not None and self._epoch >= end):
            return
        if not self._staircase:
            assert self._steps is not None
            self._adjust(self._epoch + batch / self._steps)
        elif batch == 0:
            self._adjust(self._epoch)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the learning rate to the metrics."""
        if logs is not None:
            logs["learning_rate"] = float(self.model.optimizer.learning_rate)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = float(optimizer.learning_rate)
        rate = self._initial_lr * self._factor(epoch)
        optimizer.learning_rate = rate
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if self._momentum_correction and before:
            for velocity in _velocities(inner):
                velocity.assign(velocity * (rate / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from `initial_lr / size` to `initial_lr` (Goyal et al. 2017).

    Args:
        initial_lr: learning rate after warm-up, for the global batch of all ranks.
        warmup_epochs: epochs that warm-up takes.
        momentum_correction: as in `LearningRateScheduleCallback`.
        steps_per_epoch: batches in an epoch, where Keras does not know.
        verbose: 1: print a line on rank 0 when warm-up is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self._steps is not None
            ranks: int = hvd.size()
            done = min(1.0, (epoch + 1 / self._steps) / warmup_epochs)  # 1 in the last batch
            return (1 + done * (ranks - 1)) / ranks

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the learning rate to the metrics; print a line when warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if self._verbose and epoch + 1 == self._epochs[1] and hvd.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


def _velocities(optimizer: Any) -> list[Any]:
    """SGD's velocity variables, which carry the learning rate; none for other optimizers."""
    if not isinstance(optimizer, keras.optimizers.SGD) or not optimizer.built:
        return []
    return [v for v in getattr(optimizer, "momentums", []) if v is not None]
