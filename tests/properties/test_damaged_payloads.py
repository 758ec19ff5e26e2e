"""Payloads that were damaged on their way, of every codec: ranks refuse them or read the same.

A reader refuses what no writer can have written, and what would make ranks differ; a damaged value
is a value. Whatever arrives, no rank may fail otherwise, nor wait for another, nor change its state
in a step that some rank refuses.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracle.backends import NATIVE, NUMPY, Backend
from oracle.world import Gradients, World, drawn, same_bits

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.errors import PayloadError, PlanMismatchError
from horovod_topk.methods import METHODS, Codec, Method

RANKS = 3
SPECS = [TensorSpec("w", (40, 30), "float32"), TensorSpec("b", (3,), "float32")]
SETTINGS: dict[str, dict[str, Any]] = {  # where the defaults send tensors whole, or few entries
    "TopKEF": {"ratio": 0.1},
    "Dense": {"values": "bfloat16"},
    "QSGD": {"bits": 3},
    "Threshold": {"threshold": 0.5, "max_ratio": 0.1},  # which keeps its largest level
}
CODECS = [name for name, method in METHODS.items() if issubclass(method, Codec)]
USUAL = ("TernGrad", "Threshold")  # in the fast tier: one announces numbers, one measures
TRIES = 20
KINDS = ("bit", "byte", "zeros", "ones", "swapped")


def method_of(name: str, exchange: str) -> Method:
    return METHODS[name](exchange=exchange, min_numel=8, **SETTINGS.get(name, {}))


def cases() -> Iterator[Any]:
    for name in CODECS:
        for exchange in ("allgather", "sharded"):
            if exchange in METHODS[name]().exchanges:
                marks = [] if name in USUAL else [pytest.mark.slow]
                yield pytest.param(name, exchange, marks=marks, id=f"{name}-{exchange}")


def gradients(step: int) -> list[Gradients]:
    return drawn(SPECS, RANKS, step)


def damage(payload: Any, kind: str, draw: random.Random) -> None:
    """Spoil some bytes of a payload, in place: of its header and first scales, or anywhere."""
    data: NDArray[np.uint8] = payload if isinstance(payload, np.ndarray) else payload.numpy()
    at = draw.randrange(data.size if draw.random() < 0.5 else 48)
    some = slice(at, at + draw.randint(1, 16))
    if kind == "bit":
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        data[at] = draw.randrange(256)
    elif kind == "swapped":
        data[some] = data[some][::-1].copy()
    else:
        data[some] = 255 * (kind == "ones")


def outcomes(world: World, step: int, message: str, draw: random.Random, kind: str) -> list[Any]:
    """What each rank applies, or the error that it raises, when one message is damaged."""
    world.launch(gradients(step))
    ended: list[Any] = [None] * RANKS
    spoilt = False
    for _ in range(world.ranks[0].step.stages + 1):
        for (name, number), posted in world.network._posted.items():
            if name.endswith(message) and number == step and not spoilt:
                damage(posted[draw.randrange(RANKS)], kind, draw)
                spoilt = True
        for rank, compressor in enumerate(world.ranks):
            try:
                if ended[rank] is None:
                    compressor.step.advance()
            except (PayloadError, PlanMismatchError) as error:
                ended[rank] = error
    assert spoilt
    for rank, compressor in enumerate(world.ranks):
        arrays = world._of_bucket(rank, world.plan.buckets[0])
        try:
            if ended[rank] is None:
                compressor.step.finish({0: arrays})
                ended[rank] = [world.backend.numpy(array) for array in arrays]
        except (PayloadError, PlanMismatchError) as error:
            ended[rank] = error
    return ended


@pytest.mark.parametrize(
    "backend", [NUMPY, pytest.param(NATIVE, marks=pytest.mark.slow)], ids=["numpy", "native"]
)
@pytest.mark.parametrize(("name", "exchange"), list(cases()))
def test_ranks_refuse_what_is_damaged_or_read_the_same(
    name: str, exchange: str, backend: Backend
) -> None:
    plan = make_plan(SPECS, method_of(name, exchange))
    messages = {"allgather": [".0"], "sharded": ["scatter", "gather"]}[exchange]
    if any("announce" in sent for sent, _ in _sent(World(plan, RANKS, backend))):
        messages = ["announce", *messages]
    draw, refused = random.Random(f"{name} {exchange}"), 0
    for i in range(TRIES):
        world, other = World(plan, RANKS, backend), World(plan, RANKS, backend)
        for each in (world, other):
            each.step(gradients(0))
        before = world.kept()
        ended = outcomes(world, 1, messages[i % len(messages)], draw, KINDS[i % len(KINDS)])
        errors = [each for each in ended if isinstance(each, Exception)]
        read = [each for each in ended if not isinstance(each, Exception)]
        for rank, each in enumerate(ended):
            if isinstance(each, Exception):
                world.ranks[rank].abandon()
        assert all(_same(each, read[0]) for each in read)
        if errors:
            refused += 1
            assert all(np.isnan(array).all() for each in read for array in each)
            assert not any(world.commit())
            assert world.kept() == before
            assert same_bits(world.step(gradients(2)), other.step(gradients(2)))
    assert refused > TRIES / 10


def _sent(world: World) -> list[tuple[str, bytes]]:
    world.step(gradients(0))
    return world.payloads(0)


def _same(one: list[Any], other: list[Any]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))
