"""`TopKEF(momentum="optimizer")` between real ranks: as if both had been told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kerasses import LIBRARIES, compiled, data, fit, same
from proof import assert_ranks_equal

import horovod_topk.tensorflow.keras as hvd_keras
from plain import PlainTopKEF as TopKEF

NAMED = {"ratio": 0.1, "min_numel": 0, "momentum": 0.9}
TAKEN = NAMED | {"momentum": "optimizer"}

Make = Callable[[Any], Any]
PAIRS: dict[str, tuple[Make, Make]] = {
    "SGD": (lambda k: k.SGD(0.05, momentum=0.9), lambda k: k.SGD(0.05)),
    "Adam": (lambda k: k.Adam(0.01), lambda k: k.Adam(0.01, beta_1=0.0)),
}  # with a momentum, and without
KINDS = pytest.mark.parametrize("kind", PAIRS)
BOTH = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


def alike(one: Any, other: Any, within: float = 1e-5) -> bool:
    """Whether two models have weights that differ by little."""
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return all(np.allclose(a, b, rtol=10 * within, atol=within) for a, b in pairs)


def pair(kind: str, optimizers: Any) -> tuple[Any, Any]:
    of_its_own, without = PAIRS[kind]
    return of_its_own(optimizers), without(optimizers)


@pytest.mark.one_in(3, first=1)
@pytest.mark.parametrize(("library", "kind"), [(keras, "SGD"), (keras, "Adam"), (tf_keras, "Adam")])
def test_the_optimizers_momentum_is_taken_over(library: Any, kind: str) -> None:
    """The same training as naming it twice; gradients have another size, and Adam an epsilon."""
    of_its_own, without = pair(kind, library.optimizers)
    taken = fit(library, of_its_own, TopKEF(**TAKEN), epochs=1)
    named = fit(library, without, TopKEF(**NAMED), epochs=1)
    assert alike(taken, named, within=1e-5 if kind == "SGD" else 2e-3)
    assert_ranks_equal(taken.get_weights())
    stats = TopKEF.of(taken.optimizer).stats()
    assert (stats.momentum, stats.steps) == (0.9, 8)


@pytest.mark.one_in(9)
@pytest.mark.one_in(2, first=1)
@BOTH
def test_within_a_loss_scale(library: Any) -> None:
    kind = tf_keras.mixed_precision if library is tf_keras else keras.optimizers
    of_its_own, without = map(kind.LossScaleOptimizer, pair("SGD", library.optimizers))
    taken = fit(library, of_its_own, TopKEF(**TAKEN), epochs=1)
    assert alike(taken, fit(library, without, TopKEF(**NAMED), epochs=1))
    assert_ranks_equal(taken.get_weights())


def test_at_once_without_a_graph() -> None:
    of_its_own, without = pair("SGD", keras.optimizers)
    taken = fit(keras, of_its_own, TopKEF(**TAKEN), epochs=1, eager=True)
    assert alike(taken, fit(keras, without, TopKEF(**NAMED), epochs=1, eager=True))
    assert_ranks_equal(taken.get_weights())


@pytest.mark.slow
def test_older_optimizers_of_tfkeras_and_horovods_other_name() -> None:
    of_its_own, without = pair("SGD", tf_keras.optimizers.legacy)
    named = fit(tf_keras, without, TopKEF(**NAMED), epochs=1)
    optimizer = hvd.DistributedOptimizer(of_its_own, compression=TopKEF(**TAKEN))
    model = compiled(tf_keras, optimizer)
    train(model)
    assert alike(model, named)
    assert_ranks_equal(model.get_weights())


@pytest.mark.slow
@pytest.mark.parametrize(("library", "kind"), [(keras, "Adam"), (tf_keras, "SGD")])
def test_compact_learns(library: Any, kind: str) -> None:
    of_its_own, _ = pair(kind, library.optimizers)
    model = fit(library, of_its_own, TopKEF(momentum="optimizer", min_numel=0), epochs=4)
    assert_ranks_equal(model.get_weights())
    stats = TopKEF.of(model.optimizer).stats()
    assert (stats.momentum, stats.steps) == (0.9, 32)
    assert stats.reduction > 5
    before = compiled(library, "sgd").evaluate(*data(), verbose=0)[0]
    assert model.evaluate(*data(), verbose=0)[0] < 0.9 * before


@pytest.mark.slow
@BOTH
def test_clipping_velocities_is_warned_of_once(
    library: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Keras clips what it is given, and that is what was exchanged."""
    optimizer = library.optimizers.SGD(0.05, clipnorm=1.0)
    model = fit(library, optimizer, TopKEF(**NAMED), epochs=1)
    assert caplog.text.count("threshold 10 times larger") == 1
    (warning,) = TopKEF.of(model.optimizer).stats().warnings
    assert "SGD has clipnorm=1." in warning
    assert "TopKEF(clip_norm=...)" in warning
    taken = library.optimizers.SGD(0.05, momentum=0.9, clipnorm=1.0)
    for quiet, settings in ((library.optimizers.SGD(0.05), NAMED), (taken, TAKEN)):
        found = fit(library, quiet, TopKEF(**settings), epochs=1)
        assert not TopKEF.of(found.optimizer).stats().warnings


@pytest.mark.slow
@BOTH
def test_keras_clips_gradients_of_a_momentum_that_was_taken_over(library: Any) -> None:
    """To a tenth of what clips the velocities of a momentum that is named."""
    of_its_own = library.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.01)
    without = library.optimizers.SGD(0.05, global_clipnorm=0.1)
    clipped = fit(library, of_its_own, TopKEF(**TAKEN), epochs=1)
    assert alike(clipped, fit(library, without, TopKEF(**NAMED), epochs=1))
    free = fit(library, library.optimizers.SGD(0.05, momentum=0.9), TopKEF(**TAKEN), epochs=1)
    assert not alike(clipped, free)


@pytest.mark.slow
@KINDS
def test_a_saved_model_goes_on_with_what_was_taken_over(kind: str, tmp_path: Path) -> None:
    """Model, optimizer, residuals and velocities: as if it had not stopped."""
    first, then, path = TopKEF(**TAKEN), TopKEF(**TAKEN), tmp_path / "model.keras"
    whole = functional(pair(kind, keras.optimizers)[0], TopKEF(**TAKEN))
    half = functional(pair(kind, keras.optimizers)[0], first)
    train(half)
    half.save(path)
    owed = tf.train.Checkpoint(compression=first).save(str(tmp_path / "owed"))
    tf.train.Checkpoint(compression=then).restore(owed)
    again = hvd_keras.load_model(path, compression=then)
    train(again)
    train(whole, epochs=2)
    assert same(again, whole)
    assert_ranks_equal(again.get_weights())
    assert TopKEF.of(again.optimizer).stats().momentum == 0.9


def functional(optimizer: Any, compression: TopKEF) -> Any:
    """A model whose variables have the same names once it is loaded; a Sequential's have not."""
    keras.utils.set_random_seed(0)
    inputs = keras.layers.Input((20,))
    model = keras.Model(inputs, keras.layers.Dense(10)(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = hvd_keras.DistributedOptimizer(optimizer, compression=compression)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    return model


def train(model: Any, epochs: int = 1) -> None:
    model.fit(*data(), batch_size=8, epochs=epochs, shuffle=False, verbose=0)
