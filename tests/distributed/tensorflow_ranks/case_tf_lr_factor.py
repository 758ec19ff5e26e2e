"""The learning rate of Keras' Adam and AdamW is lowered while steps overshoot, on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kerasses import LIBRARIES, distributed
from proof import assert_ranks_equal
from tapes import noise

from horovod_topk import checkpoint
from horovod_topk.errors import ConfigError
from plain import PlainTopKEF as TopKEF

LR, DECAY, STEPS, SHAPE = 0.5, 0.125, 8, (60, 20)
BOTH = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


def auto(**settings: Any) -> TopKEF:
    given = {"ratio": 0.25, "min_numel": 0, "momentum": "auto", "lower_lr": True}
    return TopKEF(**given | settings)


class Run:
    """A variable whose gradients are given: they point to one side and then to the other."""

    def __init__(self, library: Any, kind: str, compression: TopKEF, *, graph: bool) -> None:
        self.library, self.variable = library, tf.Variable(noise(9, 0, SHAPE))
        self.compression = compression
        decay = {"weight_decay": DECAY} if kind == "AdamW" else {}
        made = getattr(library.optimizers, kind)(LR, **decay)
        self.optimizer = distributed(library, made, compression)
        self._apply = tf.function(self._take) if graph else self._take

    def take(self, step: int) -> None:
        """A step with this rank's gradient."""
        gradient = noise(hvd.rank(), step, SHAPE) / 4 + noise(0, 99, SHAPE)
        self._apply(tf.constant((-1.0) ** step * gradient, tf.float32))

    def _take(self, gradient: Any) -> None:
        if self.library is tf_keras:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.variable * gradient)
            ((gradient, _),) = self.optimizer.compute_gradients(loss, [self.variable], tape=tape)
        self.optimizer.apply_gradients([(gradient, self.variable)])

    def factor(self) -> float:
        """The factor of the last step's learning rate."""
        factor: float = TopKEF.of(self.optimizer).stats().lr_factor
        return factor

    def copy_from(self, other: Run) -> None:
        """Copy the other run's variable and its optimizer's variables, before a first step."""
        self.variable.assign(other.variable)
        self.optimizer.build([self.variable])
        of_both = self.optimizer.variables, other.optimizer.variables
        ours, theirs = (each() if callable(each) else each for each in of_both)
        for mine, its in zip(ours, theirs, strict=True):
            mine.assign(its)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(("kind", "graph"), [("Adam", True), ("AdamW", False)])
def test_steps_are_those_of_the_lower_rate(library: Any, kind: str, graph: bool) -> None:
    """A second run is given the lower learning rate, and a decay that is stronger to match."""
    run = Run(library, kind, auto(), graph=graph)
    other = Run(library, kind, auto(lower_lr=False), graph=graph)
    factors = list[float]()
    for step in range(STEPS):
        run.take(step)
        factor = run.factor()
        other.optimizer.learning_rate = LR * factor
        if kind == "AdamW":
            other.optimizer.weight_decay = DECAY / factor
        other.take(step)
        ours, theirs = run.variable.numpy(), other.variable.numpy()
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
        assert float(run.optimizer.learning_rate) == LR
        factors.append(factor)
    assert min(factors) < 0.2
    assert_ranks_equal([run.variable.numpy(), np.array(factors)])


@BOTH
def test_a_checkpoint_has_the_factor(library: Any, tmp_path: Path) -> None:
    folder = hvd.broadcast_object(str(tmp_path))
    run, again = (Run(library, "Adam", auto(name=n), graph=True) for n in ("run", "again"))
    for step in range(5):
        run.take(step)
    checkpoint.save(folder, TopKEF.of(run.optimizer))
    again.copy_from(run)
    hvd.allgather_object(0, name="saved by all")
    checkpoint.load(folder, again.compression)
    for step in range(5, STEPS):
        run.take(step)
        again.take(step)
        assert run.factor() == again.factor() < 1.0
    assert np.array_equal(run.variable.numpy(), again.variable.numpy())


@pytest.mark.slow
def test_the_rate_of_older_optimizers_cannot_be_lowered() -> None:
    with pytest.raises(ConfigError, match="lower_lr=True was given, and legacy Adam is no Adam"):
        distributed(tf_keras, tf_keras.optimizers.legacy.Adam(LR), auto())
