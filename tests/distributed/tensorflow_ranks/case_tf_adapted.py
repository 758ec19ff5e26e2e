"""`TopKEF.adapt`: a tape with an adapted optimizer does what a distributed optimizer does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kerasses import LIBRARIES, distributed
from proof import Array, assert_ranks_equal, assert_same_history
from tapes import FEW, Perceptron, batch, batch_size

from horovod_topk.core.run.stats import StepCounters
from horovod_topk.errors import ConfigError, NotAttachedError, PlanMismatchError
from horovod_topk.tensorflow import TopKEF

STEPS = 6  # two sizes of batches: a graph is traced twice, and the first trace runs again
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"momentum": 0.9, "nesterov": True, "clipnorm": 0.5}),
    "Adam": ("Adam", {"epsilon": 1e-5, "amsgrad": True}),
    "RMSprop": ("RMSprop", {}),  # a step of its own, which is corrected
    "Adamax": ("Adamax", {}),  # the same, and a mean of gradients that is moved
    "plain": ("SGD", {}),  # not adapted: plain error feedback, the rate followed
}
# Variables of three optimizers; the last has an embedding, whose gradient is sparse.
PARTS = {"SGD": slice(0, 3), "Adam": slice(3, 6), "plain": slice(6, None)}
Step = Callable[[Any, Any], None]


def settings(**more: Any) -> TopKEF:
    return TopKEF(**{"ratio": 0.1, "min_numel": 0, "warmup": None} | more)


def made(library: Any, kind: str) -> Any:
    optimizers = LIBRARIES[library].optimizers if library in LIBRARIES else LEGACY
    name, options = KINDS[kind]
    options = {k: v for k, v in options.items() if library != "legacy" or k != "clipnorm"}
    return getattr(optimizers, name)(falling(library), **options)


def falling(library: str) -> Any:
    module = keras if library == "Keras 3" else tf_keras
    return module.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9)


LEGACY = tf_keras.optimizers.legacy
ALL = [*LIBRARIES, "legacy"]


def by_tape(model: Any, compression: Any, optimizer: Any, part: slice = slice(None)) -> Step:
    """A step of a hand-written loop."""
    own = model.variables[part]

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        optimizer.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))

    return step


def by_optimizer(model: Any, optimizer: Any, part: slice = slice(None)) -> Step:
    """A step of an optimizer that `DistributedOptimizer` has made."""
    own = model.variables[part]

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        if isinstance(optimizer, keras.optimizers.Optimizer):
            pairs = [*zip(tape.gradient(loss, own), own, strict=True)]
        else:
            pairs = optimizer.compute_gradients(loss, own, tape=tape)
        optimizer.apply_gradients(pairs)

    return step


def history(
    model: Any, steps: Sequence[Step], *, graph: bool, count: int = FEW
) -> list[list[Array]]:
    """The variables after every step of all, which run one after another."""

    def run(x: Any, y: Any) -> None:
        for step in steps:
            step(x, y)

    run = tf.function(run) if graph else run
    found = []
    for position in range(count):
        run(*batch(position, batch_size(position)))
        found.append([variable.numpy() for variable in model.variables])
    return found


def assert_same_state(one: Any, other: Any) -> None:
    """Equal residuals, arrival codes, energies and norms."""
    ours, theirs = (each.state_dict() for each in (one, other))
    assert ours.keys() == theirs.keys()
    for key in [None, *(key for key in ours if key.startswith("state."))]:
        both = [(each[key] if key else each)["residuals"] for each in (ours, theirs)]
        pairs = zip(*(each.items() for each in both), strict=True)
        wrong = [name for (name, a), (_, b) in pairs if not np.array_equal(a, b)]
        assert not wrong, f"{key or 'residuals'}: {wrong}"


@pytest.mark.one_in(40, first=1)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("library", ALL)
def test_an_adapted_optimizer_does_what_a_distributed_one_does(
    library: str, kind: str, graph: bool
) -> None:
    models, optimizer = (Perceptron(), Perceptron()), made(library, kind)
    compression = settings().adapt(optimizer)
    other = distributed(LIBRARIES.get(library, tf_keras), made(library, kind), settings())
    ours = history(
        models[0], [by_tape(models[0], compression, optimizer)], graph=graph, count=STEPS
    )
    theirs = history(models[1], [by_optimizer(models[1], other)], graph=graph, count=STEPS)
    assert_same_history(ours, theirs)
    assert_same_state(TopKEF.of(optimizer), TopKEF.of(other))
    assert TopKEF.of(optimizer).stats().steps == STEPS
    assert compression.stats().warnings == TopKEF.of(other).stats().warnings
    assert any(TopKEF.of(optimizer).state_dict()["residuals"]["v0"].numpy())
    assert ("state.arrivals" in compression.state_dict()) == (kind != "plain")
    assert ("state.squares" in compression.state_dict()) == (kind in ("RMSprop", "Adamax"))
    assert_ranks_equal(ours[-1])


@pytest.mark.slow
@pytest.mark.parametrize("library", ["Keras 3", "tf-keras"])
def test_three_optimizers_of_one_model_on_one_tape(library: str) -> None:
    """As three distributed optimizers; each variable has the update of its own.

    It is eager: graphs of one tape and of three round gradients differently.
    """
    models, compression = [Perceptron(embedding=True) for _ in range(2)], settings()
    ours, theirs = ({kind: made(library, kind) for kind in PARTS} for _ in range(2))
    for kind, optimizer in ours.items():
        compression.adapt(optimizer, models[0].variables[PARTS[kind]])
    seen = list[StepCounters]()
    compression.on_step(seen.append)
    theirs = {k: distributed(LIBRARIES[library], o, settings()) for k, o in theirs.items()}
    found = history(models[0], [by_one_tape(models[0], compression, ours)], graph=False)
    assert_same_history(found, history(models[1], [by_both(models[1], theirs)], graph=False))
    assert_ranks_equal(found[-1])
    assert len(seen) == 2 * len(found)  # the third optimizer's gradient is sparse
    for kind, (state, count) in {"SGD": ("norms", 3), "Adam": ("energy", 2)}.items():
        assert_same_state(TopKEF.of(ours[kind]), TopKEF.of(theirs[kind]))
        known = TopKEF.of(ours[kind]).state_dict()[f"state.{state}"]["residuals"].values()
        assert sum(each.shape[0] > 0 for each in known) == count
    assert "sparse" in TopKEF.of(ours["plain"]).stats().skipped["v6"]
    with pytest.raises(NotAttachedError, match="3 optimizers use this TopKEF"):
        compression.stats()


def by_one_tape(model: Any, compression: Any, optimizers: dict[str, Any]) -> Step:
    """A step whose tape has the variables of all optimizers."""

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        pairs = [*zip(tape.gradient(loss, model.variables), model.variables, strict=True)]
        with pytest.raises(NotAttachedError, match=r"of 3 optimizers.*TopKEF\.of\(optimizer\)"):
            TopKEF.of(tape)
        for kind, optimizer in optimizers.items():
            optimizer.apply_gradients(pairs[PARTS[kind]])

    return step


def by_both(model: Any, optimizers: dict[str, Any]) -> Step:
    """A step of distributed optimizers, on gradients of the same weights."""

    def step(x: Any, y: Any) -> None:
        pairs = []
        for kind, optimizer in optimizers.items():
            own = model.variables[PARTS[kind]]
            with tf.GradientTape() as tape:
                loss = model.loss(x, y)
            if isinstance(optimizer, keras.optimizers.Optimizer):
                pairs.append([*zip(tape.gradient(loss, own), own, strict=True)])
            else:
                pairs.append(optimizer.compute_gradients(loss, own, tape=tape))
        for each, optimizer in zip(pairs, optimizers.values(), strict=True):
            optimizer.apply_gradients(each)

    return step


@pytest.mark.slow
@pytest.mark.parametrize("library", ["Keras 3", "tf-keras"])
def test_a_loss_scale_changes_nothing_and_an_overflow_skips_all_ranks(library: str) -> None:
    """Scales are powers of two, so that no bit depends on them."""
    models, plain = (Perceptron(), Perceptron()), made(library, "Adam")
    module = keras.optimizers if library == "Keras 3" else tf_keras.mixed_precision
    growing = {"initial_scale": 1024.0, "dynamic_growth_steps": 3}
    scaler = module.LossScaleOptimizer(made(library, "Adam"), **growing)
    step = scaled(models[0], settings().adapt(scaler), scaler)
    ours = history(models[0], [step], graph=True)
    expected = [by_tape(models[1], settings().adapt(plain), plain)]
    assert_same_history(ours, history(models[1], expected, graph=True))
    before = TopKEF.of(scaler).state_dict()
    x, y = batch(STEPS, 8)
    step(x * (np.inf if hvd.rank() == 0 else 1.0), y)
    assert_same_history([ours[-1], [0]], [[v.numpy() for v in models[0].variables], [0]])
    after = TopKEF.of(scaler).state_dict()
    for name, residual in before["residuals"].items():
        assert np.array_equal(residual, after["residuals"][name])


def scaled(model: Any, compression: Any, scaler: Any) -> Step:
    """A step of a hand-written loop with a loss scale, as each Keras documents it."""

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
            is_3 = isinstance(scaler, keras.optimizers.Optimizer)
            loss = scaler.scale_loss(loss) if is_3 else scaler.get_scaled_loss(loss)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.variables)
        if not is_3:
            gradients = scaler.get_unscaled_gradients(gradients)
        scaler.apply_gradients(zip(gradients, model.variables, strict=True))

    return step


@pytest.mark.slow
@pytest.mark.parametrize("library", ALL)
def test_a_function_that_only_exchanges_selects_by_adams_mean_squares(library: str) -> None:
    """It is traced before the optimizer has applied a gradient."""
    ends = []
    for apart in (True, False):
        model, optimizer = Perceptron(), made(library, "Adam")
        compression = settings().adapt(optimizer)

        step = in_two if apart else by_tape
        steps = [step(model, compression, optimizer)]
        ends.append(history(model, steps, graph=not apart))
    assert_same_history(*ends)


def in_two(model: Any, compression: Any, optimizer: Any) -> Step:
    """A step that exchanges in a tf.function and applies gradients outside of it."""

    @tf.function
    def exchange(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, model.variables)

    def step(x: Any, y: Any) -> None:
        optimizer.apply_gradients(zip(exchange(x, y), model.variables, strict=True))

    return step


@pytest.mark.slow
def test_an_optimizer_that_was_built_for_too_few_says_so() -> None:
    """By the first of two exchanges in a tf.function, as Adam's mean squares are read there."""
    model, optimizer = Perceptron(), made("Keras 3", "Adam")
    compression = settings().adapt(optimizer)

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape(persistent=True) as tape:
            loss = model.loss(x, y)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        parts = model.variables[:2], model.variables[2:]
        gradients = [gradient for part in parts for gradient in tape.gradient(loss, part)]
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    with pytest.raises(ConfigError, match=r"'v2'.*Adam was built without.*optimizer\.build"):
        step(*batch(0, 8))


@pytest.mark.slow
def test_a_tape_without_an_optimizer_says_once_what_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, compression = Perceptron(), settings(ratio=0.2)
    optimizer = made("Keras 3", "Adam")
    with caplog.at_level(logging.WARNING, "horovod_topk"):
        history(model, [by_tape(model, compression, optimizer)], graph=False)
    (warning,) = compression.stats().warnings
    line = "compression = TopKEF(ratio=0.2, min_numel=0, warmup=None).adapt(optimizer)"
    assert line in warning and caplog.text.count(warning) == 1
    with caplog.at_level(logging.WARNING, "horovod_topk"):
        quiet, optimizer = Perceptron(), made("Keras 3", "Adam")
        history(quiet, [by_tape(quiet, settings(momentum=0), optimizer)], graph=False)
    assert caplog.text.count("does not adapt") == 1
    assert_ranks_equal([each.numpy() for each in model.variables])


@pytest.mark.parametrize("taped", [True, False], ids=["adapted", "distributed"])
def test_a_rank_with_another_optimizer_is_named(taped: bool) -> None:
    """Nothing that is sent depends on the optimizer here, and weights would go apart.

    Every rank makes both optimizers: Keras counts them in names that dense exchanges go by.
    """
    kinds = [made("Keras 3", kind) for kind in ("plain", "Adam")]
    model, optimizer, compression = Perceptron(), kinds[hvd.rank()], settings(momentum=0)
    if taped:
        step = by_tape(model, compression.adapt(optimizer), optimizer)
    else:
        step = by_optimizer(model, distributed(keras, optimizer, compression))
    with pytest.raises(PlanMismatchError, match=r'ranks disagree on optimizer: .*"Adam" on rank'):
        step(*batch(0, 8))


def test_a_variable_without_an_optimizer_is_an_error() -> None:
    model, optimizers = Perceptron(), [made("Keras 3", kind) for kind in ("SGD", "Adam")]
    compression = settings().adapt(optimizers[0], model.variables[:2])
    step = by_tape(model, compression, optimizers[0])
    with pytest.raises(ConfigError, match=r"'v2'.*0 of 1 adapted optimizers update this variable"):
        step(*batch(0, 8))
    compression.adapt(optimizers[1])
    with pytest.raises(ConfigError, match=r"'v0'.*2 of 2 adapted optimizers update this variable"):
        step(*batch(0, 8))
