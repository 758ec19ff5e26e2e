"""Metrics as TensorBoard scalars. `pip install horovod_topk[tensorboard]`."""

from __future__ import annotations

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from horovod_topk.core.run.stats import StepCounters
from horovod_topk.metrics import as_dictionary
from horovod_topk.schedules import check_steps


class TensorBoard:
    """Writes the metrics of steps as TensorBoard scalars.

    Args:
        folder: folder for the event files, one for each rank.
        every: one step in so many is written.

    Raises:
        ConfigError: `every` is no number of steps.
    """

    def __init__(self, folder: str | Path, every: int = 1) -> None:
        check_steps("every", every)
        self._folder, self._every = str(folder), every
        self._writer: EventFileWriter | None = EventFileWriter(self._folder)

    def __call__(self, counters: StepCounters) -> None:
        """Write the metrics of a step, if its number is a multiple of `every`.

        After `close` they go to a new file of the same folder.
        """
        if counters.step % self._every:
            return
        numbers = as_dictionary(counters).items()  # one event for all: an event a scalar costs more
        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers]
        event = Event(step=counters.step, wall_time=time.time(), summary=Summary(value=values))
        self._writer = self._writer or EventFileWriter(self._folder)
        self._writer.add_event(event)

    def close(self) -> None:
        """Write pending metrics, and close the file; a later step opens a new one."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
