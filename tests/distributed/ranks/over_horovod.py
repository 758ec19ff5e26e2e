"""What ranks that Horovod launched do in their own way; over_torch.py has the same functions."""

from __future__ import annotations

import time

import horovod.torch as hvd
import pytest
from horovod.torch import mpi_ops

from horovod_topk.core.plan.nodes import Location


def place(monkeypatch: pytest.MonkeyPatch, location: Location) -> None:
    """Have this rank say that it runs there."""
    monkeypatch.setattr("horovod_topk.process_sets.here", lambda rank, local: location)


def begin() -> None:
    """Know the other ranks."""
    without_spinning()
    hvd.init()


def without_spinning() -> None:
    """Sleep between two looks at a collective, as Horovod's own waiting does not.

    It takes a whole core, and with more ranks than cores every message of every background thread
    waits for a time slice: with some process sets a step of a few collectives then takes seconds.
    """
    library = mpi_ops.mpi_lib
    wait_and_clear = library.horovod_torch_wait_and_clear

    def wait(handle: int) -> None:
        while not library.horovod_torch_poll(handle):
            time.sleep(50e-6)
        wait_and_clear(handle)

    library.horovod_torch_wait_and_clear = wait
