"""Steps that Keras' optimizers make themselves on compressed gradients, corrected by family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_topk.updates import formulas, tracker
from horovod_topk.updates.formulas import AFTER, ALWAYS, FARTHEST, family_of

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")
keras, tf_keras = (pytest.importorskip(name) for name in ("keras", "tf_keras"))
adapter = pytest.importorskip("horovod_topk.tensorflow.updates")
kernels = pytest.importorskip("horovod_topk.updates.tensorflow")
own_steps = pytest.importorskip("horovod_topk.tensorflow.own_steps")
variables = pytest.importorskip("horovod_topk.tensorflow.variables")

LR, SHAPE, STEPS, DAMPING = 0.01, (30, 40), 6, (0.5, 0.8)
NUMEL = SHAPE[0] * SHAPE[1]
LIBRARIES = {"Keras 3": keras.optimizers, "tf-keras": tf_keras.optimizers}
LIBRARIES["legacy"] = tf_keras.optimizers.legacy
KERAS_3 = ("RMSprop", "Adamax", "Nadam", "Adagrad", "Adadelta", "Lion", "Lamb", "Ftrl", "Adafactor")
CASES = [
    *[("Keras 3", name) for name in (*KERAS_3, "Muon")],
    *[("tf-keras", name) for name in ("RMSprop", "Adamax", "Nadam", "Adagrad", "Lion")],
    *[("legacy", name) for name in ("RMSprop", "Adamax", "Nadam", "Adagrad")],
]


class State:
    """What an exchange tells of a variable."""

    def __init__(self, damping: tuple[float, float]) -> None:
        self.codes, self.squares = tf.Variable(tf.zeros([NUMEL], tf.uint8)), tf.zeros([NUMEL])
        self.squares, self.does = tf.Variable(self.squares), kernels.Codes.FOLLOW
        self._damping = tf.constant([damping])

    def is_adapted(self, variable: Any) -> bool:
        return True

    def update_inputs(self, each: Any) -> Any:
        codes, squares = (
            variables.VariablePiece(kept, 0, NUMEL) for kept in (self.codes, self.squares)
        )
        return kernels.UpdateInputs([codes], self._damping, None, tf.constant(self.does), [squares])


def made(library: str, name: str, state: State | None = None) -> tuple[Any, Any]:
    """An optimizer and its variable; its steps are corrected if there is a state."""
    start = np.random.default_rng(0).normal(size=SHAPE).astype("f4")
    optimizer = getattr(LIBRARIES[library], name)(LR)
    variable = keras.Variable(start) if library == "Keras 3" else tf.Variable(start)
    if state is None:
        return optimizer, variable
    updates = adapter.Updates(tracker.OWN, family=family_of(optimizer))
    if library == "Keras 3":
        optimizer = adapter.own_class(optimizer, updates).from_config(optimizer.get_config())
    else:
        adapter.update_tf_keras(optimizer, updates)
    updates.adapt(state, [variable])
    return optimizer, variable


def gradient_of(step: int, share: float = 0.4) -> Any:
    random = np.random.default_rng(step + 1)
    return (random.normal(size=SHAPE) * (random.random(SHAPE) < share)).astype("f4")


def stepped(optimizer: Any, variable: Any, *, graph: bool) -> Any:
    """The variable after steps in which all elements arrive."""

    def step(gradient: Any) -> None:
        optimizer.apply_gradients([(gradient, variable)])

    run = tf.function(step) if graph else step
    for number in range(STEPS):
        run(tf.constant(gradient_of(number, 1.0)))
    return variable.numpy()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("library", "name", "graph"),
    [
        pytest.param(*case, graph, id=f"{'-'.join(case)}-{'graph' if graph else 'eager'}")
        for case in CASES
        for graph in (False, True)
        if (*case, graph) != ("tf-keras", "Nadam", True)  # by itself, it divides by 0 in graphs
    ],
)
def test_where_every_element_always_arrives_it_is_the_optimizers_own_step(
    library: str, name: str, graph: bool
) -> None:
    """To the bit, as nothing is withheld then."""
    state = State((1.0, 1.0))
    state.codes.assign(tf.fill([NUMEL], tf.constant(ALWAYS, tf.uint8)))
    ours, plain = (stepped(*made(library, name, each), graph=graph) for each in (state, None))
    assert np.array_equal(ours, plain) and np.isfinite(ours).all()
    assert (state.codes.numpy() == ALWAYS).all()


@pytest.mark.parametrize(("library", "name"), CASES)
def test_rare_elements_are_corrected(library: str, name: str) -> None:
    """And arrivals and mean squares are what the formulas say, from the exchanged gradients."""
    state = State(DAMPING)
    optimizer, variable = made(library, name, state)
    codes, square = np.zeros(SHAPE, "u1"), np.zeros(SHAPE, "f4")
    for number in range(STEPS):
        gradient, before = gradient_of(number), variable.numpy()
        optimizer.apply_gradients([(tf.constant(gradient), variable)])
        codes = np.array(AFTER, "u1")[(gradient != 0).astype(int), codes]
        square = formulas.own_square(square, gradient)
        assert np.array_equal(state.codes.numpy(), codes.ravel())
        np.testing.assert_allclose(state.squares.numpy(), square.ravel(), 1e-5)
        moved = np.abs(variable.numpy() - before)
        far = max(LR, FARTHEST * np.sqrt(np.square(before).mean()))
        assert 0 < moved.max() <= far * 1.001
    assert int(optimizer.iterations) == STEPS


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_root_of_squares_is_damped_by_class(library: str) -> None:
    """Adagrad's step has no state that the correction changes."""
    state = State(DAMPING)
    ours, plain = made(library, "Adagrad", state), made(library, "Adagrad")
    often = np.arange(NUMEL).reshape(SHAPE) % 2 == 0
    state.codes.assign(np.where(often, 250, 0).astype("u1").ravel())
    start, gradient = ours[1].numpy(), gradient_of(0, 1.0)
    for optimizer, variable in (ours, plain):
        optimizer.apply_gradients([(tf.constant(gradient), variable)])
    own, expected = ours[1].numpy() - start, plain[1].numpy() - start
    np.testing.assert_allclose(own, expected * np.where(often, *DAMPING), 1e-3, 1e-6)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_mean_of_gradients_moves_before_the_step(library: str) -> None:
    """Adamax's mean, and its change: c / phi^(1/2) times that of a step with this mean."""
    state = State(DAMPING)
    optimizer, variable = made(library, "Adamax", state)
    mean, code, norm = np.zeros(SHAPE), np.zeros(SHAPE, "u1"), np.zeros(SHAPE)
    for number in range(4):
        gradient, before = gradient_of(number).astype("f8"), variable.numpy()
        optimizer.apply_gradients([(tf.constant(gradient, tf.float32), variable)])
        factor = np.where(formulas.arrives_often(code), *DAMPING)
        code = np.array(AFTER, "u1")[(gradient != 0).astype(int), code]
        share = formulas.share(code)
        mean = formulas.own_mean(mean, gradient, share, 1.0 - 0.9**number)
        mean, norm = 0.9 * mean + 0.1 * gradient, np.maximum(norm * 0.999, np.abs(gradient))
        change = -LR * mean / ((1.0 - 0.9 ** (number + 1)) * (norm + 1e-7))
        change = change * factor / np.maximum(share**2, 0.1)
        far = max(LR, FARTHEST * np.sqrt(np.square(before).mean()))
        expected = before + np.clip(change, -far, far)
        np.testing.assert_allclose(variable.numpy(), expected, 1e-4, 1e-5)
        kept = adapter._mean_of(optimizer, variable)
        np.testing.assert_allclose(kept.numpy(), mean, 1e-4, 1e-6)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_step_that_is_not_committed_is_the_optimizers_own(library: str) -> None:
    state = State(DAMPING)
    state.does = kernels.Codes.STAY
    ours, plain = made(library, "Nadam", state), made(library, "Nadam")
    for optimizer, variable in (ours, plain):
        optimizer.apply_gradients([(tf.constant(gradient_of(0)), variable)])
    assert np.array_equal(ours[1].numpy(), plain[1].numpy())
    assert not state.codes.numpy().any() and not state.squares.numpy().any()


@pytest.mark.parametrize("family", [formulas.UNKNOWN, formulas.SIGN])
def test_a_step_of_an_unknown_optimizer_is_not_limited(family: Any) -> None:
    """It may be linear, and a limit would lose gradients."""
    variable, known = tf.Variable(tf.zeros(SHAPE)), State((1.0, 1.0)).update_inputs([])
    own = own_steps.OwnStep(tf.constant(gradient_of(0)), variable, known, family)
    variable.assign_sub(tf.ones(SHAPE))
    own.correct(tf.constant(LR, tf.float64))
    expected = np.float32(-1.0 if family is formulas.UNKNOWN else -LR)
    assert (variable.numpy() == expected).all()
