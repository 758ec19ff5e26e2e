"""What TopKEF does about a Keras optimizer's momentum, and what it refuses and warns of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import horovod._keras
import horovod.tensorflow as hvd
import keras
import pytest
import tensorflow as tf
import tf_keras

import horovod_topk.tensorflow.keras as hvd_keras
from horovod_topk.errors import ConfigError
from horovod_topk.methods.topk import TopK
from horovod_topk.tensorflow import PowerSGD, TopKEF, momentum
from horovod_topk.tensorflow.compressor import Compressor
from horovod_topk.tensorflow.momentum import Fitted, fitted_to
from horovod_topk.tensorflow.updates import Updates
from horovod_topk.updates import formulas, tracker
from horovod_topk.updates.formulas import Family

Make = Callable[[], Any]
SGD, ADAMW = keras.optimizers.SGD, keras.optimizers.AdamW
LEGACY = tf_keras.optimizers.legacy


@pytest.fixture
def among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were other ranks."""
    monkeypatch.setattr(momentum, "why_inactive", lambda _: None)
    monkeypatch.setattr(hvd, "is_initialized", lambda: True)


def fitted(optimizer: Any, compressor: Compressor) -> Fitted:
    return fitted_to(optimizer, compressor, hvd.global_process_set)


def test_a_number_beside_the_optimizers_own_is_refused() -> None:
    number = TopKEF(momentum=0.9, follow_lr=False, warmup=None)
    for optimizer in (keras.optimizers.Adam(), tf_keras.optimizers.Adam(), LEGACY.Adam()):
        with pytest.raises(ConfigError, match=r"beta_1=0\.9: it would be applied twice.*beta_1=0"):
            fitted(optimizer, number)
    with pytest.raises(ConfigError, match="applied twice"):
        fitted(LEGACY.SGD(momentum=0.9), number)
    with pytest.raises(ConfigError, match="Adam has no such form"):
        fitted(keras.optimizers.Adam(beta_1=0.0), TopKEF(momentum=(0.9, "nesterov")))
    assert fitted(keras.optimizers.Adam(beta_1=0.0), number).config == number.config
    assert fitted(SGD(), number).config == number.config


@pytest.mark.usefixtures("among_others")
@pytest.mark.parametrize(("make", "setting"), [(SGD, "momentum"), (ADAMW, "beta_1")])
def test_a_momentum_that_comes_later_is_refused(make: Any, setting: str) -> None:
    variable = keras.Variable([1.0, 1.0, 1.0])
    optimizer = wrapped(make(**{setting: 0.0}), TopKEF(momentum=0.9))
    setattr(optimizer, setting, 0.5)
    with pytest.raises(ConfigError, match=rf"{setting}=0\.5: it would be applied twice"):
        optimizer.apply([tf.ones(3)], [variable])
    assert variable.numpy().tolist() == [1.0, 1.0, 1.0]


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


def wrapped(optimizer: Any, compressor: Compressor) -> Any:
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
        wrapped(SGD(), TopKEF(momentum=0.9, clip_norm=1.0))
        wrapped(keras.optimizers.AdamW(beta_1=0.0, clipnorm=1.0), TopKEF(momentum=0.9))
        wrapped(tf_keras.optimizers.Adam(clipvalue=1.0), TopKEF())
    assert "times larger" not in caplog.text


LEFT: dict[str, tuple[Make, type[Compressor], str]] = {
    "none": (SGD, TopKEF, "it has none"),
    "with weights of its own": (
        keras.optimizers.ScheduleFreeAdamW,
        TopKEF,
        "it keeps weights beside the model's",
    ),
    "of a subclass": (
        lambda: type("Own", (SGD,), {})(momentum=0.9),
        TopKEF,
        "it is none of SGD, Adam or AdamW",
    ),
    "that changes": (
        lambda: tf_keras.optimizers.SGD(momentum=lambda: 0.9),
        TopKEF,
        "it changes by itself",
    ),
    "on sums": (lambda: SGD(momentum=0.9), PowerSGD, "sums of all ranks have no elements"),
}


@pytest.mark.usefixtures("among_others")
@pytest.mark.parametrize("kind", LEFT)
def test_auto_leaves_a_momentum_that_cannot_depend_on_arrivals(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, method, why = LEFT[kind]
    with caplog.at_level(logging.INFO, "horovod_topk"):
        found = fitted(make(), method(momentum="auto", follow_lr="auto"))
    assert (found.config.momentum, found.updates, found.config.follow_lr) == (0.0, None, True)
    assert f": {why}" in caplog.text
    assert [why in each for each in found.warnings] == [True] * (kind != "none")


OWN: dict[str, tuple[Make, Family]] = {
    "Keras 3": (keras.optimizers.RMSprop, formulas.SQUARES),
    "tf-keras": (tf_keras.optimizers.Adamax, formulas.LARGEST),
    "legacy": (LEGACY.Nadam, formulas.MEAN),
    "Adam without momentum": (lambda: ADAMW(beta_1=0.0), formulas.MEAN),
    "of a subclass": (lambda: type("Mine", (ADAMW,), {})(), formulas.MEAN),
    "signs": (keras.optimizers.Lion, formulas.SIGN),
}


@pytest.mark.usefixtures("among_others")
@pytest.mark.parametrize("kind", OWN)
def test_auto_has_other_optimizers_step_by_their_family(kind: str) -> None:
    make, family = OWN[kind]
    found = fitted(make(), TopKEF())
    assert found.updates == Updates(tracker.OWN, family=family) and not found.warnings
    assert (found.config.warmup is None) == (found.config.ratio == formulas.QUICK_RATIO)
    first = 0.0 if kind == "Adam without momentum" else None
    own = formulas.default_ratio(family, first)
    assert found.config.ratio == (own or TopKEF().config.ratio)
    assert fitted(make(), TopKEF(ratio=0.02)).config.ratio == 0.02


@pytest.mark.usefixtures("among_others")
@pytest.mark.parametrize(("beta_1", "ratio"), [(0.5, 0.25), (0.9, 0.02)])
@pytest.mark.parametrize("make", [keras.optimizers.Adam, tf_keras.optimizers.Adam])
def test_a_small_first_beta_is_that_of_networks_against_each_other(
    make: Any, beta_1: float, ratio: float
) -> None:
    config = fitted(make(beta_1=beta_1), TopKEF()).config
    assert isinstance(config, TopK) and config.ratio == ratio


@pytest.mark.usefixtures("among_others")
@pytest.mark.parametrize(
    "base", [keras.optimizers.Optimizer, tf_keras.optimizers.Optimizer, LEGACY.Optimizer]
)
def test_an_optimizer_that_is_not_known_is_warned_of(base: Any) -> None:
    kind = type("Sophia", (base,), {"learning_rate": 0.1})
    found = fitted(kind.__new__(kind), TopKEF())
    assert found.updates == Updates(tracker.OWN, family=formulas.UNKNOWN)
    (warning,) = found.warnings
    assert "does not know how" in warning and "Sophia" in warning


@pytest.mark.usefixtures("among_others")
def test_auto_has_sgd_step_by_arrivals_and_a_tape_has_none() -> None:
    compressor = TopKEF(momentum="auto", follow_lr="auto")
    for make, rule in ((SGD, tracker.SGD), (ADAMW, tracker.ADAM)):
        optimizer = make(momentum=0.9) if make is SGD else make()
        assert fitted(optimizer, compressor).updates == Updates(rule, 0.0 if make is SGD else 0.999)
        config = wrapped(optimizer, compressor)._allreduce_grads.config
        assert (config.momentum, config.follow_lr) == (0.0, True)
    hvd.DistributedGradientTape(tf.GradientTape(), compression=compressor)
    assert (compressor.config.momentum, compressor.config.follow_lr) == (0.0, False)
