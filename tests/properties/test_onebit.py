"""Test OneBit and ByteGrad against NumPy transcriptions of their docstrings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracle.backends import NUMPY, Backend, each_framework
from oracle.world import World

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.errors import ConfigError
from horovod_topk.methods import ByteGrad, Codec, OneBit
from horovod_topk.methods.protocol import Context, Piece

SHAPES = ((40, 50), (6, 7, 5), (100, 3), (301,), (1,), (2, 33))
Array = NDArray[Any]


def coded(method: Codec, values: Array, backend: Backend = NUMPY) -> Array:
    """Encode values, and return what receivers decode."""
    piece, ops = Piece(TensorSpec("w", values.shape, "float32"), values.size, 0), backend.ops
    data = method.pack(ops, piece, backend.array(values.reshape(-1), "float32"), Context())
    assert ops.numel(data) == method.data_bytes(piece)
    rows = ops.load(data, ops.numel(data), 0, ops.numel(data))
    assert all(backend.numpy(each).all() for each in method.sound(ops, piece, rows, "float32"))
    return backend.numpy(method.unpack(ops, piece, rows, "float32", Context()))[0].reshape(
        values.shape
    )


def values_of(shape: tuple[int, ...], seed: int = 0) -> Array:
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * random.exponential(2.0, shape) + 0.2
    return values.astype(np.float32)


def columns_of(values: Array) -> list[Array]:
    """Split values by their first index, and join columns of fewer than 32 elements."""
    rows = values.reshape(1, -1) if values.ndim == 1 else values.reshape(values.shape[0], -1)
    joined = -(-32 // rows.shape[1]) if values.ndim > 1 else 1
    return [rows[at : at + joined].reshape(-1) for at in range(0, len(rows), joined)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_bit_stands_for_the_mean_of_its_sign_in_its_column(shape: tuple[int, ...]) -> None:
    values, expected = values_of(shape), []
    for column in columns_of(values):
        below = column < 0
        means = [column[chosen].mean() if chosen.any() else 0 for chosen in (~below, below)]
        expected.append(np.where(below, means[1], means[0]))
    got = coded(OneBit(), values).reshape(-1)
    np.testing.assert_allclose(got, np.concatenate(expected), rtol=2**-8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_bit_contracts(shape: tuple[int, ...]) -> None:
    """The squared error is the variance within each sign of a column."""
    for seed in range(5):
        values = values_of(shape, seed)
        expected = 0.0
        for column in columns_of(values):
            for chosen in (column[column >= 0], column[column < 0]):
                expected += float(np.square(chosen - chosen.mean()).sum()) if chosen.size else 0.0
        square = float(np.square(values - coded(OneBit(), values)).sum())
        assert square == pytest.approx(
            expected, rel=1e-3, abs=1e-4 * float(np.square(values).sum())
        )
        assert square < np.square(values).sum()


@pytest.mark.parametrize("block", [16, 100, 2048])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e30])
def test_a_byte_is_the_nearest_of_256_steps_of_its_blocks_range(block: int, scale: float) -> None:
    values = values_of((3001,)) * np.float32(scale)
    got = coded(ByteGrad(block=block), values)
    for at in range(0, values.size, block):
        part = values[at : at + block].astype(float)
        step = (part.max() - part.min()) / 255
        error = got[at : at + block] - part
        assert abs(error).max() <= step * 0.501 + 1e-6 * abs(part).max()
    square = np.square(got.astype(float) - values).sum()
    assert square < 1e-2 * np.square(values.astype(float)).sum()


@each_framework
@pytest.mark.parametrize("method", [OneBit(), ByteGrad(block=16)], ids=["one bit", "bytes"])
def test_every_framework_writes_the_same_values(backend: Backend, method: Codec) -> None:
    values = values_of((6, 80))
    values.reshape(-1)[::37] = [0, -0.0, 3e38, -3e38, np.inf, np.nan, 1, 2, 1e30, 5, 6, 7, 8]
    assert np.array_equal(coded(method, values, backend), coded(method, values))


@pytest.mark.parametrize("method", [OneBit, ByteGrad])
def test_what_is_left_out_is_sent_in_later_steps(method: Any) -> None:
    """The mean of the applied gradients approaches the gradient as 1 / steps."""
    specs, g = [TensorSpec("w", (20, 50), "float32")], values_of((20, 50))
    world = World(make_plan(specs, method(min_numel=0)), 2, NUMPY)
    sums = sum(world.step([{"w": g}] * 2)[0]["w"].astype(float) for _ in range(200))
    assert abs(sums / 200 - g).max() < 0.15 * abs(g).max()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="sharded"):
        OneBit(exchange="sharded")
    for block in (0, 15, 16.0, True, 1 << 20):
        with pytest.raises(ConfigError, match="block="):
            ByteGrad(block=block)
