"""tf-keras: `apply_gradients` takes what has been exchanged, and refuses the rest at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kerasses import BATCH, compiled, data, distributed
from proof import assert_ranks_equal

from horovod_topk.errors import StepBeforeSynchronizeError
from plain import PlainTopKEF as TopKEF

Scaler = tf_keras.mixed_precision.LossScaleOptimizer
REFUSED = pytest.raises(StepBeforeSynchronizeError, match="compute_gradients")


def sgd(**options: Any) -> Any:
    """With slots, which are made where gradients are first applied."""
    optimizer = tf_keras.optimizers.SGD(0.01, momentum=0.9)
    return distributed(tf_keras, optimizer, TopKEF(ratio=0.1, min_numel=0), **options)


def scaled_within() -> Any:
    optimizer = Scaler(tf_keras.optimizers.SGD(0.01), initial_scale=8.0)
    return distributed(tf_keras, optimizer, TopKEF(ratio=0.1, min_numel=0))


KINDS: dict[str, Callable[[], Any]] = {
    "plain": sgd,
    "aggregating": lambda: sgd(backward_passes_per_step=2),
    "loss scale around": lambda: Scaler(sgd(), initial_scale=8.0),
    "loss scale within": scaled_within,
    "legacy": lambda: distributed(tf_keras, tf_keras.optimizers.legacy.SGD(0.01), TopKEF),
}


def fit(model: Any, batch: int = BATCH) -> None:
    model.fit(*data(), batch_size=batch, shuffle=False, verbose=0)


def loss_of(model: Any) -> tuple[Any, Any]:
    x, y = data()
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean((model(x) - tf.one_hot(y, 10)) ** 2)
    return loss, tape


def local(model: Any) -> list[Any]:
    """Gradients and variables, of this rank's data alone."""
    loss, tape = loss_of(model)
    variables = model.trainable_variables
    return list(zip(tape.gradient(loss, variables), variables, strict=True))


def exchanged(model: Any) -> list[Any]:
    loss, tape = loss_of(model)
    return list(model.optimizer.compute_gradients(loss, model.trainable_variables, tape=tape))


def assert_refused(model: Any) -> None:
    before = model.get_weights()
    for _ in range(2):
        with REFUSED:
            model.optimizer.apply_gradients(local(model))
    assert all(map(np.array_equal, model.get_weights(), before))


@pytest.mark.slow
@pytest.mark.one_in(9)
@pytest.mark.parametrize(("kind", "eager"), [*((kind, False) for kind in KINDS), ("plain", True)])
def test_local_gradients_are_refused_before_and_after_fit(kind: str, eager: bool) -> None:
    model = compiled(tf_keras, KINDS[kind](), eager=eager)
    assert_refused(model)
    for batch in (BATCH, BATCH, BATCH - 1):  # the last one is traced anew
        fit(model, batch)
        assert_refused(model)
    if not kind.startswith("loss scale"):
        for _ in range(3):
            model.optimizer.apply_gradients(exchanged(model))
            assert_refused(model)
    if kind != "aggregating":  # between exchanges, ranks differ
        assert_ranks_equal(model.get_weights())


def test_parts_may_be_applied_one_by_one() -> None:
    model = compiled(tf_keras, sgd())
    model.optimizer.build(model.trainable_variables)
    for _ in range(2):
        pairs = exchanged(model)
        model.optimizer.apply_gradients(pairs[:1])
        with REFUSED:
            model.optimizer.apply_gradients(pairs[:2])
        model.optimizer.apply_gradients(pairs[1:])
    assert_refused(model)


@pytest.mark.slow
def test_a_trace_may_hand_out_what_it_exchanges() -> None:
    """Python does not see when it does so again."""
    model = compiled(tf_keras, sgd())
    compute = tf.function(lambda: [gradient for gradient, _ in exchanged(model)])
    for _ in range(3):
        pairs = zip(compute(), model.trainable_variables, strict=True)
        model.optimizer.apply_gradients(pairs)
    assert_ranks_equal(model.get_weights())


@pytest.mark.slow
def test_a_trace_may_apply_what_is_handed_in() -> None:
    """Also where TensorFlow traces it twice, as it makes the optimizer's slots."""
    model = compiled(tf_keras, sgd())

    @tf.function
    def apply(gradients: list[Any]) -> None:
        pairs = zip(gradients, model.trainable_variables, strict=True)
        model.optimizer.apply_gradients(pairs)

    for _ in range(3):
        apply([gradient for gradient, _ in exchanged(model)])
    assert_ranks_equal(model.get_weights())


def test_a_step_in_one_trace() -> None:
    model = compiled(tf_keras, sgd())
    model.optimizer.build(model.trainable_variables)  # else TensorFlow traces it twice
    step = tf.function(lambda: model.optimizer.apply_gradients(exchanged(model)))
    for _ in range(3):
        step()
    assert_ranks_equal(model.get_weights())
    assert_refused(model)


def test_a_failed_exchange_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled(tf_keras, sgd())

    def fail(*_: Any) -> None:
        raise OSError

    monkeypatch.setattr(model.optimizer, "_allreduce_grads", fail)
    with pytest.raises(OSError):
        exchanged(model)
    assert_refused(model)
