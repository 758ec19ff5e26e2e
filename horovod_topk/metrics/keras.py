"""Callbacks of Keras 3 and tf-keras: metrics of steps, and losses for the guard."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from horovod_topk import reporting
from horovod_topk.core.run.stats import StepCounters
from horovod_topk.metrics import as_dictionary

Logs = MutableMapping[str, float] | None


REDUCTION = "comm/reduction"  # the one metric in the logs, and so in Keras' progress line


def callback(compression: Any, library: Any, loggers: Sequence[Any] = ()) -> Any:
    """Return a callback that hands the last step's metrics to `history` and to loggers.

    `model.fit(...).history` has the metrics at the end of each epoch. Of all metrics the logs have
    `comm/reduction` alone, as Keras' progress line shows whatever they have.

    Args:
        compression: the instance that the optimizer was built with, such as `TopKEF()`.
        library: `keras` or `tf_keras`.
        loggers: callbacks such as `keras.callbacks.CSVLogger` or `TensorBoard`, whose logs have
            every metric. Do not give them to `fit` as well.
    """

    class Metrics(library.callbacks.Callback):  # type: ignore[misc]
        """Hands metrics to the history and to loggers."""

        def __init__(self) -> None:
            super().__init__()
            self._last: dict[str, float] = {}
            self._loggers = library.callbacks.CallbackList(list(loggers), add_history=False)
            compression.on_step(self._take)

        def set_model(self, model: Any) -> None:
            """Hand the model to the loggers."""
            super().set_model(model)
            self._loggers.set_model(model)

        def set_params(self, params: Any) -> None:
            """Hand the parameters of training to the loggers."""
            super().set_params(params)
            self._loggers.set_params(params)

        def on_train_begin(self, logs: Logs = None) -> None:
            """Begin training in the loggers."""
            self._loggers.on_train_begin(logs)

        def on_train_end(self, logs: Logs = None) -> None:
            """End training in the loggers."""
            self._loggers.on_train_end(logs)

        def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
            """Begin an epoch in the loggers."""
            self._loggers.on_epoch_begin(epoch, logs)

        def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
            """Begin a batch in the loggers."""
            self._loggers.on_train_batch_begin(batch, logs)

        def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
            """Hand out the metrics of the last step."""
            self._hand_out(logs)
            self._loggers.on_train_batch_end(batch, {**(logs or {}), **self._last})

        def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
            """Hand out the metrics of the epoch's last step."""
            history = getattr(getattr(self.model, "history", None), "history", {})
            for name, value in self._last.items() if self._hand_out(logs) else ():
                if name != REDUCTION:
                    history.setdefault(name, []).append(value)
            self._loggers.on_epoch_end(epoch, {**(logs or {}), **self._last})

        def _hand_out(self, logs: Logs) -> bool:
            if logs is not None and REDUCTION in self._last:
                logs[REDUCTION] = self._last[REDUCTION]
            return logs is not None

        def _take(self, counters: StepCounters) -> None:
            self._last = as_dictionary(counters)

    return Metrics()


def report_losses(library: Any) -> Any:
    """Return a callback that reports each batch's loss to the guard (`horovod_topk.report`).

    Keras logs the mean loss of an epoch so far; the callback computes the losses of single batches
    from it (`horovod_topk.reporting.BatchLoss`).

    Args:
        library: `keras` or `tf_keras`.
    """

    class ReportLosses(library.callbacks.Callback):  # type: ignore[misc]
        """Reports the losses of batches."""

        def __init__(self) -> None:
            super().__init__()
            self._of_batch = reporting.BatchLoss()

        def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
            """Report the loss of this batch, or the mean of those since the last report."""
            loss = self._of_batch(batch, float((logs or {})["loss"]))
            if loss is not None:
                reporting.report(loss)

    return ReportLosses()
