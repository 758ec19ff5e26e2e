"""Test QSGD: unbiasedness, the paper's variance bounds, contraction, and refused settings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracle.backends import NUMPY, Backend, each_framework

from horovod_topk.errors import ConfigError
from horovod_topk.methods import QSGD
from horovod_topk.methods.keys import Key, halves
from horovod_topk.methods.protocol import Context, Piece, TensorSpec

SIZE = 300
PIECE = Piece(TensorSpec("w", (SIZE,), "float32"), SIZE, 0)
Array = NDArray[Any]
SETTINGS = [
    {"bits": bits, "norm": norm, "block": block}
    for bits in (2, 4, 8)
    for norm, block in (("max", 64), ("l2", 128), ("max", 512))
]


def key(committed: int) -> Key:
    return Key(0, ("w", "direct", 0), committed, lambda: 0, lambda row: row)


def coded(method: QSGD, values: Array, committed: int, backend: Backend = NUMPY) -> Array:
    """Encode values, and return what receivers decode."""
    ops = backend.ops
    data = method.pack(ops, PIECE, backend.array(values, "float32"), Context(key(committed)))
    rows = ops.load(data, ops.numel(data), 0, ops.numel(data))
    assert all(backend.numpy(fact).all() for fact in method.sound(ops, PIECE, rows, "float32"))
    return backend.numpy(method.unpack(ops, PIECE, rows, "float32", Context()))[0]


def values_of(seed: int = 5) -> Array:
    random = np.random.default_rng(seed)
    return (random.standard_normal(SIZE) * random.exponential(2.0, SIZE)).astype(np.float32)


def paper(method: QSGD, block: Array, drawn: Array) -> Array:
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
def test_it_is_what_the_paper_says(settings: dict[str, Any]) -> None:
    """Compare with `paper`; an l2 norm summed in another order may round to the next step."""
    method, values = QSGD(**settings), values_of()
    stream = key(3).own
    drawn = (halves(NUMPY.ops, stream, SIZE, "cpu") + 0.5) / 65536
    got = coded(method, values, 3)
    for at in range(0, SIZE, method.block):
        part = slice(at, at + method.block)
        expected = paper(method, values[part], drawn[part])
        np.testing.assert_allclose(got[part], expected, rtol=1e-6 if method.norm == "max" else 0.01)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_mean_over_draws_is_the_gradient_and_the_variance_within_its_bound(
    settings: dict[str, Any],
) -> None:
    method, values, draws = QSGD(**settings), values_of(), 1500
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


@pytest.mark.parametrize("settings", [s for s in SETTINGS if QSGD(**s).contracts], ids=str)
@pytest.mark.parametrize("shape", ["flat", "spike", "normal"])
def test_with_error_feedback_the_error_is_smaller_than_the_block(
    settings: dict[str, Any], shape: str
) -> None:
    method = QSGD(**settings)
    values = {"flat": np.full(SIZE, 0.3), "spike": np.eye(1, SIZE)[0], "normal": values_of()}[shape]
    values = (values + 1e-3).astype(np.float32)
    square = np.mean([np.square(coded(method, values, i) - values).sum() for i in range(200)])
    assert square < np.square(values).sum()


@each_framework
@pytest.mark.parametrize("settings", SETTINGS[:4], ids=str)
def test_every_framework_writes_the_same_values(backend: Backend, settings: dict[str, Any]) -> None:
    values = np.concatenate([values_of(), [0, -0.0, 1e30, -3e38, np.inf, np.nan]])[-SIZE:]
    values = values.astype(np.float32)
    method = QSGD(**settings)
    assert np.array_equal(coded(method, values, 7, backend), coded(method, values, 7))


@pytest.mark.parametrize(
    "settings",
    [{"bits": 1}, {"bits": 9}, {"bits": 4.0}, {"block": 8}, {"norm": "l1"}, {"seed": -1}],
    ids=str,
)
def test_what_is_out_of_range_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        QSGD(**settings)


def test_error_feedback_is_refused_where_it_would_diverge() -> None:
    assert QSGD(bits=4).error_feedback
    assert not QSGD(bits=2).error_feedback
    assert not QSGD(bits=4, norm="l2").error_feedback
    assert not QSGD(error_feedback=False).error_feedback
    with pytest.raises(ConfigError, match="residuals would grow"):
        QSGD(bits=2, error_feedback=True)
