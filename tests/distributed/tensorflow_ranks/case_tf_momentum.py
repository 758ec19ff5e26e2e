"""Momentum correction between real ranks: instead of SGD's momentum, and never besides it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kerasses import LIBRARIES, distributed, fit
from proof import Array, ErrorFeedback, assert_ranks_equal
from tapes import Linear, noise

from horovod_topk.errors import ConfigError, StateDictError, UnsupportedDtypeError
from plain import PlainTopKEF as TopKEF

SHAPES = [(30, 20), (7,)]
SPARSE = {"ratio": 0.1, "min_numel": 0, "momentum": 0.9}
WAYS = pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
BOTH = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


class Velocities:
    """Momentum correction from its formulas, for all ranks at once, around error feedback."""

    def __init__(self, nesterov: bool) -> None:
        self.feedback = ErrorFeedback(hvd.size(), SPARSE["ratio"])
        self.of = [[np.zeros(s, np.float32) for s in SHAPES] for _ in range(hvd.size())]
        self._nesterov = nesterov

    def exchange(self, gradients: list[list[Array]]) -> list[Array]:
        m, moved = np.float32(SPARSE["momentum"]), []
        for rank, mine in enumerate(gradients):
            self.of[rank] = [m * u + g for u, g in zip(self.of[rank], mine, strict=True)]
            ahead = [m * u + g for u, g in zip(self.of[rank], mine, strict=True)]
            moved.append(ahead if self._nesterov else self.of[rank])
        means = self.feedback.exchange(moved)
        for rank, kept in enumerate(self.feedback.residuals):
            pairs = zip(self.of[rank], kept.values(), strict=True)
            self.of[rank] = [np.where(e == 0, np.float32(0), u) for u, e in pairs]
        return means


def gradients_of(rank: int, step: int) -> list[Array]:
    return [noise(rank, 10 * step + i, shape).numpy() for i, shape in enumerate(SHAPES)]


def take(model: Linear, compression: TopKEF, step: int, graph: bool = True) -> list[Array]:
    return model.exchange(compression, gradients_of(hvd.rank(), step), graph=graph)


def kept(compression: TopKEF) -> list[Array]:
    """All residuals and velocities."""
    state = compression.state_dict()
    owned = state.get("owned", {"residuals": {}})
    parts = state, state["velocity"], owned
    return [e.numpy() for part in parts for e in part["residuals"].values()]


def assert_equal(ours: list[Array], theirs: list[Array]) -> None:
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.one_in(3)
@WAYS
@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "nesterov"])
def test_what_is_sent_and_kept_is_that_of_the_formulas(graph: bool, nesterov: bool) -> None:
    momentum = (SPARSE["momentum"], "nesterov") if nesterov else SPARSE["momentum"]
    model, compression = Linear(SHAPES), TopKEF(**{**SPARSE, "momentum": momentum})
    expected = Velocities(nesterov)
    for step in range(5):
        exchanged = take(model, compression, step, graph)
        assert_equal(
            exchanged, expected.exchange([gradients_of(r, step) for r in range(hvd.size())])
        )
        velocity = compression.state_dict()["velocity"]["residuals"].values()
        mine = [u.reshape(-1) for u in expected.of[hvd.rank()]]
        assert_equal([u.numpy() for u in velocity], mine)
        assert any((u == 0).any() for u in mine)
    assert_ranks_equal(exchanged)


@pytest.mark.one_in(4, first=2)
@BOTH
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_at_ratio_one_it_is_the_momentum_of_sgd(library: Any, exchange: str) -> None:
    dense = fit(library, library.optimizers.SGD(0.05, momentum=0.9), hvd.Compression.none)
    compression = TopKEF(ratio=1.0, momentum=0.9, exchange=exchange)
    ours = fit(library, library.optimizers.SGD(0.05), compression)
    for mine, theirs in zip(ours.get_weights(), dense.get_weights(), strict=True):
        assert np.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert_ranks_equal(ours.get_weights())


@pytest.mark.one_in(9)
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
@pytest.mark.parametrize("way", ["state dict", "checkpoint"])
def test_what_is_saved_has_velocities(exchange: str, way: str, tmp_path: Path) -> None:
    first, again = (TopKEF(**SPARSE, exchange=exchange) for _ in range(2))
    model, other = Linear(SHAPES), Linear(SHAPES)
    for step in range(3):
        take(model, first, step)
    if way == "state dict":
        again.load_state_dict(first.state_dict())
    else:
        path = tf.train.Checkpoint(compression=first).save(str(tmp_path / "one"))
        tf.train.Checkpoint(compression=again).restore(path)
    for step in range(3, 6):
        exchanged = take(model, first, step)
        assert_equal(exchanged, take(other, again, step))
    assert_equal(kept(first), kept(again))
    assert_ranks_equal(exchanged)
    first.reset()
    assert not any(each.any() for each in kept(first))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_a_step_with_an_infinity_leaves_velocities_as_they_were(exchange: str) -> None:
    model, compression = Linear(SHAPES), TopKEF(**SPARSE, exchange=exchange)
    take(model, compression, 0)
    before = kept(compression)
    spoiled = [g * (np.inf if hvd.rank() == 1 else 1) for g in gradients_of(hvd.rank(), 1)]
    assert np.isnan(model.exchange(compression, spoiled, graph=True)[0]).all()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, kept(compression), strict=True))
    assert compression.stats().rolled_back == 1
    assert_ranks_equal(take(model, compression, 2))


@pytest.mark.slow
@BOTH
def test_fit_under_warm_up(library: Any) -> None:
    compression = TopKEF(**SPARSE, warmup=[(5, 0.5)])
    model = fit(library, library.optimizers.SGD(0.05), compression, epochs=1)
    assert_ranks_equal(model.get_weights())
    assert TopKEF.of(model.optimizer).stats().steps == 8


@BOTH
def test_a_momentum_of_the_optimizer_is_refused(library: Any) -> None:
    sgd = library.optimizers.SGD(0.05, momentum=0.9)
    with pytest.raises(ConfigError, match=r"has momentum=0\.9: it would be applied twice"):
        distributed(library, sgd, TopKEF(**SPARSE))
    with pytest.raises(ConfigError, match=r"has beta_1=0\.9: it would be applied twice"):
        distributed(library, library.optimizers.Adam(), TopKEF(**SPARSE))
    scaler = (
        tf_keras.mixed_precision.LossScaleOptimizer
        if library is tf_keras
        else keras.optimizers.LossScaleOptimizer
    )
    with pytest.raises(ConfigError, match="applied twice"):
        distributed(library, scaler(sgd), TopKEF(**SPARSE))


def test_what_does_not_fit_is_refused() -> None:
    model, plain = Linear(SHAPES), TopKEF(ratio=0.1, min_numel=0)
    take(model, plain, 0)
    compression = TopKEF(**SPARSE)
    other = Linear(SHAPES)
    take(other, compression, 0)
    with pytest.raises(StateDictError, match="lacks velocities"):
        compression.load_state_dict(plain.state_dict())
    assert other.variables
    half = Linear(SHAPES, "float16")
    with pytest.raises(UnsupportedDtypeError, match="velocity is float32"):
        half.exchange(compression, [tf.ones(s, tf.float16) for s in SHAPES])
