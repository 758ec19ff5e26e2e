"""Metrics as TensorBoard scalars. `pip install horovod_topk[tensorboard]`."""

from __future__ import annotations

from pathlib import Path

from tensorboard.summary import Writer

from horovod_topk.core.stats import StepCounters
from horovod_topk.metrics import as_dictionary


class TensorBoard:
    """Writes the metrics of steps as TensorBoard scalars.

    Args:
        folder: folder for the event files, one for each rank.
        every: one step in so many is written.
    """

    def __init__(self, folder: str | Path, every: int = 1) -> None:
        self._writer, self._every = Writer(str(folder)), every

    def __call__(self, counters: StepCounters) -> None:
        """Write the metrics of a step, if its number is a multiple of `every`."""
        if counters.step % self._every == 0:
            for name, number in as_dictionary(counters).items():
                self._writer.add_scalar(name, number, counters.step)

    def close(self) -> None:
        """Write pending metrics, and close the files."""
        self._writer.close()
