"""A DDP rank and a Horovod rank: for the same gradients the same bytes and the same training.

Ranks that Horovod has launched meet once more in torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import horovod_topk.ddp
import horovod_topk.torch
import training
from horovod_topk.torch.collective import HorovodCollective
from horovod_topk.torch_training.collective import GroupCollective
from meeting import FOLDER
from training import Setup
from witness import assert_same, bits

STEPS = 6
OWN = {"min_numel": 16, "ratio": 0.1}
Calls = list[tuple[str, str, bytes]]


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    store = dist.FileStore(str(FOLDER / "store"), hvd.size())
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    yield
    dist.barrier()
    dist.destroy_process_group()


def in_two(task: Any) -> list[list[Tensor]]:
    """Buckets: DDP's order of parameters, and another one."""
    p = list(task.parameters())
    return [[p[5], p[2], p[4]], [p[0], p[1], p[3]]]


def over(kind: type, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The collectives of an adapter from here on: verb, name without its prefix, and bytes."""
    calls: Calls = []

    def recorded(verb: str) -> Callable[..., Any]:
        original = getattr(kind, verb)

        def call(self: Any, array: Tensor, *args: Any) -> Any:
            name = next(each for each in args if isinstance(each, str))
            sent = bytes(bits([array]).numpy())
            calls.append((verb, name.split(".", 3)[-1], sent))
            return original(self, array, *args)

        return call

    for verb in ("allgather", "alltoall", "reduce_scatter", "allreduce"):
        monkeypatch.setattr(kind, verb, recorded(verb))
    return calls


@pytest.mark.one_in(2)
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("groups", [None, in_two], ids=["by default", "in two"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("TopKEF", {"min_numel": 16}),
        ("TopKEF", {**OWN, "values": "int4", "exchange": "sharded"}),
        ("TopKEF", {**OWN, "exchange": "hierarchical"}),
        ("PowerSGD", {"min_numel": 16, "rank": 1}),
        ("QSGD", {"min_numel": 16}),
        ("Dense", {"values": "bfloat16"}),
    ],
    ids=str,
)
def test_the_same_bytes_and_the_same_training(
    name: str, settings: dict[str, Any], groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(groups=groups)
    task, theirs = setup.task(), setup.task()
    ours = over(GroupCollective, monkeypatch)
    model, own = DistributedDataParallel(task, bucket_cap_mb=0.001), training.sgd(task.parameters())
    compressor = getattr(horovod_topk.ddp, name)(**settings)
    compressor.attach(model, own, None if groups is None else groups(task))
    other = over(HorovodCollective, monkeypatch)
    optimizer = setup.distributed(theirs, getattr(horovod_topk.torch, name)(**settings))
    for calls in (ours, other):  # of the agreement, which numbers optimizers
        calls.clear()
    for step in range(STEPS):
        own.zero_grad()
        model(hvd.rank(), step).backward()
        own.step()
        training.ordinary(theirs, optimizer, step)
        assert_same(training.snapshot(task), training.snapshot(theirs))
    assert len(ours) >= STEPS
    assert sorted(ours) == sorted(other)  # Horovod's order is its own
    state = horovod_topk.torch.TopKEF.of(optimizer).state_dict()
    kept = horovod_topk.ddp.TopKEF.of(model).state_dict()
    assert list(kept) == list(state)
    for tensor, residual in state["residuals"].items():
        assert torch.equal(kept["residuals"][tensor], residual), tensor
