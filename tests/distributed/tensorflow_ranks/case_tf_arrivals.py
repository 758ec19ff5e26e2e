"""Updates of Keras' Adam and AdamW depend on how often elements arrive, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kerasses import LIBRARIES, distributed
from proof import assert_ranks_equal
from tapes import noise

from horovod_topk.updates.formulas import AFTER, arrives_often, share
from plain import PlainTopKEF as TopKEF

LR, DECAY, STEPS, SHAPE = 0.15, 0.125, 8, (60, 20)
BETAS = 0.5, 0.99  # for 4 steps far is 1
BOTH = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


def auto(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": 0.25, "min_numel": 0, "momentum": "auto"} | settings)


class Run:
    """A variable whose gradients are given: they point to one side and then to the other."""

    def __init__(
        self,
        library: Any,
        kind: Any,
        compression: TopKEF,
        *,
        graph: bool,
        around: Any = None,
        **settings: Any,
    ) -> None:
        self.library, self.variable = library, tf.Variable(noise(9, 0, SHAPE))
        self.compression = compression
        of_adam = {"beta_1": BETAS[0], "beta_2": BETAS[1], "epsilon": 1e-7}
        made = kind(LR, **(settings if kind.__name__ == "SGD" else of_adam | settings))
        made = made if around is None else around(made, initial_scale=1.0)
        self.optimizer = distributed(library, made, compression)
        self._apply = tf.function(self._take) if graph else self._take

    def take(self, step: int) -> np.ndarray[Any, Any]:
        """A step with this rank's gradient; returns the exchanged one."""
        gradient = noise(hvd.rank(), step, SHAPE) / 2 + noise(0, 99, SHAPE)
        applied = self._apply(tf.constant((-1.0) ** step * gradient, tf.float32))
        return np.asarray(applied)

    def _take(self, gradient: Any) -> Any:
        if self.library is tf_keras:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.variable * gradient)
            ((gradient, _),) = self.optimizer.compute_gradients(loss, [self.variable], tape=tape)
        self.optimizer.apply_gradients([(gradient, self.variable)])
        return gradient

    def state(self, key: str) -> np.ndarray[Any, Any]:
        """One of the states after the last step."""
        (found,) = TopKEF.of(self.optimizer).state_dict()[f"state.{key}"]["residuals"].values()
        return np.array(found)

    def copy_from(self, other: Run) -> None:
        """Copy the other run's variable and its optimizer's variables, before a first step."""
        self.variable.assign(other.variable)
        self.optimizer.build([self.variable])
        of_both = self.optimizer.variables, other.optimizer.variables
        ours, theirs = (each() if callable(each) else each for each in of_both)
        for mine, its in zip(ours, theirs, strict=True):
            mine.assign(its)


def codes_after(codes: Any, gradient: Any) -> Any:
    """Codes of phi after a step with a gradient."""
    return np.array(AFTER, "u1")[np.where(gradient != 0, 1, 0), codes]


class Reference:
    """Adam by the formulas of `horovod_topk.updates.formulas`, in float64."""

    def __init__(self, start: Any, decay: float) -> None:
        self.p, self.decay, self.steps = np.array(start, "f8"), decay, 0
        self.m, self.v = np.zeros_like(self.p), np.zeros_like(self.p)
        self.codes = np.zeros(SHAPE, "u1")

    def step(self, gradient: Any, factors: Any) -> None:
        often, self.codes = arrives_often(self.codes), codes_after(self.codes, gradient)
        g, self.steps = np.array(gradient, "f8"), self.steps + 1
        self.p *= 1 - LR * self.decay
        grown = min(1.0, (1 - BETAS[0]) ** 2 * self.steps)
        far = max(1.0, 0.2 * grown * np.sqrt(np.square(self.p).mean()) / LR)
        b = BETAS[0] * share(self.codes) ** 2 * (self.steps > 1)
        c = np.where(often, *factors) if self.steps > 1 else 1.0
        self.m = b * self.m + (1 - b) * c * g
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * g**2
        unbias = np.sqrt(1 - BETAS[1] ** self.steps)
        most = far * np.sqrt(self.v) / unbias if self.steps > 1 else np.inf
        self.m = np.clip(self.m, -most, most)
        self.p = self.p - LR * self.m * unbias / (np.sqrt(self.v) + 1e-7)


def kinds(library: Any) -> dict[str, Any]:
    own = library.optimizers
    return {"Adam": own.Adam, "AdamW": own.AdamW, "legacy": own.legacy.Adam}


@pytest.mark.parametrize(("kind", "graph"), [("AdamW", True), ("Adam", False), ("legacy", True)])
def test_updates_are_those_of_the_formula(kind: str, graph: bool) -> None:
    library = tf_keras  # that of Keras 3 exchanges within the step, unseen
    settings = {"weight_decay": DECAY} if kind == "AdamW" else {}
    run = Run(library, kinds(library)[kind], auto(), graph=graph, **settings)
    reference = Reference(run.variable.numpy(), settings.get("weight_decay", 0.0))
    for step in range(STEPS):
        applied = run.take(step)
        factors, codes = run.state("factors"), run.state("arrivals").reshape(SHAPE)
        reference.step(applied, factors)
        assert np.array_equal(codes, reference.codes)
        np.testing.assert_allclose(run.variable.numpy(), reference.p, 1e-4, 2e-5)
        assert_ranks_equal([run.variable.numpy(), factors, codes])
    assert 0.0999 < TopKEF.of(run.optimizer).stats().step_factor < 0.95


@pytest.mark.slow
@pytest.mark.one_in(8)
@pytest.mark.parametrize("kind", ["AdamW", "legacy", "Keras 3", "scaled"])
@pytest.mark.parametrize("graph", [True, False])
def test_ranks_send_what_moves_adams_weights_most(kind: str, graph: bool) -> None:
    """Weights are about v^(-1/4); a v far below its mean counts as a larger one."""
    library: Any = LIBRARIES["Keras 3"] if kind in ("Keras 3", "scaled") else tf_keras
    around = library.optimizers.LossScaleOptimizer if kind == "scaled" else None
    adam = kinds(library).get(kind, library.optimizers.Adam)
    run = Run(library, adam, auto(), graph=graph, around=around)
    steep, waiting = np.logspace(-1, 1, SHAPE[1]), np.zeros(SHAPE)
    by_magnitude = list[bool]()
    for step in range(STEPS):
        v = np.ones(SHAPE) if step == 0 else squares_of(run)
        magnitude = np.abs(waiting + (gradient := steep * noise(hvd.rank(), step, SHAPE)))
        run._apply(tf.constant(gradient, tf.float32))
        (found,) = TopKEF.of(run.optimizer).state_dict()["residuals"].values()
        waiting = np.array(found).reshape(SHAPE)
        keys = magnitude * np.maximum(v, 2.0 ** (np.floor(np.log2(v.mean())) - 7)) ** -0.25
        sent = waiting == 0
        assert sent.sum() == 300
        assert keys[sent].min() > keys[~sent].max() / 1.25
        by_magnitude.append(magnitude[sent].min() >= magnitude[~sent].max())
    assert by_magnitude[0] and not any(by_magnitude[1:])


def squares_of(run: Run) -> np.ndarray[Any, Any]:
    """Return Adam's mean square v of the variable."""
    optimizer = getattr(run.optimizer, "inner_optimizer", run.optimizer)
    if hasattr(optimizer, "_hyper"):
        return np.array(optimizer.get_slot(run.variable, "v"))
    return np.array(optimizer._velocities[0])


def assert_libraries_agree(kind: str, make: Callable[..., TopKEF], **settings: Any) -> None:
    """Compare the steps of Keras 3 with those of tf-keras.

    kind: class name of the optimizer; make: makes the compressor of a name; settings: the
    optimizer's.
    """
    runs = [
        Run(
            library,
            getattr(library.optimizers, kind),
            make(name=name.replace(" ", "")),
            graph=True,
            **settings,
        )
        for name, library in LIBRARIES.items()
    ]
    for step in range(STEPS):
        for run in runs:
            run.take(step)
        one, other = (run.variable.numpy() for run in runs)
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)


@pytest.mark.slow
def test_keras_3_takes_the_steps_of_tf_keras() -> None:
    """Steps of tf-keras are compared with the formula above."""
    assert_libraries_agree("AdamW", auto, weight_decay=DECAY)


@pytest.mark.slow
@BOTH
def test_embeddings_and_accumulated_gradients_train(library: Any) -> None:
    """Gradients of embeddings are sparse: they are made dense, to be compressed."""
    layers, options = library.layers, {"gradient_accumulation_steps": 2}
    inner = layers.Embedding(50, 8), layers.Flatten(), layers.Dense(3)
    model = library.Sequential([library.Input((4,)), *inner])
    made = library.optimizers.Adam(0.01, **({} if library is tf_keras else options))
    optimizer = distributed(library, made, auto())
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    tokens = np.random.default_rng(hvd.rank()).integers(0, 50, (32, 4))
    for variable in model.variables:
        variable.assign(
            np.full(variable.shape, 0.1) + noise(0, len(variable.shape), variable.shape)
        )
    before = [np.array(each) for each in model.get_weights()]
    model.fit(tokens, tokens[:, 0] % 3, batch_size=8, epochs=2, shuffle=False, verbose=0)
    after = model.get_weights()
    assert all(not np.array_equal(*pair) for pair in zip(before, after, strict=True))
    assert_ranks_equal(after)
    state = TopKEF.of(model.optimizer).state_dict()["state.arrivals"]["residuals"]
    assert len(state) == len(model.trainable_variables)
