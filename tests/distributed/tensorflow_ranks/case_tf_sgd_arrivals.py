"""Updates of Keras' SGD depend on how often elements arrive, on all ranks alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from case_tf_arrivals import LR, SHAPE, STEPS, Run, assert_libraries_agree, auto, codes_after
from kerasses import LIBRARIES
from proof import assert_ranks_equal

from horovod_topk.updates.formulas import CUT, share
from plain import PlainTopKEF as TopKEF

MOMENTUM = 0.9
BOTH = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


def sgd_of(library: Any, kind: str) -> Any:
    return library.optimizers.legacy.SGD if kind == "legacy" else library.optimizers.SGD


def fitted(**settings: Any) -> TopKEF:
    return auto(**{"follow_lr": "auto"} | settings)


class Reference:
    """SGD by the formulas of `horovod_topk.updates.formulas`, in float64."""

    def __init__(self, start: Any, *, nesterov: bool) -> None:
        self.p, self.nesterov = np.array(start, "f8"), nesterov
        self.codes, self.waiting = np.zeros(SHAPE, "u1"), np.zeros_like(self.p)
        self.unit = self.largest = 0.0  # learning rates

    def step(self, gradient: Any, lr: float) -> None:
        self.codes = codes_after(self.codes, gradient)
        self.unit, self.largest = max(lr, 0.95 * self.unit), max(self.largest, lr)
        left, whole = share(self.codes.astype("f8")), self.waiting * MOMENTUM
        whole -= lr * (1 - CUT * left**4 * (self.unit / self.largest) ** 2) * gradient
        moved, self.waiting = (1 - MOMENTUM * left) / (1 - MOMENTUM) * whole, left * whole
        self.p += MOMENTUM * moved - lr * gradient if self.nesterov else moved


@pytest.mark.parametrize(
    ("kind", "graph", "nesterov"),
    [("SGD", True, False), ("SGD", False, True), ("legacy", True, True), ("legacy", False, False)],
)
def test_updates_are_those_of_the_formula(kind: str, graph: bool, nesterov: bool) -> None:
    library: Any = tf_keras  # that of Keras 3 exchanges within the step, unseen
    settings = {"momentum": MOMENTUM, "nesterov": nesterov}
    run = Run(library, sgd_of(library, kind), fitted(), graph=graph, **settings)
    reference = Reference(run.variable.numpy(), nesterov=nesterov)
    for step in range(STEPS):
        rate = LR * 0.8**step
        run.optimizer.learning_rate.assign(rate) if step else None
        applied = run.take(step).astype("f8")
        reference.step(applied, rate)
        codes = run.state("arrivals").reshape(SHAPE)
        assert np.array_equal(codes, reference.codes)
        np.testing.assert_allclose(run.variable.numpy(), reference.p, 1e-4, 2e-5)
        assert_ranks_equal([run.variable.numpy(), codes])


@pytest.mark.parametrize("nesterov", [False, True])
def test_keras_3_takes_the_steps_of_tf_keras(nesterov: bool) -> None:
    """Steps of tf-keras are compared with the formula above."""
    assert_libraries_agree("SGD", fitted, momentum=MOMENTUM, nesterov=nesterov)


@pytest.mark.slow
@BOTH
def test_momentum_without_arrivals_moves_weights_as_slowly_as_with_dense_sgd(library: Any) -> None:
    """After a checkpoint of an earlier version; else all of it would move at once."""
    run = Run(library, library.optimizers.SGD, fitted(name="old"), graph=True, momentum=MOMENTUM)
    for step in range(4):
        run.take(step)
    state = TopKEF.of(run.optimizer)
    saved = {k: v for k, v in state.state_dict().items() if not k.startswith("state.")}
    state.load_state_dict(saved)
    assert not run.state("arrivals").any()
    (slot,) = run.optimizer.variables[-1:] if library is not tf_keras else run.optimizer.momentums
    slot.assign(np.ones(SHAPE, "f4"))
    before = run.variable.numpy()
    run._apply(tf.zeros(SHAPE))
    moved = run.variable.numpy() - before
    assert MOMENTUM < np.median(moved) < 1.3 * MOMENTUM, "all at once it would be 10 times that"
    assert run.state("arrivals").min() == 248
