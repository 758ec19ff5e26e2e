"""What every PyTorch rank does around a case; see ../meeting.py."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator

import horovod.torch as hvd
import pytest
import torch

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


def pytest_configure(config: pytest.Config) -> None:
    without_compiler()
    hvd.init()
    torch.set_num_threads(1)
    config.pluginmanager.register(Meeting(hvd.rank(), hvd.size()), "meeting")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    choose(config, items, hvd.size())
    gc.freeze()  # what is imported by now need not be searched after every case


@pytest.fixture(autouse=True)
def _forget_optimizers() -> Iterator[None]:
    """Horovod's optimizers are reference cycles: end them with the case that made them."""
    yield
    gc.collect()


@pytest.fixture
def pair() -> Iterator[hvd.ProcessSet]:
    """A process set of ranks 0 and 1; a hierarchical exchange may have added it already."""
    (process_set,) = find_or_add([[0, 1]])
    yield process_set
    hvd.remove_process_set(process_set)
