"""Local steps in `fit` of Keras 3."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras

from horovod_topk.errors import ConfigError, NotAttachedError
from horovod_topk.local.state import chosen
from horovod_topk.tensorflow import local_steps
from horovod_topk.tensorflow.compressor import Compressor
from horovod_topk.tensorflow.planning import unwrap

Logs = dict[str, Any] | None


class LocalSteps(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback of `fit` that makes the outer steps of `horovod_topk.tensorflow.LocalSteps`.

    The model is compiled with a plain Keras optimizer. Pass `BroadcastGlobalVariablesCallback`,
    too: the weights before the first batch of a `fit` are the anchors, and equal on all ranks. If
    `fit` builds the model in its first step, that step does not count: ranks go on with rank 0's
    weights. After the last epoch ranks have equal weights. With `steps_per_execution` an outer step
    follows the execution in which it is due.

    Args:
        preset: see `horovod_topk.tensorflow.LocalSteps`, as for `compression`, `offload`,
            `process_set` and `settings`.
        compression: the compressor of movements.
        averaged: average the statistics of batch norm, and what other layers keep in variables that
            are not trained, at outer steps. False: they stay each rank's own.
        stop_after: end `fit` after so many outer steps. With `every=` in seconds it is needed, as
            ranks take different numbers of steps.
        offload: keep anchors, outer momentum and residuals in the host's memory.
        process_set: the ranks that train.
        settings: every, outer, decay, fragments, delay, alpha, clip.

    Raises:
        ConfigError, UnknownSettingError: settings cannot be combined.
    """

    def __init__(
        self,
        preset: str | None = None,
        *,
        compression: Any = None,
        averaged: bool = True,
        stop_after: int | None = None,
        offload: bool = False,
        process_set: Any = hvd.global_process_set,
        **settings: Any,
    ) -> None:
        super().__init__()
        compressor, self._config = chosen(preset, compression, settings, Compressor)
        if self._config.seconds and stop_after is None:
            raise ConfigError(
                f"every={self._config.every!r} was given without stop_after=: ranks would end fit "
                "after different numbers of outer steps",
                cure="Pass stop_after=, the number of outer steps, and more epochs than they need",
            )
        self._averaged, self._stop_after = averaged, stop_after
        own = {each: getattr(self._config, each) for each in self._config.__dataclass_fields__}
        places = {"offload": offload, "process_set": process_set}
        self._settings = {"compression": compressor, **places, **own}
        self._trained: list[Any] = []
        self._first = 0  # of the batches of an execution
        self._has_begun = False  # whether this fit has had a batch
        self.local: local_steps.LocalSteps | None = None  # once the model is built

    @property
    def rounds(self) -> int:
        """Outer steps so far, of each fragment; equal on all ranks."""
        return 0 if self.local is None else self.local.rounds

    @property
    def _topkef(self) -> Any:
        if self.local is None:
            raise NotAttachedError(
                "LocalSteps has no state before fit", cure="Ask in fit or after it"
            )
        return self.local._topkef

    def on_train_begin(self, logs: Logs = None) -> None:
        """Make the present weights the anchors, if the model is built."""
        self._has_begun = False
        if self.model.built:
            self._begin()

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Note the first batch of an execution; other callbacks may have replaced weights."""
        self._first = batch
        local, is_first = self.local, not self._has_begun
        if local and is_first and not any(f.since for f in local._topkef.rounds.fragments):
            local.begin()  # not after a state was loaded that was saved in the middle of a round
        self._has_begun = True

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Count the steps of an execution, and make the outer steps that are due."""
        if self.local is None:
            self._begin()
            return
        for _ in range(batch - self._first + 1):
            self.local.step()
        if self._stop_after is not None and self.rounds >= self._stop_after:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Give ranks equal weights after the last epoch.

        Callbacks before this one may replace them when training ends, such as `EarlyStopping`.
        """
        if self.model.stop_training or epoch + 1 == self.params.get("epochs"):
            self.on_train_end()

    def on_train_end(self, logs: Logs = None) -> None:
        """Give ranks equal weights, if a callback after this one has stopped training."""
        if self.local is not None:
            self.local.synchronize()

    def _begin(self) -> None:
        model, steps = self.model, self._config.steps
        trained = [unwrap(v) for v in model.trainable_variables]
        if self.local is not None:
            if [*map(id, trained)] != [*map(id, self._trained)]:
                raise ConfigError(
                    "the model has other trainable variables than in the fit before",
                    cure="Make LocalSteps anew, on every rank, when layers are frozen or unfrozen",
                )
            return
        if getattr(getattr(model.optimizer, "inner_optimizer", model.optimizer), "use_ema", False):
            raise ConfigError(
                "the optimizer has use_ema=True: at its end fit would replace the weights by "
                "averages that differ from rank to rank",
                cure="Leave use_ema out; outer steps average weights, too",
            )
        if steps and model.steps_per_execution > steps:
            raise ConfigError(
                f"every={steps} is below steps_per_execution={model.steps_per_execution}",
                cure=f"Compile the model with steps_per_execution={steps} at most",
            )
        layers = [*model._flatten_layers()] if self._averaged else []
        beside = [v for layer in layers for v in layer._non_trainable_variables]
        own = {**self._settings, "averaged": beside}
        self.local = local_steps.LocalSteps(model.optimizer, trained, **own)
        self._trained = trained
