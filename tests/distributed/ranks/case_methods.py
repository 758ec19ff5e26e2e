"""Methods other than Top-K on real ranks: dense in a fixed order, and one of two rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from oracle.dithered import Dithered
from oracle.two_rounds import TwoRounds

import training
from horovod_topk.core.state.state_dict import parts_of
from horovod_topk.methods import METHODS
from plain import PlainTopKEF as TopKEF
from training import Setup
from witness import assert_ranks_equal, bits
from world import adapter, hvd

METHODS |= {"TwoRounds": TwoRounds, "Dithered": Dithered}
NEWEST = {  # one announces numbers, one has levels by counts
    "terngrad": ("TernGrad", {"min_numel": 16}),
    "threshold": ("Threshold", {"min_numel": 16, "max_ratio": 0.2, "threshold": 2.0}),
}


def start(name: str, **settings: Any) -> tuple[Any, Any]:
    setup = Setup(optimizer=training.adamw)
    task = setup.task()
    compressor = getattr(adapter, name)(**settings)
    return task, setup.distributed(task, compressor)


def states_in(state: Any) -> list[dict[str, torch.Tensor]]:
    """Residuals of a state dict, and what it has beside them: owners' residuals, method state."""
    return [state["residuals"], *(state[part]["residuals"] for part in sorted(parts_of(state)))]


@pytest.mark.everywhere
@pytest.mark.world_size(2, 3, 4)
def test_dense_in_float32_trains_as_horovod_does() -> None:
    setup = Setup(optimizer=training.plain_sgd)
    task, theirs = setup.task(), setup.task()
    ours = setup.distributed(task, adapter.Dense())
    other = setup.distributed(theirs, hvd.Compression.none)
    for step in range(10):
        training.ordinary(task, ours, step)
        training.ordinary(theirs, other, step)
    if hvd.size() == 2:  # where there is one order of addition
        assert torch.equal(bits(task.parameters()), bits(theirs.parameters()))
    for mine, other in zip(task.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    stats = TopKEF.of(ours).stats()
    assert stats.residual_norm == stats.owned_norm == 0
    assert 0.4 < stats.reduction <= 1  # owners of a small model have uneven shards


@pytest.mark.horovod
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("method", NEWEST)
def test_options_of_horovods(method: str) -> None:
    """Groups, several backward passes, half precision, clipping, momentum; dense and back."""
    name, settings = NEWEST[method]
    make = getattr(adapter, name)
    for options, dtype, own in (
        ({"groups": 2}, torch.float32, {"clip_norm": 1.0}),
        ({"backward_passes_per_step": 2}, torch.float16, {}),
        ({}, torch.bfloat16, {"warmup": [(2, 1.0)]}),
        ({}, torch.float32, {"momentum": 0.9}),
    ):
        torch.manual_seed(0)
        task = training.perceptron(dtype)
        compressor = make(**settings, **own)
        optimizer = hvd.DistributedOptimizer(
            training.plain_sgd(task.parameters()),
            named_parameters=task.named_parameters(),
            compression=compressor,
            **options,
        )
        for step in range(5):
            compressor.set_ratio(1.0 if step == 3 else None)
            optimizer.zero_grad()
            for _ in range(options.get("backward_passes_per_step", 1)):
                task.loss(hvd.rank(), step).backward()
            optimizer.step()
            assert step != 3 or compressor.stats().residual_norm == 0
        assert all(p.isfinite().all() for p in task.parameters())
        assert_ranks_equal(task.parameters())
        assert compressor.stats().steps == 5


@dataclass(frozen=True, kw_only=True)
class Faulty(TwoRounds):
    """Raises on the last rank in round `fails_in` of a step, once `armed`."""

    fails_in: int = 1
    armed: ClassVar[bool] = False

    def send(self, ops: Any, bucket: Any, piece: Any, i: int, work: Any) -> Any:
        if self.armed and i == self.fails_in and hvd.rank() == hvd.size() - 1:
            raise ArithmeticError(f"round {i} of {piece.spec.name}")
        return super().send(ops, bucket, piece, i, work)


@pytest.mark.everywhere
@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("fails_in", [0, 1])
def test_a_rank_whose_method_raises_ends_the_step_for_all(
    fails_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others see NaN and roll the step back; none waits for the round that never comes."""
    monkeypatch.setitem(METHODS, "Faulty", Faulty)
    task, optimizer = start("Faulty", fails_in=fails_in, min_numel=16, columns=3)
    training.ordinary(task, optimizer, 0)
    before = bits(e for part in states_in(TopKEF.of(optimizer).state_dict()) for e in part.values())
    monkeypatch.setattr(Faulty, "armed", True)
    optimizer.zero_grad()
    if hvd.rank() == hvd.size() - 1:
        with pytest.raises(ArithmeticError, match=f"round {fails_in} of "):
            task.loss(hvd.rank(), 1).backward()
            optimizer.synchronize()
        optimizer.load_state_dict(optimizer.state_dict())  # Horovod's own way out of a step
    else:
        task.loss(hvd.rank(), 1).backward()
        optimizer.synchronize()
        assert all(p.grad.isnan().all() for p in task.parameters())
    monkeypatch.setattr(Faulty, "armed", False)
    optimizer.zero_grad()
    after = bits(e for part in states_in(TopKEF.of(optimizer).state_dict()) for e in part.values())
    assert torch.equal(after, before)
    training.ordinary(task, optimizer, 2)
    assert_ranks_equal(task.parameters())
