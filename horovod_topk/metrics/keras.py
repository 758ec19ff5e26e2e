"""Callbacks of Keras 3 and tf-keras: metrics in the logs, and losses for the guard."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from horovod_topk import reporting
from horovod_topk.core.stats import StepCounters
from horovod_topk.metrics import as_dictionary


def callback(compression: Any, library: Any) -> Any:
    """Return a callback that adds the last step's metrics to the logs of batches and epochs.

    `model.fit(...).history` has them, and every later callback sees them.

    Args:
        compression: the instance that the optimizer was built with, such as `TopKEF()`.
        library: `keras` or `tf_keras`.
    """

    class Metrics(library.callbacks.Callback):  # type: ignore[misc]
        """Adds metrics to Keras' logs."""

        def __init__(self) -> None:
            super().__init__()
            self._last: dict[str, float] = {}
            compression.on_step(self._take)

        def on_train_batch_end(
            self, batch: int, logs: MutableMapping[str, float] | None = None
        ) -> None:
            """Add the metrics of the last step."""
            if logs is not None:
                logs.update(self._last)

        def on_epoch_end(self, epoch: int, logs: MutableMapping[str, float] | None = None) -> None:
            """Add the metrics of the epoch's last step."""
            if logs is not None:
                logs.update(self._last)

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
