"""A step on a GPU launches few kernels: those of this package and of PyTorch, counted without one.

Launches only count, and tensors on the CPU stand for those of the GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
from test_triton import needs_triton
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from horovod_topk.cli.compare.simulated import exchanges
from horovod_topk.cli.models import specs_of
from horovod_topk.core.exchange.loopback import Loopback
from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.kernels import native, triton
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch_training.updates import Updates, moments
from horovod_topk.updates.tracker import Rule, Tracker

RANKS = 2
receive = Loopback.receive
FREE = ("aten::empty", "aten::detach", "aten::lift_fresh")  # operations that launch nothing


class Operations(TorchDispatchMode):
    """Counts operations of PyTorch that launch a kernel on a GPU."""

    def __init__(self, launches: Launches, steps: Callable[[], list[Tensor]]) -> None:
        super().__init__()
        self._launches, self._steps = launches, steps  # steps: AdamW's, which are on the host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        of = args[0] if args and isinstance(args[0], list) else args
        is_host = any(each is step for each in of[:1] for step in self._steps())
        if not (func.is_view or name.startswith(FREE) or is_host):
            self._launches.note(name)
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Counts copies to the host that a kernel has to make contiguous first."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist and not args[0].is_contiguous():
            self._launches.note("strided copy to the host")
        return func(*args, **(kwargs or {}))


class Launches:
    """Counts launches within `count`."""

    def __init__(self) -> None:
        self.found, self._counts = Counter[str](), False

    def launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        self.note(kernel.fn.__name__)

    def note(self, name: str) -> None:
        self.found[name] += self._counts

    def receive(self, *arguments: Any) -> Tensor:
        """`Loopback.receive`, which stands for a collective of NCCL."""
        before, self._counts = self._counts, False
        received = receive(*arguments)
        self._counts = before
        return received

    @contextmanager
    def count(self, steps: Callable[[], list[Tensor]]) -> Iterator[None]:
        self.found.clear()
        self._counts = True
        with Operations(self, steps), Reads(self):
            yield
        self._counts = False


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Have tensors on the CPU take the way of those on a GPU; kernels only count."""
    from horovod_topk.kernels.triton import memory
    from horovod_topk.kernels.triton.topk import bucket
    from horovod_topk.kernels.triton.updates import lists

    found = Launches()
    for module in (bucket, lists):
        monkeypatch.setattr(module, "launch", found.launch)
    monkeypatch.setattr(Loopback, "receive", lambda *arguments: found.receive(*arguments))
    monkeypatch.setattr(memory.Addresses, "store", lambda each, numbers: each._array)
    monkeypatch.setattr(native, "find", lambda: native.Found(None, "left out"))
    monkeypatch.setattr(triton, "for_lists", lambda kind: lists)
    monkeypatch.setattr(TorchOps, "fused", lambda ops, *of: bucket.TritonBucket(*of))
    return found


def small_model() -> tuple[nn.ParameterDict, Callable[[nn.Module, TopK], Plan]]:
    """A small tensor for each one of a ResNet-50, and what plans them in as many buckets."""
    specs = specs_of("resnet50")
    sizes = {spec.name: prod(spec.shape) // 4096 + 8 for spec in specs}
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(n)) for name, n in sizes.items()})
    small = {name: TensorSpec(name, (n,), "float32") for name, n in sizes.items()}

    def plan_of(model: nn.Module, config: TopK) -> Plan:
        buckets = make_plan(specs, config).buckets
        groups = [[small[piece.spec.name] for piece in each.gradients] for each in buckets]
        return make_plan([*small.values()], config, groups=groups)

    return model, plan_of


@needs_triton
@pytest.mark.parametrize(("kind", "count"), [("sgd", 16), ("adam", 17)])
def test_a_step_of_a_resnet_launches_few_kernels(
    kind: str, count: int, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode, commit and update of all buckets, with the payloads of two ranks."""
    model, plan_of = small_model()
    monkeypatch.setattr(exchanges, "plan_of", plan_of)
    parameters = list(model.parameters())
    optimizer: Any = torch.optim.AdamW(parameters)
    if kind == "sgd":
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)
    names, rule = {p: name for name, p in model.items()}, Rule(kind)
    follower = Tracker(rule, TorchOps(), lambda: moments(optimizer, names))
    config = TopK(values="int4", exchange="allgather", min_numel=4)
    exchange = exchanges.Compressed(model, RANKS, config, rule, follower)
    first, second = exchange.compressors
    updates = Updates(names, first)

    def steps() -> list[Tensor]:
        return [state["step"] for state in optimizer.state.values() if "step" in state]

    assert len(parameters) == 161 and len(exchange.in_buckets(parameters)) == 5
    for _ in range(3):
        gradients = [[torch.randn_like(p) for p in parameters] for _ in range(RANKS)]
        split = [exchange.in_buckets(each) for each in gradients]
        for compressor, own in zip(exchange.compressors, split, strict=True):
            for ordinal, bucket in own.items():
                compressor.launch(ordinal, bucket)
        with launches.count(steps):
            for ordinal, bucket in split[0].items():
                first.step.finish(ordinal, bucket)
            first.commit()
            for p, gradient in zip(parameters, gradients[0], strict=True):
                p.grad = gradient
            updates.begin(optimizer)
            updates.end(optimizer)
        for ordinal, bucket in split[1].items():
            second.step.finish(ordinal, bucket)
        second.commit()
    assert launches.found.total() == count, launches.found
