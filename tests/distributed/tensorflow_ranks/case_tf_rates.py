"""Residuals that follow the learning rate of a Keras optimizer, between real ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kerasses import LIBRARIES, distributed, fit, same
from proof import assert_ranks_equal
from tapes import noise

from plain import PlainTopKEF as TopKEF

SPARSE: dict[str, Any] = {"ratio": 0.05, "min_numel": 0}
SHAPES = [(60, 50), (515,)]
BOTH = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


class Run:
    """Variables whose gradients are given, and an optimizer with a schedule.

    in_turns: every other step has one variable more.
    """

    def __init__(
        self, library: Any, compression: TopKEF, *, graph: bool = False, in_turns: bool = False
    ) -> None:
        values = (0.1, 0.2, 0.195, 0.19)
        self.schedule = library.optimizers.schedules.PiecewiseConstantDecay([0, 2, 3], values)
        self.variables = [tf.Variable(noise(9, i, shape)) for i, shape in enumerate(SHAPES)]
        self.compression, self._more = compression, tf.Variable(tf.zeros(3))
        optimizer = library.optimizers.SGD(self.schedule)
        self.optimizer = distributed(library, optimizer, compression)
        if in_turns:
            self.optimizer.build([*self.variables, self._more])
        self._is_keras_3, self._in_turns = library is keras, in_turns
        self._apply = tf.function(self._take) if graph else self._take

    def take(self, step: int, factor: float = 1.0) -> None:
        """A step with this rank's gradients times a factor."""
        given = [tf.constant(factor * g) for g in gradients(step)]
        self._apply(given + [tf.zeros(3)] * (self._in_turns and step % 2))

    def _take(self, given: list[Any]) -> None:
        variables = [*self.variables, self._more][: len(given)]
        if not self._is_keras_3:
            with tf.GradientTape() as tape:
                pairs = zip(variables, given, strict=True)
                loss = tf.add_n([tf.reduce_sum(v * g) for v, g in pairs])
            given = self.optimizer.compute_gradients(loss, variables, tape=tape)
            given = [gradient for gradient, _ in given]
        self.optimizer.apply_gradients(zip(given, variables, strict=True))

    def owed(self) -> list[Any]:
        """What this rank keeps, in the order of the variables."""
        state = TopKEF.of(self.optimizer)
        return [state.residual(name).numpy() for name in state.tensors]


def gradients(step: int) -> list[Any]:
    return [noise(hvd.rank(), 10 * step + i, shape) for i, shape in enumerate(SHAPES)]


def mean(arrays: Iterable[Any]) -> list[Any]:
    """Over ranks, in float64."""
    each = [np.asarray(array, np.float64).ravel() for array in arrays]
    return [hvd.allreduce(array, name=f"mean.{i}").numpy() for i, array in enumerate(each)]


def gap(run: Run) -> float:
    """By how much updates and what is owed miss all gradients at their rates, at most."""
    begun = [v.numpy().ravel() for v in run.variables]
    due, rates = [0.0] * len(SHAPES), []
    for step in range(5):
        rates.append(float(run.schedule(step)))
        due = [d + rates[-1] * g for d, g in zip(due, mean(gradients(step)), strict=True)]
        run.take(step)
    assert len(set(rates)) == 4
    assert_ranks_equal(run.variables)
    moved = [b - v.numpy().ravel() for b, v in zip(begun, run.variables, strict=True)]
    left = [rates[-1] * e for e in mean(run.owed())]
    missed = zip(moved, left, due, strict=True)
    return max(float(np.linalg.norm(m + e - d) / np.linalg.norm(d)) for m, e, d in missed)


@pytest.mark.slow
@pytest.mark.one_in(9)
@BOTH
@pytest.mark.parametrize("graph", [False, True], ids=["at once", "in a graph"])
def test_updates_and_what_is_owed_are_all_gradients_at_their_rates(
    library: Any, graph: bool
) -> None:
    assert gap(Run(library, TopKEF(**SPARSE, follow_lr=True), graph=graph)) < 1e-5
    assert gap(Run(library, TopKEF(**SPARSE), graph=graph)) > 1e-2


@pytest.mark.slow
def test_lists_of_the_same_variables_share_their_rates() -> None:
    """Two losses in turns have such lists, and so has a model that trains a layer later."""
    run = Run(tf_keras, TopKEF(**SPARSE, follow_lr=True), in_turns=True)
    assert gap(run) < 1e-5


@pytest.mark.slow
def test_lists_of_the_same_variables_load_what_they_share_once() -> None:
    """By the first of them: when the other one begins, it has moved."""
    runs = [Run(tf_keras, TopKEF(**SPARSE, follow_lr=True), in_turns=True) for _ in range(2)]
    for step in range(2):
        runs[0].take(step)
    runs[1].compression.deserialize(runs[0].compression.serialize())
    runs[1].optimizer.iterations.assign(2)
    for mine, saved in zip(runs[1].variables, runs[0].variables, strict=True):
        mine.assign(saved)
    for step in range(2, 5):
        for run in runs:
            run.take(step)
    one, other = ([v.numpy() for v in run.variables] for run in runs)
    assert all(map(np.array_equal, one, other))


@pytest.mark.slow
@pytest.mark.one_in(9)
@BOTH
def test_within_a_loss_scale(library: Any) -> None:
    """A scale that is a power of two changes no bit."""
    kind = tf_keras.mixed_precision if library is tf_keras else keras.optimizers
    optimizers = library.optimizers
    sgd = [optimizers.SGD(optimizers.schedules.CosineDecay(0.1, 16)) for _ in range(2)]
    scaled = fit(library, kind.LossScaleOptimizer(sgd[0]), TopKEF(**SPARSE, follow_lr=True))
    assert same(scaled, fit(library, sgd[1], TopKEF(**SPARSE, follow_lr=True)))
    assert_ranks_equal(scaled.get_weights())


def test_a_step_that_is_skipped_changes_neither_residual_nor_rate() -> None:
    run = Run(keras, TopKEF(**SPARSE, follow_lr=True))
    run.take(0)
    before, rates = run.owed(), run.compression.state_dict()["rates"]
    run.take(1, factor=float("nan") if hvd.rank() == 0 else 1.0)
    assert TopKEF.of(run.optimizer).stats().rolled_back == 1
    assert all(map(np.array_equal, run.owed(), before))
    assert run.compression.state_dict()["rates"] == rates
