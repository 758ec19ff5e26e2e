"""`TopKEF.adapt`: what it changes of a Keras optimizer, what it refuses, and what it keeps."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import pytest
import tensorflow as tf
import tf_keras

import horovod_topk.tensorflow.keras as hvd_keras
from horovod_topk.errors import ConfigError, NotAttachedError, UnsupportedOperationError
from horovod_topk.tensorflow import PowerSGD, TopKEF, adapting, momentum
from horovod_topk.tensorflow.adapting import find_adapted, split, warn_of_tape
from horovod_topk.updates import tracker

LEGACY = tf_keras.optimizers.legacy
MAKE: dict[str, Callable[[], Any]] = {
    "Keras 3": lambda: keras.optimizers.Adam(0.1),
    "tf-keras": lambda: tf_keras.optimizers.Adam(0.1),
    "legacy": lambda: LEGACY.Adam(0.1),
}


@pytest.fixture(autouse=True)
def _among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were other ranks."""
    monkeypatch.setattr(momentum, "why_inactive", lambda _: None)
    monkeypatch.setattr(hvd, "is_initialized", lambda: True)


@pytest.mark.parametrize("library", MAKE)
def test_an_optimizer_is_adapted_once(library: str) -> None:
    optimizer, plain = MAKE[library](), MAKE[library]()
    compression = TopKEF(ratio=0.05)
    assert compression.adapt(optimizer) is compression
    again = TopKEF(ratio=0.05).adapt(optimizer)  # as in a script that builds both in each step
    (known,), (same,) = compression.adapted, again.adapted
    assert known is same is find_adapted(optimizer)
    assert known.fitted.updates is not None and known.fitted.updates.rule == tracker.ADAM
    assert (known.fitted.config.follow_lr, known.fitted.config.warmup) == (True, ((60, 0.25),))
    with pytest.raises(ConfigError, match=r"adapted to TopKEF\(ratio=0\.05\), and now to TopKEF\("):
        TopKEF().adapt(optimizer)
    assert isinstance(optimizer, type(plain))
    assert type(optimizer).__name__ == type(plain).__name__ == "Adam"
    assert type(optimizer).__module__ == type(plain).__module__
    ours, theirs = optimizer.get_config(), plain.get_config()
    assert {**ours, "name": ""} == {**theirs, "name": ""}


def test_it_may_be_called_on_the_class() -> None:
    compression = TopKEF.adapt(MAKE["Keras 3"]())
    assert isinstance(compression, TopKEF) and compression.config == TopKEF().config


def test_what_is_adapted_ends_with_the_optimizer() -> None:
    for make in MAKE.values():
        optimizer, compression = make(), TopKEF()
        compression.adapt(optimizer)
        known = weakref.ref(find_adapted(optimizer))
        del optimizer
        gc.collect()
        assert known() is None and compression.adapted == []


def test_a_copy_of_a_compressor_knows_no_optimizer() -> None:
    optimizer = MAKE["Keras 3"]()
    compression = TopKEF().adapt(optimizer)
    assert copy.deepcopy(compression).adapted == []
    assert len(compression.adapted) == 1


def test_the_optimizer_within_a_loss_scale_is_adapted() -> None:
    for scaler in (
        keras.optimizers.LossScaleOptimizer(MAKE["Keras 3"]()),
        tf_keras.mixed_precision.LossScaleOptimizer(MAKE["tf-keras"]()),
    ):
        (adapted,) = TopKEF().adapt(scaler).adapted
        assert adapted is find_adapted(scaler) is find_adapted(scaler.inner_optimizer)
        assert adapted.optimizer() is scaler.inner_optimizer
        assert float(adapted.scale(None)()) == 2.0**15


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no optimizer": (lambda: "adam", UnsupportedOperationError, "no optimizer of Keras"),
    "a model": (
        lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
        UnsupportedOperationError,
        "no optimizer of Keras",
    ),
    "distributed": (
        lambda: hvd_keras.DistributedOptimizer(MAKE["Keras 3"](), compression=TopKEF),
        UnsupportedOperationError,
        "Adam exchanges gradients by itself",
    ),
    "accumulation": (
        lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=4),
        UnsupportedOperationError,
        "SGD has gradient_accumulation_steps=4",
    ),
    "several": (
        lambda: keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(MAKE["Keras 3"](), {"a": keras.optimizers.SGD(0.1)})
        ),
        UnsupportedOperationError,
        "MultiOptimizer hands gradients on.*Adapt each of its optimizers",
    ),
    "division by 0": (lambda: keras.optimizers.Adam(epsilon=0.0), ConfigError, "Adam makes weigh"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_adapted_is_refused_and_stays(kind: str) -> None:
    make, error, message = REFUSED[kind]
    optimizer, compression = make(), TopKEF()
    before = type(optimizer)
    with pytest.raises(error, match=message):
        compression.adapt(optimizer)
    assert type(optimizer) is before and compression.adapted == []


def test_it_needs_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapting.hvd, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"before hvd\.init"):
        TopKEF().adapt(MAKE["Keras 3"]())


def test_a_momentum_that_is_a_number_is_not_applied_twice() -> None:
    with pytest.raises(ConfigError, match=r"beta_1=0\.9: it would be applied twice"):
        TopKEF(momentum=0.9).adapt(MAKE["Keras 3"]())
    optimizer = keras.optimizers.SGD(0.1, clipnorm=1.0)
    (adapted,) = TopKEF(momentum=0.9).adapt(optimizer).adapted
    assert ["threshold 10 times larger" in each for each in adapted.memory.warnings] == [True]


def test_an_adapted_optimizer_is_not_distributed() -> None:
    optimizer = MAKE["Keras 3"]()
    TopKEF().adapt(optimizer)
    for compression in (TopKEF, hvd.Compression.none):
        with pytest.raises(UnsupportedOperationError, match="Adam was adapted for tapes"):
            hvd_keras.DistributedOptimizer(optimizer, compression=compression)


def test_its_state_is_there_after_the_first_step() -> None:
    optimizer = MAKE["tf-keras"]()
    with pytest.raises(NotAttachedError, match=r"was not built with.*TopKEF\(\.\.\.\)\.adapt got"):
        TopKEF.of(optimizer)
    TopKEF().adapt(optimizer)
    with pytest.raises(NotAttachedError, match="has not exchanged a gradient yet"):
        TopKEF.of(optimizer)


class SGD(keras.optimizers.SGD):  # type: ignore[misc]
    """An optimizer of another package with a name of Keras."""


class ScheduleFreeAdamW(keras.optimizers.ScheduleFreeAdamW):  # type: ignore[misc]
    """The same."""


@pytest.mark.parametrize(
    ("kind", "why"), [(SGD, "it is none of SGD, Adam"), (ScheduleFreeAdamW, "it keeps weights")]
)
def test_the_warning_names_the_module_of_an_optimizer_that_is_not_known(
    kind: type, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = kind(0.1)
    with caplog.at_level(logging.WARNING, "horovod_topk"):
        (adapted,) = TopKEF().adapt(optimizer).adapted
    (warning,) = adapted.memory.warnings
    assert f"the steps of {__name__}.{kind.__name__}: {why}" in warning
    assert caplog.text.count(warning) == 1


def test_narrow_variables_are_warned_of_by_the_module_of_the_optimizer() -> None:
    class Own(keras.optimizers.SGD):  # type: ignore[misc]
        pass

    updates = momentum.Updates(tracker.SGD)
    (warning,) = updates.leave_narrow(Own(0.1), [tf.Variable([1.0], dtype=tf.float16, name="w")])
    assert f"{__name__}." in warning and ".Own: variable 'w:0' is float16" in warning


def test_positions_of_the_variables_of_each_optimizer() -> None:
    names = "abcd"
    variables = [tf.Variable(1.0, name=name) for name in names]
    one, other = MAKE["Keras 3"](), keras.optimizers.SGD(0.1)
    assert split([], variables) == [(None, [0, 1, 2, 3])]
    compression = TopKEF().adapt(one)
    (alone,) = compression.adapted
    assert split(compression.adapted, variables) == [(alone, [0, 1, 2, 3])]
    compression.adapt(one, variables[1::2]).adapt(other, variables[::2])
    first, second = compression.adapted
    assert split(compression.adapted, variables) == [(first, [1, 3]), (second, [0, 2])]
    assert split(compression.adapted, variables[:1]) == [(second, [0])]
    with pytest.raises(ConfigError, match="'e': 0 of 2 adapted optimizers"):
        split(compression.adapted, [tf.Variable(1.0, name="e")])
    compression.adapt(other)
    with pytest.raises(ConfigError, match="'b': 2 of 2 adapted optimizers"):
        split(compression.adapted, variables)


def test_tapes_that_lose_nothing_by_it_are_not_warned_of() -> None:
    quiet = TopKEF(momentum=0), TopKEF(momentum=0.9), TopKEF(ratio=1.0), PowerSGD()
    assert [warn_of_tape(each) for each in quiet] == [()] * 4
    (warning,) = warn_of_tape(TopKEF(ratio=0.05))
    assert "Write compression = TopKEF(ratio=0.05).adapt(optimizer) before the first" in warning
    assert warning.index("adapt(optimizer)") < 200  # what a table of stats() shows


def test_follow_lr_needs_an_optimizer() -> None:
    tape, compression = tf.GradientTape(), TopKEF(follow_lr=True)
    with pytest.raises(ConfigError, match=r"follow_lr=True.*\.adapt\(optimizer\)"):
        hvd.DistributedGradientTape(tape, compression=compression)
    optimizer = MAKE["Keras 3"]()
    hvd.DistributedGradientTape(tape, compression=compression.adapt(optimizer))
