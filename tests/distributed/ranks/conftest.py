"""What every PyTorch rank does around a case; see ../meeting.py."""

from __future__ import annotations

import gc
import sys
import time
import types
from collections.abc import Iterator

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import mpi_ops

from horovod_topk.process_sets import find_or_add
from meeting import Meeting, choose


def without_compiler() -> None:
    """Spare each rank the import of torch's compiler, seconds long, on its first optimizer step.

    torch asks it for two things there: to leave a function uncompiled, and to stop compiling.
    """
    compiler = types.ModuleType("torch._dynamo")
    compiler.disable = lambda function, *args, **kwargs: function
    compiler.graph_break = lambda: None
    sys.modules.setdefault(compiler.__name__, compiler)


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


def pytest_configure(config: pytest.Config) -> None:
    without_compiler()
    without_spinning()
    hvd.init()
    torch.set_num_threads(1)
    config.pluginmanager.register(Meeting(hvd.rank(), hvd.size()), "meeting")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    choose(config, items, hvd.size())
    gc.freeze()  # what is imported by now need not be searched after every case


@pytest.fixture(autouse=True)
def _forget_optimizers() -> Iterator[None]:
    """Horovod's optimizers are reference cycles: end them with the case that made them.

    What is left then need not be searched after the next case.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_optimizers() -> None:
    """End what earlier cases have made and a traceback, for example, still held when they ended."""
    gc.unfreeze()
    gc.collect()


@pytest.fixture
def pair() -> Iterator[hvd.ProcessSet]:
    """A process set of ranks 0 and 1; a hierarchical exchange may have added it already."""
    (process_set,) = find_or_add([[0, 1]])
    yield process_set
    hvd.remove_process_set(process_set)
