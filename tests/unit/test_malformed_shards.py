"""220 malformed checkpoints: each is refused by name, and changes nothing of a rank.

Five settings, eleven kinds of damage, four seeds; a job of as many ranks as saved meets the first
two seeds, one of another number of ranks, which reads the files of all, the others.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle.backends import NATIVE
from oracle.checkpoints import ranks, resigned, save
from oracle.world import World, drawn
from safetensors.torch import save as safetensors

from horovod_topk import checkpoint
from horovod_topk.checkpoint import shard
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.errors import CheckpointError, StateDictError, TopKError
from horovod_topk.methods.topk import TopK

SPECS = [TensorSpec("w", (37, 30), "float32"), TensorSpec("läyer/b", (3,), "float32")]
WARMUP = {"warmup": ((2, 0.5), (9, 0.2))}
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {  # saving ranks, and what was set
    "allgather float32": (3, {}),
    "sharded int8": (2, {"exchange": "sharded", "values": "int8"}),
    "momentum int8": (4, {"values": "int8", "momentum": 0.9}),
    "sharded warm-up": (5, {"exchange": "sharded", **WARMUP}),
    "hierarchical int4": (4, {"exchange": "hierarchical", "values": "int4"}),
    "sharded int2": (2, {"exchange": "sharded", "values": "int2"}),
}
SEEDS = range(4)


def world(setting: str, size: int, steps: int) -> World:
    config = TopK(ratio=0.1, min_numel=0, **SETTINGS[setting][1])
    job, noise = World(make_plan(SPECS, config), size, NATIVE), np.random.default_rng(steps)
    for _ in range(steps):
        job.step(drawn(SPECS, size, noise))
    return job


@cache
def saved(setting: str, steps: int = 3) -> Callable[[Path], list[Path]]:
    """Writes the shards of a setting anew."""
    job = world(setting, SETTINGS[setting][0], steps)
    return lambda folder: save(job, folder)


def loading(setting: str, seed: int) -> World:
    """A job that goes on: of as many ranks, or of another number."""
    size = SETTINGS[setting][0]
    return world(setting, size if seed < 2 else size + 1, steps=1)


def bits(job: World) -> list[Any]:
    """All that every rank keeps."""
    return [_frozen(compressor.state_dict()) for compressor in job.ranks]


def _frozen(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    return {k: _frozen(v) for k, v in state.items()} if isinstance(state, dict) else state


# What can happen to a rank's file. Each returns what the message has to say besides its name.


def truncated(file: Path, draw: random.Random) -> str:
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data))])
    return "damaged|no shard"


def lengthened(file: Path, draw: random.Random) -> str:
    file.write_bytes(file.read_bytes() + draw.randbytes(draw.randrange(1, 20)))
    return "damaged"


def flipped_anywhere(file: Path, draw: random.Random) -> str:
    return _flip(file, draw, 0, file.stat().st_size)


def flipped_in_its_header(file: Path, draw: random.Random) -> str:
    return _flip(file, draw, 0, 8 + int.from_bytes(file.read_bytes()[:8], "little"))


def _flip(file: Path, draw: random.Random, start: int, stop: int) -> str:
    data, at = bytearray(file.read_bytes()), draw.randrange(start, stop)
    data[at] ^= 1 << draw.randrange(8)
    file.write_bytes(data)
    return "damaged|no shard|different steps"


def swapped_with_the_next(file: Path, draw: random.Random) -> str:
    files = sorted(file.parent.iterdir())
    other = files[(files.index(file) + 1) % len(files)]
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)
    return "was saved by rank"


def of_another_rank(file: Path, draw: random.Random) -> str:
    file.write_bytes(draw.choice([f for f in file.parent.iterdir() if f != file]).read_bytes())
    return "was saved by rank"


def of_another_version(file: Path, draw: random.Random) -> str:
    version = draw.choice([0, 2, 7, "1", None])
    file.write_bytes(resigned(file.read_bytes(), version=version))
    return f"version {version!r}"


def foreign(file: Path, draw: random.Random) -> str:
    noise, nested = draw.randbytes(5000), b"[" * 200_000
    model = safetensors({"fc.weight": torch.ones(3, 4)}, {"format": "pt"})
    header = len(nested).to_bytes(8, "little") + nested
    file.write_bytes(draw.choice([b"", noise, nested, header, model, signed("[]"), signed("{}")]))
    return "no shard|version None"


def missing(file: Path, draw: random.Random) -> str:
    file.unlink()
    return "No such file"


def with_a_nan(file: Path, draw: random.Random) -> str:
    state = shard.parse(file.read_bytes(), "torch", "")
    parts = [part["residuals"] for part in (state, state.get("owned", state))]
    name, array = draw.choice([(n, a) for part in parts for n, a in part.items() if len(a)])
    array[draw.randrange(len(array))] = draw.choice([float("nan"), float("inf")])
    file.write_bytes(shard.dump(state, "torch"))
    return f"'{name}'.*NaN or an infinity"


def lacking_something(file: Path, draw: random.Random) -> str:
    """As another version might write it: signed, but not what this one reads."""
    change = draw.choice(
        [
            {"rank": None},
            {"tensors": []},
            {"reduction": 3},
            {"shapes": {"w": [4]}},
            {"released": "w"},
        ]
    )
    file.write_bytes(resigned(file.read_bytes(), **change))
    return "no shard as this version writes them"


def signed(state: str) -> bytes:
    """A safetensors file with a digest that is right, and no residuals."""
    data = safetensors({}, {"format": shard.FORMAT, "sha256": "0" * 64, "state": state})
    return data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode())


DAMAGES = [
    truncated,
    lengthened,
    flipped_anywhere,
    flipped_in_its_header,
    swapped_with_the_next,
    of_another_rank,
    of_another_version,
    foreign,
    missing,
    with_a_nan,
    lacking_something,
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_malformed_shard_is_refused(tmp_path: Path, setting: str, damage: Any) -> None:
    for seed in SEEDS:
        draw = random.Random(f"{setting}/{damage.__name__}/{seed}")
        files = saved(setting)(tmp_path / str(seed))
        rank = draw.randrange(len(files))
        problem = damage(files[rank], draw)
        job = loading(setting, seed)
        before = bits(job)
        with pytest.raises((CheckpointError, StateDictError), match=f"(?s){problem}") as caught:
            checkpoint.load(files[rank].parent, ranks(job)[rank])
        assert _names_one_of(caught.value, files, rank, damage)
        assert bits(job) == before


def _names_one_of(error: TopKError, files: list[Path], rank: int, damage: Any) -> bool:
    """The file at fault, by name; where two were swapped, either."""
    if damage is swapped_with_the_next:
        return any(file.name in str(error) for file in files)
    return files[rank].name in str(error)


def test_every_single_bit_counts(tmp_path: Path) -> None:
    data = saved("sharded int8")(tmp_path)[1].read_bytes()
    assert shard.parse(data, "torch", "it")
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        with pytest.raises(CheckpointError, match="it is"):
            shard.parse(flipped, "torch", "it")


@pytest.mark.parametrize("setting", SETTINGS)
def test_files_as_they_were_saved_are_taken_on(tmp_path: Path, setting: str) -> None:
    """Or the tests above would prove nothing."""
    saved(setting)(tmp_path)
    for seed in (0, 3):
        job = loading(setting, seed)
        before = bits(job)
        for rank in ranks(job):
            checkpoint.load(tmp_path, rank)
        assert bits(job) != before


def test_shards_of_two_steps_are_refused_by_name(tmp_path: Path) -> None:
    files = saved("momentum int8")(tmp_path)
    late = saved("momentum int8", steps=4)(tmp_path / "late")
    files[2].write_bytes(late[2].read_bytes())
    job = loading("momentum int8", 0)
    before = bits(job)
    with pytest.raises(CheckpointError, match=rf"different steps.*{files[2].name}': 4"):
        checkpoint.load(tmp_path, ranks(job)[0])
    assert bits(job) == before


# With strict=False


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_unless_asked_to_the_rank_starts_at_zero(tmp_path: Path, damage: Any, caplog: Any) -> None:
    files = saved("sharded warm-up")(tmp_path)
    damage(files[1], random.Random(damage.__name__))
    job = loading("sharded warm-up", 0)
    with caplog.at_level(logging.WARNING):
        checkpoint.load(tmp_path, ranks(job)[1], strict=False)
    assert "starts with all residuals at zero" in caplog.text
    assert not any(part.any() for part in job.residuals()[1].values())
    assert not any(part.any() for part in job.owned()[1].values())


@pytest.mark.parametrize("damage", [truncated, missing, of_another_version, foreign])
@pytest.mark.parametrize("seed", [0, 2])
def test_ranks_keep_to_one_ratio_all_the_same(tmp_path: Path, damage: Any, seed: int) -> None:
    """A rank that alone began warm-up anew would wait for collectives that no other one joins."""
    files = saved("sharded warm-up")(tmp_path)
    damage(files[1], random.Random(seed))
    job = loading("sharded warm-up", seed)
    for rank in ranks(job):
        checkpoint.load(tmp_path, rank, strict=False)
    assert {compressor.ratio for compressor in job.ranks} == {0.2}
    assert {compressor.state_dict()["committed"] for compressor in job.ranks} == {3}


def test_without_any_whole_shard_warm_up_stays_where_it_is(tmp_path: Path, caplog: Any) -> None:
    for file in saved("sharded warm-up")(tmp_path):
        file.write_bytes(b"")
    job = loading("sharded warm-up", 0)
    with caplog.at_level(logging.WARNING):
        for rank in ranks(job):
            checkpoint.load(tmp_path, rank, strict=False)
    assert {compressor.state_dict()["committed"] for compressor in job.ranks} == {1}
    assert "goes on from 1 committed steps" in caplog.text


@pytest.mark.parametrize("rates", [{"w": 0}, {"w": float("nan")}, {"w": "0.1"}, [0.1]])
def test_rates_that_are_none_are_refused_and_given_up_with_the_residuals(
    tmp_path: Path, rates: Any
) -> None:
    files = saved("sharded warm-up")(tmp_path)
    files[1].write_bytes(resigned(files[1].read_bytes(), rates=rates))
    job = loading("sharded warm-up", 0)
    before = bits(job)
    with pytest.raises(CheckpointError, match=r"no shard as this version writes .*learning rates"):
        checkpoint.load(tmp_path, ranks(job)[1])
    assert bits(job) == before
    checkpoint.load(tmp_path, ranks(job)[1], strict=False)
    assert not any(part.any() for part in job.residuals()[1].values())
    assert job.ranks[1].state_dict()["committed"] == 3
