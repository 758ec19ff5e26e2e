"""The first lines of newcomers: what is mistyped ends in an error that names the right line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import horovod_topk
import horovod_topk.tensorflow
import horovod_topk.torch
from horovod_topk import checkpoint, ddp
from horovod_topk.errors import AdapterImportError, CheckpointError, ConfigError, NotAttachedError
from horovod_topk.methods import METHODS

TORCHS = "Write from horovod_topk.torch import TopKEF"
DDPS = "write from horovod_topk.ddp import TopKEF"
ATTACH = "TopKEF().attach(model, optimizer)"


@pytest.fixture
def optimizer() -> Optimizer:
    return SGD(nn.Linear(40, 40).parameters(), lr=0.1)


@pytest.fixture
def model() -> Iterator[DistributedDataParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(40, 40))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("compression", "problem"),
    [
        ("topk", "compression='topk' is no compressor"),
        (None, "compression=None is no compressor"),
        (0.01, "compression=0.01 is no compressor"),
        (horovod_topk.TopKConfig, "is no compressor"),
        (ddp.TopKEF, "compression=TopKEF is of horovod_topk.ddp"),
        (ddp.TopKEF(0.01), "compression=TopKEF is of horovod_topk.ddp"),
        (horovod_topk.tensorflow.TopKEF, "compression=TopKEF is of horovod_topk.tensorflow"),
    ],
)
def test_what_horovods_optimizer_is_given(
    optimizer: Optimizer, compression: object, problem: str
) -> None:
    names = [(f"{i}", p) for i, p in enumerate(optimizer.param_groups[0]["params"])]
    with pytest.raises(ConfigError) as error:
        hvd.DistributedOptimizer(optimizer, names, compression)
    assert problem in str(error.value)
    assert TORCHS in str(error.value)


@pytest.mark.parametrize("given", [horovod_topk.torch.TopKEF, horovod_topk.torch.TopKEF()])
def test_a_compressor_in_the_place_of_the_names(optimizer: Optimizer, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"Pass it by name: .*compression=TopKEF"):
        hvd.DistributedOptimizer(optimizer, given)


def test_horovod_alone_asks_a_compressor_of_ddp() -> None:
    """Where horovod_topk.torch is not imported, Horovod calls `compress`."""
    with pytest.raises(ConfigError, match=r"from horovod_topk\.torch import TopKEF"):
        ddp.TopKEF.compress(torch.ones(1))


@pytest.mark.parametrize("name", [*METHODS, "Guard"])
def test_the_package_itself_has_no_compressor(name: str) -> None:
    with pytest.raises(AdapterImportError, match=rf"from horovod_topk\.torch import {name}"):
        getattr(horovod_topk, name)
    assert not hasattr(horovod_topk, "no_such_name")


@pytest.mark.parametrize(
    ("library", "package"),
    [
        ("Accelerate", "accelerate"),
        ("Lightning", "lightning"),
        ("Transformers", r"'transformers\[torch\]'"),
    ],
)
def test_an_integration_without_its_library(
    monkeypatch: pytest.MonkeyPatch, library: str, package: str
) -> None:
    for name in (library.lower(), "lightning.pytorch", "accelerate.utils"):
        monkeypatch.setitem(sys.modules, name, None)
    message = rf"{library} cannot be imported: .*pip install {package}; plain PyTorch"
    with pytest.raises(AdapterImportError, match=message):
        importlib.import_module(f"horovod_topk.integrations.{library.lower()}")


@pytest.mark.parametrize("adapter", ["torch", "ddp", "tensorflow"])
def test_an_adapter_lists_all_its_compressors(adapter: str) -> None:
    module = importlib.import_module(f"horovod_topk.{adapter}")
    assert {*METHODS} < {*dir(module)}
    with pytest.raises(AdapterImportError, match=r"has no 'TopKef'\. Import TopKEF"):
        _ = module.TopKef
    assert not hasattr(module, "__wrapped__")


@pytest.mark.parametrize("kind", [horovod_topk.torch.TopKEF, horovod_topk.tensorflow.TopKEF])
@pytest.mark.parametrize("call", ["attach", "hook"])
def test_a_compressor_of_horovod_with_ddp(
    model: DistributedDataParallel, optimizer: Optimizer, kind: Any, call: str
) -> None:
    for compressor in (kind, kind()):
        with pytest.raises(ConfigError, match=DDPS):
            getattr(compressor, call)(model, optimizer)


def test_the_class_itself_is_attached(model: DistributedDataParallel) -> None:
    plain = SGD(model.parameters(), lr=0.1)
    ddp.TopKEF.attach(model, plain)
    assert not ddp.TopKEF.of(model).active
    other = DistributedDataParallel(nn.Linear(2, 2))
    state, hook = ddp.QSGD.hook(other, SGD(other.parameters(), lr=0.1))
    assert (type(state), hook) == (ddp.DDPState, ddp.exchange)


def test_a_compressor_is_no_hook_and_no_state_of_one(model: DistributedDataParallel) -> None:
    with pytest.raises(ConfigError) as error:
        model.register_comm_hook(None, ddp.TopKEF)
    assert ATTACH in str(error.value)
    with pytest.raises(ConfigError) as error:
        ddp.exchange(ddp.TopKEF(), None)  # type: ignore[arg-type]
    assert ATTACH in str(error.value)


@pytest.mark.parametrize(
    "asked", [ddp.TopKEF.of, horovod_topk.torch.TopKEF.of, horovod_topk.tensorflow.TopKEF().of]
)
def test_of_without_what_was_built(asked: Callable[..., Any], optimizer: Optimizer) -> None:
    for given in ([], [optimizer], [nn.Linear(2, 2)]):
        with pytest.raises(NotAttachedError):
            asked(*given)


def test_what_is_no_state_of_a_compressor(optimizer: Optimizer, tmp_path: Path) -> None:
    for given in (optimizer, nn.Linear(2, 2), ddp.TopKEF, horovod_topk.torch.TopKEF, None):
        for call in (checkpoint.save, checkpoint.load):
            with pytest.raises(CheckpointError, match=r"Pass TopKEF\.of\(optimizer\)"):
                call(tmp_path, given)  # type: ignore[operator]
