"""What every PyTorch rank does around a case; see ../meeting.py."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meeting import Meeting, choose
from world import FSDP, begin, hvd


def without_compiler() -> None:
    """Spare each rank the import of torch's compiler, seconds long, on its first optimizer step.

    torch asks it for two things there: to leave a function uncompiled, and to stop compiling.
    DistributedDataParallel asks whether it is to be compiled.
    """
    compiler = types.ModuleType("torch._dynamo")
    compiler.disable = lambda function, *args, **kwargs: function
    compiler.graph_break = lambda: None
    compiler.utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    compiler.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
    sys.modules.setdefault(compiler.__name__, compiler)


def pytest_configure(config: pytest.Config) -> None:
    if not (FSDP or "case_fsdp.py" in " ".join(map(str, config.args))):  # DTensors need more
        without_compiler()
    begin()
    torch.set_num_threads(1)
    config.pluginmanager.register(Meeting(hvd.rank(), hvd.size()), "meeting")


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(getattr(getattr(each, "setup", each), "options", None) for each in values):
            item.add_marker("horovod")  # they are arguments of its DistributedOptimizer
        if not any(map(item.get_closest_marker, ("everywhere", "one_in"))):
            item.add_marker(pytest.mark.one_in(4))
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
def pair() -> Iterator[Any]:
    """A process set of ranks 0 and 1; a hierarchical exchange may have added it already."""
    from horovod_topk.process_sets import find_or_add

    (process_set,) = find_or_add([[0, 1]])
    yield process_set
    hvd.remove_process_set(process_set)
