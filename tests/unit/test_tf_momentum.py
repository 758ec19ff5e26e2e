"""Which momentum TopKEF takes over from a Keras optimizer, and what that is saved with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod._keras
import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import horovod_topk.tensorflow.keras as hvd_keras
from horovod_topk.errors import ConfigError
from horovod_topk.tensorflow import TopKEF, momentum
from horovod_topk.tensorflow.momentum import Fitted, check_not_twice, fitted_to
from horovod_topk.tensorflow.takeover import Taken

Make = Callable[[], Any]
SGD, ADAMW = keras.optimizers.SGD, keras.optimizers.AdamW
LEGACY = tf_keras.optimizers.legacy
KNOWN: dict[str, tuple[Make, str, float, bool]] = {
    "SGD": (lambda: SGD(0.1, momentum=0.9), "momentum", 0.9, False),
    "Nesterov": (lambda: SGD(0.1, momentum=0.8, nesterov=True), "momentum", 0.8, True),
    "Adam": (lambda: keras.optimizers.Adam(), "beta_1", 0.9, False),
    "AdamW": (lambda: ADAMW(beta_1=0.95), "beta_1", 0.95, False),
    "scaled": (
        lambda: keras.optimizers.LossScaleOptimizer(SGD(momentum=0.9)),
        "momentum",
        0.9,
        False,
    ),
    "tf-keras": (lambda: tf_keras.optimizers.SGD(momentum=0.9), "momentum", 0.9, False),
    "tf-keras' AdamW": (lambda: tf_keras.optimizers.AdamW(), "beta_1", 0.9, False),
    "tf-keras, scaled": (
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.Adam()),
        "beta_1",
        0.9,
        False,
    ),
    "legacy": (lambda: LEGACY.SGD(momentum=0.9, nesterov=True), "momentum", 0.9, True),
    "legacy Adam": (lambda: LEGACY.Adam(), "beta_1", 0.9, False),
}


class Own(SGD):  # type: ignore[misc]
    """May update in a way of its own."""


UNKNOWN: dict[str, Make] = {
    "RMSprop": lambda: keras.optimizers.RMSprop(momentum=0.9),
    "Nadam": lambda: keras.optimizers.Nadam(),
    "Lion": lambda: keras.optimizers.Lion(),
    f"{__name__}.Own": lambda: Own(momentum=0.9),
    "SGD": lambda: tf_keras.optimizers.SGD(momentum=lambda: 0.9),
}


@pytest.fixture
def among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were other ranks."""
    monkeypatch.setattr(momentum, "why_inactive", lambda _: None)
    monkeypatch.setattr(hvd, "is_initialized", lambda: True)


def fitted(optimizer: Any, compressor: TopKEF | None = None) -> Fitted:
    return fitted_to(optimizer, compressor or TopKEF(momentum="optimizer"), hvd.global_process_set)


def inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


@pytest.mark.usefixtures("among_others")
@pytest.mark.parametrize("kind", KNOWN)
def test_it_is_known_what_to_take_over(kind: str) -> None:
    make, setting, value, nesterov = KNOWN[kind]
    optimizer = make()
    found = fitted(optimizer)
    assert found.taken == Taken(setting, value)
    assert (found.config.momentum, found.config.nesterov) == (value, nesterov)
    assert float(inner(optimizer).get_config()[setting]) == pytest.approx(value)


@pytest.mark.usefixtures("among_others")
@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_is_not_known_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"and {kind} has no momentum .* SGD, Adam or AdamW of"):
        fitted(UNKNOWN[kind]())


@pytest.mark.usefixtures("among_others")
def test_what_cannot_be_corrected_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"SGD has none.*momentum=0\.9 or beta_1=0\.9"):
        fitted(SGD())
    with pytest.raises(ConfigError, match="exchange='hierarchical'"):
        fitted(SGD(momentum=0.9), TopKEF(momentum="optimizer", exchange="hierarchical"))
    with pytest.raises(ConfigError, match="neither tells what momentum is applied"):
        hvd.DistributedGradientTape(tf.GradientTape(), compression=TopKEF(momentum="optimizer"))


def test_where_nothing_is_compressed_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(momentum, "why_inactive", lambda _: "world size 1")
    for make, *_ in KNOWN.values():
        found = fitted(make())
        assert (found.taken, found.config.momentum) == (None, 0.0)
    optimizer = hvd_keras.DistributedOptimizer(ADAMW(), compression=TopKEF(momentum="optimizer"))
    assert optimizer.beta_1 == 0.9
    with pytest.raises(ConfigError, match="Lion has no momentum"):
        fitted(keras.optimizers.Lion())


def test_a_number_beside_the_optimizers_own_is_refused() -> None:
    number = TopKEF(momentum=0.9, follow_lr=False, warmup=None)
    for optimizer in (keras.optimizers.Adam(), tf_keras.optimizers.Adam(), LEGACY.Adam()):
        with pytest.raises(ConfigError, match=r"beta_1=0\.9: it would be applied twice.*beta_1=0"):
            fitted(optimizer, number)
    with pytest.raises(ConfigError, match="applied twice"):
        fitted(LEGACY.SGD(momentum=0.9), number)
    with pytest.raises(ConfigError, match="Adam has no such form"):
        fitted(keras.optimizers.Adam(beta_1=0.0), TopKEF(momentum=0.9, nesterov=True))
    assert fitted(keras.optimizers.Adam(beta_1=0.0), number).config == number.config
    assert fitted(SGD(), number).taken is None


@pytest.mark.usefixtures("among_others")
def test_plain_adam_draws_advice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "horovod_topk"):
        for quiet in (SGD(momentum=0.9), ADAMW(beta_1=0.0), keras.optimizers.Lion()):
            fitted(quiet, TopKEF(momentum=0))
        fitted(ADAMW(), TopKEF())
        fitted(ADAMW(), TopKEF(ratio=1.0))
        assert not caplog.text
        fitted(ADAMW(), TopKEF(momentum=0))
    assert "AdamW divides by the mean square" in caplog.text
    assert "Pass momentum='auto'" in caplog.text


CLIPPING: dict[str, Make] = {
    "clipnorm": lambda: SGD(clipnorm=1.0),
    "global_clipnorm": lambda: SGD(global_clipnorm=1.0),
    "clipvalue": lambda: SGD(clipvalue=1.0),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(SGD(clipnorm=1.0)),
    "tf-keras": lambda: tf_keras.optimizers.SGD(clipnorm=1.0),
    "tf-keras, scaled": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        tf_keras.optimizers.SGD(global_clipnorm=1.0)
    ),
    "legacy": lambda: LEGACY.SGD(clipvalue=1.0),
}


def wrapped(optimizer: Any, compressor: TopKEF) -> Any:
    """An optimizer as a user of its library wraps it."""
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return hvd_keras.DistributedOptimizer(optimizer, compression=compressor)
    return horovod._keras.create_distributed_optimizer(
        tf_keras, optimizer, None, "", "", compressor, False, 1.0, hvd.Average
    )


@pytest.mark.usefixtures("among_others")
@pytest.mark.parametrize("kind", CLIPPING)
def test_an_sgd_that_clips_velocities_is_warned_of(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "horovod_topk"):
        wrapped(CLIPPING[kind](), TopKEF(momentum=0.9))
    assert caplog.text.count("threshold 10 times larger") == 1
    assert "SGD has " in caplog.text
    assert "clip" in caplog.text.partition("SGD has ")[2].partition("=1.")[0]


@pytest.mark.usefixtures("among_others")
def test_clipping_that_does_no_harm_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Without momentum correction, of gradients, before the exchange, or where Adam normalises."""
    with caplog.at_level(logging.WARNING, "horovod_topk"):
        wrapped(SGD(momentum=0.9, clipnorm=1.0), TopKEF())
        wrapped(SGD(momentum=0.9, clipnorm=1.0), TopKEF(momentum="optimizer"))
        wrapped(SGD(), TopKEF(momentum=0.9, clip_norm=1.0))
        wrapped(keras.optimizers.AdamW(beta_1=0.0, clipnorm=1.0), TopKEF(momentum=0.9))
        wrapped(tf_keras.optimizers.Adam(clipvalue=1.0), TopKEF(momentum="optimizer"))
    assert "times larger" not in caplog.text


SAVED = pytest.mark.parametrize("kind", ["SGD", "Nesterov", "Adam", "AdamW", "scaled"])


@pytest.mark.usefixtures("among_others")
@SAVED
def test_the_copy_applies_none_and_is_saved_with_it(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Loaded without Horovod it is the user's again; wrapped again, it is taken over again."""
    make, setting, value, nesterov = KNOWN[kind]
    original, path = make(), tmp_path / "model.keras"
    with caplog.at_level(logging.INFO, "horovod_topk"):
        optimizer = hvd_keras.DistributedOptimizer(
            original, compression=TopKEF(momentum="optimizer")
        )
    assert f"takes over the momentum of {type(inner(original)).__name__}: {value}" in caplog.text
    assert getattr(inner(original), setting) == value
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    optimizer.build(model.trainable_variables)
    assert getattr(inner(optimizer), setting) == 0.0
    assert not getattr(inner(optimizer), "momentums", [])
    inner(optimizer).iterations.assign(7)
    for slot in getattr(inner(optimizer), "_momentums", []):
        slot.assign_add(np.ones(slot.shape))  # Adam with beta_1=0 has the last gradient there
    model.save(path)

    plain = keras.saving.load_model(path).optimizer
    assert type(inner(plain)) is type(inner(original))
    assert getattr(inner(plain), setting) == value
    assert int(inner(plain).iterations) == 7
    slots = inner(plain).momentums if setting == "momentum" else inner(plain)._momentums
    assert len(slots) == 2
    assert not any(slot.numpy().any() for slot in slots)

    again = hvd_keras.load_model(path, compression=TopKEF(momentum="optimizer")).optimizer
    assert getattr(inner(again), setting) == 0.0
    assert int(inner(again).iterations) == 7
    config = again._allreduce_grads.config
    assert (config.momentum, config.nesterov) == (value, nesterov)
    with pytest.raises(ConfigError, match="applied twice"):
        hvd_keras.load_model(path, compression=TopKEF(momentum=0.9))


@pytest.mark.usefixtures("among_others")
def test_what_was_saved_is_taken_on_in_place() -> None:
    """As Keras' BackupAndRestore does, into an optimizer that has been taken over."""
    variables = [keras.Variable(np.ones(3, np.float32))]
    for make in (lambda: SGD(momentum=0.9), lambda: ADAMW()):
        one, other = (
            hvd_keras.DistributedOptimizer(make(), compression=TopKEF(momentum="optimizer"))
            for _ in "12"
        )
        store: dict[str, Any] = {}
        for each in (one, other):
            each.build(variables)
        one.iterations.assign(5)
        one.save_own_variables(store)
        other.load_own_variables(store)
        assert int(other.iterations) == 5
        store[str(len(store) - 1 if isinstance(other, SGD) else 2)] += 1.0
        one.iterations.assign(0)
        with pytest.raises(ConfigError, match="would be lost"):
            one.load_own_variables(store)
        assert int(one.iterations) == 0


@pytest.mark.usefixtures("among_others")
@pytest.mark.parametrize("make", [lambda: SGD(momentum=0.9), ADAMW], ids=["SGD", "AdamW"])
def test_what_has_trained_is_refused(make: Make) -> None:
    variable = keras.Variable(np.ones(3, np.float32))
    optimizer = make()
    optimizer.build([variable])
    copy = hvd_keras.DistributedOptimizer(optimizer, compression=TopKEF(momentum="optimizer"))
    assert copy.built
    optimizer.apply([tf.ones(3)])
    for given in (optimizer, keras.optimizers.LossScaleOptimizer(optimizer)):
        with pytest.raises(ConfigError, match=r"has trained with .*=0\.9.* has not trained yet"):
            hvd_keras.DistributedOptimizer(given, compression=TopKEF(momentum="optimizer"))
    hvd_keras.DistributedOptimizer(optimizer, compression=TopKEF)


@pytest.mark.usefixtures("among_others")
@pytest.mark.parametrize(
    ("make", "setting"), [(lambda: SGD(momentum=0.9), "momentum"), (ADAMW, "beta_1")]
)
def test_a_momentum_that_comes_later_is_refused(make: Make, setting: str) -> None:
    variable = keras.Variable(np.ones(3, np.float32))
    optimizer = hvd_keras.DistributedOptimizer(make(), compression=TopKEF(momentum="optimizer"))
    setattr(optimizer, setting, 0.5)
    with pytest.raises(ConfigError, match=rf"{setting}=0\.5: it would be applied twice"):
        optimizer.apply([tf.ones(3)], [variable])
    assert np.array_equal(variable.numpy(), np.ones(3))


@pytest.mark.usefixtures("among_others")
@pytest.mark.parametrize("kind", [name for name in KNOWN if name.startswith(("tf-", "leg"))])
def test_tfkeras_applies_none_and_says_what_it_was(kind: str) -> None:
    make, setting, value, nesterov = KNOWN[kind]
    wrapped = horovod._keras.create_distributed_optimizer(
        tf_keras, make(), None, "", "", TopKEF(momentum="optimizer"), False, 1.0, hvd.Average
    )
    assert inner(wrapped).get_config()[setting] == value
    config = inner(wrapped)._allreduce_grads.config
    assert (config.momentum, config.nesterov) == (value, nesterov)
    check_not_twice(wrapped, config)


LEFT: dict[str, tuple[Make, str]] = {
    "none": (lambda: SGD(), "it has none"),
    "of another kind": (lambda: keras.optimizers.Adagrad(), "it is none of SGD, Adam or AdamW"),
}


@pytest.mark.usefixtures("among_others")
@pytest.mark.parametrize("kind", LEFT)
def test_auto_leaves_a_momentum_that_it_cannot_correct(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, why = LEFT[kind]
    with caplog.at_level(logging.INFO, "horovod_topk"):
        optimizer = wrapped(make(), TopKEF(momentum="auto", follow_lr="auto"))
    config = optimizer._allreduce_grads.config
    assert (config.momentum, config.taken_over, config.follow_lr) == (0.0, False, True)
    assert f": {why}" in caplog.text


@pytest.mark.usefixtures("among_others")
def test_auto_has_sgd_step_by_arrivals_and_a_tape_has_none() -> None:
    compressor = TopKEF(momentum="auto", follow_lr="auto")
    config = wrapped(SGD(momentum=0.9), compressor)._allreduce_grads.config
    assert (config.by_arrivals, config.momentum, config.follow_lr) == ("sgd", 0.0, True)
    hvd.DistributedGradientTape(tf.GradientTape(), compression=compressor)
    assert (compressor.config.momentum, compressor.config.follow_lr) == (0.0, False)
