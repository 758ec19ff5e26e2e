"""What a case watches while it trains: equality of ranks, residuals, and collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horovod_topk.torch_training.gradients import local
from plain import PlainTopKEF as TopKEF
from world import hvd


def bits(tensors: Iterable[Tensor]) -> Tensor:
    """All bytes of some tensors: tells -0 from 0 and one NaN from another."""
    parts = [
        local(t).detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors if t.numel()
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)


def assert_ranks_equal(tensors: Iterable[Tensor], process_set: Any = None) -> None:
    """Every rank has the same bits. A collective."""
    options = {} if process_set is None else {"process_set": process_set}
    ranks = hvd.size() if process_set is None else process_set.size()
    gathered = hvd.allgather(bits(tensors), name="witness.bits", **options)
    rows = gathered.view(ranks, -1)
    different = (rows != rows[0]).any(1).nonzero().squeeze(1).tolist()
    assert not different, f"ranks {different} differ from rank 0"


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """torch.equal, tensor by tensor: bitwise but for the sign of zero."""
    wrong = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)]
    assert not wrong, [(ours[i] - theirs[i]).abs().max() for i in wrong]


def assert_same_history(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> None:
    """`assert_same` after every step."""
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        wrong = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not torch.equal(x, y)]
        assert not wrong, f"step {step}: parameters {wrong} differ"
    assert not all(torch.equal(x, y) for x, y in zip(ours[0], ours[-1], strict=True)), "no training"


def assert_close(ours: list[Tensor], theirs: list[Tensor], relative: float = 1e-6) -> None:
    """The distance of each tensor is small against its norm."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        distance, norm = (a - b).double().norm(), b.double().norm()
        assert distance <= relative * norm, f"parameter {i}: {distance / norm:.2e} of its norm"


def residuals(optimizer: Any) -> dict[str, Tensor]:
    """Copies of all committed residuals."""
    kept: dict[str, Tensor] = TopKEF.of(optimizer).state_dict()["residuals"]
    return kept


def assert_residuals(optimizer: Any, before: Mapping[str, Tensor]) -> None:
    """The residuals are as they were, bit for bit."""
    now = residuals(optimizer)
    assert list(now) == list(before)
    wrong = [name for name in now if not torch.equal(bits([now[name]]), bits([before[name]]))]
    assert not wrong, f"residuals changed: {wrong}"


@contextmanager
def nothing_changes(model: nn.Module, optimizer: Any) -> Iterator[None]:
    """Parameters and residuals are bitwise the same afterwards."""
    parameters = bits(model.parameters()).clone()
    before = residuals(optimizer)
    yield
    assert torch.equal(parameters, bits(model.parameters())), "a parameter changed"
    assert_residuals(optimizer, before)


@contextmanager
def spoiled(parameter: Tensor, value: float, position: int = 0) -> Iterator[None]:
    """Gradients computed within have `value` at one position."""

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[position] = value
        return gradient

    hook = parameter.register_hook(spoil)
    try:
        yield
    finally:
        hook.remove()


@dataclass
class Recording:
    """Calls of Horovod's collectives in the order they were made, on this rank."""

    names: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    waits: int = 0  # calls of hvd.synchronize

    def take(self) -> tuple[list[str], list[int]]:
        """What was recorded since the last call."""
        taken = self.names, self.sizes
        self.names, self.sizes = [], []
        return taken


def record(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """Count allgathers and waits from here to the end of the case."""
    recording, allgather, wait = Recording(), hvd.allgather_async, hvd.synchronize

    def counted_allgather(tensor: Tensor, *args: Any, **kwargs: Any) -> int:
        recording.names.append(kwargs["name"])
        recording.sizes.append(tensor.numel() * tensor.element_size())
        handle: int = allgather(tensor, *args, **kwargs)
        return handle

    def counted_wait(handle: int) -> Tensor:
        recording.waits += 1
        result: Tensor = wait(handle)
        return result

    monkeypatch.setattr(hvd, "allgather_async", counted_allgather)
    monkeypatch.setattr(hvd, "synchronize", counted_wait)
    monkeypatch.setattr("horovod.torch.optimizer.synchronize", counted_wait)
    return recording
