"""`report` and `seed`: a training script reports metrics to guards and `horovod-topk compare`.

    import horovod_topk

    torch.manual_seed(horovod_topk.seed(0))
    ...
    horovod_topk.report(step=step, loss=loss)

Outside of a comparison `report` only calls guards, and `seed` returns its default. A comparison
sets two environment variables on every rank:

    HOROVOD_TOPK_REPORT   the file that rank 0 appends JSON lines to
    HOROVOD_TOPK_SEED     the run's seed

Each line has the time in seconds of a monotonic clock. This module imports no framework.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import resource
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, SupportsFloat, TextIO

from horovod_topk.errors import ConfigError

REPORT = "HOROVOD_TOPK_REPORT"
SEED = "HOROVOD_TOPK_SEED"
RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "RANK")  # of launchers


def report(
    value: SupportsFloat | None = None,
    /,
    *,
    step: int | None = None,
    **metrics: SupportsFloat,
) -> None:
    """Report training metrics: `report(loss)`, or by name, such as `report(step=9, loss=0.3)`.

    The guard of every optimizer in this process watches `value`, or else the metric `loss`
    (`horovod_topk.guard`). Each rank's guard uses only values reported on that rank; it is enough
    to report on rank 0.

    `horovod-topk compare` records the metrics of rank 0. If ranks compute a metric on different
    data, average it over ranks before.

    Args:
        value: a value such as the loss; lower is better.
        step: number of finished training steps; required with metrics.
        metrics: numbers by name, for example `loss=` or `accuracy=`.

    Raises:
        ConfigError: a value that is used is not one number.
        ValueError: in a comparison, no metric was given, or metrics without a step.
    """
    watched = metrics.get("loss") if value is None else value
    if watched is not None:
        for state in _watched:
            state.report(watched)
    file = _file()
    if file is None or (value is not None and not metrics):
        return
    if step is None:
        raise ValueError("report() has no step. Pass the steps that are done, such as step=100")
    if not metrics:
        raise ValueError(f"report(step={step}) has no metric. Pass one, such as loss=0.3")
    found = {name: number_of(value, name) for name, value in metrics.items()}
    if not number_of(step, "step").is_integer():
        raise ValueError(f"report(step={step}) counts no whole steps. Pass the steps that are done")
    _write(file, "report", step=int(step), metrics=found, **_costs())


def number_of(value: SupportsFloat, name: str = "") -> float:
    """Convert a reported value to a float.

    Args:
        value: a number, or an array of one element.
        name: the argument of `report` that it was passed as.

    Raises:
        ConfigError: it is not one number, or beyond the range of floats.
    """
    try:
        if isinstance(value, str | bytes):
            raise TypeError("it is text")
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        # Python refuses to print an integer of more than 4,300 digits.
        shown = f"an integer of {value.bit_length()} bits" if type(value) is int else repr(value)
        what = f"{name}={shown:.60}" if name else f"{shown:.60}"
        raise ConfigError(
            f"report() was given {what}, which is not one number: {error}",
            cure="Pass a number, or a tensor of one element, such as the loss of this step",
        ) from error


class BatchLoss:
    """Computes the loss of each batch from the mean of an epoch so far, which Keras logs.

    Such a mean starts anew in each epoch, from a single batch, so that it rises and falls by what
    single batches differ: a guard could not tell that from harm.
    """

    def __init__(self) -> None:
        self._batches, self._mean = 0, 0.0

    def __call__(self, batch: int, mean: float) -> float | None:
        """Return the mean loss of the batches since the last call.

        Args:
            batch: number of the last batch in its epoch, from 0 on.
            mean: mean loss of the epoch's batches so far.

        Returns:
            None: it is not known, since an earlier batch of the epoch had a NaN or an infinity.
        """
        before, known, count = self._batches, self._mean, batch + 1
        if count <= before:  # a new epoch
            before, known = 0, 0.0
        self._batches, self._mean = count, mean
        if not math.isfinite(known):
            return None
        return (mean * count - known * before) / (count - before)


def seed(default: int = 0) -> int:
    """Return the seed that `horovod-topk compare` sets for this run; outside of it, `default`."""
    asked = os.environ.get(SEED)
    note("seed")
    return default if asked is None else int(asked)


def launched_rank() -> int | None:
    """This process's rank, read from the launcher's environment variables; None: no launcher."""
    return next((int(os.environ[name]) for name in RANKS if name in os.environ), None)


# Called by the adapters.


@functools.cache
def note(event: str, **details: str) -> None:
    """Write an event to the report, once; the event "compressor" starts the training clock."""
    file = _file()
    if file is not None:
        _write(file, event, **details)


def watch(state: Any) -> None:
    """Count the steps and bytes of an optimizer, and pass reported values to its state."""
    if state in _watched:
        return
    _watched.add(state)
    if _file() is not None:
        state.on_step(_count)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Count the seconds of a block in which an optimizer waits for exchanged gradients."""
    if _file() is None:
        yield
        return
    began = time.perf_counter()
    try:
        yield
    finally:
        _totals["waited"] += time.perf_counter() - began


_watched: weakref.WeakSet[Any] = weakref.WeakSet()  # states of optimizers
_totals: dict[str, float] = {"sent_bytes": 0, "dense_bytes": 0, "exchanges": 0, "waited": 0.0}


def _count(counters: Any) -> None:
    """Add up the `core.run.stats.StepCounters` of a step."""
    _totals["sent_bytes"] += counters.sent_bytes
    _totals["dense_bytes"] += counters.dense_bytes
    _totals["exchanges"] += counters.optimizer == 0  # of a model's optimizers the first one


def _costs() -> dict[str, float]:
    """Totals so far, and the peak memory of this process in bytes."""
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB
    return _totals | {"peak_memory": peak}


@functools.cache
def _file() -> TextIO | None:
    """The file that rank 0 appends lines to; None outside of a comparison and on other ranks."""
    path = os.environ.get(REPORT)
    if path is None or launched_rank() not in (None, 0):
        return None
    return Path(path).open("a", buffering=1, encoding="utf-8")  # closed when the process ends


def _write(file: TextIO, event: str, **details: object) -> None:
    file.write(json.dumps({"event": event, "seconds": time.monotonic(), **details}) + "\n")
