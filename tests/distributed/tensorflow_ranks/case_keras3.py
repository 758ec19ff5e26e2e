"""What users of Keras 3 run into: dtypes, modes, frozen rates, embeddings, resumed models."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from kerasses import Words
from proof import assert_ranks_equal

import horovod_topk.tensorflow.keras as hvd_keras
from horovod_topk import checkpoint
from horovod_topk.errors import ConfigError, UnsupportedOperationError
from horovod_topk.tensorflow import TopKEF

O = keras.optimizers  # noqa: E741


def model_of() -> Any:
    """A perceptron without a name."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential([keras.Input((40,)), layers.Dense(40, "relu"), layers.Dense(4)])


def trained(model: Any, optimizer: Any, compression: Any, **options: Any) -> Any:
    """The model after two steps on this rank's data."""
    wrapped = hvd_keras.DistributedOptimizer(optimizer, compression=compression)
    model.compile(wrapped, "mse", **{"jit_compile": False, **options})
    return fitted(model)


def fitted(model: Any) -> Any:
    """The model after two more steps."""
    x = np.random.default_rng(hvd.rank()).normal(size=(16, 40)).astype("float32")
    model.fit(x, x[:, :4], batch_size=8, verbose=0, shuffle=False)
    return model


def assert_sound(model: Any) -> None:
    """All variables, those that float8 overwrites too, are finite and equal on all ranks."""
    weights = model.get_weights()
    assert all(np.isfinite(np.asarray(each, np.float64)).all() for each in weights)
    assert_ranks_equal(weights)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("compression", [TopKEF, hvd.Compression.none], ids=["TopKEF", "none"])
def test_float8(compression: Any) -> None:
    """Scales are overwritten by what are called their gradients: by the largest of all ranks."""
    model = model_of()
    model.quantize("float8")
    assert_sound(trained(model, O.AdamW(0.01), compression))
    assert float(model.layers[0].inputs_scale.value) != 1.0


@pytest.mark.slow
def test_float64_with_momentum() -> None:
    keras.config.set_dtype_policy("float64")
    try:
        assert_sound(trained(model_of(), O.SGD(0.1, momentum=0.9), TopKEF(warmup=None)))
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.slow
def test_adafactor_has_a_floor() -> None:
    assert_sound(trained(model_of(), O.Adafactor(0.01), TopKEF(warmup=None)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [O.Muon, O.Lion, O.Nadam, O.Lamb])
def test_a_step_of_its_own_is_corrected_in_fit(kind: Any) -> None:
    model = trained(model_of(), kind(0.01), TopKEF(warmup=None, min_numel=0))
    assert_sound(model)
    kept = TopKEF.of(model.optimizer).state_dict()["state.squares"]["residuals"]
    assert sum(np.asarray(each).any() for each in kept.values()) == len(model.trainable_variables)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("kind", [O.Adam, O.RMSprop])
def test_what_cannot_bear_zeros_is_refused(kind: Any) -> None:
    optimizer = kind(epsilon=0.0)
    with pytest.raises(ConfigError, match="where rows and columns of a gradient are zero"):
        hvd_keras.DistributedOptimizer(optimizer, compression=TopKEF)
    hvd_keras.DistributedOptimizer(optimizer, compression=TopKEF(ratio=1.0, values="float32"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("compression", [TopKEF, hvd.Compression.none], ids=["TopKEF", "none"])
def test_xla_is_refused_in_a_line(compression: Any) -> None:
    with pytest.raises(UnsupportedOperationError, match=r"XLA.*jit_compile=False"):
        trained(model_of(), O.SGD(0.1), compression, jit_compile=True)


@pytest.mark.slow
def test_embeddings_move_alike_dense_and_compressed() -> None:
    """Adam squares the sum of a row's slices, not each slice."""
    found = []
    for compression, options in (
        (hvd.Compression.none, {}),
        (hvd.Compression.none, {"sparse_as_dense": True}),
        (TopKEF(ratio=1.0, values="float32", momentum=0, warmup=None), {}),
    ):
        wrapped = hvd_keras.DistributedOptimizer(O.Adam(0.1), compression=compression, **options)
        found.append(Words(keras, wrapped).fit(epochs=1).weights())
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("follow_lr", [True, False])
def test_a_rate_of_0_keeps_residuals(follow_lr: bool) -> None:
    """Gradients are exchanged alone meanwhile, and nothing that waited moves when it returns."""
    model, optimizer = model_of(), O.SGD(0.1)
    compression = TopKEF(warmup=None, momentum=0, follow_lr=follow_lr)
    trained(model, optimizer, compression)
    state = TopKEF.of(model.optimizer)
    before = {name: state.residual(name).numpy() for name in state.tensors}
    weights = model.get_weights()
    assert any(np.any(each) for each in before.values())
    model.optimizer.learning_rate = 0.0
    fitted(model)
    for name, residual in before.items():
        assert np.array_equal(state.residual(name).numpy(), residual)
    assert all(map(np.array_equal, weights, model.get_weights()))
    assert state.stats().steps == 4
    model.optimizer.learning_rate = 0.1
    fitted(model)
    assert any(not np.array_equal(state.residual(n).numpy(), r) for n, r in before.items())


def functional() -> Any:
    """A functional model with a model in it."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((40,))
    inner = keras.Sequential([keras.layers.Dense(40, "relu"), keras.layers.Dense(40)])
    return keras.Model(inputs, keras.layers.Dense(4)(inner(inputs)))


@keras.saving.register_keras_serializable("case_keras3")
class Subclassed(keras.Model):  # type: ignore[misc]
    """Two layers of one name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.one, self.two = (keras.layers.Dense(n, name="same") for n in (40, 4))

    def call(self, inputs: Any) -> Any:
        """Both layers."""
        return self.two(self.one(inputs))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("make", [model_of, functional, Subclassed])
def test_a_loaded_model_goes_on_with_its_residuals(make: Callable[[], Any], tmp_path: Path) -> None:
    """Keras gives its variables other paths; their order stays."""
    folder = hvd.broadcast_object(tmp_path, 0, name="folder")
    model = trained(make(), O.SGD(0.01), TopKEF(warmup=None))
    state = TopKEF.of(model.optimizer)
    kept = [each.numpy() for each in state.state_dict()["residuals"].values()]
    file = f"{folder}/{hvd.rank()}.keras"
    model.save(file)
    checkpoint.save(folder, state)
    hvd.allgather_object("saved", name="saved")
    compression = TopKEF(warmup=None)
    loaded = hvd_keras.load_model(file, compression=compression)
    checkpoint.load(folder, compression)
    loaded.optimizer.learning_rate = 0.0  # so that residuals stay
    fitted(loaded)
    after = TopKEF.of(loaded.optimizer).state_dict()["residuals"].values()
    assert all(map(np.array_equal, kept, [each.numpy() for each in after]))


@pytest.mark.slow
def test_a_recompiled_model_leaves_no_graph() -> None:
    model = trained(model_of(), O.SGD(0.1, momentum=0.9), TopKEF(warmup=None))
    optimizer, state = (weakref.ref(each) for each in (model.optimizer, TopKEF.of(model.optimizer)))
    function = weakref.ref(model.train_function)
    graphs = [o for o in gc.get_objects() if isinstance(o, tf.__internal__.FuncGraph)]
    mine = [weakref.ref(graph) for graph in graphs if graph.name == "one_step_on_data"][-2:]
    del graphs
    trained(model, O.SGD(0.1), hvd.Compression.none)
    for _ in range(3):
        gc.collect()
    assert (optimizer(), state(), function()) == (None, None, None)
    assert mine
    assert [graph() for graph in mine] == [None] * len(mine)


KEPT: dict[str, Callable[[], Any]] = {
    name: getattr(O, name)
    for name in (
        *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor"),
        *("Nadam", "Ftrl", "Lion", "Lamb"),
    )
}


@pytest.mark.slow
def test_nothing_is_lost_with_any_optimizer() -> None:
    """What optimizers are given, and the mean residual, is the sum of the mean gradients."""
    numbers = np.random.default_rng(0).normal(size=(3, hvd.size(), 300)).astype("float32")
    for name, make in KEPT.items():
        compression = TopKEF(ratio=0.02, min_numel=1, warmup=None, momentum=0, follow_lr=False)
        wrapped = hvd_keras.DistributedOptimizer(make(), compression=compression)
        given: list[Any] = []
        step = wrapped._backend_update_step

        def update(grads: Any, *rest: Any, step: Any = step, given: Any = given) -> None:
            given.append(grads[0].numpy())
            step(grads, *rest)

        wrapped._backend_update_step = update
        variable = keras.Variable(np.ones(300, "float32"), name="w")
        for each in numbers:
            wrapped.apply([tf.constant(each[hvd.rank()])], [variable])
        (residual,) = TopKEF.of(wrapped).state_dict()["residuals"].values()
        waits = hvd.allreduce(residual, name=f"waits.{name}").numpy()
        assert np.any(waits), name
        np.testing.assert_allclose(
            sum(given) + waits, numbers.mean(1).sum(0), rtol=1e-3, atol=1e-4, err_msg=name
        )
