"""Momentum that the guard hands back to Keras optimizers: from then on training is dense."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kerasses import BATCH, LIBRARIES, compiled, data, distributed, fit, same
from proof import assert_ranks_equal
from tapes import Run, equal, noise

from horovod_topk import report
from horovod_topk.core.stats import StepCounters
from horovod_topk.errors import ConfigError
from horovod_topk.guard import Guard
from horovod_topk.tensorflow.takeover import slots_of
from plain import PlainTopKEF as TopKEF


class Trainer:
    """Variables, and a distributed Keras optimizer that steps on gradients of noise.

    Args:
        library: Keras 3 or tf-keras.
        optimizer: not distributed.
        compression: passed to the distributed optimizer.
        graph: whether steps are in a tf.function.
    """

    def __init__(self, library: Any, optimizer: Any, compression: Any, graph: bool = True) -> None:
        make = library.Variable if library is keras else tf.Variable
        starts = [noise(99, i, shape) for i, shape in enumerate(Run.shapes)]
        self.variables = [make(start, name=f"v{i}") for i, start in enumerate(starts)]
        self.optimizer = distributed(library, optimizer, compression)
        self.optimizer.build(self.variables)
        step = self._apply if library is keras else self._compute_and_apply
        self._step = tf.function(step, autograph=False) if graph else step
        self.compression, self.seen = compression, list[StepCounters]()
        if isinstance(compression, TopKEF):
            compression.on_step(self.seen.append)

    def take(self, steps: Iterable[int], factor: float = 1.0) -> Trainer:
        """Take steps on this rank's gradients, which depend on the number of the step."""
        for step in steps:
            shapes = enumerate(Run.shapes)
            self._step(*[factor * noise(hvd.rank(), 10 * step + i, s) for i, s in shapes])
        return self

    def fall_back(self) -> Trainer:
        """Take 6 steps, the last of which hands momentum back."""
        return self.take(range(2)).reports().take(range(2, 6))

    def reports(self) -> Trainer:
        """Report a value that leaves its trend: the guard falls back after two more steps."""
        for value in [1.0] * 10 + [np.inf] * 4:
            TopKEF.of(self.optimizer).report(value)
        return self

    @property
    def every(self) -> list[Any]:
        """The variables and the optimizer's own ones."""
        own = self.optimizer.variables
        return [*self.variables, *(own() if callable(own) else own)]

    def values(self) -> list[Any]:
        """Copies of the variables and of the optimizer's own ones."""
        return [variable.numpy() for variable in self.every]

    def start_from(self, other: Trainer) -> Trainer:
        """Copy the variables of another one, the optimizer's own ones included."""
        for variable, value in zip(self.every, other.values(), strict=True):
            variable.assign(value)
        return self

    def velocities(self) -> list[Any]:
        """This rank's velocities, in the order of the variables."""
        saved = TopKEF.of(self.optimizer).state_dict()["velocity"]["residuals"]
        return [saved[name].numpy() for name in sorted(saved)]

    def momenta(self) -> list[Any]:
        """The optimizer's momentum of each variable, flat."""
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        return [np.ravel(slot.numpy()) for slot in slots_of(inner)]

    def _apply(self, *gradients: Any) -> None:
        self.optimizer.apply(list(gradients), self.variables)

    def _compute_and_apply(self, *gradients: Any) -> None:
        products = zip(self.variables, gradients, strict=True)
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable * gradient) for variable, gradient in products])
        pairs = self.optimizer.compute_gradients(loss, self.variables, tape=tape)
        self.optimizer.apply_gradients(pairs)


RATE, M = 0.05, 0.9
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda k: k.SGD(RATE, momentum=M),
    "Nesterov": lambda k: k.SGD(RATE, momentum=M, nesterov=True),
    "AdamW": lambda k: k.AdamW(RATE, beta_1=M),
}
TAKEN = {"ratio": 0.05, "min_numel": 0, "momentum": "optimizer"}
WATCHED = Guard(nonfinite=None)


def trainer(library: Any, kind: str, graph: bool = True, **settings: Any) -> Trainer:
    """A trainer whose momentum is taken over."""
    compression = TopKEF(**TAKEN | {"guard": WATCHED} | settings)
    return Trainer(library, OPTIMIZERS[kind](library.optimizers), compression, graph)


def assert_dense_from_here(ours: Trainer, dense: Trainer, steps: Iterable[int]) -> None:
    """It trains as stock Horovod's dense training does from its state, bit for bit."""
    dense.start_from(ours)
    before = ours.values()
    for step in steps:
        assert equal(ours.take([step]).values(), dense.take([step]).values())
    changed = zip(before[:2], ours.values()[:2], strict=True)
    assert not any(np.array_equal(one, other) for one, other in changed)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("library", "kind", "graph"),
    [
        (keras, "Nesterov", True),
        (keras, "SGD", True),
        (tf_keras, "AdamW", True),
        (tf_keras, "SGD", True),
        (keras, "AdamW", True),
        (tf_keras, "Nesterov", False),
        (keras, "SGD", False),
    ],
)
def test_with_its_momentum_back_training_is_dense_to_the_bit(
    library: Any, kind: str, graph: bool
) -> None:
    ours = trainer(library, kind, graph).fall_back()
    assert [each.fell_back for each in ours.seen] == ["", "", "", "trend", "", ""]
    for velocity, slot in zip(ours.velocities(), ours.momenta(), strict=True):
        mean = hvd.allreduce(velocity, name="guard.velocity").numpy()
        handed = (1 - M) * mean if kind == "AdamW" else -RATE * mean
        np.testing.assert_allclose(slot, handed, rtol=1e-4, atol=1e-6)
    optimizer = OPTIMIZERS[kind](library.optimizers)
    dense = Trainer(library, optimizer, hvd.Compression.none, graph)
    assert_dense_from_here(ours, dense, range(6, 10))
    assert [each.level for each in ours.seen] == [0.05] * 4 + [1.0] * 6
    stats = TopKEF.of(ours.optimizer).stats()
    assert (stats.residual_norm, stats.momentum) == (0.0, 0.0)
    assert_ranks_equal(ours.values())


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
def test_within_a_loss_scale_a_step_that_is_skipped_hands_over_nothing(library: Any) -> None:
    kind = tf_keras.mixed_precision if library is tf_keras else keras.optimizers

    def scaled(compression: Any) -> Trainer:
        sgd = OPTIMIZERS["SGD"](library.optimizers)
        return Trainer(library, kind.LossScaleOptimizer(sgd), compression)

    ours = scaled(TopKEF(**TAKEN, guard=WATCHED)).take(range(2)).reports().take(range(2, 5))
    ours.take([5], np.nan if hvd.rank() else 1.0)
    assert not any(map(np.any, ours.momenta()))
    ours.take([5])
    assert all(map(np.any, ours.momenta()))
    assert_dense_from_here(ours, scaled(TopKEF(1.0)), range(6, 9))  # stock Horovod takes no scale


@pytest.mark.slow
def test_with_the_sharded_exchange() -> None:
    ours = trainer(keras, "SGD", exchange="sharded").fall_back()
    dense = Trainer(keras, OPTIMIZERS["SGD"](keras.optimizers), hvd.Compression.none)
    assert_dense_from_here(ours, dense, range(6, 9))


@pytest.mark.slow
def test_with_accumulated_gradients() -> None:
    """Every second step exchanges and applies gradients."""

    def accumulating(compression: Any) -> Trainer:
        optimizer = keras.optimizers.SGD(RATE, momentum=M, gradient_accumulation_steps=2)
        return Trainer(keras, optimizer, compression)

    ours = accumulating(TopKEF(**TAKEN, guard=WATCHED))
    ours.take(range(4)).reports().take(range(4, 12))
    assert all(map(np.any, ours.momenta()))
    assert_dense_from_here(ours, accumulating(hvd.Compression.none), range(12, 17))


@pytest.mark.slow
def test_compiled_by_xla() -> None:
    """TensorFlow compiles an update once for each key, so the two updates have two keys."""
    ours = trainer(tf_keras, "SGD")
    dense = Trainer(tf_keras, OPTIMIZERS["SGD"](tf_keras.optimizers), hvd.Compression.none)
    for each in (ours, dense):
        each.optimizer.jit_compile = True
    assert_dense_from_here(ours.fall_back(), dense, range(6, 9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "kind", "graph"),
    [(keras, "SGD", True), (keras, "AdamW", False), (tf_keras, "SGD", False)],
)
def test_after_a_cool_down_velocities_are_the_optimizers_momentum(
    library: Any, kind: str, graph: bool
) -> None:
    guard = Guard(nonfinite=None, cool_down=3)
    ours = trainer(library, kind, graph, guard=guard).fall_back().take(range(6, 9))
    factor = 1 / (1 - M) if kind == "AdamW" else -1 / RATE
    for velocity, slot in zip(ours.velocities(), ours.momenta(), strict=True):
        assert np.any(slot)
        np.testing.assert_allclose(velocity, factor * slot, rtol=1e-5, atol=1e-6)
    before = ours.velocities()
    ours.take([9, 10])
    assert [each.level for each in ours.seen] == [0.05] * 4 + [1.0] * 5 + [0.05] * 2
    for old, new, i in zip(before, ours.velocities(), itertools.count(), strict=False):
        first, second = (np.ravel(noise(hvd.rank(), 10 * s + i, Run.shapes[i])) for s in (9, 10))
        undamped = M * (M * old + first) + second
        assert np.mean(np.isclose(new, undamped, rtol=1e-3, atol=1e-4)) > 0.4, i
    assert TopKEF.of(ours.optimizer).stats().momentum == M
    assert_ranks_equal(ours.values()[:2])


@pytest.mark.slow
@pytest.mark.parametrize("steps", [5, 6, 8, 10])
@pytest.mark.parametrize(("library", "kind"), [(keras, "SGD"), (tf_keras, "AdamW")])
def test_a_checkpoint_goes_on_at_every_stage(library: Any, kind: str, steps: int) -> None:
    """Stages: handing over, dense, the last dense step, and after compression has come back."""
    guard = Guard(nonfinite=None, cool_down=3)
    ours = trainer(library, kind, guard=guard).take(range(2)).reports().take(range(2, steps))
    again = trainer(library, kind, guard=guard).start_from(ours)
    again.compression.load_state_dict(TopKEF.of(ours.optimizer).state_dict())
    for step in range(steps, steps + 5):
        assert equal(ours.take([step]).values(), again.take([step]).values())


@pytest.mark.slow
def test_a_saved_model_has_the_momentum_that_was_handed_back(tmp_path: Path) -> None:
    """Loaded after TopKEF's state, it goes on densely; loaded alone, its momentum is dropped."""
    ours = trainer(keras, "SGD").fall_back()
    store = dict[str, Any]()
    ours.optimizer.save_own_variables(store)
    handed = [store[str(i)] for i in (2, 3)]
    assert all(map(np.any, handed))
    again = trainer(keras, "SGD")
    again.compression.load_state_dict(TopKEF.of(ours.optimizer).state_dict())
    again.optimizer.load_own_variables(store)
    for mine, its in zip(again.variables, ours.variables, strict=True):
        mine.assign(its)
    for step in range(6, 9):
        assert equal(ours.take([step]).values(), again.take([step]).values())
    with pytest.raises(ConfigError, match="would be lost"):
        trainer(keras, "SGD").optimizer.load_own_variables(store)


@pytest.mark.slow
def test_legacy_optimizers_keep_a_corrected_momentum(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = tf_keras.optimizers.legacy.SGD(RATE, momentum=M)
    compression = TopKEF(**TAKEN, guard=WATCHED)
    seen = list[StepCounters]()
    compression.on_step(seen.append)
    compression.on_step(lambda counters: report(1.0 if counters.step < 12 else np.nan))
    model = fit(tf_keras, optimizer, compression, epochs=3)
    assert "as a legacy SGD cannot take it back" in caplog.text
    assert [each.fell_back for each in seen].count("trend") == 1
    assert TopKEF.of(model.optimizer).stats().momentum == M
    assert_ranks_equal(model.get_weights())


@pytest.mark.slow
@pytest.mark.parametrize(("library", "kind"), [(keras, "AdamW"), (tf_keras, "SGD")])
def test_fit_goes_on_as_dense_training(library: Any, kind: str) -> None:
    compression, seen = TopKEF(**TAKEN, guard=WATCHED), list[StepCounters]()
    compression.on_step(seen.append)
    compression.on_step(lambda counters: report(1.0 if counters.step < 12 else np.nan))
    make, optimizers = OPTIMIZERS[kind], library.optimizers
    ours = fit(library, make(optimizers), compression, epochs=3)
    assert [each.fell_back for each in seen].count("trend") == 1
    dense = compiled(library, distributed(library, make(optimizers), hvd.Compression.none))
    dense.optimizer.build(dense.trainable_variables)
    own = [each.optimizer.variables for each in (dense, ours)]
    pairs = zip(*[each() if callable(each) else each for each in own], strict=True)
    for mine, its in (*zip(dense.weights, ours.weights, strict=True), *pairs):
        mine.assign(its)
    before = ours.get_weights()
    for model in (ours, dense):
        model.fit(*data(), batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    assert same(ours, dense)
    assert not equal(before, ours.get_weights())
