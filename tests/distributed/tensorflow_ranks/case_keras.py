"""`DistributedOptimizer(compression=TopKEF)` in `fit`: Keras 3 (ours), tf-keras (Horovod's)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_tfkeras
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kerasses import LIBRARIES, compiled, data, distributed, fit, model_of, same
from oracle.two_rounds import TwoRounds
from proof import assert_ranks_equal

import horovod_topk.tensorflow.keras as hvd_keras
from horovod_topk.errors import NotAttachedError, UnsupportedOperationError
from horovod_topk.methods import METHODS
from plain import PlainTopKEF as TopKEF

METHODS["TwoRounds"] = TwoRounds
EVERYTHING = {"ratio": 1.0, "min_numel": 0}
SPARSE = {"ratio": 0.02, "min_numel": 0}
WAYS = pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
BOTH = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


def with_momentum(library: Any) -> Any:
    return library.optimizers.SGD(0.05, momentum=0.9)


@pytest.mark.one_in(4)
@WAYS
@BOTH
def test_everything_sent_equals_dense(library: Any, eager: bool) -> None:
    """Residuals are variables neither of the model nor of its optimizer."""
    make, options = with_momentum, {"eager": eager, "epochs": 2}
    dense = fit(library, make(library), hvd.Compression.none, **options)
    ours = fit(library, make(library), TopKEF(**EVERYTHING), **options)
    assert same(ours, dense)
    assert TopKEF.of(ours.optimizer).stats().steps == 16
    assert TopKEF.of(ours.optimizer).state_dict()["residuals"]
    assert len(ours.variables) == len(dense.variables)
    assert len(ours.optimizer.variables) == len(dense.optimizer.variables)


@pytest.mark.slow
@pytest.mark.one_in(2, first=1)
@BOTH
@pytest.mark.world_size(2, 4)
def test_ranks_are_equal_and_learn(library: Any) -> None:
    """With a smaller batch at the end of each epoch."""
    model = fit(library, with_momentum(library), TopKEF(**SPARSE), epochs=6, examples=58)
    assert_ranks_equal(model.get_weights())
    state = TopKEF.of(model.optimizer)
    assert state.stats().reduction > 5
    assert state.stats().residual_norm > 0
    seen = data(count=58)
    before = compiled(library, "sgd").evaluate(*seen, verbose=0)
    assert model.evaluate(*seen, verbose=0) < before


@pytest.mark.slow
def test_tfkeras_aggregates_locally() -> None:
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    make = with_momentum
    dense = fit(tf_keras, make(tf_keras), hvd.Compression.none, **options)
    ours = fit(tf_keras, make(tf_keras), TopKEF(**EVERYTHING), **options)
    assert same(ours, dense)
    assert TopKEF.of(ours.optimizer).stats().steps == 8


# Keras 3 alone.


@pytest.mark.parametrize("wrap", [hvd.DistributedOptimizer, hvd_tfkeras.DistributedOptimizer])
def test_horovods_own_wrapper_refuses_topkef_under_keras_3(wrap: Any) -> None:
    with pytest.raises(UnsupportedOperationError, match=r"horovod_topk\.tensorflow\.keras"):
        wrap(keras.optimizers.SGD(0.05), compression=TopKEF)


@pytest.mark.slow
@pytest.mark.one_in(2, first=1)
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_horovods_compressors_keep_ranks_equal(compression: str) -> None:
    chosen = getattr(hvd.Compression, compression)
    assert_ranks_equal(fit(keras, keras.optimizers.Adam(1e-3), chosen).get_weights())


@pytest.fixture
def mixed() -> Any:
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.one_in(2, first=1)
@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize(
    "compression", [hvd.Compression.none, TopKEF(**SPARSE)], ids=["none", "topk"]
)
def test_all_ranks_skip_a_step_that_overflows_on_one(compression: Any) -> None:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=8.0)
    model = compiled(keras, distributed(keras, optimizer, compression))
    x, y = data()
    model.train_on_batch(x[:8], y[:8])
    weights, scale = model.get_weights(), float(model.optimizer.dynamic_scale)
    bad = x[:8] * (np.inf if hvd.rank() == 1 else 1)
    if isinstance(compression, TopKEF):
        before = [e.numpy() for e in compression.state_dict()["residuals"].values()]
    model.train_on_batch(bad, y[:8])
    assert all(np.array_equal(a, b) for a, b in zip(weights, model.get_weights(), strict=True))
    assert float(model.optimizer.dynamic_scale) == scale / 2
    if isinstance(compression, TopKEF):
        after = [e.numpy() for e in compression.state_dict()["residuals"].values()]
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        assert compression.stats().rolled_back == 1
    model.train_on_batch(x[8:16], y[8:16])
    assert_ranks_equal(model.get_weights())


def test_a_loss_scale_around_a_distributed_optimizer_is_refused() -> None:
    optimizer = distributed(keras, keras.optimizers.SGD(0.05), TopKEF)
    with pytest.raises(UnsupportedOperationError, match=r"DistributedOptimizer\(keras\.optimizers"):
        keras.optimizers.LossScaleOptimizer(optimizer)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda: keras.optimizers.SGD(0.1),
            {"backward_passes_per_step": 2},
            "gradient_accumulation",
        ),
        (lambda: keras.optimizers.SGD(0.1), {"op": hvd.Adasum}, r"hvd\.Average or hvd\.Sum"),
        (
            lambda: keras.optimizers.SGD(0.1),
            {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
            "splits an average",
        ),
        (lambda: tf_keras.optimizers.SGD(0.1), {}, "no optimizer of Keras 3"),
        (
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
            ),
            {},
            "every micro-step",
        ),
        (
            lambda: distributed(keras, keras.optimizers.SGD(0.1), TopKEF),
            {},
            "exchanges gradients already",
        ),
    ],
)
def test_what_cannot_work_is_refused(make: Any, options: Any, message: str) -> None:
    with pytest.raises(UnsupportedOperationError, match=message):
        distributed(keras, make(), TopKEF, **options)


def test_xla_is_refused_by_the_broadcast() -> None:
    model = compiled(keras, distributed(keras, keras.optimizers.SGD(0.05), TopKEF))
    model.jit_compile = True
    with pytest.raises(UnsupportedOperationError, match="jit_compile=False"):
        model.fit(
            *data(), verbose=0, callbacks=[hvd_keras.callbacks.BroadcastGlobalVariablesCallback()]
        )


def test_of_names_what_is_not_ours() -> None:
    with pytest.raises(NotAttachedError, match="SGD was not built with compression=TopKEF"):
        TopKEF.of(distributed(keras, keras.optimizers.SGD(0.05), hvd.Compression.none))


@pytest.mark.slow
def test_a_saved_model_loads_without_horovod(tmp_path: Path) -> None:
    """That it goes on with Horovod, as if it had not stopped, is in case_tf_auto.py."""
    model = fit(keras, with_momentum(keras), TopKEF(**EVERYTHING), epochs=1)
    path = tmp_path / "model.keras"
    model.save(path)
    plain = keras.saving.load_model(path)
    assert type(plain.optimizer) is keras.optimizers.SGD
    assert int(plain.optimizer.iterations) == 8


def test_state_and_exclusions_survive_a_loss_scale() -> None:
    model = compiled(keras, keras.optimizers.AdamW(1e-3, weight_decay=0.5))
    bias = model.trainable_variables[1]
    model.optimizer.exclude_from_weight_decay([bias])
    model.fit(*data(rank=0), batch_size=8, verbose=0, shuffle=False)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        copy = distributed(keras, model.optimizer, TopKEF)
    finally:
        keras.config.set_dtype_policy("float32")
    inner = copy.inner_optimizer
    pairs = zip(inner.variables, model.optimizer.variables, strict=True)
    assert all(np.array_equal(mine.numpy(), theirs.numpy()) for mine, theirs in pairs)
    assert not inner._use_weight_decay(bias)
    again = distributed(keras, keras.optimizers.LossScaleOptimizer(inner), TopKEF)
    assert not again.inner_optimizer._use_weight_decay(bias)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that Keras cannot find by name."""

    def __call__(self, step: Any) -> Any:
        return 0.1 * keras.ops.power(0.5, keras.ops.cast(step, "float32"))


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("rate", [Halving(), lambda: 0.1], ids=["schedule", "function"])
def test_any_learning_rate_is_kept(rate: Any) -> None:
    model = fit(keras, keras.optimizers.SGD(rate), TopKEF(**SPARSE), epochs=1)
    assert model.optimizer._learning_rate is rate
    assert_ranks_equal(model.get_weights())


@pytest.mark.parametrize("scaled", [False, True], ids=["", "loss scale"])
def test_a_variable_without_a_gradient_keeps_its_state(scaled: bool) -> None:
    """Also where it is left out, as one that is frozen is."""
    model, compression = compiled(keras, "sgd"), TopKEF(**SPARSE)
    inner = keras.optimizers.SGD(0.05)
    given = keras.optimizers.LossScaleOptimizer(inner) if scaled else inner
    optimizer = distributed(keras, given, compression)
    variables = model.trainable_variables
    gradients = [tf.ones(v.shape) for v in variables]
    optimizer.apply(gradients, variables)
    optimizer.apply([None, *gradients[1:]], variables)
    optimizer.apply(gradients[1:], variables[1:])
    optimizer.apply(gradients, variables)
    assert compression.stats().steps == 4
    assert len(compression.state_dict()["residuals"]) == len(variables)


class Stubborn(keras.optimizers.SGD):
    """Updates in a way of its own."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(0.1 * gradient)


def test_an_optimizer_that_goes_around_the_exchange_is_refused() -> None:
    with pytest.raises(UnsupportedOperationError, match="a way of its own"):
        fit(keras, Stubborn(0.1), hvd.Compression.none)


def test_lists_of_groups_are_refused_with_horovods_compressors() -> None:
    groups = [compiled(keras, "sgd").trainable_variables]
    with pytest.raises(UnsupportedOperationError, match="as a number"):
        distributed(keras, keras.optimizers.SGD(0.1), hvd.Compression.none, groups=groups)


def test_groups_take_keras_variables() -> None:
    model = compiled(keras, "sgd")
    groups = [model.trainable_variables[:1], model.trainable_variables[1:]]
    compression = TopKEF(**SPARSE)
    model.optimizer = distributed(keras, keras.optimizers.SGD(0.05), compression, groups=groups)
    model.fit(*data(), batch_size=8, verbose=0)
    assert compression.stats().buckets == 2


# Callbacks.


def test_broadcast_starts_all_ranks_alike() -> None:
    callback, first = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(1), list[list[Any]]()
    note = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: first.append(callback.model.get_weights())
    )
    options = {"seed": hvd.rank(), "callbacks": [callback, note], "epochs": 1}
    model = fit(keras, keras.optimizers.Adam(1e-3), TopKEF(**SPARSE), **options)
    assert_ranks_equal([*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)])
    assert all(map(np.array_equal, first[0], model_of(keras, seed=1).get_weights()))


def test_broadcast_of_a_model_that_was_compiled_without_an_optimizer() -> None:
    """As one whose `train_step` has several of its own."""
    model = model_of(keras, seed=hvd.rank())
    model.compile(optimizer=None, jit_compile=False)
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback()
    callback.set_model(model)
    callback.on_train_begin()
    assert_ranks_equal(model.get_weights())


@pytest.mark.slow
def test_broadcast_of_a_model_that_is_built_by_its_first_step() -> None:
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(10)])
    optimizer = distributed(keras, keras.optimizers.SGD(0.05), TopKEF(**SPARSE))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback()
    model.fit(*data(), batch_size=8, verbose=0, callbacks=[callback])
    assert_ranks_equal(model.get_weights())


def test_metrics_are_averaged() -> None:
    seen: list[list[float]] = []  # before and after
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append([logs["accuracy"], logs["loss"]])
    )
    around = [note, hvd_keras.callbacks.MetricAverageCallback(), note]
    options = {"epochs": 1, "callbacks": around, "metrics": ["accuracy"]}
    fit(keras, keras.optimizers.SGD(0.05), hvd.Compression.none, **options)
    mine, mean = seen
    assert mine != mean
    assert mean == pytest.approx(hvd.allreduce(tf.constant(mine), op=hvd.Average).numpy(), rel=1e-6)


@pytest.mark.slow
def test_warm_up_reaches_the_full_rate() -> None:
    warmup = hvd_keras.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2)
    rates: list[float] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    model = compiled(keras, distributed(keras, keras.optimizers.SGD(0.2), TopKEF(**SPARSE)))
    history = model.fit(*data(), batch_size=8, epochs=3, verbose=0, callbacks=[warmup, note])
    assert rates == pytest.approx([*(0.1 + 0.1 * (i + 1) / 16 for i in range(16)), *[0.2] * 8])
    assert history.history["learning_rate"] == pytest.approx([0.15, 0.2, 0.2])


@pytest.mark.slow
def test_a_staircase_multiplies_by_epochs_and_rescales_velocities() -> None:
    schedule = hvd_keras.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=1)
    model = compiled(keras, distributed(keras, keras.optimizers.SGD(0.1, momentum=0.9), TopKEF))
    history = model.fit(*data(), batch_size=8, epochs=3, verbose=0, callbacks=[schedule])
    assert history.history["learning_rate"] == pytest.approx([0.1, 0.1, 0.05])
    functions = TopKEF.of(model.optimizer)._functions.values()  # Keras traces a step twice
    assert {each.experimental_get_tracing_count() for each in functions} == {1}
    before = model.optimizer.momentums[0].numpy()
    schedule.on_epoch_begin(3)
    schedule.on_train_batch_begin(0)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.025)
    assert np.allclose(model.optimizer.momentums[0].numpy(), before / 2, rtol=1e-6)
