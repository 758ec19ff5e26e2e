"""Every option of Keras' SGD, Adam and AdamW, as the table in docs/tensorflow.md says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from kerasses import LIBRARIES, compiled, data, distributed
from proof import assert_ranks_equal
from tapes import noise

from horovod_topk.errors import TopKError
from plain import PlainTopKEF as TopKEF

PAGE = Path(__file__).parents[3] / "docs" / "tensorflow.md"
SHAPE, DENSE, STEPS = (60, 20), 4, 8  # the first steps send all elements
ALL, THREE, LEGACY = tuple(LIBRARIES), ("Keras 3",), ("tf-keras",)
KINDS = {"all": ("SGD", "Adam"), "SGD": ("SGD",), "Adam, AdamW": ("AdamW",)}  # those that are tried
BEGUN = 1000  # steps before these, after which Adam no longer corrects a bias


def itself(optimizer: Any) -> Any:
    return optimizer


def scaled(optimizer: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)


def falling(library: Any) -> Any:
    bounds, rates = [BEGUN + 1, BEGUN + 3], [0.1, 0.05, 0.02]
    return library.optimizers.schedules.PiecewiseConstantDecay(bounds, rates)


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        outcome: "adapted"; "left", with a warning that has `shown`; "own": the optimizer's own
            step, without a warning; "error", with `shown`.
        of: the optimizers that have the option.
        given: returns options of the optimizer, for a Keras.
        libraries: names of the Kerases that have the option.
        around: returns what is distributed in place of the optimizer.
        scale: factor of the loss, which the optimizer takes out.
        dtype: of the variable.
        shown: part of the warning or error.
    """

    outcome: str
    of: str = "all"
    given: Callable[[Any], dict[str, Any]] = field(default=lambda _: {})
    libraries: tuple[str, ...] = ALL
    around: Callable[[Any], Any] = itself
    scale: float = 1.0
    dtype: str = "float32"
    shown: str = ""


def options(outcome: str, of: str = "all", libraries: Any = ALL, **own: Any) -> Row:
    return Row(outcome, of, lambda _: own, libraries)


ROWS = {
    "learning_rate": options("adapted", learning_rate=0.05),
    "learning_rate as a schedule": Row("adapted", given=lambda k: {"learning_rate": falling(k)}),
    "momentum = 0": options("own", "SGD", momentum=0.0),
    "beta_1 = 0": options("adapted", "Adam, AdamW", beta_1=0.0),
    "nesterov": options("adapted", "SGD", nesterov=True),
    "amsgrad": options("adapted", "Adam, AdamW", amsgrad=True),
    "epsilon": options("adapted", "Adam, AdamW", epsilon=1e-3),
    "weight_decay": options("adapted", weight_decay=0.1),
    "clipnorm": options("adapted", clipnorm=0.5),
    "clipvalue": options("adapted", clipvalue=0.1),
    "global_clipnorm": options("adapted", global_clipnorm=0.5),
    "use_ema": options("adapted", use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "gradient_accumulation_steps": options(
        "adapted", libraries=THREE, gradient_accumulation_steps=2
    ),
    "loss_scale_factor": Row(
        "adapted", given=lambda _: {"loss_scale_factor": 4.0}, libraries=THREE, scale=4.0
    ),
    "LossScaleOptimizer": Row("adapted", libraries=THREE, around=scaled, scale=4.0),
    "jit_compile": options("adapted", libraries=LEGACY, jit_compile=True),
    "float64 variables": Row("adapted", dtype="float64"),
    "bfloat16 variables": Row("left", dtype="bfloat16", shown="is bfloat16"),
    "float16 variables": Row("left", dtype="float16", shown="is float16"),
}
CASES = [
    pytest.param(row, library, kind, id=f"{name}-{library}-{kind}")
    for name, row in ROWS.items()
    for library in row.libraries
    for kind in KINDS[row.of]
]


def made(row: Row, library: Any, kind: str) -> Any:
    usual = {"momentum": 0.9} if kind == "SGD" else {"beta_1": 0.5, "beta_2": 0.5}
    given = {"learning_rate": 0.1, **usual, **row.given(library)}
    return row.around(getattr(library.optimizers, kind)(**given))


def begun(optimizer: Any, variable: Any) -> Any:
    """An optimizer that has taken steps of zeros."""
    optimizer.build([variable])
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    inner._iterations.assign(BEGUN * (getattr(inner, "gradient_accumulation_steps", None) or 1))
    return optimizer


def gradient(row: Row, rank: int, step: int) -> Any:
    mine = noise(rank, step, SHAPE) / 2 + noise(0, 99, SHAPE)
    return tf.cast((-1.0) ** step * mine, row.dtype)


def applied(optimizer: Any, given: Any, variable: Any, *, exchanges: bool) -> None:
    """Apply a gradient, which Horovod exchanges when tf-keras computes it."""
    if exchanges and not isinstance(optimizer, keras.optimizers.Optimizer):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * given)
        ((given, _),) = inner.compute_gradients(loss, [variable], tape=tape)
    optimizer.apply_gradients([(given, variable)])


@pytest.mark.one_in(60)
@pytest.mark.parametrize(("row", "library", "kind"), CASES)
def test_each_option_does_what_the_table_says(row: Row, library: str, kind: str) -> None:
    """Compare with the optimizer's own step, first with all elements sent, then with some."""
    package = LIBRARIES[library]
    compression = TopKEF(ratio=0.25, min_numel=0, momentum="auto", warmup=((DENSE, 1.0),))
    ours, own = (tf.Variable(tf.cast(noise(9, 0, SHAPE), row.dtype)) for _ in range(2))
    optimizer = begun(distributed(package, made(row, package, kind), compression), ours)
    dense = begun(made(row, package, kind), own)
    near = {"float16": 1e-2, "bfloat16": 1e-1}.get(row.dtype, 1e-5)
    for step in range(STEPS):
        ranks = [gradient(row, rank, step) * row.scale for rank in range(hvd.size())]
        applied(optimizer, ranks[hvd.rank()], ours, exchanges=True)
        applied(dense, tf.add_n(ranks) / hvd.size(), own, exchanges=False)
        if step < DENSE:
            np.testing.assert_allclose(ours.numpy(), own.numpy(), near, near)
    weights = ours.numpy().astype("f8")
    assert np.isfinite(weights).all() and not np.allclose(weights, own.numpy().astype("f8"), near)
    assert_ranks_equal([weights])
    state = TopKEF.of(optimizer)
    warnings = state.stats().warnings
    assert len(warnings) == int(row.outcome == "left") and all(row.shown in w for w in warnings)
    assert state.stats().steps == STEPS // row.given(package).get("gradient_accumulation_steps", 1)
    assert ("state.arrivals" in state.state_dict()) == (row.outcome == "adapted")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_step_compiled_by_xla_is_refused(library: str) -> None:
    package = LIBRARIES[library]
    optimizer = distributed(package, package.optimizers.SGD(0.1, momentum=0.9), TopKEF)
    model = compiled(package, optimizer)
    model.compile(optimizer=optimizer, loss=model.loss, jit_compile=True)
    with pytest.raises(TopKError, match="compiled by XLA"):
        model.fit(*data(), batch_size=8, verbose=0)


def test_the_table_has_every_row() -> None:
    words = {"adapted": "adapted", "left": "left", "own": "own step", "error": "error"}
    table = PAGE.read_text().split("## Options of SGD, Adam and AdamW")[1].split("\n## ")[0]
    found = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| \*\*([^*]+)\*\*", table, re.M)
    held = {n.replace("`", ""): tuple(more) for n, *more in found if "XLA" not in n}
    assert held == {
        name: (
            row.of,
            "both" if row.libraries == ALL else row.libraries[0],
            words[row.outcome],
        )
        for name, row in ROWS.items()
    }
