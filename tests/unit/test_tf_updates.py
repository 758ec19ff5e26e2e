"""Updates of Keras' optimizers have the values of `horovod_topk.updates.formulas`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_topk.ops.coding import FREE
from horovod_topk.updates import formulas, tracker
from horovod_topk.updates.formulas import AFTER, ALWAYS, Sgd, adam_of

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")
keras, tf_keras = (pytest.importorskip(name) for name in ("keras", "tf_keras"))
adapter = pytest.importorskip("horovod_topk.tensorflow.updates")
kernels = pytest.importorskip("horovod_topk.updates.tensorflow")
variables = pytest.importorskip("horovod_topk.tensorflow.variables")

LR, SHAPE, STEPS, CUT, DAMPING = 0.1, (30, 40), 5, 0.3, (0.5, 0.8)
ADAM: dict[str, Any] = {"beta_1": 0.5, "beta_2": 0.99, "epsilon": 1e-3}
LIBRARIES = {"Keras 3": keras.optimizers, "tf-keras": tf_keras.optimizers}
LIBRARIES["legacy"] = tf_keras.optimizers.legacy
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "Adam": ("Adam", ADAM),
    "amsgrad": ("Adam", {**ADAM, "amsgrad": True}),
    "AdamW": ("AdamW", {**ADAM, "weight_decay": 0.1}),
}


class State:
    """What an exchange tells of a variable."""

    def __init__(self, kind: str) -> None:
        every = tf.fill([1300], tf.constant(7, tf.uint8))  # also of other tensors
        self.array, self.does = tf.Variable(every), kernels.Codes.FOLLOW
        self.piece = variables.VariablePiece(self.array, 64, 1200)
        self.piece.assign(tf.zeros([1200], tf.uint8))
        sgd = kind == "SGD"
        self.known = (
            (None, tf.constant([CUT], tf.float64)) if sgd else (tf.constant([DAMPING]), None)
        )

    @property
    def codes(self) -> Any:
        codes = self.array.numpy()
        assert (codes[:64] == 7).all() and (codes[1264:] == 7).all()
        return codes[64:1264]

    def is_adapted(self, variable: Any) -> bool:
        return True

    def update_inputs(self, variables: Any) -> Any:
        return kernels.UpdateInputs([self.piece], *self.known, tf.constant(self.does))


class Verbs:
    root = staticmethod(np.sqrt)
    where: Any = staticmethod(np.where)


class Reference:
    """The update by NumPy, in float32."""

    def __init__(self, start: Any, kind: str, settings: dict[str, Any]) -> None:
        self.p, self.kind, self.settings, self.steps = start, kind, settings, 0
        self.moments = [np.zeros_like(start) for _ in range(3)]
        self.codes = np.zeros(SHAPE, "u1")

    def step(self, gradient: Any) -> None:
        self.steps += 1
        often = formulas.arrives_often(self.codes)
        self.codes = np.array(AFTER, "u1")[(gradient != 0).astype(int), self.codes]
        share = formulas.share(self.codes.astype("f4"))
        if self.kind == "SGD":
            nesterov = self.settings.get("nesterov", False)
            of = Sgd(self.settings["momentum"], LR, 0.0, nesterov, CUT)
            buffer = self.moments[0] / -LR  # Keras' momentum is -lr times the buffer
            self.p, after = formulas.sgd(self.p, buffer, gradient, share, of)
            self.moments[0] = after * -LR
            return
        betas, eps = (self.settings["beta_1"], self.settings["beta_2"]), self.settings["epsilon"]
        unbias = np.sqrt(1.0 - betas[1] ** self.steps)
        decays = 0.0, self.settings.get("weight_decay", 0.0)
        numbers = adam_of(betas, self.steps, LR, decays, eps / unbias)
        factor = np.where(often, *DAMPING).astype("f4") if self.steps > 1 else 1.0
        rms = np.sqrt(np.square(self.p).mean()) * (1.0 - LR * decays[1])
        kept = *self.moments[:2], self.moments[2] if self.settings.get("amsgrad") else None
        self.p, *found = formulas.adam(self.p, kept, gradient, share, factor, rms, numbers, Verbs())
        self.moments[: len(found)] = found


def prepared(library: str, kind: str, settings: dict[str, Any]) -> tuple[Any, Any, State]:
    """An optimizer whose updates are replaced, its variable and what is known of the exchange."""
    start = np.random.default_rng(0).normal(size=SHAPE).astype("f4")
    optimizer = getattr(LIBRARIES[library], kind)(LR, **settings)
    updates, state = adapter.Updates(tracker.SGD if kind == "SGD" else tracker.ADAM), State(kind)
    if library == "Keras 3":
        own = adapter.own_class(optimizer, updates)
        optimizer, variable = own.from_config(optimizer.get_config()), keras.Variable(start)
    else:
        adapter.update_tf_keras(optimizer, updates)
        variable = tf.Variable(start)
    updates.adapt(state, [variable])
    return optimizer, variable, state


def gradient_of(step: int) -> Any:
    random = np.random.default_rng(step + 1)
    return (random.normal(size=SHAPE) * (random.random(SHAPE) < 0.4)).astype("f4")


@pytest.fixture(params=["kernel", "operations"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes the updates."""
    if request.param == "operations":
        monkeypatch.setattr(kernels, "find_operations", lambda: None)
    elif kernels.find_operations() is None:
        pytest.skip("the kernels are not compiled")


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize(
    ("library", "case"),
    [
        *[("Keras 3", case) for case in CASES],
        *[("tf-keras", "nesterov"), ("tf-keras", "Adam"), ("legacy", "SGD"), ("legacy", "amsgrad")],
    ],
)
def test_updates_are_those_of_the_formulas(library: str, case: str) -> None:
    kind, settings = CASES[case]
    optimizer, variable, state = prepared(library, kind, settings)
    reference = Reference(variable.numpy(), kind, settings)
    for step in range(STEPS):
        gradient = gradient_of(step)
        optimizer.apply_gradients([(tf.constant(gradient), variable)])
        reference.step(gradient)
        assert np.array_equal(state.codes, reference.codes.ravel())
        np.testing.assert_allclose(variable.numpy(), reference.p, 2e-5, 2e-6)
        slots = adapter.slots_of(optimizer, variable)
        for slot, expected in zip(slots, reference.moments, strict=False):
            np.testing.assert_allclose(slot.numpy(), expected, 2e-5, 1e-6)
    assert int(optimizer.iterations) == STEPS


@pytest.mark.usefixtures("by")
def test_a_weight_that_is_nan_leaves_others_the_largest_limit() -> None:
    optimizer, variable, state = prepared("Keras 3", *CASES["Adam"])
    reference = Reference(variable.numpy(), *CASES["Adam"])
    for step in range(2):
        gradient = gradient_of(step)
        gradient[0, 0] = np.nan
        optimizer.apply_gradients([(tf.constant(gradient), variable)])
        reference.step(gradient)
        np.testing.assert_allclose(variable.numpy(), reference.p, 2e-5, 2e-6)
        moment = adapter.slots_of(optimizer, variable)[0]
        reference.moments[0] = np.full_like(reference.p, 1e9)
        moment.assign(reference.moments[0])
    assert state.codes.any() and np.abs(reference.p[1]).max() > 0.5 * FREE * LR


@pytest.mark.usefixtures("by")
def test_codes_stay_in_a_step_that_is_not_committed_and_are_full_where_all_is_sent() -> None:
    optimizer, variable, state = prepared("Keras 3", *CASES["SGD"])
    optimizer.apply_gradients([(tf.constant(gradient_of(0)), variable)])
    before, state.does = state.codes, kernels.Codes.STAY
    optimizer.apply_gradients([(tf.constant(gradient_of(1)), variable)])
    assert before.any() and np.array_equal(state.codes, before)
    state.does, start, momentum = kernels.Codes.FILL, variable.numpy(), optimizer.momentums[0]
    moved, gradient = momentum.numpy(), gradient_of(2)
    optimizer.apply_gradients([(tf.constant(gradient), variable)])
    assert state.codes.min() >= 248
    arrives = gradient != 0
    expected = start + 0.9 * moved - LR * (1.0 - CUT) * gradient
    np.testing.assert_allclose(variable.numpy()[arrives], expected[arrives], 1e-5, 1e-6)


@pytest.mark.usefixtures("by")
def test_a_momentum_of_dense_steps_is_not_applied_at_once() -> None:
    optimizer, variable, state = prepared("Keras 3", *CASES["SGD"])
    optimizer.build([variable])
    optimizer.momentums[0].assign(np.ones(SHAPE, "f4"))
    before = variable.numpy()
    optimizer.apply_gradients([(tf.zeros(SHAPE), variable)])
    moved = variable.numpy() - before
    assert moved.min() > 0.9 and moved.max() < 1.2, "all at once it would be 9"
    assert state.codes.min() == AFTER[False][ALWAYS]
