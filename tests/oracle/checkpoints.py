"""Simulated ranks as `horovod_topk.checkpoint` sees them, and files that are signed anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from horovod_topk import checkpoint
from horovod_topk.checkpoint import shard
from horovod_topk.core.run.stats import Stats
from horovod_topk.core.state.state_dict import parts_of
from oracle.world import World


class Rank:
    """A compressor of a simulated rank as `checkpoint` sees it."""

    def __init__(self, world: World, rank: int, framework: str) -> None:
        self._compressor = world.ranks[rank]
        self._backend = world.backend
        self.framework, self.rank_and_ranks, self.part = framework, (rank, world.size), ""
        self.reduction, self.steps, self.active = world.plan.reduction, self._compressor.steps, True
        self.skipped: dict[str, str] = {}
        self.tensors = {t.spec.name: list(t.spec.shape) for t in world.plan.tensors()}

    def stats(self) -> Stats:
        return Stats(active=self.active, skipped=self.skipped)

    def state_dict(self) -> dict[str, Any]:
        return _each(self._compressor.state_dict(), lambda array: getattr(array, "value", array))

    def reset(self) -> None:
        self._compressor.reset()

    def load_state_dict(self, state: Any) -> None:
        as_array = self._backend.array
        self._compressor.load_state_dict(_each(state, lambda a: as_array(_numpy(a), "float32")))


def ranks(world: World, framework: str = "torch") -> list[Rank]:
    return [Rank(world, rank, framework) for rank in range(world.size)]


def save(world: World, folder: Path, framework: str = "torch") -> list[Path]:
    paths = [checkpoint.save(folder, rank) for rank in ranks(world, framework)]
    return [path for path in paths if path is not None]


def load(folder: Path, world: World, framework: str = "torch") -> None:
    for rank in ranks(world, framework):
        checkpoint.load(folder, rank)


def resigned(data: bytes, **facts: Any) -> bytes:
    """A PyTorch shard with other facts and a digest that is right."""
    return shard.dump({**shard.parse(data, "torch", ""), **facts}, "torch")


def _numpy(array: Any) -> Any:
    return array.numpy() if hasattr(array, "numpy") else array


def _each(state: Any, change: Any) -> dict[str, Any]:
    changed = {**state, "residuals": {n: change(a) for n, a in state["residuals"].items()}}
    for part in parts_of(state):
        changed[part] = _each(state[part], change)
    return changed
