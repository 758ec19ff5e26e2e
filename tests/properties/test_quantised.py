"""Methods that send every element in few bits, against transcriptions of papers and docstrings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracle.backends import NUMPY, TENSORFLOW, TORCH, Backend, each_framework
from oracle.world import World

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.errors import ConfigError
from horovod_topk.methods import QSGD, ByteGrad, Codec, OneBit, SignSGD, TernGrad
from horovod_topk.methods.keys import Key, halves
from horovod_topk.methods.protocol import Announced, AnnouncingCodec, Context, Piece

RANKS = 3
SHAPES = ((40, 50), (6, 7, 5), (100, 3), (301,), (1,), (2, 33))
SIZE = 303  # no multiple of 5
SETTINGS = [
    {"bits": bits, "norm": norm, "block": block}
    for bits in (2, 4, 8)
    for norm, block in (("max", 64), ("l2", 128), ("max", 512))
]
Array = NDArray[Any]


def piece_of(method: Codec, shape: tuple[int, ...] = (SIZE,), direction: str = "direct") -> Piece:
    part = Piece(TensorSpec("w", shape, "float32"), math.prod(shape), 0)
    return replace(method, min_numel=0).piece(part, direction)


def key(committed: int, rank: int = 0) -> Key:
    return Key(0, ("w", "direct", 0), committed, lambda: rank)


def coded_together(
    method: Codec, of_ranks: Sequence[Array], committed: int = 0, backend: Backend = NUMPY
) -> list[Array]:
    """What receivers decode of what each rank sends."""
    ops, shape, read = backend.ops, of_ranks[0].shape, []
    piece = piece_of(method, shape)
    arrays = [backend.array(values.reshape(-1), "float32") for values in of_ranks]
    own: list[Any] = [None] * len(arrays)
    if isinstance(method, AnnouncingCodec):
        told = [method.announce(ops, piece, values) for values in arrays]
        rows = ops.load(ops.joined(told), 1, 0, 1)
        own = [Announced(each, rows) for each in told]
    for rank, values in enumerate(arrays):
        context = Context(key(committed, rank), announced=own[rank])
        data = method.pack(ops, piece, values, context)
        assert ops.numel(data) == method.data_bytes(piece)
        written = ops.load(data, ops.numel(data), 0, ops.numel(data))
        facts = method.sound(ops, piece, written, "float32")
        assert all(backend.numpy(fact).all() for fact in facts)
        values = backend.numpy(method.unpack(ops, piece, written, "float32", Context()))
        read.append(values[0].reshape(shape))
    return read


def coded(method: Codec, values: Array, committed: int = 0) -> Array:
    """What receivers decode of what one rank sends."""
    return coded_together(method, [values], committed)[0]


def values_of(shape: tuple[int, ...] = (SIZE,), seed: int = 0, mean: float = 0.0) -> Array:
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * random.exponential(2.0, shape) + mean
    return values.astype(np.float32)


@each_framework
@pytest.mark.parametrize(
    "method",
    [
        OneBit(),
        ByteGrad(block=16),
        *(QSGD(**settings) for settings in SETTINGS[:4]),
        TernGrad(clip=None),
        TernGrad(),
    ],
    ids=repr,
)
def test_every_framework_writes_the_same_values(backend: Backend, method: Codec) -> None:
    usual = [values_of((6, 80), seed) for seed in range(RANKS)]
    odd = [each.copy() for each in usual]
    odd[0].reshape(-1)[::37] = [0, -0.0, 3e38, -3e38, np.inf, np.nan, 1, 2, 1e30, 5, 6, 7, 8]
    odd[1][:] = 0
    odd[1][-1, -2:] = np.inf, np.nan
    for given in (usual, odd):
        found, expected = (coded_together(method, given, 7, each) for each in (backend, NUMPY))
        assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))


# OneBit and ByteGrad.


def columns_of(values: Array) -> list[Array]:
    """Split values by their first index, and join columns of fewer than 32 elements."""
    rows = values.reshape(1, -1) if values.ndim == 1 else values.reshape(values.shape[0], -1)
    joined = -(-32 // rows.shape[1]) if values.ndim > 1 else 1
    return [rows[at : at + joined].reshape(-1) for at in range(0, len(rows), joined)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_bit_stands_for_the_mean_of_its_sign_in_its_column(shape: tuple[int, ...]) -> None:
    values, expected = values_of(shape, mean=0.2), []
    for column in columns_of(values):
        below = column < 0
        means = [column[chosen].mean() if chosen.any() else 0 for chosen in (~below, below)]
        expected.append(np.where(below, means[1], means[0]))
    got = coded(OneBit(), values).reshape(-1)
    np.testing.assert_allclose(got, np.concatenate(expected), rtol=2**-8)


@pytest.mark.parametrize("block", [16, 100, 2048])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e30])
def test_a_byte_is_the_nearest_of_256_steps_of_its_blocks_range(block: int, scale: float) -> None:
    values = values_of((3001,), mean=0.2) * np.float32(scale)
    got = coded(ByteGrad(block=block), values)
    for at in range(0, values.size, block):
        part = values[at : at + block].astype(float)
        step = (part.max() - part.min()) / 255
        error = got[at : at + block] - part
        assert abs(error).max() <= step * 0.501 + 1e-6 * abs(part).max()
    square = np.square(got.astype(float) - values).sum()
    assert square < 1e-2 * np.square(values.astype(float)).sum()


@pytest.mark.parametrize("method", [OneBit, ByteGrad])
def test_what_is_left_out_is_sent_in_later_steps(method: Any) -> None:
    """The mean of the applied gradients approaches the gradient as 1 / steps."""
    specs, g = [TensorSpec("w", (20, 50), "float32")], values_of((20, 50), mean=0.2)
    world = World(make_plan(specs, method(min_numel=0)), 2, NUMPY)
    sums = sum(world.step([{"w": g}] * 2)[0]["w"].astype(float) for _ in range(100))
    assert abs(sums / 100 - g).max() < 0.3 * abs(g).max()


# QSGD.


def steps_of(method: QSGD, block: Array, drawn: Array) -> Array:
    """Alistarh et al. 2017, equation 4, with the step that the module's docstring says."""
    s = method.levels
    norm = np.abs(block).max() if method.norm == "max" else np.linalg.norm(block.astype(float))
    step = least_bfloat16(norm / s * (1 + 2.0**-20))
    lower = np.floor(np.abs(block) / np.float32(step))
    up = 1 - drawn <= np.abs(block) / np.float32(step) - lower
    return np.sign(block) * (lower + up) * step


def least_bfloat16(number: float) -> float:
    mantissa, exponent = math.frexp(number)
    return math.ldexp(math.ceil(mantissa * 256), exponent - 8)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_qsgd_is_what_the_paper_says(settings: dict[str, Any]) -> None:
    """Compare values with `steps_of`, up to one step if the order of an l2 sum may round."""
    method, values = QSGD(**settings), values_of(seed=5)
    stream = key(3).own
    drawn = (halves(NUMPY.ops, stream, SIZE, "cpu") + 0.5) / 65536
    got = coded(method, values, 3)
    for at in range(0, SIZE, method.block):
        part = slice(at, at + method.block)
        expected = steps_of(method, values[part], drawn[part])
        np.testing.assert_allclose(got[part], expected, rtol=1e-6 if method.norm == "max" else 0.01)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_mean_over_draws_is_the_gradient_and_the_variance_within_its_bound(
    settings: dict[str, Any],
) -> None:
    method, values, draws = QSGD(**settings), values_of(seed=5), 500
    seen = np.stack([coded(method, values, i) for i in range(draws)]).astype(float)
    step = np.abs(np.diff(np.unique(np.abs(seen)))).max()
    error = seen.std(0) / math.sqrt(draws)  # 0 where the rarer of two levels was never drawn
    assert (np.abs(seen.mean(0) - values) <= 5 * error + 10 * step / draws).all()
    s, square = method.levels / 1.008, np.square(seen - values).sum(1).mean()
    bound = 0.0
    for at in range(0, SIZE, method.block):
        block = values[at : at + method.block].astype(float)
        n = block.size
        if method.norm == "max":
            bound += n / (4 * s**2) * np.abs(block).max() ** 2
        else:
            bound += min(n / s**2, math.sqrt(n) / s) * np.square(block).sum()
    assert square <= 1.02 * bound
    assert square > 0


def test_error_feedback_is_refused_where_it_would_diverge() -> None:
    assert QSGD(bits=4).error_feedback
    assert not QSGD(bits=2).error_feedback
    assert not QSGD(bits=4, norm="l2").error_feedback
    assert not QSGD(error_feedback=False).error_feedback
    with pytest.raises(ConfigError, match="residuals would grow"):
        QSGD(bits=2, error_feedback=True)


# TernGrad.


def of_ranks() -> list[Array]:
    """Values of three ranks whose elements are of equal scales."""
    random = np.random.default_rng(5)
    spread = random.exponential(2.0, SIZE)
    return [(random.standard_normal(SIZE) * spread).astype(np.float32) for _ in range(RANKS)]


def clipped(values: Array, clip: float | None) -> Array:
    """Clip elements at c standard deviations (Wen et al. 2017, equation 7)."""
    if clip is None:
        return values
    limit = clip * values.std(dtype=np.float64)
    return np.clip(values, -limit, limit)


def ternary(of_ranks: Sequence[Array], clip: float | None, drawn: Sequence[Array]) -> list[Array]:
    """Wen et al. 2017, equations 2 and 3, with the scale shared by ranks (section 3.3)."""
    gradients = [clipped(values, clip) for values in of_ranks]
    scale = max(np.abs(g).max() for g in gradients)
    pairs = zip(gradients, drawn, strict=True)
    return [scale * np.sign(g) * (b < np.abs(g) / scale) for g, b in pairs]


@pytest.mark.parametrize("clip", [None, 2.5, 1.0])
def test_terngrad_is_what_the_paper_says(clip: float | None) -> None:
    method, given = TernGrad(clip=clip), of_ranks()
    drawn = [
        (halves(NUMPY.ops, key(3, rank).own, SIZE, "cpu") + 0.5) * 2.0**-16 for rank in range(RANKS)
    ]
    expected = ternary(given, clip, drawn)
    got = coded_together(method, given, 3)
    different = np.count_nonzero(np.sign(np.concatenate(expected)) != np.sign(np.concatenate(got)))
    assert different <= 1  # where a draw is within rounding of the probability
    for one, other in zip(expected, got, strict=True):
        same = np.sign(one) == np.sign(other)
        np.testing.assert_allclose(other[same], one[same], rtol=1e-4)


def test_an_owner_clips_no_means() -> None:
    """Most elements of a mean of ternary values are 0, so that its deviation says nothing."""
    means = np.zeros(SIZE, np.float32)
    means[:3] = 1.0
    back = piece_of(TernGrad(), direction="gather")
    assert NUMPY.ops.numel(TernGrad().announce(NUMPY.ops, back, means)) == 1
    assert TernGrad().announce(NUMPY.ops, back, means)[0] == 1.0
    assert TernGrad().announce(NUMPY.ops, piece_of(TernGrad()), means)[0] < 0.5


def test_five_elements_take_a_byte() -> None:
    method = TernGrad()
    assert method.data_bytes(piece_of(method)) == 4 + 61
    values = np.array([3, 0, -3, 0, 3, -3], np.float32)
    announced = Announced(np.float32([3]), np.float32([[2], [3]]))
    piece = piece_of(method, (6,))
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


# SignSGD.


def voting(ranks: int, backend: Backend = NUMPY, op: str = "average", **settings: Any) -> World:
    specs = [TensorSpec("w", (2500,), "float32")]
    return World(make_plan(specs, SignSGD(min_numel=0, **settings), op), ranks, backend)


def test_signs_contract_by_the_share_of_its_paper() -> None:
    """Karimireddy et al. 2019, lemma 8, block by block, with a scale rounded to 8 bits."""
    world, g = voting(1), values_of((2500,), 3)
    world.step([{"w": g}])
    left = world.residuals()[0]["w"].astype(float)
    for at in range(0, 2500, 1024):
        block, rest = g[at : at + 1024].astype(float), left[at : at + 1024]
        square = np.square(block).sum()
        share = np.abs(block).sum() ** 2 / (block.size * square)
        assert np.square(rest).sum() == pytest.approx((1 - share) * square, rel=1e-4)


@pytest.mark.parametrize("op", ["average", "sum"])
@pytest.mark.parametrize("backend", [NUMPY, TORCH, TENSORFLOW], ids=lambda each: each.name)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_majority_decides(backend: Backend, ranks: int, op: str) -> None:
    """Ties are 0; a gradient of 0 votes for +1."""
    world = voting(ranks, backend, op, majority=True)
    gradients = [values_of((2500,), seed) for seed in range(ranks)]
    for g in gradients:
        g[:5] = 0
    votes = sum(np.where(g < 0, -1, 1) for g in gradients)
    for applied in world.step([{"w": g} for g in gradients]):
        assert np.array_equal(applied["w"], np.sign(votes) * (ranks if op == "sum" else 1))
    assert not any(one["w"].any() for one in world.residuals())


@pytest.mark.parametrize("majority", [False, True])
def test_dense_is_a_level_of_signs(majority: bool) -> None:
    world, g = voting(2, majority=majority, warmup=((1, 1.0),)), values_of((2500,), 3)
    assert np.array_equal(world.step([{"w": g}] * 2)[0]["w"], g)
    world.step([{"w": g}] * 2)
    left = world.residuals()[0]["w"]
    assert left.any() != majority
    world.set_ratio(1.0)
    np.testing.assert_allclose(world.step([{"w": g}] * 2)[0]["w"], g + left, rtol=1e-6)
    assert not world.residuals()[0]["w"].any()
