"""FSDP2 on two nodes of two ranks: shards are added up within a node, and compressed between."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from horovod_topk import checkpoint, ddp
from horovod_topk.core.run.substitute import HOROVODS, VARIABLE
from horovod_topk.errors import (
    ConfigError,
    NotAttachedError,
    PlanMismatchError,
    RepeatedSynchronizeError,
    StepBeforeSynchronizeError,
    UnsupportedOperationError,
)
from horovod_topk.fsdp import PowerSGD, SignSGD, TopKEF
from horovod_topk.torch_training.onebit_adam import OneBitAdam

pytestmark = pytest.mark.world_size(4)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "fused AdamW": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
}
DENSE = {"ratio": 1.0, "values": "float32"}
SPARSE = {"ratio": 0.1, "min_numel": 0, "warmup": None}


@pytest.fixture(scope="module")
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


class Net(nn.Module):
    """Three units; the second one may be left out. Shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(20, 33), nn.Linear(33, 33), nn.Linear(33, 7)

    def forward(self, x: Tensor, uses_second: bool = True) -> Tensor:
        x = self.first(x).tanh()
        return self.last(self.second(x).tanh() if uses_second else x)


def sharded(
    mesh: DeviceMesh, prepare: Callable[[nn.Module], Any] = lambda unit: unit, **options: Any
) -> Net:
    torch.manual_seed(3)
    net = Net()
    for name in ("first", "second", "last"):
        setattr(net, name, fully_shard(prepare(getattr(net, name)), mesh=mesh, **options))
    return fully_shard(net, mesh=mesh, **options)


def attached(mesh: DeviceMesh, optimizer: Any, settings: Any, **options: Any) -> tuple[Net, Any]:
    net = sharded(mesh["shard"], **options)
    own = optimizer(net.parameters())
    compressor = settings if isinstance(settings, TopKEF.__mro__[1]) else TopKEF(**settings)
    compressor.attach(net, own, between=mesh["replicate"])
    return net, own


def loss(net: nn.Module, step: int, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(8, 20, generator=generator)
    return (net(x, **options).float() - x[:, :7].sin()).square().mean()


def ordinary(net: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss(net, step).backward()
    optimizer.step()


def parts(net: nn.Module) -> list[Tensor]:
    return [p.to_local().detach().clone() for p in net.parameters()]  # type: ignore[attr-defined]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def assert_nodes_equal(net: nn.Module, mesh: DeviceMesh) -> None:
    own = torch.cat([part.reshape(-1) for part in parts(net)])
    both = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(both, own, group=mesh["replicate"].get_group())
    assert torch.equal(*both)


# What it computes.


def clipped(net: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss(net, step).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()


def accumulated(net: Any, optimizer: Any, step: int, begin: str = "gradient_sync") -> None:
    optimizer.zero_grad()
    for i in range(3):
        getattr(net, f"set_requires_{begin}")(i == 2)
        loss(net, 3 * step + i).backward()
    optimizer.step()


LOOPS: dict[str, Callable[..., None]] = {
    "ordinary": ordinary,
    "clipped": clipped,
    "accumulated": accumulated,
    "accumulated shards": partial(accumulated, begin="all_reduce"),
}


@pytest.mark.everywhere
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_at_full_ratio_it_is_hsdp(name: str, loop: str, mesh: DeviceMesh) -> None:
    """To the bit, with two nodes."""
    ours, own = attached(mesh, OPTIMIZERS[name], DENSE)
    theirs = sharded(mesh)
    its = OPTIMIZERS[name](theirs.parameters())
    for step in range(5):
        LOOPS[loop](ours, own, step)
        LOOPS[loop](theirs, its, step)
    assert_same(parts(ours), parts(theirs))


NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "mixed precision": {"mp_policy": NARROW},
    "not resharded": {"reshard_after_forward": False},
    "checkpointed": {"prepare": checkpoint_wrapper},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_fully_shard(option: str, mesh: DeviceMesh) -> None:
    ours, own = attached(mesh, OPTIMIZERS["AdamW"], DENSE, **OPTIONS[option])
    theirs = sharded(mesh, **OPTIONS[option])
    its = OPTIMIZERS["AdamW"](theirs.parameters())
    for step in range(4):
        ordinary(ours, own, step)
        ordinary(theirs, its, step)
    assert_same(parts(ours), parts(theirs))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", HOROVODS)
def test_dense_as_a_comparison_asks_for_it(
    name: str, loop: str, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 averages gradients between nodes; those of 16 bits differ."""
    monkeypatch.setenv(VARIABLE, name)
    ours, own = attached(mesh, OPTIMIZERS["SGD"], SPARSE)
    theirs = sharded(mesh)
    its = OPTIMIZERS["SGD"](theirs.parameters())
    for step in range(4):
        LOOPS[loop](ours, own, step)
        LOOPS[loop](theirs, its, step)
    assert_nodes_equal(ours, mesh)
    assert not TopKEF.of(ours).stats().active
    tolerance = 1e-3 if name == "fp16" else 1e-7
    for one, other in zip(parts(ours), parts(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    same = all(torch.equal(a, b) for a, b in zip(parts(ours), parts(theirs), strict=True))
    assert same == (name == "none") or loop == "accumulated shards"  # added up in another order


SETTINGS: dict[str, Any] = {
    "default": dict[str, Any](),
    "sparse": SPARSE,
    "sharded": SPARSE | {"exchange": "sharded"},
    "sampled int8": SPARSE | {"values": "int8", "selection": "sampled"},
    "adaptive": SPARSE | {"allocation": "adaptive"},
    "PowerSGD": PowerSGD(rank=1, min_numel=0),
    "SignSGD": SignSGD(min_numel=0),
}


@pytest.mark.everywhere
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nodes_stay_equal(name: str, settings: str, mesh: DeviceMesh) -> None:
    net, optimizer = attached(mesh, OPTIMIZERS[name], SETTINGS[settings])
    for step in range(6):
        ordinary(net, optimizer, step)
        assert_nodes_equal(net, mesh)
    stats = TopKEF.of(net).stats()
    assert stats.steps == 6 and stats.ranks == 2
    assert stats.elements == sum(part.numel() for part in parts(net))
    assert stats.residual_norm > 0 and stats.sent_bytes < stats.dense_bytes


def test_what_is_not_sent_comes_later(mesh: DeviceMesh) -> None:
    """The sum of what both nodes applied and of their residuals is that of their gradients."""
    net, optimizer = attached(mesh, partial(torch.optim.SGD, lr=0.0), SPARSE | {"momentum": 0})
    twin = sharded(mesh["shard"])
    sent, came = list[Tensor](), list[Tensor]()
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 1e-30
        ordinary(net, optimizer, step)
        sent.append(flat([p.grad.to_local() for p in net.parameters()]))  # type: ignore[union-attr]
        twin.zero_grad()
        loss(twin, step).backward()
        came.append(flat([p.grad.to_local() for p in twin.parameters()]))  # type: ignore[union-attr]
    state = TopKEF.of(net)
    residuals = flat([state.residual(name) for name, _ in net.named_parameters()])
    mean = torch.stack([sum(came), residuals])  # type: ignore[list-item]
    dist.all_reduce(mean, group=mesh["replicate"].get_group())
    gradients, left = mean / 2
    torch.testing.assert_close(sum(sent) + left, gradients, rtol=1e-4, atol=1e-6)
    assert residuals.any()


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in tensors])


# What is left out of a step.


def test_a_unit_that_one_node_does_not_use(mesh: DeviceMesh) -> None:
    net, optimizer = attached(mesh, OPTIMIZERS["AdamW"], SPARSE)
    for step in range(5):
        optimizer.zero_grad()
        uses = mesh["replicate"].get_local_rank() == 0 or step == 2
        loss(net, step, uses_second=uses).backward()
        optimizer.step()
        assert_nodes_equal(net, mesh)
    assert TopKEF.of(net).stats().steps == 5


def by_node(net: Net, step: int, mesh: DeviceMesh, first: bool = True) -> Tensor:
    """A loss in which the second unit is used on one node alone."""
    return loss(net, step, uses_second=(mesh["replicate"].get_local_rank() == 0) == first)


def test_clipping_where_one_node_does_not_use_a_unit(mesh: DeviceMesh) -> None:
    """Its gradient is None on no rank, or on all of them, as norms are collectives."""
    net, optimizer = attached(mesh, OPTIMIZERS["AdamW"], SPARSE | {"ratio": 0.01})
    for step in range(4):
        optimizer.zero_grad()
        by_node(net, step, mesh).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        assert_nodes_equal(net, mesh)


@pytest.mark.parametrize("begin", ["requires_gradient_sync", "requires_all_reduce"])
def test_a_unit_that_only_the_first_of_several_backwards_uses(begin: str, mesh: DeviceMesh) -> None:
    ours, own = attached(mesh, OPTIMIZERS["SGD"], DENSE)
    theirs = sharded(mesh)
    its = OPTIMIZERS["SGD"](theirs.parameters())
    for step in range(4):
        for net, optimizer in ((ours, own), (theirs, its)):
            optimizer.zero_grad()
            getattr(net, f"set_{begin}")(False)
            loss(net, 2 * step).backward()
            getattr(net, f"set_{begin}")(True)
            loss(net, 2 * step + 1, uses_second=False).backward()
            optimizer.step()
        assert_nodes_equal(ours, mesh)
    if begin == "requires_gradient_sync":
        assert_same(parts(ours), parts(theirs))


class Shared(Net):
    """Uses its second unit three times."""

    def forward(self, x: Tensor, uses_second: bool = True) -> Tensor:
        x = self.first(x).tanh()
        for _ in range(3):
            x = self.second(x).tanh()
        return self.last(x)


def test_a_unit_that_is_used_several_times(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hooks are called for parts of its gradient: with several buckets, some are sent then."""
    monkeypatch.setitem(globals(), "Net", Shared)
    theirs, ours = sharded(mesh), sharded(mesh["shard"])
    own, its = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (ours, theirs))
    groups = [[*getattr(ours, name).parameters()] for name in ("last", "second", "first")]
    TopKEF(**DENSE).attach(ours, own, between=mesh["replicate"], groups=groups)
    for step in range(4):
        accumulated(ours, own, step)
        accumulated(theirs, its, step)
        assert_nodes_equal(ours, mesh)
    for one, other in zip(parts(ours), parts(theirs), strict=True):  # added up in another order
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_an_optimizer_whose_gradients_one_node_has(mesh: DeviceMesh) -> None:
    net = sharded(mesh["shard"])
    second = [*net.second.parameters()]
    others = [p for p in net.parameters() if not any(p is each for each in second)]
    both = [torch.optim.SGD(others, lr=0.1), torch.optim.AdamW(second, lr=0.01)]
    TopKEF(**SPARSE).attach(net, both, between=mesh["replicate"])
    for step in range(4):
        net.zero_grad()
        by_node(net, step, mesh, first=step < 2).backward()
        for optimizer in both:
            optimizer.step()
        assert_nodes_equal(net, mesh)
    assert TopKEF.of(net).stats().steps == 8


def test_another_optimizer_inherits_residuals(mesh: DeviceMesh) -> None:
    net, optimizer = attached(mesh, OPTIMIZERS["SGD"], SPARSE)
    for step in range(3):
        ordinary(net, optimizer, step)
    before = TopKEF.of(net).residual("last.weight")
    other = OPTIMIZERS["AdamW"](net.parameters())
    TopKEF(**SPARSE).attach(net, other, between=mesh["replicate"])
    assert torch.equal(TopKEF.of(net).residual("last.weight"), before) and before.any()
    for step in range(3, 6):
        ordinary(net, other, step)
    assert_nodes_equal(net, mesh)
    assert TopKEF.of(net).stats().steps == 3


def test_a_frozen_unit(mesh: DeviceMesh) -> None:
    net = sharded(mesh["shard"])
    net.second.requires_grad_(False)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    TopKEF(**SPARSE).attach(net, optimizer, between=mesh["replicate"])
    for step in range(3):
        ordinary(net, optimizer, step)
    assert_nodes_equal(net, mesh)
    assert not any("second" in name for name in TopKEF.of(net).tensors)


def test_two_optimizers(mesh: DeviceMesh) -> None:
    net = sharded(mesh["shard"])
    last = [*net.last.parameters()]
    others = [p for p in net.parameters() if not any(p is each for each in last)]
    both = [torch.optim.SGD(others, lr=0.1, momentum=0.9), torch.optim.AdamW(last, lr=0.01)]
    TopKEF(**SPARSE).attach(net, both, between=mesh["replicate"])
    for step in range(3):
        net.zero_grad()
        loss(net, step).backward()
        for optimizer in both:
            optimizer.step()
    assert_nodes_equal(net, mesh)
    assert TopKEF.of(net).stats().steps == 6


def test_a_forward_without_gradients_between_backward_and_step(mesh: DeviceMesh) -> None:
    net, optimizer = attached(mesh, OPTIMIZERS["SGD"], SPARSE)
    twin, its = attached(mesh, OPTIMIZERS["SGD"], SPARSE)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 1)
        loss(net, step).backward()
        with torch.no_grad():
            loss(net, 70)
        optimizer.step()
        ordinary(twin, its, step)
    assert_same(parts(net), parts(twin))


# Checkpoints.


def test_a_restart_goes_on_to_the_bit(mesh: DeviceMesh, tmp_path: Path) -> None:
    folders = [str(tmp_path)]
    dist.broadcast_object_list(folders)
    net, optimizer = attached(mesh, OPTIMIZERS["AdamW"], SPARSE)
    for step in range(3):
        ordinary(net, optimizer, step)
    path = checkpoint.save(folders[0], TopKEF.of(net))
    dist.barrier()
    assert path is not None and len([*path.parent.glob("*.safetensors")]) == 4
    again = sharded(mesh["shard"])
    with torch.no_grad():
        for p, q in zip(again.parameters(), net.parameters(), strict=True):
            p.copy_(q)
    its = OPTIMIZERS["AdamW"](again.parameters())
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    TopKEF(**SPARSE).attach(again, its, between=mesh["replicate"])
    checkpoint.load(folders[0], TopKEF.of(again))
    for step in range(3, 6):
        ordinary(net, optimizer, step)
        ordinary(again, its, step)
    assert_same(parts(net), parts(again))


# What is refused.


def test_local_steps_between_nodes(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Each node trains alone, and exchanges movements of shards; a restart is in mid-round."""
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    group = mesh["replicate"].get_group()

    def made() -> tuple[Net, ddp.LocalSteps]:
        net = sharded(mesh["shard"])
        inner = torch.optim.AdamW(net.parameters(), lr=0.01)
        compression = ddp.TopKEF(ratio=0.1, min_numel=0)
        options: Any = {"every": 3, "compression": compression, "group": group}
        return net, ddp.LocalSteps(inner, net.named_parameters(), **options)

    net, optimizer = made()
    for step in range(7):
        ordinary(net, optimizer, step)
        if step % 3 == 2:
            assert_nodes_equal(net, mesh)
    checkpoint.save(folder[0], ddp.TopKEF.of(optimizer))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    other, resumed = made()
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    dist.barrier()
    checkpoint.load(folder[0], ddp.TopKEF.of(resumed))
    for step in range(7, 12):
        ordinary(net, optimizer, step)
        ordinary(other, resumed, step)
    assert_same(parts(other), parts(net))


@pytest.fixture
def plain(mesh: DeviceMesh) -> tuple[Net, Any]:
    net = sharded(mesh["shard"])
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def test_models_and_meshes_that_are_refused(plain: tuple[Net, Any], mesh: DeviceMesh) -> None:
    net, optimizer = plain
    native = sharded(mesh)
    its = torch.optim.SGD(native.parameters(), lr=0.1)
    between = mesh["replicate"]
    with pytest.raises(ConfigError, match="a mesh of 2 dimensions, so that PyTorch itself adds"):
        TopKEF().attach(native, its, between=between)
    with pytest.raises(ConfigError, match="between= is a mesh of 2 dimensions"):
        TopKEF().attach(net, optimizer, between=mesh)
    with pytest.raises(ConfigError, match="FSDP2 shards it among ranks that between= has too"):
        TopKEF().attach(net, optimizer, between=mesh["shard"])
    with pytest.raises(ConfigError, match="neither a mesh nor a process group"):
        TopKEF().attach(net, optimizer, between="replicate")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="fully_shard was not called with this Linear"):
        TopKEF().attach(nn.Linear(2, 2), optimizer, between=between)
    with pytest.raises(ConfigError, match="the model is an optimizer"):
        TopKEF().attach(optimizer, net, between=between)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="trains it, and no optimizer has it"):
        few = torch.optim.SGD(net.last.parameters(), lr=0.1)
        TopKEF().attach(net, few, between=between)
    with pytest.raises(ConfigError, match="clip_norm=1 was given"):
        TopKEF(clip_norm=1.0).attach(net, optimizer, between=between)
    with pytest.raises(UnsupportedOperationError, match="OneBitAdam exchanges its momentum"):
        TopKEF().attach(net, OneBitAdam(net.parameters(), 5), between=between)
    with pytest.raises(NotAttachedError, match="no compressor is attached to this FSDPNet"):
        TopKEF.of(net)
    TopKEF().attach(net, optimizer, between=between)
    with pytest.raises(ConfigError, match="attached to this model and this optimizer already"):
        TopKEF().attach(net, optimizer, between=between)


def test_memory_is_free_once_a_model_is_deleted(mesh: DeviceMesh) -> None:
    """Models that FSDP2 has sharded are reference cycles of its own."""
    net, optimizer = attached(mesh, OPTIMIZERS["AdamW"], SPARSE)
    ordinary(net, optimizer, 0)
    held = [*map(weakref.ref, (net, TopKEF.of(net)._compressor))]
    del net, optimizer
    gc.collect()
    assert [each() for each in held] == [None, None]


def test_nodes_with_different_settings(plain: tuple[Net, Any], mesh: DeviceMesh) -> None:
    net, optimizer = plain
    ratio = 0.1 if mesh["replicate"].get_local_rank() else 0.2
    with pytest.raises(PlanMismatchError, match="settings"):
        TopKEF(ratio=ratio).attach(net, optimizer, between=mesh["replicate"])


def test_attaching_between_backward_and_step(plain: tuple[Net, Any], mesh: DeviceMesh) -> None:
    net, optimizer = plain
    loss(net, 0).backward()
    TopKEF(**SPARSE).attach(net, optimizer, between=mesh["replicate"])
    with pytest.raises(StepBeforeSynchronizeError, match=r"attach\(\) was called between backward"):
        optimizer.step()
    ordinary(net, optimizer, 1)
    assert_nodes_equal(net, mesh)


@pytest.mark.parametrize("scaled", [True, False])
def test_a_scaler_is_told_from_a_factor(scaled: bool, mesh: DeviceMesh) -> None:
    """Gradients that a loop halves have no scale that changes."""
    net, optimizer = attached(mesh, OPTIMIZERS["AdamW"], SPARSE)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss(net, step)).backward()
        for p in net.parameters():
            assert p.grad is not None
            p.grad.mul_(1.0 if scaled else 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert len(TopKEF.of(net).stats().warnings) == scaled


def test_steps_that_are_refused(mesh: DeviceMesh) -> None:
    net, optimizer = attached(mesh, OPTIMIZERS["AdamW"], SPARSE)
    loss(net, 0).backward()
    for _ in range(2):  # nothing has changed in between
        net_before = parts(net)
        with pytest.raises(RepeatedSynchronizeError, match="exchanged already and not stepped on"):
            loss(net, 1).backward()
        assert_same(parts(net), net_before)
    optimizer.zero_grad()
    loss(net, 1, uses_second=False).backward()
    with pytest.raises(RepeatedSynchronizeError, match="exchanged already and not stepped on"):
        net.second(torch.ones(2, 33)).sum().backward()
    net.set_requires_gradient_sync(False)
    optimizer.zero_grad()
    loss(net, 2).backward()
    net.set_requires_gradient_sync(True)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(StepBeforeSynchronizeError, match="were not exchanged"):
        optimizer.step()
    optimizer.zero_grad()
    ordinary(net, optimizer, 3)
    assert_nodes_equal(net, mesh)
