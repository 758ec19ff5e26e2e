"""`hvd.DistributedGradientTape(compression=TopKEF)`: equality with dense, and with the formulas."""

from __future__ import annotations

from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from proof import assert_ranks_equal, assert_same_history
from tapes import FEW, Linear, Perceptron, batch, batch_size, noise, step_of, train

from plain import PlainTopKEF as TopKEF

EVERYTHING = {"ratio": 1.0, "min_numel": 0}
WAYS = pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
DENSE = hvd.Compression.none
SHAPES = [(30, 20), (7,), (3, 5), ()]


@pytest.mark.one_in(10)
@pytest.mark.everywhere(one_in=20)
@WAYS
@pytest.mark.parametrize(
    "model",
    [{}, {"dtype": "float64"}, {"dtype": "float16"}, {"embedding": True}, {"absent": True}],
    ids=["plain", "float64", "float16", "embedding", "absent"],
)
def test_everything_sent_equals_dense(graph: bool, model: dict[str, Any]) -> None:
    dense = train(DENSE, graph=graph, steps=FEW, **model)
    assert_same_history(train(TopKEF(**EVERYTHING), graph=graph, steps=FEW, **model), dense)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Sum, "groups": 2},
        lambda model: {
            "gradient_predivide_factor": 2.0,
            "groups": [model.variables[:2], [model.variables[3]]],
        },
    ],
    ids=["sum, groups=2", "predivide, groups=lists"],
)
def test_everything_sent_equals_dense_with(options: Any) -> None:
    dense = train(DENSE, options=options, steps=FEW)
    assert_same_history(train(TopKEF(**EVERYTHING), options=options, steps=FEW), dense)


@pytest.mark.slow
def test_a_sparse_gradient_as_dense_equals_dense() -> None:
    options = {"options": {"sparse_as_dense": True}, "embedding": True, "steps": FEW}
    dense = train(DENSE, **options)
    assert_same_history(train(TopKEF(**EVERYTHING), **options), dense)


def test_more_groups_than_variables_are_as_many_buckets() -> None:
    """Horovod itself fails here."""
    model, compression = Linear(SHAPES), TopKEF(ratio=0.1)
    model.exchange(compression, [tf.ones(shape) for shape in SHAPES], groups=99)
    assert compression.stats().buckets == len(SHAPES)


@pytest.mark.slow
@pytest.mark.world_size(3)
def test_a_process_set_exchanges_among_its_members(pair: Any) -> None:
    options = {"options": {"process_set": pair}, "steps": FEW}
    if pair.included():
        ours, dense = (train(each, **options) for each in (TopKEF(**EVERYTHING), DENSE))
        assert_same_history(ours, dense)


def gradients(rank: int, step: int) -> list[Any]:
    return [noise(rank, 10 * step + i, shape).numpy() for i, shape in enumerate(SHAPES)]


@WAYS
def test_ranks_may_come_and_go(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In elastic training the number of ranks is no constant of the graph; results are the same."""
    settings = {"ratio": 0.05, "min_numel": 8}
    model, fixed = Linear(SHAPES), TopKEF(**settings)
    expected = [model.exchange(fixed, gradients(hvd.rank(), step)) for step in range(3)]
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    model, elastic = Linear(SHAPES), TopKEF(**settings)
    for step, theirs in enumerate(expected):
        ours = model.exchange(elastic, gradients(hvd.rank(), step), graph=graph)
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_of_every_precision(dtype: str) -> None:
    model, compression = Linear([(40, 30)], dtype), TopKEF(ratio=0.1)
    for step in range(3):
        (exchanged,) = model.exchange(compression, [noise(hvd.rank(), step, (40, 30), dtype)])
    assert exchanged.dtype == tf.as_dtype(dtype).as_numpy_dtype
    assert 120 <= np.count_nonzero(exchanged) <= 240
    (residual,) = compression.state_dict()["residuals"].values()
    assert residual.dtype == ("float64" if dtype == "float64" else "float32")


def test_a_smaller_batch_is_a_second_trace_and_no_third() -> None:
    model, compression, traces = Perceptron(), TopKEF(ratio=0.1, min_numel=0), []
    step = step_of(model, compression)

    @tf.function
    def run(x: Any, y: Any) -> None:
        traces.append(x.shape[0])
        step(x, y)

    kept = set()
    for position in range(15):
        run(*batch(position, batch_size(position)))
        (state,) = TopKEF._living_states(compression)
        pieces = state._state.parts["residuals"].pieces.values()
        kept |= {id(piece.variable) for (piece,) in pieces}
    assert traces == [8, 6]
    (function,) = state._functions.values()
    assert function.experimental_get_tracing_count() == 1, "both traces call it"
    assert len(kept) == 1, "of the bucket"
    assert compression.stats().steps == 15


def test_the_eager_way_traces_once() -> None:
    model, compression = Perceptron(), TopKEF(ratio=0.1, min_numel=0)
    step = step_of(model, compression)
    for position in range(FEW + 1):
        step(*batch(position, batch_size(position)))
    (function,) = compression._living_states()[0]._functions.values()
    assert function.experimental_get_tracing_count() == 1


def test_none_and_sparse_gradients_keep_their_places() -> None:
    model = Perceptron(embedding=True, absent=True)
    compression = TopKEF(ratio=0.1, min_numel=0)
    with tf.GradientTape() as tape:
        loss = model.loss(*batch(0, 8))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    exchanged = tape.gradient(loss, model.variables)
    assert isinstance(exchanged[6], tf.IndexedSlices)
    assert exchanged[7] is None
    assert [g.shape for g in exchanged[:6]] == [v.shape for v in model.variables[:6]]
    assert_ranks_equal([exchanged[6].values, exchanged[6].indices, *exchanged[:6]])
    assert "sparse" in compression.stats().skipped["v6"]


def test_two_models_and_two_tapes_in_flight() -> None:
    """Their losses depend on each other, their residuals do not."""
    compression = TopKEF(ratio=0.1, min_numel=0)
    alone = [train_pair(TopKEF(ratio=0.1, min_numel=0), which) for which in ("first", "second")]
    both = train_pair(compression, "both")
    for ours, theirs in zip(both, [alone[0][0], alone[1][1]], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def train_pair(compression: TopKEF, which: str) -> list[list[Any]]:
    """Two models, stepped from tapes that are open at the same time; a tape alone is the proof."""
    models = Perceptron(), Perceptron()

    @partial(tf.function, autograph=False)
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as one, tf.GradientTape() as other:
            losses = models[0].loss(x, y), models[1].loss(x, 2 * y)
        for tape, model, loss, name in zip(
            (one, other), models, losses, ("first", "second"), strict=True
        ):
            if which in (name, "both"):
                tape = hvd.DistributedGradientTape(tape, compression=compression)
                for v, g in zip(model.variables, tape.gradient(loss, model.variables), strict=True):
                    v.assign_sub(0.05 * g)

    for position in range(FEW):
        step(*batch(position, 8))
    return [[v.numpy() for v in model.variables] for model in models]


def test_the_class_serves_every_model_with_a_state_of_its_own() -> None:
    models = Perceptron(), Perceptron()
    states = []
    for model in models:
        with tf.GradientTape() as tape:
            loss = model.loss(*batch(0, 8))
        tape = hvd.DistributedGradientTape(tape, compression=TopKEF)
        tape.gradient(loss, model.variables)
        states.append(TopKEF.of(tape))
    assert states[0] is not states[1]
    assert [state.stats().steps for state in states] == [1, 1]
