"""`momentum="auto"` where a velocity has no place, and checkpoints of and for dense training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
SAID = "starts at zero instead of from its buffers"


def auto(**settings: Any) -> TopKEF:
    given = {"ratio": 0.1, "min_numel": 0, "momentum": "auto", "follow_lr": "auto"}
    return TopKEF(**given | settings)


def taking() -> TopKEF:
    """A compressor that takes over the optimizer's momentum, as a share of velocity is named."""
    return auto(velocity_kept=0.5)


def set_policy(library: Any, name: str) -> None:
    policy = library.mixed_precision if library is tf_keras else library.config
    getattr(policy, "set_global_policy" if library is tf_keras else "set_dtype_policy")(name)


@pytest.mark.one_in(9, first=2)
@BOTH
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_momentum_of_narrow_variables_is_left_to_the_optimizer(
    library: Any, dtype: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As with `momentum=0`."""
    make = KINDS[kind]
    set_policy(library, dtype)
    try:
        with caplog.at_level("INFO", "horovod_topk"):
            left = fit(library, make(library.optimizers), auto(), epochs=1)
        plain = fit(library, make(library.optimizers), auto(momentum=0), epochs=1)
    finally:
        set_policy(library, "float32")
    assert f"does not adapt the steps of {kind}: variable " in caplog.text
    assert f"is {dtype}" in TopKEF.of(left.optimizer).stats().warnings[0]
    assert TopKEF.of(left.optimizer).stats().momentum == 0.0
    assert same(left, plain)
    name = "momentum" if kind == "SGD" else "beta_1"
    assert left.optimizer.get_config()[name] == 0.9
    assert_ranks_equal(left.get_weights())


@pytest.mark.slow
def test_older_optimizers_of_narrow_variables_keep_their_momentum() -> None:
    set_policy(tf_keras, "bfloat16")
    try:
        makes = [lambda: tf_keras.optimizers.legacy.SGD(0.05, momentum=0.9)] * 2
        left, plain = (
            fit(tf_keras, make(), compression, epochs=1)
            for make, compression in zip(makes, (auto(), auto(momentum=0)), strict=True)
        )
    finally:
        set_policy(tf_keras, "float32")
    assert same(left, plain)


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


def train(model: Any) -> None:
    model.fit(*data(), batch_size=8, epochs=1, shuffle=False, verbose=0)


WAYS = [(keras, "SGD"), (tf_keras, "SGD")]
KEPT = [*WAYS, (keras, "Adam"), (tf_keras, "Adam"), (tf_keras, "legacy Adam")]


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("library", "kind"), WAYS)
@pytest.mark.parametrize("late", [False, True], ids=["at first", "after some steps"])
def test_a_dense_checkpoint_is_loaded_without_its_velocity_and_that_is_said(
    library: Any, kind: str, late: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "dense.weights.h5"
    weights_of(library, kind, hvd.Compression.none, path)
    model = built(library, kind, taking())
    if late:
        train(model)
    load(library, model, path)
    train(model)
    assert caplog.text.count(SAID) == 1
    assert [SAID in each for each in TopKEF.of(model.optimizer).stats().warnings] == [True]
    assert int(optimizer_weights(model)[0]) == 16  # iterations
    assert_ranks_equal(model.get_weights())


def named(optimizer: Any, compression: Any) -> Any:
    """A model whose variables have the same names once it is loaded; a Sequential's have not."""
    inputs = keras.layers.Input((20,))
    model = keras.Model(inputs, keras.layers.Dense(10, name="only")(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = distributed(keras, optimizer, compression)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    return model


@pytest.fixture
def same_names_afterwards() -> Iterator[None]:
    """Give the models of later tests equal names on all ranks.

    Keras numbers the names of the models that a process builds, and Horovod matches dense gradients
    by these names.
    """
    yield
    keras.backend.clear_session()


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("same_names_afterwards")
@pytest.mark.parametrize("kind", ["SGD"])
def test_one_rank_alone_may_load_a_dense_model(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It broadcasts that to the others, which have built theirs."""
    path, compression = tmp_path / "model.keras", taking()
    before = named(KINDS[kind](keras.optimizers), hvd.Compression.none)
    train(before)
    before.save(path)
    if hvd.rank() == 0:
        model = hvd_keras.load_model(path, compression=compression)
    else:
        model = named(KINDS[kind](keras.optimizers), compression)
    callbacks = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback()]
    model.fit(*data(), batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    assert_ranks_equal(model.get_weights())
    stats = compression.stats()
    assert (stats.momentum, int(model.optimizer.iterations)) == (0.9, 16)
    assert SAID in caplog.text if hvd.rank() == 0 else SAID not in caplog.text
    assert len(stats.warnings) == (hvd.rank() == 0)


@pytest.mark.one_in(9)
@pytest.mark.one_in(3, first=1)
@pytest.mark.parametrize(("library", "kind"), WAYS)
def test_a_compressed_checkpoint_has_zeros_for_what_was_taken_over(
    library: Any, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "compressed.weights.h5"
    weights_of(library, kind, taking(), path)
    dense = built(library, kind, hvd.Compression.none)
    fresh = [not np.any(each) for each in optimizer_weights(dense)]
    load(library, dense, path)
    assert int(optimizer_weights(dense)[0]) == 8
    loaded = [not np.any(each) for each in optimizer_weights(dense)]
    count = len(dense.trainable_variables)
    assert sum(loaded) == count, (fresh, loaded)
    train(dense)
    assert_ranks_equal(dense.get_weights())
    again = built(library, kind, taking())
    load(library, again, path)
    train(again)
    assert SAID not in caplog.text
    assert not TopKEF.of(again.optimizer).stats().warnings


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("library", "kind"), KEPT)
def test_momentum_goes_on_with_and_without_compression(
    library: Any, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
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
    assert SAID not in caplog.text


@pytest.mark.parametrize("kind", ["SGD"])
def test_a_checkpoint_of_tensorflow_has_zeros_as_well(kind: str, tmp_path: Path) -> None:
    model = fit(keras, KINDS[kind](keras.optimizers), taking(), epochs=1)
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "all"))
    dense = built(keras, kind, hvd.Compression.none)
    tf.train.Checkpoint(model=dense, optimizer=dense.optimizer).restore(saved)
    slots = dense.optimizer.momentums
    assert same(dense, model)
    assert not any(slot.numpy().any() for slot in slots)
