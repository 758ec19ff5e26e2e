"""`momentum="auto"`: checkpoints of and for dense training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kerasses import LIBRARIES, compiled, data, distributed, fit, same
from proof import assert_ranks_equal

import horovod_topk.tensorflow.keras as hvd_keras
from plain import PlainTopKEF as TopKEF

BOTH = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
KINDS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda optimizers: optimizers.SGD(0.05, momentum=0.9),
    "Adam": lambda optimizers: optimizers.Adam(0.01),
    "legacy Adam": lambda optimizers: optimizers.legacy.Adam(0.01),
}


def auto(**settings: Any) -> TopKEF:
    given = {"ratio": 0.1, "min_numel": 0, "momentum": "auto", "follow_lr": "auto"}
    return TopKEF(**given | settings)


def weights_of(library: Any, kind: str, compression: Any, path: Path) -> None:
    """The weights of a model and its optimizer after an epoch, in a file of rank 0's."""
    model = fit(library, KINDS[kind](library.optimizers), compression, epochs=1)
    if library is tf_keras:
        np.save(path, np.array([*optimizer_weights(model)], dtype=object), allow_pickle=True)
    else:
        model.save_weights(path)


def optimizer_weights(model: Any) -> list[Any]:
    optimizer = model.optimizer
    if hasattr(optimizer, "get_weights"):
        return list(optimizer.get_weights())
    return [variable.numpy() for variable in optimizer.variables]


def built(library: Any, kind: str, compression: Any) -> Any:
    """A model whose optimizer has its variables."""
    made = KINDS[kind](library.optimizers)
    model = compiled(library, distributed(library, made, compression), seed=1)
    if hasattr(model.optimizer, "build"):
        model.optimizer.build(model.trainable_variables)
    else:
        model.optimizer._create_all_weights(model.trainable_variables)
    return model


def load(library: Any, model: Any, path: Path) -> None:
    if library is tf_keras:
        model.optimizer.set_weights(list(np.load(f"{path}.npy", allow_pickle=True)))
    else:
        model.load_weights(path)


def train(model: Any, epochs: int = 1) -> None:
    model.fit(*data(), batch_size=8, epochs=epochs, shuffle=False, verbose=0)


KEPT = [
    *((keras, "SGD"), (tf_keras, "SGD")),
    *((keras, "Adam"), (tf_keras, "Adam"), (tf_keras, "legacy Adam")),
]


def named(optimizer: Any, compression: Any) -> Any:
    """A model whose variables have the same names once it is loaded; a Sequential's have not."""
    keras.utils.set_random_seed(0)
    inputs = keras.layers.Input((20,))
    model = keras.Model(inputs, keras.layers.Dense(10, name="only")(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = distributed(keras, optimizer, compression)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    return model


@pytest.mark.slow
def test_a_saved_model_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Model, optimizer and TopKEF's state, each rank its own."""
    first, then, path = auto(), auto(), tmp_path / "model.keras"
    whole, half = (named(KINDS["SGD"](keras.optimizers), each) for each in (auto(), first))
    train(half)
    half.save(path)
    state = tf.train.Checkpoint(compression=first).save(str(tmp_path / "state"))
    tf.train.Checkpoint(compression=then).restore(state)
    again = hvd_keras.load_model(path, compression=then)
    train(again)
    train(whole, epochs=2)
    assert same(again, whole)
    assert_ranks_equal(again.get_weights())


@pytest.mark.slow
@pytest.mark.one_in(5, first=2)
@pytest.mark.parametrize(("library", "kind"), KEPT)
def test_momentum_goes_on_with_and_without_compression(
    library: Any, kind: str, tmp_path: Path
) -> None:
    """Where updates depend on arrivals, it is the optimizer's own."""
    dense, compressed = hvd.Compression.none, auto()
    for before, after in ((dense, compressed), (compressed, dense)):
        path = tmp_path / f"{before is dense}.weights.h5"
        weights_of(library, kind, before, path)
        model = built(library, kind, after)
        load(library, model, path)
        count = len(model.trainable_variables)
        several = 1 if kind == "SGD" else 2
        moments = optimizer_weights(model)[-several * count :]
        assert sum(np.any(each) for each in moments) == several * count
        train(model)
        assert int(optimizer_weights(model)[0]) == 16
        assert_ranks_equal(model.get_weights())


@BOTH
def test_a_momentum_that_comes_later_is_warned_of(
    library: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """TopKEF does not adapt the steps of such an SGD, and says so once."""
    variable, made = tf.Variable(tf.zeros([60, 50])), library.optimizers.SGD(0.05)
    optimizer = distributed(library, made, auto())
    with caplog.at_level(logging.WARNING, "horovod_topk"):
        for momentum in (0.0, 0.9, 0.9):
            optimizer.momentum = momentum
            optimizer._allreduce_grads([tf.ones([60, 50])], [variable])
            assert caplog.text.count("momentum was set after TopKEF") == (momentum > 0)
    assert "momentum was set" in TopKEF.of(optimizer).stats().warnings[0]
