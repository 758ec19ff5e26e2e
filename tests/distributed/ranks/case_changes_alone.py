"""What one rank may do alone: nothing that all have in common. Every rank raises, and names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from horovod_topk.errors import PlanMismatchError
from world import CONTROLLER, TopKEF, hvd

IN_ORDER = CONTROLLER == "torchrun"  # collectives are matched by their order
ODD = 1  # the rank that does something alone
STATE = "a state that was loaded or reset"
STEPS = "the number of committed steps"


class Training:
    """A model that all ranks train; under DDP in a process group of its own."""

    def __init__(self, compression: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Linear(40, 30)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if IN_ORDER:
            group = torch.distributed.new_group()  # a collective that is left would block others
            self.model = nn.parallel.DistributedDataParallel(self.model, process_group=group)
            compression.attach(self.model, self.optimizer)
        else:
            names = self.model.named_parameters()
            options = {"named_parameters": names, "compression": compression}
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, **options)

    @property
    def state(self) -> Any:
        return super(TopKEF, TopKEF).of(self.model) if IN_ORDER else TopKEF.of(self.optimizer)

    def exchange(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 40)).square().mean().backward()
        if not IN_ORDER:
            self.optimizer.synchronize()

    def apply(self) -> None:
        if IN_ORDER:
            self.optimizer.step()
        else:
            with self.optimizer.skip_synchronize():
                self.optimizer.step()

    def step(self) -> None:
        self.exchange()
        self.apply()


def load(job: Training, saved: dict[str, Any]) -> None:
    job.state.load_state_dict(saved)


def set_rate(job: Training, saved: dict[str, Any]) -> None:
    job.optimizer.param_groups[0]["lr"] = 0.05


def allocate(job: Training, saved: dict[str, Any]) -> None:
    job.state._state.allocation = (("weight", 3),)


# What a rank does after five steps; what every rank says; whether ranks under DDP meet first.
ACTS: dict[str, tuple[Callable[[Training, dict[str, Any]], None], str, bool]] = {
    "set_ratio": (lambda job, _: job.state.set_ratio(1.0), "the ratio of this step", True),
    "load": (load, STEPS, True),
    "reset": (lambda job, _: job.state.reset(), STATE, True),
    "allocate": (allocate, STATE, True),
    "rate": (set_rate, "learning rates", False),
    "exchange without a step": (lambda job, _: job.exchange(), STEPS, False),
}


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
@pytest.mark.parametrize("act", ACTS)
def test_every_rank_names_the_one_that_changed(act: str, exchange: str) -> None:
    does, text, meets = ACTS[act]
    job = Training(TopKEF(warmup=None, exchange=exchange))
    job.step()
    saved = job.state.state_dict()
    for _ in range(4):
        job.step()
    if act == "exchange without a step":
        job.exchange()
        if hvd.rank() != ODD:
            job.apply()
    elif hvd.rank() == ODD:
        does(job, saved)
    with pytest.raises(PlanMismatchError) as raised:
        job.step()
    texts = hvd.allgather_object(str(raised.value))
    assert all(f"rank {ODD}" in each for each in texts), texts
    if meets and IN_ORDER:  # before a payload of another size is sent
        assert all("has loaded or reset a state, called set_ratio()," in each for each in texts)
    else:
        assert all(each.startswith(f"ranks disagree on {text}") for each in texts), texts
        assert len({*texts}) == 1


def test_a_state_that_is_broadcast_like_a_model_does() -> None:
    """Horovod's habit, to load on one rank and to broadcast, is not enough."""
    job = Training(TopKEF(warmup=None))
    for _ in range(3):
        job.step()
    saved = hvd.broadcast_object(job.state.state_dict(), 0)
    other = Training(TopKEF(warmup=None))
    other.state.load_state_dict(saved)
    other.step()
    assert other.state.stats().steps == 1


@pytest.mark.horovod
def test_one_rank_dense() -> None:
    compression = hvd.Compression.none if hvd.rank() == ODD else TopKEF()
    with pytest.raises(PlanMismatchError, match=r"method: .*NoneCompressor"):
        Training(compression)


@pytest.mark.parametrize("asked", ["none", "fp16"])
def test_one_rank_dense_by_its_environment(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if hvd.rank() == ODD:
        monkeypatch.setenv("HOROVOD_TOPK_COMPRESSION", asked)
    with pytest.raises(PlanMismatchError, match="method"):
        Training(TopKEF())
