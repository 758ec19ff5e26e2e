"""Learning rates that residuals follow in TensorFlow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")


def schedules(library: Any) -> Any:
    """One of the library's schedules: 0.4, then 0.3, and so on."""
    return library.optimizers.schedules.PolynomialDecay(0.4, 4, 0.0)


@pytest.mark.parametrize("name", ["keras", "tf_keras", "legacy"])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_rate_is_that_of_the_step_to_come(name: str, scaled: bool) -> None:
    from horovod_topk.tensorflow.learning_rates import rate_of

    library: Any = pytest.importorskip("keras" if name == "keras" else "tf_keras")
    optimizers = library.optimizers.legacy if name == "legacy" else library.optimizers
    around = library.optimizers if name == "keras" else library.mixed_precision
    inner = optimizers.SGD(schedules(library))
    optimizer = around.LossScaleOptimizer(inner) if scaled else inner
    variable, rates = tf.Variable([1.0]), []
    for _ in range(4):
        before = float(variable[0])
        rates.append(float(rate_of(optimizer)))
        inner.apply_gradients([(tf.constant([1.0]), variable)])
        assert before - float(variable[0]) == pytest.approx(rates[-1])
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_the_rate_within_a_loss_scale_and_of_an_optimizer_without_one() -> None:
    from horovod_topk.tensorflow.learning_rates import rate_of

    assert rate_of(SimpleNamespace()) is None
    inner = SimpleNamespace(learning_rate=0.5)
    assert float(rate_of(SimpleNamespace(inner_optimizer=inner))) == 0.5


@pytest.mark.parametrize(
    ("unit", "rate", "owed", "then"),
    [
        (0.0, 0.5, 3.0, 0.5),  # nothing was noted
        (0.5, 0.48, 3.125, 0.48),
        (0.5, 0.5, 3.0, 0.5),
        (0.5, 2.0, 0.75, 2.0),
        (0.5, 0.25, 3 / 0.95, 0.475),  # a twentieth less, at most
        (0.5, 1e-9, 3 / 0.95, 0.475),
        (0.5, 0.0, 0.0, 0.5),  # weights are frozen: a gradient is sent alone
        (0.0, 1e-13, 3.0, 0.0),  # ignored, as `core.rates` has it
        (0.5, -1.0, 3.0, 0.5),
        (0.5, float("nan"), 3.0, 0.5),
        (0.5, float("inf"), 3.0, 0.5),
    ],
)
def test_the_same_update_is_owed(unit: float, rate: float, owed: float, then: float) -> None:
    from horovod_topk.core.plan.buckets import TensorSpec, make_plan
    from horovod_topk.methods.topk import TopK
    from horovod_topk.tensorflow.learning_rates import VariableRates
    from horovod_topk.tensorflow.state_variables import VariableArenas
    from horovod_topk.tensorflow.variables import RateVariables, VariablePiece

    other, kept, stored = tf.Variable(0.0), tf.Variable([3.0, -3.0]), RateVariables()
    rows = dict(zip(["other", "w"], stored.of([other, kept]), strict=True))
    rates = VariableRates(lambda _: 0.95, rows)
    rates.load({"rates": {"w": unit}, "largest_rates": {"w": 2 * unit}})
    (bucket,) = make_plan([TensorSpec("w", (2,), "float32")], TopK()).buckets
    now = rates.at(["w"], tf.constant(rate, tf.float64))
    pieces = [VariablePiece(kept, 0, 2)]
    factors = now.factors(["w"], "float32")
    scaled = VariableArenas(bucket, pieces, factors).residual.value.numpy()
    assert scaled.tolist() == pytest.approx([owed, -owed])
    largest = max(2 * unit, then)
    assert float(now.decays(["w"])[0]) == pytest.approx(then / largest if unit else 1.0)
    now.take_on()
    assert float(now.largest_decay) == float(now.decays(["w"])[0])
    saved = {"rates": {"w": then}, "largest_rates": {"w": largest}}
    assert rates.saved() == (saved if then else {"rates": {}, "largest_rates": {}})
    assert kept.numpy().tolist() == [3.0, -3.0]
    assert VariableArenas(bucket, pieces).residual.value.numpy().tolist() == [3.0, -3.0]
