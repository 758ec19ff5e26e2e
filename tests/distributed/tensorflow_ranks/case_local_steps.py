"""Local steps: ranks train alone, and have equal weights after each outer step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from proof import assert_ranks_equal, ranks_equal
from tapes import equal, noise

import horovod_topk.tensorflow.keras as hvd_keras
from horovod_topk import checkpoint
from horovod_topk.errors import (
    ConfigError,
    PlanMismatchError,
    UnknownSettingError,
    UnsupportedOperationError,
)
from horovod_topk.tensorflow import Dense, LocalSteps, Outer, PowerSGD
from plain import PlainTopKEF as TopKEF

SHAPES = [(30, 20), (7,), (), (0,)]
RATE = np.float32(0.125)
O = keras.optimizers  # noqa: E741
Array = np.ndarray[Any, Any]


def start() -> list[Array]:
    return [noise(99, i, shape).numpy() for i, shape in enumerate(SHAPES)]


class Alone:
    """Variables that each rank moves by noise of (rank, step), and their local steps."""

    def __init__(self, dtype: str = "float32", **settings: Any) -> None:
        initial = [tf.cast(each, dtype) for each in start()]
        self.variables = [tf.Variable(each, name=f"v{i}") for i, each in enumerate(initial)]
        self.steps = 0
        self.local = LocalSteps(None, self.variables, **settings)

    def take(self, count: int, factor: float = 1.0) -> Alone:
        """Take inner steps."""
        for _ in range(count):
            for i, v in enumerate(self.variables):
                by = RATE * factor * noise(hvd.rank(), 10 * self.steps + i, v.shape)
                v.assign_sub(tf.cast(by, v.dtype))
            self.steps += 1
            self.local.step()
        return self

    @property
    def weights(self) -> list[Array]:
        return [v.numpy() for v in self.variables]


def moved(anchors: list[Array], first: int, count: int, rank: int) -> list[Array]:
    """How far inner steps move a rank, rounded as its weights are."""
    found = []
    for i, x in enumerate(anchors):
        w = x
        for step in range(first, first + count):
            w = w - RATE * noise(rank, 10 * step + i, x.shape).numpy()
        found.append(x - w)
    return found


def mean(anchors: list[Array], first: int, count: int) -> list[Array]:
    """The mean movement of all ranks, added up in their order."""
    every = [moved(anchors, first, count, rank) for rank in range(hvd.size())]
    share = np.float32(1 / hvd.size())
    return [sum(each[1:], each[0]) * share for each in zip(*every, strict=True)]


@pytest.mark.everywhere
@pytest.mark.world_size(2, 3)
def test_an_average_of_weights() -> None:
    """Dense, without momentum and at a rate of 1: to the bit."""
    alone, x = Alone(every=3, compression=Dense, outer=Outer()), start()
    for round_ in range(2):
        alone.take(2)
        assert not ranks_equal(alone.weights)
        alone.take(1)
        assert_ranks_equal(alone.weights)
        x = [a - d for a, d in zip(x, mean(x, 3 * round_, 3), strict=True)]
        assert equal(alone.weights, x)
    assert alone.local.rounds == 2


COMPRESSORS: dict[str, Callable[[], Any]] = {
    "allgather": lambda: TopKEF(ratio=0.05, values="int4", min_numel=0),
    "sharded": lambda: TopKEF(ratio=0.05, min_numel=0, exchange="sharded"),
    "int8": lambda: TopKEF(ratio=0.05, min_numel=0, residuals="int8"),
    "allreduce": lambda: Dense(exchange="allreduce"),
    "reduce": lambda: PowerSGD(rank=2, min_numel=0),
}


@pytest.mark.everywhere(one_in=2)
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_ranks_are_equal_after_each_outer_step(name: str) -> None:
    alone = Alone(every=2, compression=COMPRESSORS[name](), decay=0.95, clip=None)
    for _ in range(3):
        assert_ranks_equal(alone.take(2).weights)
    stats = TopKEF.of(alone.local).stats()
    assert (stats.steps, alone.local.rounds) == (3, 3)
    assert (stats.residual_norm > 0) == (name != "allreduce")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "settings",
    [{"fragments": 2, "delay": 1, "alpha": 0.25}, {"clip": 1.5}],
    ids=["fragments", "clip"],
)
def test_other_settings(settings: dict[str, Any]) -> None:
    alone = Alone(every=4, compression=COMPRESSORS["allgather"](), **settings).take(9)
    alone.local.synchronize()
    assert_ranks_equal(alone.weights)
    assert alone.local.rounds == 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes(dtype: str) -> None:
    """Anchors are in float32, or float64; a weight that does not move has no movement."""
    alone = Alone(dtype, every=2, compression=Dense, outer=Outer(momentum=0.5)).take(4)
    assert_ranks_equal(alone.weights)
    alone.take(2, 0.0)  # the momentum moves on
    assert_ranks_equal(alone.weights)
    assert TopKEF.of(alone.local).stats().gradient_norm == 0.0


def test_averages() -> None:
    """Of values that differ, and of a constant, which stays to the bit; a NaN brings them back."""
    rank, ranks = float(hvd.rank()), hvd.size()
    v, constant, apart = (tf.Variable(each) for each in ([1.0], [0.1], [rank]))
    local = LocalSteps(None, [v], every=1, compression=Dense, averaged=[constant, apart])
    local.step()
    assert float(constant[0]) == float(np.float32(0.1))
    assert float(apart[0]) == (ranks - 1) / 2
    apart.assign([np.nan if rank else 7.0])
    local.step()
    assert float(apart[0]) == (ranks - 1) / 2


def test_in_seconds() -> None:
    """A rank that is slower takes fewer steps, and counts by their number."""
    alone = Alone(every="0.2s", compression=Dense, outer=Outer())
    while alone.local.rounds < 2:
        time.sleep(0.01 + 0.04 * hvd.rank())
        alone.take(1)
    assert_ranks_equal(alone.weights)
    counts = hvd.allgather(tf.constant([alone.steps])).numpy()
    assert counts[0] > counts[1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "settings",
    [{"alpha": 0.5}, {"fragments": 2, "delay": 1}],
    ids=["alpha", "fragments"],
)
@pytest.mark.parametrize("by", ["checkpoint", "tensorflow"])
def test_resume_in_mid_round(by: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = hvd.broadcast_object(tmp_path, root_rank=0, name="folder")
    outer = Outer(lr=0.7, momentum=0.9, mean="senders")
    made = [TopKEF(ratio=0.1, min_numel=0) for _ in range(2)]
    whole, other = (
        Alone(every=3, compression=each, outer=outer, decay=0.9, **settings) for each in made
    )
    whole.take(5)
    if by == "checkpoint":
        checkpoint.save(folder, TopKEF.of(whole.local))
        hvd.allgather_object("saved", name="saved")
        checkpoint.load(folder, TopKEF.of(other.local))
    else:
        written = str(tmp_path / f"rank{hvd.rank()}")
        saved = tf.train.Checkpoint(compression=made[0]).write(written)
        tf.train.Checkpoint(compression=made[1]).read(saved)
    for mine, v in zip(whole.weights, other.variables, strict=True):
        v.assign(mine)
    other.steps = 5
    assert equal(whole.take(5).weights, other.take(5).weights)
    one, two = (TopKEF.of(each.local).state_dict() for each in (whole, other))
    assert equal([*one["residuals"].values()], [*two["residuals"].values()])


def test_a_nan_rolls_the_round_back() -> None:
    """On every rank, bitwise; the optimizer's states that are not finite begin anew."""
    v, optimizer = tf.Variable(start()[0], name="v"), O.Adam(0.1)
    settings = {"every": 2, "compression": TopKEF(ratio=0.1, min_numel=0)}
    local = LocalSteps(optimizer, [v], outer=Outer(momentum=0.5), **settings)

    def take(count: int, factor: float = 1.0) -> None:
        for step in range(count):
            optimizer.apply_gradients([(factor * noise(hvd.rank(), step, v.shape), v)])
            local.step()

    take(2)
    before, kept = v.numpy(), TopKEF.of(local).state_dict()
    take(2, np.nan if hvd.rank() == 1 else 1.0)
    assert np.array_equal(v.numpy(), before)
    now = TopKEF.of(local).state_dict()
    for key in ("residuals", "method/anchor", "method/outer_momentum"):
        one, two = (each.get(key, {}) for each in (kept, now))
        one, two = (each.get("residuals", each) for each in (one, two))
        assert equal([*one.values()], [*two.values()])
    take(2)
    assert not np.array_equal(v.numpy(), before)
    assert np.isfinite(v.numpy()).all()
    assert_ranks_equal([v.numpy()])


def test_what_is_refused() -> None:
    v = tf.Variable(start()[0], name="v")
    distributed = hvd_keras.DistributedOptimizer(O.SGD(0.1), compression=TopKEF)
    for optimizer in (distributed, TopKEF().adapt(adapted := O.SGD(0.1)) and adapted):
        with pytest.raises(ConfigError, match="exchanges gradients in every step"):
            LocalSteps(optimizer, [v])
    with pytest.raises(UnknownSettingError, match="'evry'"):
        LocalSteps(None, [v], evry=3)
    with pytest.raises(ConfigError, match="no variable of floats"):
        LocalSteps(None, [])
    with pytest.raises(ConfigError, match="stop_after="):
        hvd_keras.LocalSteps(every="60s")
    local = LocalSteps(None, [v])
    with pytest.raises(UnsupportedOperationError, match=r"in a tf\.function"):
        tf.function(local.step)()
    v.assign_add(tf.fill(v.shape, float(hvd.rank())))
    local.begin()
    with pytest.raises(PlanMismatchError, match=r"'v'.*different weights"):
        local.step()


def model_of(*, built: bool = True, policy: str | None = None) -> Any:
    """A perceptron with batch norm, and a layer that is frozen."""
    keras.utils.set_random_seed(hvd.rank())  # other weights on each rank, until the broadcast
    layers = keras.layers
    frozen = layers.Dense(12, trainable=False)
    norm = layers.BatchNormalization(momentum=0.5)
    own = [keras.Input((10,))] if built else []
    return keras.Sequential(
        [*own, frozen, layers.Dense(8, "relu", dtype=policy), norm, layers.Dense(3)]
    )


def fit(model: Any, *callbacks: Any, epochs: int = 1, **options: Any) -> Any:
    """Twelve steps in an epoch."""
    if not model.compiled:
        model.compile(O.Adam(0.05), "mse", **{"jit_compile": False, **options})
    x = np.random.default_rng(hvd.rank()).normal(size=(48, 10)).astype("float32")
    first = hvd_keras.callbacks.BroadcastGlobalVariablesCallback()
    own = {"batch_size": 4, "epochs": epochs, "verbose": 0, "shuffle": False}
    return model.fit(x, x[:, :3], callbacks=[first, *callbacks], **own)


def test_fit() -> None:
    """Iterations count inner steps; a second fit goes on; frozen layers stay."""
    model = model_of(policy="mixed_float16")
    local = hvd_keras.LocalSteps(every=5, compression=TopKEF(ratio=0.1, min_numel=0))
    seen = list[bool]()

    class Looks(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(ranks_equal(model.get_weights()))

    fit(model, local, Looks())
    assert [at + 1 for at, same in enumerate(seen) if same] == [5, 10]
    assert_ranks_equal(model.get_weights())
    assert (local.rounds, int(model.optimizer.iterations)) == (3, 12)
    assert TopKEF.of(local).stats().steps == 3
    frozen = model.layers[0].get_weights()
    fit(model, local)
    assert_ranks_equal(model.get_weights())
    assert local.rounds == 6
    assert equal(model.layers[0].get_weights(), frozen)
    model.compile(O.SGD(0.1, use_ema=True), "mse")
    with pytest.raises(ConfigError, match="use_ema=True"):
        fit(model, hvd_keras.LocalSteps())
    model.layers[0].trainable = True
    model.compile(O.SGD(0.1), "mse")
    with pytest.raises(ConfigError, match="other trainable variables"):
        fit(model, local)


@pytest.mark.slow
def test_weights_that_are_replaced_between_fits_stay() -> None:
    """A callback may load the weights of the best epoch or of a file, also after this callback."""
    model, few = model_of(), TopKEF(ratio=0.1, min_numel=0)
    local = hvd_keras.LocalSteps("local_sgd", every=5, compression=few)
    fit(model, local)
    TopKEF.of(local).reset()  # else what waits would move them
    model.optimizer.learning_rate = 0.0
    new = [weight + 1.0 for weight in model.get_weights()]

    class Restores(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            self.model.set_weights(new)
            self.trained = [v.numpy() for v in model.trainable_variables]

    fit(model, local, restores := Restores())
    assert equal([v.numpy() for v in model.trainable_variables], restores.trained)


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
def test_the_best_weights_that_are_restored_stay(is_first: bool) -> None:
    """Early stopping restores them when training ends, before or after local steps are told."""
    model, kept = model_of(), list[list[Array]]()
    stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    local = hvd_keras.LocalSteps("diloco", every=4)

    class Keeps(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["loss"] = float(epoch)  # the first epoch is the best one
            kept.append(self.model.get_weights())

    fit(model, Keeps(), *([stopping, local] if is_first else [local, stopping]), epochs=5)
    assert len(kept) == 2
    assert equal(model.get_weights(), kept[0])
    assert_ranks_equal([v.numpy() for v in model.trainable_variables])


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{"steps_per_execution": 4}, {"jit_compile": True}], ids=str)
def test_fit_in_other_ways(options: dict[str, Any]) -> None:
    """Also of a model that its first step builds, until the outer steps are enough."""
    model = model_of(built="jit_compile" in options)
    local = hvd_keras.LocalSteps("diloco", every=4, stop_after=4)
    fit(model, local, epochs=9, **options)
    assert_ranks_equal(model.get_weights())
    assert local.rounds == 4
