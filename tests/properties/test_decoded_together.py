"""Buckets that a kernel decodes at once, as on a GPU, end as if they were decoded one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from oracle.backends import NATIVE
from oracle.world import Gradients, World, drawn, same_bits
from torch import Tensor

from horovod_topk.core.codec import codec
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.errors import PayloadError, PlanMismatchError
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.protocol import EACH, HEAD, Arrived, Fused
from horovod_topk.ops.torch import TorchOps

RANKS = 4
EXCHANGES = pytest.mark.parametrize("exchange", ["allgather", "sharded", "hierarchical"])
SPECS = [TensorSpec(str(i), (n,), "float32") for i, n in enumerate((900, 3, 700, 5, 1200))]
GROUPS = [SPECS[:2], SPECS[2:4], SPECS[4:]]


@dataclass
class Together:
    """A kernel of the CPU that decodes buckets at once, as those of a GPU do."""

    alone: Fused[Tensor]
    recipe: Sequence[int]
    flags: list[bool] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.alone, name)

    @staticmethod
    def heads(
        arrived: Sequence[Arrived[Tensor]], widths: Sequence[int], counts: Sequence[int]
    ) -> list[list[bytes]]:
        TogetherOps.reads.append(len(arrived))
        found = []
        for each, width, count in zip(arrived, widths, counts, strict=True):
            rows = each.gathered.view(-1, width)[:, :count].numpy()
            kernel: Any = each.kernel
            bits = int.from_bytes(np.bitwise_or.reduce(rows)[kernel.recipe[3] :], "little")
            kernel.flags = [bool(bits >> at & 1) for at in kernel.recipe[HEAD + 8 :: EACH]]
            found.append([row.tobytes() for row in rows])
        return found

    @staticmethod
    def decode_all(arrived: Sequence[Arrived[Tensor]]) -> None:
        for each in arrived:
            kernel: Any = each.kernel
            assert (
                kernel.alone.decode(each.gathered, each.scale, kernel.flags, each.gradients) is None
            )


class TogetherOps(TorchOps):
    """`TorchOps` with such kernels."""

    reads: ClassVar[list[int]] = []  # how many buckets' headers were read, each time

    def fused(self, recipe: Sequence[int], device: str) -> Any:
        return Together(super().fused(recipe, device), recipe)


TOGETHER = replace(NATIVE, name="together", ops=TogetherOps())


def world_of(exchange: str, backend: Any) -> World:
    config = TopK(ratio=0.05, min_numel=8, exchange=exchange)
    return World(make_plan(SPECS, config, groups=GROUPS), RANKS, backend)


def gradients(step: int) -> list[Gradients]:
    return drawn(SPECS, RANKS, step)


@EXCHANGES
@pytest.mark.parametrize(("at_once", "reads"), [(codec.AT_ONCE, [3]), (1, [1, 1, 1])])
def test_steps_are_those_of_buckets_one_by_one(
    exchange: str, at_once: int, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second step a rank has a NaN, which flags that tensor alone, on all ranks."""
    monkeypatch.setattr(codec, "AT_ONCE", at_once)
    worlds = world_of(exchange, TOGETHER), world_of(exchange, NATIVE)
    for step in range(3):
        given = gradients(step)
        if step == 1:
            given[2]["2"][7] = np.nan
        TogetherOps.reads.clear()
        both = [world.exchange(given) for world in worlds]
        assert TogetherOps.reads == reads * RANKS
        assert same_bits(*both)
        flagged = {rank.step.flagged for world in worlds for rank in world.ranks}
        assert flagged == {("2",) if step == 1 else ()}
        for world in worlds:
            world.rollback() if step == 1 else world.commit()
    assert worlds[0].kept() == worlds[1].kept()


@pytest.mark.parametrize(("byte", "error"), [(9, PlanMismatchError), (0, PayloadError)])
@pytest.mark.parametrize("bucket", [0, 2])
def test_a_payload_that_is_refused_ends_the_step_for_all_and_changes_nothing(
    bucket: int, byte: int, error: type[Exception]
) -> None:
    """Byte 0 is of the magic letters, byte 9 of the number of tensors."""
    world, other = (world_of("allgather", TOGETHER) for _ in range(2))
    for each in (world, other):
        each.step(gradients(0))
    before = world.kept()
    world.launch(gradients(1))
    world.network._posted[f"job.0.{bucket}", 1][1][byte] ^= 1
    for number, rank in enumerate(world.ranks):
        targets = {b.ordinal: world._of_bucket(number, b) for b in world.plan.buckets}
        with pytest.raises(error, match=rf"bucket {bucket}\b"):
            rank.step.finish(targets)
        rank.abandon()
    assert not any(world.commit())
    assert world.kept() == before
    assert same_bits(world.step(gradients(2)), other.step(gradients(2)))
