"""A step on a GPU waits, launches and takes memory as docs/gpu.md says: counted without a GPU.

The steps are those of DistributedDataParallel's hook and of a PyTorch optimizer, with the payloads
of two ranks: encode, decode, commit and update of all buckets of a ResNet-50.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import Watch, on_gpu
from test_triton import needs_triton
from torch import Tensor, nn

from horovod_topk.cli.compare.simulated import exchanges
from horovod_topk.cli.models import specs_of
from horovod_topk.core.exchange.loopback import Loopback
from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.core.run.timing import StepTimer
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch_training import collective
from horovod_topk.torch_training.updates import Updates, moments
from horovod_topk.updates.tracker import Rule, Tracker

RANKS, BUCKETS = 2, 5
PHASES = "encode", "sums of owners", "decode and commit", "update"
post, receive = Loopback.post, Loopback.receive


@pytest.fixture
def watch(fake_gpu: Watch, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Watch a step whose collectives, in place of NCCL's, are not counted.

    What they receive is never where it was in another step. While one is under way, the first rank
    launches nothing that writes to what it sends.
    """
    kept = list[Tensor]()

    def posted(network: Any, rank: int, name: str, payload: Tensor) -> Any:
        if rank == 0:
            fake_gpu.sent.append(payload)
        return post(network, rank, name, payload)

    def received(network: Any, rank: int, key: Any, joined: Any) -> Tensor:
        with fake_gpu.pausing():
            if rank == 0:  # what was posted first arrives first
                fake_gpu.sent.pop(0)
            kept.append(receive(network, rank, key, joined))
        return kept[-1]

    monkeypatch.setattr(Loopback, "post", posted)
    monkeypatch.setattr(Loopback, "receive", received)
    return fake_gpu


def documented(row: str) -> dict[str, int]:
    """Launches of each phase, from the table of docs/gpu.md."""
    page = (Path(__file__).parents[2] / "docs/gpu.md").read_text().splitlines()
    heads = next(line for line in page if all(phase in line for phase in PHASES))
    cells = next(line for line in page[page.index(heads) :] if line.startswith(f"| {row} |"))
    split = zip(heads.split("|"), cells.split("|"), strict=True)
    launches = {name.strip(): cell.strip() for name, cell in split}
    return {phase: int(launches[phase] or 0) for phase in PHASES}


def small_model(dtype: torch.dtype) -> tuple[nn.ParameterDict, Callable[[nn.Module, TopK], Plan]]:
    """A small tensor for each one of a ResNet-50, and what plans them in as many buckets."""
    specs = specs_of("resnet50")
    sizes = {spec.name: prod(spec.shape) // 4096 + 8 for spec in specs}
    drawn = {name: on_gpu(torch.randn(n, dtype=dtype)) for name, n in sizes.items()}
    model = nn.ParameterDict({name: nn.Parameter(p) for name, p in drawn.items()})
    kind = str(dtype).removeprefix("torch.")
    small = {name: TensorSpec(name, (n,), kind, "cuda:0") for name, n in sizes.items()}

    def plan_of(model: nn.Module, config: TopK) -> Plan:
        buckets = make_plan(specs, config).buckets
        groups = [[small[piece.spec.name] for piece in each.gradients] for each in buckets]
        return make_plan([*small.values()], config, groups=groups)

    return model, plan_of


class Training:
    """Two ranks' gradients, which stay where they are, and the optimizer of the first rank."""

    def __init__(self, kind: str, exchange: str, model: nn.ParameterDict) -> None:
        self.parameters = list(model.parameters())
        self.optimizer: Any = torch.optim.AdamW(self.parameters)
        if kind == "sgd":
            own = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
            self.optimizer = torch.optim.SGD(self.parameters, **own)
        names, rule = {p: name for name, p in model.items()}, Rule(kind)
        follower = Tracker(rule, TorchOps(), lambda: moments(self.optimizer, names))
        config = TopK(values="int4", exchange=exchange, min_numel=4, follow_lr=True)
        made = exchanges.Compressed(model, RANKS, config, rule, follower)
        self.ranks = made.compressors
        self.updates, self.follow = Updates(names, self.ranks[0]), made.attach
        of_ranks = [[torch.randn_like(p).detach() for p in self.parameters] for _ in self.ranks]
        self.gradients = of_ranks[0]
        self.buckets = [made.in_buckets(each) for each in of_ranks]

    def step(self, phase: Callable[[str], Any]) -> None:
        """Make a step of both ranks. Of the first one each phase runs in a context."""
        first, second = self.ranks
        with phase("encode"):
            for ordinal, bucket in self.buckets[0].items():
                first.launch(ordinal, bucket)
        for ordinal, bucket in self.buckets[1].items():
            second.launch(ordinal, bucket)
        with phase("sums of owners"):
            first.step.advance()
        second.step.advance()
        with phase("decode and commit"):
            first.step.finish(self.buckets[0])
            first.commit()
        second.step.finish(self.buckets[1])
        second.commit()
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            p.grad = gradient
        with phase("update"):
            self.updates.begin(self.optimizer)
            self.updates.end(self.optimizer)


@needs_triton
@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("row", "kind", "exchange", "dtype"),
    [
        ("`TopKEF()`, SGD with momentum", "sgd", "allgather", torch.float32),
        ("`TopKEF()`, AdamW", "adam", "allgather", torch.float32),
        ("`TopKEF()`, AdamW", "adam", "allgather", torch.bfloat16),
        ('`TopKEF(exchange="sharded")`, SGD', "sgd", "sharded", torch.float32),
        ('`TopKEF(exchange="sharded")`, AdamW', "adam", "sharded", torch.bfloat16),
    ],
)
def test_a_step_launches_waits_and_allocates_as_documented(
    row: str,
    kind: str,
    exchange: str,
    dtype: torch.dtype,
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, plan_of = small_model(dtype)
    monkeypatch.setattr(exchanges, "plan_of", plan_of)
    training = Training(kind, exchange, model)
    assert len(training.parameters) == 161 and len(training.buckets[0]) == BUCKETS
    for _ in range(3):  # these make what later ones use again
        training.step(lambda phase: nullcontext())
    seen = {phase: Counter[str]() for phase in PHASES}
    training.step(lambda phase: watch.counting(seen[phase]))
    for_owners = BUCKETS * RANKS if exchange == "sharded" else 0
    assert watch.waited == {"tolist": for_owners + 1}  # headers of payloads
    assert watch.taken == {}
    assert {phase: found.total() for phase, found in seen.items()} == documented(row), str(seen)


@needs_triton
@pytest.mark.slow
def test_a_learning_rate_that_falls_takes_two_launches_more_for_each_bucket(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Residuals and mean norms are in units of it. The update's numbers take a copy, too."""
    model, plan_of = small_model(torch.float32)
    monkeypatch.setattr(exchanges, "plan_of", plan_of)
    training = Training("sgd", "allgather", model)
    training.follow(training.optimizer)
    seen = {phase: Counter[str]() for phase in PHASES}
    for _ in range(3):
        training.optimizer.param_groups[0]["lr"] *= 0.9
        seen = {phase: Counter[str]() for phase in PHASES}
        training.step(lambda phase, seen=seen: watch.counting(seen[phase]))
    assert sum(found["aten::_foreach_mul_"] for found in seen.values()) == 2 * BUCKETS, str(seen)
    added = sum(found.total() for found in seen.values())
    assert added == sum(documented("`TopKEF()`, SGD with momentum").values()) + 2 * BUCKETS + 1


def test_memory_is_not_used_again_before_the_stream_that_has_waited_for_it_is_done(
    fake_gpu: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory may have been allocated on another stream, such as FSDP2's for reductions."""
    received, streams = on_gpu(torch.zeros(4)), iter(["reduces", "steps"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *of: next(streams))
    for stream in ("reduces", "steps"):
        work = SimpleNamespace(wait=lambda: None)
        pending = collective._Pending(work, received, received, StepTimer(), None, "gathered")
        assert pending.wait() is received and received.used_on == stream


@needs_triton
def test_a_write_to_what_a_collective_reads_is_seen(fake_gpu: Watch) -> None:
    payload = on_gpu(torch.zeros(4))
    fake_gpu.sent.append(payload)
    payload.sum()
    with pytest.raises(AssertionError, match="aten::add_"):
        payload[1:].add_(1)
    with pytest.raises(AssertionError, match="pack"):
        fake_gpu.launch(SimpleNamespace(fn=SimpleNamespace(__name__="pack")), payload)


def planted() -> dict[str, Callable[[Tensor], Any]]:
    """Ways to wait for a device, by the name that they are counted by."""
    return {
        "item": lambda t: t.sum().item(),
        "__float__": lambda t: float(t[0]),
        "__bool__": lambda t: bool(t.any()),
        "tolist": lambda t: t.tolist(),
        "cpu": lambda t: t.cpu(),
        "numpy": lambda t: t.numpy(),
        "to": lambda t: t.to("cpu"),
        "copy_": lambda t: torch.empty(4).copy_(t),
        "nonzero": lambda t: t.nonzero(),
        "aten::index": lambda t: t[t > 0],
        "aten::masked_select": lambda t: t.masked_select(t > 0),
        "tensor": lambda t: torch.tensor([1.0], device=t.device),
        "aten::equal": lambda t: torch.equal(t, t + 1),
    }


@needs_triton
@pytest.mark.parametrize("name", [*planted()])
def test_what_waits_is_seen(name: str, fake_gpu: Watch) -> None:
    tensor = on_gpu(torch.ones(4))
    with fake_gpu.counting():
        planted()[name](tensor)
    assert name in fake_gpu.waited


@needs_triton
def test_what_does_not_wait_is_not_taken_for_it(fake_gpu: Watch) -> None:
    tensor, other, host = on_gpu(torch.ones(4)), on_gpu(torch.ones(4)), torch.ones(4)
    with fake_gpu.counting():
        tensor.add_(other).view(2, 2)[0].mul_(2.0)
        tensor.copy_(torch.tensor([1.0] * 4, pin_memory=True), non_blocking=True)
        host.add_(1).tolist()
        bool(host.any())
    assert fake_gpu.launched == {"aten::add_": 1, "aten::mul_": 1, "aten::copy_": 1}
    assert not fake_gpu.waited and not fake_gpu.taken
    with fake_gpu.counting():
        assert (tensor + other).device.type == "cuda"
    assert fake_gpu.taken == {"aten::add": 16}
