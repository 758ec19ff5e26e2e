"""Test TernGrad: the paper's formulas, unbiasedness, variance, clipping, and refused settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracle.backends import NUMPY, Backend, each_framework

from horovod_topk.errors import ConfigError
from horovod_topk.methods import TernGrad
from horovod_topk.methods.keys import Key, halves
from horovod_topk.methods.protocol import Announced, Context, Piece, TensorSpec

SIZE = 303  # no multiple of 5
RANKS = 3
Array = NDArray[Any]


def piece_of(method: TernGrad, leg: str = "direct", size: int = SIZE) -> Piece:
    part = Piece(TensorSpec("w", (size,), "float32"), size, 0)
    return method.piece(replace(part, spec=replace(part.spec, shape=(5000,))), leg)


def key(committed: int, rank: int = 0) -> Key:
    return Key(0, ("w", "direct", 0), committed, lambda: rank, lambda row: row)


def coded(
    method: TernGrad, of_ranks: Sequence[Array], committed: int, backend: Backend = NUMPY
) -> list[Array]:
    """What receivers decode of what each rank sends."""
    ops, piece = backend.ops, piece_of(method, size=of_ranks[0].size)
    arrays = [backend.array(values, "float32") for values in of_ranks]
    own = [method.announce(ops, piece, values) for values in arrays]
    rows, read = ops.load(ops.joined(own), 1, 0, 1), []
    for rank, values in enumerate(arrays):
        announced = Announced(own[rank], rows)
        data = method.pack(ops, piece, values, Context(key(committed, rank), announced=announced))
        assert ops.numel(data) == method.data_bytes(piece)
        written = ops.load(data, ops.numel(data), 0, ops.numel(data))
        facts = method.sound(ops, piece, written, "float32")
        assert all(backend.numpy(fact).all() for fact in facts)
        read.append(backend.numpy(method.unpack(ops, piece, written, "float32", Context()))[0])
    return read


def values_of(ranks: int = RANKS, seed: int = 5) -> list[Array]:
    random = np.random.default_rng(seed)
    spread = random.exponential(2.0, SIZE)
    return [(random.standard_normal(SIZE) * spread).astype(np.float32) for _ in range(ranks)]


def clipped(values: Array, clip: float | None) -> Array:
    """Wen et al. 2017, equation 7: elements beyond c standard deviations become these."""
    if clip is None:
        return values
    limit = clip * values.std(dtype=np.float64)
    return np.clip(values, -limit, limit)


def paper(of_ranks: Sequence[Array], clip: float | None, drawn: Sequence[Array]) -> list[Array]:
    """Wen et al. 2017, equations 2 and 3, with the scale shared by ranks (section 3.3)."""
    gradients = [clipped(values, clip) for values in of_ranks]
    scale = max(np.abs(g).max() for g in gradients)
    pairs = zip(gradients, drawn, strict=True)
    return [scale * np.sign(g) * (b < np.abs(g) / scale) for g, b in pairs]


@pytest.mark.parametrize("clip", [None, 2.5, 1.0])
def test_it_is_what_the_paper_says(clip: float | None) -> None:
    method, given = TernGrad(clip=clip), values_of()
    drawn = [
        (halves(NUMPY.ops, key(3, rank).own, SIZE, "cpu") + 0.5) * 2.0**-16 for rank in range(RANKS)
    ]
    expected = paper(given, clip, drawn)
    got = coded(method, given, 3)
    different = np.count_nonzero(np.sign(np.concatenate(expected)) != np.sign(np.concatenate(got)))
    assert different <= 1  # where a draw is within rounding of the probability
    for one, other in zip(expected, got, strict=True):
        same = np.sign(one) == np.sign(other)
        np.testing.assert_allclose(other[same], one[same], rtol=1e-4)


def test_ranks_values_are_multiples_of_one_scale() -> None:
    got = coded(TernGrad(), values_of(), 0)
    assert len(set(np.abs(np.concatenate(got)).tolist()) - {0.0}) == 1
    assert {-1.0, 0.0, 1.0} == set(np.sign(np.concatenate(got)).tolist())


@pytest.mark.parametrize("clip", [None, 2.5])
def test_the_mean_over_draws_is_the_clipped_gradient_and_the_variance_is_the_papers(
    clip: float | None,
) -> None:
    """The variance of an element g at scale s is |g| (s - |g|)."""
    method, draws, (values,) = TernGrad(clip=clip), 1200, values_of(1)
    seen = np.stack([coded(method, [values], i)[0] for i in range(draws)]).astype(float)
    expected = clipped(values.astype(float), clip)
    scale = np.abs(expected).max()
    variance = np.abs(expected) * (scale - np.abs(expected))
    error = np.sqrt(variance / draws)
    assert (np.abs(seen.mean(0) - expected) <= 4.5 * error + 1e-3 * scale).all()
    assert seen.var(0).sum() == pytest.approx(variance.sum(), rel=0.03)


def test_clipping_makes_the_noise_smaller() -> None:
    (values,) = values_of(1)
    squares = [
        np.mean([np.square(coded(TernGrad(clip=c), [values], i)[0] - values).sum() for i in (0, 1)])
        for c in (None, 2.5)
    ]
    assert squares[1] < squares[0] / 2


def test_an_owner_clips_no_means() -> None:
    """Most elements of a mean of ternary values are 0, so that its deviation says nothing."""
    means = np.zeros(SIZE, np.float32)
    means[:3] = 1.0
    back = piece_of(TernGrad(), "gather")
    assert NUMPY.ops.numel(TernGrad().announce(NUMPY.ops, back, means)) == 1
    assert TernGrad().announce(NUMPY.ops, back, means)[0] == 1.0
    assert TernGrad().announce(NUMPY.ops, piece_of(TernGrad()), means)[0] < 0.5


@each_framework
@pytest.mark.parametrize("clip", [None, 2.5])
def test_every_framework_writes_the_same_values(backend: Backend, clip: float | None) -> None:
    odd = np.array([0, -0.0, 1e30, -3e38, np.inf, np.nan])
    given = [np.concatenate([values, odd]).astype(np.float32) for values in values_of()]
    given[1] = np.zeros_like(given[0])
    given[1][-2:] = np.inf, np.nan
    for case in (given, values_of()):
        got, expected = (coded(TernGrad(clip=clip), case, 7, each) for each in (backend, NUMPY))
        for one, other in zip(got, expected, strict=True):
            assert one.tobytes() == other.tobytes()


def test_five_elements_take_a_byte() -> None:
    method = TernGrad()
    assert method.data_bytes(piece_of(method)) == 4 + 61
    values = np.array([3, 0, -3, 0, 3, -3], np.float32)
    announced = Announced(np.float32([3]), np.float32([[2], [3]]))
    piece = piece_of(method, size=6)
    data = method.pack(NUMPY.ops, piece, values, Context(key(0), announced=announced))
    assert data[4:].tolist() == [2 + 3 + 0 + 27 + 2 * 81, 0]


@pytest.mark.parametrize("damage", ["scale", "infinite", "digit"])
def test_what_no_writer_can_have_written_is_refused(damage: str) -> None:
    method = TernGrad()
    piece, row = piece_of(method), np.zeros((1, 65), np.uint8)
    row[0, :4] = np.array([{"scale": -1, "infinite": np.inf}.get(damage, 1)], "f4").view(np.uint8)
    row[0, 30] = 243 if damage == "digit" else 242
    facts = method.sound(NUMPY.ops, piece, row, "float32")
    assert not all(fact.all() for fact in facts)


@pytest.mark.parametrize("clip", [0, -1.0, math.inf, math.nan, "2.5", True], ids=str)
def test_what_is_out_of_range_is_refused(clip: Any) -> None:
    with pytest.raises(ConfigError, match="clip="):
        TernGrad(clip=clip)
