"""Loss scaling: residuals in unscaled units, whatever becomes of the scale; see also case_keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kerasses import BATCH, LIBRARIES, compiled, data, distributed, fit, model_of
from proof import Array, assert_ranks_equal

from horovod_topk.errors import ConfigError, UnsupportedDtypeError, UnsupportedOperationError
from plain import PlainTopKEF as TopKEF

SPARSE = {"ratio": 0.02, "min_numel": 0}
SCALE, GROWTH = 2.0**10, 3  # doubles with every third step

Scaler = tf_keras.mixed_precision.LossScaleOptimizer
Wrap = Callable[..., Any]


def around(compression: Any, optimizer: Any = tf_keras.optimizers.SGD, **settings: Any) -> Any:
    """As `compile` does it."""
    return Scaler(distributed(tf_keras, optimizer(0.05), compression), **settings)


def within(compression: Any, optimizer: Any = tf_keras.optimizers.SGD, **settings: Any) -> Any:
    """As a user may write it; Horovod alone fails at it."""
    return distributed(tf_keras, Scaler(optimizer(0.05), **settings), compression)


WAYS = pytest.mark.parametrize("wrap", [around, within])
GROWING = {"initial_scale": SCALE, "dynamic_growth_steps": GROWTH}


def trained(optimizer: Any, eager: bool = False) -> Any:
    model = compiled(tf_keras, optimizer, eager=eager)
    model.fit(*data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return model


def residuals(compression: TopKEF) -> list[Array]:
    return [e.numpy() for e in compression.state_dict()["residuals"].values()]


def assert_equal(ours: list[Array], theirs: list[Array]) -> None:
    assert all(a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True))


@cache
def plain(eager: bool = False) -> tuple[list[Array], list[Array]]:
    """Weights that a model ends with without a loss scale, and its residuals."""
    compression = TopKEF(**SPARSE)
    model = trained(distributed(tf_keras, tf_keras.optimizers.SGD(0.05), compression), eager)
    return model.get_weights(), residuals(compression)


@pytest.mark.slow
@pytest.mark.one_in(9)
@WAYS
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_scale_that_changes_changes_nothing(wrap: Wrap, eager: bool) -> None:
    """To the bit, as scales are powers of two."""
    compression = TopKEF(**SPARSE)
    ours = trained(wrap(compression, **GROWING), eager)
    weights, kept = plain(eager)
    assert float(ours.optimizer.loss_scale) == SCALE * 2 ** (16 // GROWTH)
    assert_equal(ours.get_weights(), weights)
    assert_equal(residuals(compression), kept)
    assert any(e.any() for e in kept)
    assert TopKEF.of(ours.optimizer).stats().steps == 16
    assert_ranks_equal(ours.get_weights())


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_scale_that_changes_changes_nothing_under_keras_3(eager: bool) -> None:
    found = []
    for scaled in (True, False):
        compression, sgd = TopKEF(**SPARSE), keras.optimizers.SGD(0.05)
        optimizer = keras.optimizers.LossScaleOptimizer(sgd, **GROWING) if scaled else sgd
        model = fit(keras, optimizer, compression, epochs=2, eager=eager)
        found.append([*model.get_weights(), *residuals(compression)])
        if scaled:
            assert float(model.optimizer.dynamic_scale) == SCALE * 2 ** (16 // GROWTH)
    assert_equal(*found)


@pytest.mark.one_in(4)
@WAYS
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(wrap: Wrap, exchange: str) -> None:
    compression = TopKEF(**SPARSE, exchange=exchange)
    model = compiled(tf_keras, wrap(compression, initial_scale=SCALE))
    x, y = data()
    model.train_on_batch(x[:8], y[:8])
    weights, kept = model.get_weights(), residuals(compression)
    model.train_on_batch(x[:8] * (np.inf if hvd.rank() == 1 else 1), y[:8])
    assert_equal(model.get_weights(), weights)
    assert_equal(residuals(compression), kept)
    assert float(model.optimizer.loss_scale) == SCALE / 2
    assert compression.stats().rolled_back == 1
    model.train_on_batch(x[8:16], y[8:16])
    assert compression.stats().steps == 2
    assert_ranks_equal(model.get_weights())


@pytest.fixture
def mixed() -> Iterator[None]:
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    tf_keras.mixed_precision.set_global_policy("float32")


@pytest.mark.slow
@pytest.mark.usefixtures("mixed")
def test_mixed_float16_needs_no_more_than_the_policy() -> None:
    """`compile` puts the scale around; residuals are those of another one but for float16."""
    found = []
    for scale in (None, 64.0):
        compression = TopKEF(**SPARSE)
        optimizer = distributed(tf_keras, tf_keras.optimizers.SGD(0.05), compression)
        model = trained(optimizer if scale is None else Scaler(optimizer, initial_scale=scale))
        assert isinstance(model.optimizer, Scaler)
        assert TopKEF.of(model.optimizer).stats().steps == 16
        assert_ranks_equal(model.get_weights())
        found.append(np.concatenate(residuals(compression)))
    assert np.allclose(*found, rtol=0, atol=0.02 * np.abs(found[0]).max())


class Loop:
    """A step of a user's own around a gradient tape, under a loss scale or not."""

    def __init__(self, library: Any, compression: TopKEF, scaler: Any) -> None:
        self.model, self._compression, self._scaler = model_of(library), compression, scaler
        self._optimizer = scaler or library.optimizers.SGD(0.05)

    def step(self, x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.model(x) - tf.one_hot(y, 10)) ** 2)
            loss = self._scaled(loss)
        tape = hvd.DistributedGradientTape(tape, compression=self._compression)
        variables = self.model.trainable_variables
        raw = [getattr(v, "value", v) if not isinstance(v, tf.Variable) else v for v in variables]
        gradients = tape.gradient(loss, raw)
        if self._scaler is not None and isinstance(self._scaler, Scaler):
            gradients = self._scaler.get_unscaled_gradients(gradients)
        self._optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def _scaled(self, loss: Any) -> Any:
        if self._scaler is None:
            return loss
        scale = getattr(self._scaler, "get_scaled_loss", None) or self._scaler.scale_loss
        return scale(loss)


def scaler_of(library: Any) -> Any:
    sgd = library.optimizers.SGD(0.05)
    settings = {"initial_scale": SCALE, "dynamic_growth_steps": GROWTH}
    kind = Scaler if library is tf_keras else keras.optimizers.LossScaleOptimizer
    return kind(sgd, **settings)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_a_tape_is_told_of_the_scale(library: Any, graph: bool) -> None:
    found = []
    for scaler in (scaler_of(library), None):
        compression = TopKEF(**SPARSE, grad_scaler=scaler)
        loop = Loop(library, compression, scaler)
        step = tf.function(loop.step, autograph=False) if graph else loop.step
        x, y = data()
        for position in range(8):
            step(x[position : position + 8], y[position : position + 8])
        found.append([*loop.model.get_weights(), *residuals(compression)])
        if scaler is not None:
            before = residuals(compression)
            step(x[:8] * (np.inf if hvd.rank() == 1 else 1), y[:8])
            assert_equal(residuals(compression), before)
            assert_ranks_equal(loop.model.get_weights())
            assert compression.stats().rolled_back == 1
    assert_equal(*found)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(UnsupportedOperationError, match="cannot know its scale"):
        trained(around(TopKEF(**SPARSE), dynamic=False, initial_scale=SCALE))
    passes = distributed(
        tf_keras, tf_keras.optimizers.SGD(0.05), TopKEF, backward_passes_per_step=2
    )
    with pytest.raises(UnsupportedOperationError, match="gradients of different scales"):
        trained(Scaler(passes))
    with pytest.raises(ConfigError, match="finds its loss scale by itself"):
        distributed(tf_keras, tf_keras.optimizers.SGD(0.05), TopKEF(grad_scaler=scaler_of(keras)))
    with pytest.raises(ConfigError, match=r"is no LossScaleOptimizer"):
        TopKEF(grad_scaler=object())


def test_float16_variables_are_refused() -> None:
    variable = tf.Variable(tf.ones([3], tf.float16), name="half")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * 2)
    compression = TopKEF(grad_scaler=scaler_of(tf_keras))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    with pytest.raises(UnsupportedDtypeError, match=r"half.*float16 gradients"):
        tape.gradient(loss, [variable])
