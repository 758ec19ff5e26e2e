"""What is kept: state dicts, checkpoints, counters, and errors that leave it as it was."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from tapes import Linear, noise

from horovod_topk.core.run.stats import StepCounters
from horovod_topk.errors import (
    NotAttachedError,
    OutsideOptimizerError,
    PlanMismatchError,
    ShapeChangedError,
    StateDictError,
    UnsupportedOperationError,
)
from horovod_topk.tensorflow.memory import _of_tapes
from horovod_topk.tensorflow.state import live_states
from plain import PlainTopKEF as TopKEF

SPARSE = {"ratio": 0.1, "min_numel": 0}
SHAPES = [(30, 20), (7,)]


def trained(
    compression: TopKEF, steps: int = 3, first: int = 0, model: Linear | None = None
) -> Any:
    """A model after some steps, and what the last one gave it."""
    model = model or Linear(SHAPES)
    for step in range(first, first + steps):
        mine = [noise(hvd.rank(), 10 * step + i, shape) for i, shape in enumerate(SHAPES)]
        exchanged = model.exchange(compression, mine)
    return model, exchanged


def residuals(compression: TopKEF) -> list[Any]:
    return [e.numpy() for e in compression.state_dict()["residuals"].values()]


@pytest.mark.parametrize("when", ["before the first step", "after it"])
def test_a_checkpoint_carries_a_run_over(tmp_path: Path, when: str) -> None:
    first, second = TopKEF(**SPARSE), TopKEF(**SPARSE)
    model, _ = trained(first, 3)
    path = tf.train.Checkpoint(compression=first).save(str(tmp_path / "ckpt"))
    expected = trained(first, 2, first=3, model=model)[1]
    other = Linear(SHAPES)
    if when == "after it":
        trained(second, 1, first=7, model=other)
    tf.train.Checkpoint(compression=second).restore(path).assert_consumed()
    exchanged = trained(second, 2, first=3, model=other)[1]
    assert all(np.array_equal(a, b) for a, b in zip(exchanged, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("others", [True, False], ids=["of other variables, too", "the same"])
def test_a_state_loads_into_variables_that_have_one_also_while_a_graph_is_built(
    others: bool,
) -> None:
    first, again = TopKEF(ratio=0.2, min_numel=0), TopKEF(ratio=0.2, min_numel=0)
    model, _ = trained(first, 3)
    kept = first.state_dict()
    trained(first, 2, first=3, model=model)
    again.load_state_dict(kept)
    before = model.variables  # as long as they exist, so does their state
    if others:
        model.variables = [before[0], tf.Variable(before[1], name="v")]
    mine = [noise(hvd.rank(), 30 + i, shape) for i, shape in enumerate(SHAPES)]
    exchanged = model.exchange(again, mine, graph=True)
    expected = trained(TopKEF(ratio=0.2, min_numel=0), 4)[1]
    assert all(np.array_equal(a, b) for a, b in zip(exchanged, expected, strict=True))


def test_a_tensor_that_is_no_variable_is_refused() -> None:
    watched = tf.ones([3])
    with tf.GradientTape() as tape:
        tape.watch(watched)
        loss = tf.reduce_sum(watched * 2)
    tape = hvd.DistributedGradientTape(tape, compression=TopKEF)
    with pytest.raises(UnsupportedOperationError, match="no variable"):
        tape.gradient(loss, [watched])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.pop("version"), "lacks version"),
        (lambda s: s["residuals"].pop("v"), "'v': the state dict has no residual"),
        (lambda s: s["shapes"].update(v=[600]), r"shape is \[600\], the gradient's \[30, 20\]"),
        (lambda s: s["residuals"].update(w=tf.zeros(3)), "'w': .* the optimizer has no such"),
        (lambda s: s["residuals"].update(v=tf.fill([600], np.nan)), "NaN or an infinity"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(spoil: Any, message: str) -> None:
    compression = TopKEF(**SPARSE)
    model, _ = trained(compression)
    before, state = residuals(compression), compression.state_dict()
    spoil(state)
    with pytest.raises(StateDictError, match=message):
        compression.load_state_dict(state)
    assert all(np.array_equal(a, b) for a, b in zip(residuals(compression), before, strict=True))
    late = TopKEF(**SPARSE)
    late.load_state_dict(state)
    with pytest.raises(StateDictError, match=message):
        trained(late, 1)
    assert model.variables


def test_stats_count_what_was_exchanged() -> None:
    compression, seen = TopKEF(ratio=0.01, min_numel=8), list[StepCounters]()
    model, _ = trained(compression, 1)
    left = compression.stats().residual_norm
    TopKEF.on_step(compression, seen.append)
    trained(compression, 2, first=1, model=model)
    stats = compression.stats()
    assert (stats.active, stats.ranks, stats.exchange, stats.buckets) == (True, 2, "allgather", 1)
    assert (stats.steps, stats.elements, stats.selected) == (3, 607, 6 + 7)
    assert stats.payload_bytes == stats.sent_bytes == 32 + 56 + 8
    assert stats.dense_bytes == 607 * 4
    assert "min_numel=8" in stats.skipped["v#2"]
    assert [(c.step, c.committed, c.sent_bytes) for c in seen] == [(2, True, 96), (3, True, 96)]
    measured = [noise(hvd.rank(), i, shape).numpy() for i, shape in enumerate(SHAPES)]  # of 16
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in measured))
    assert stats.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert stats.sent_share == pytest.approx(1.0 - (left / norm) ** 2, rel=1e-5)


def test_residuals_end_with_their_model() -> None:
    compression = TopKEF(**SPARSE)
    trained(compression)
    gc.collect()
    with pytest.raises(NotAttachedError, match="0 optimizers"):
        compression.stats()
    stores = vars(_of_tapes[compression.config]._stores)
    methods = stores.pop("methods").values()
    assert not any(each._of for each in (*stores.values(), *methods))


def test_groups_keep_no_model_alive() -> None:
    model, alive = Linear(SHAPES), len(live_states())
    model.exchange(TopKEF(**SPARSE), [tf.ones(s) for s in SHAPES], groups=[[model.variables[0]]])
    assert len(live_states()) == alive + 1
    del model
    gc.collect()
    assert len(live_states()) == alive


def test_skipped_tensors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "horovod_topk"):
        model, _ = trained(TopKEF(min_numel=100), 1)
    assert "2 tensors in 1 buckets, 1 of them (7 elements) sent dense" in caplog.text
    assert model.variables


# Errors.


@pytest.mark.parametrize("op", [hvd.Adasum, hvd.Min])
def test_other_reductions_are_refused(op: Any) -> None:
    with pytest.raises(UnsupportedOperationError, match=r"hvd\.Average or op=hvd\.Sum"):
        Linear(SHAPES).exchange(TopKEF, [tf.zeros(s) for s in SHAPES], op=op)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_local_gradients_are_clipped(graph: bool) -> None:
    """Exactly, by the norm of all of them; ranks that agree get the limit times sqrt(ranks)."""
    model, compression = Linear(SHAPES), TopKEF(ratio=1.0, clip_norm=0.5)
    gradients = [tf.fill(shape, 100.0) for shape in SHAPES]
    exchanged = model.exchange(compression, gradients, graph=graph)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in exchanged))
    assert norm == pytest.approx(0.5 * np.sqrt(hvd.size()), rel=1e-5)
    assert np.ptp(np.concatenate([g.reshape(-1) for g in exchanged])) < 1e-6
    small = [tf.fill(shape, 1e-3) for shape in SHAPES]
    for mine, other in zip(model.exchange(compression, small, graph=graph), small, strict=True):
        assert np.array_equal(mine, other.numpy())
    spoiled = [gradients[0] * float("inf"), *gradients[1:]]
    assert np.isnan(model.exchange(compression, spoiled, graph=graph)[0]).all()


def test_it_refuses_a_tensor_without_a_variable() -> None:
    with pytest.raises(OutsideOptimizerError, match=r"shape \[3\]"):
        hvd.allreduce(tf.zeros(3), compression=TopKEF)


def test_of_refuses_what_is_not_ours_or_has_not_begun() -> None:
    with tf.GradientTape() as plain:
        pass
    with pytest.raises(NotAttachedError, match="was not built with compression=TopKEF"):
        TopKEF.of(hvd.DistributedGradientTape(plain))
    with pytest.raises(NotAttachedError, match="not exchanged a gradient yet"):
        TopKEF.of(hvd.DistributedGradientTape(plain, compression=TopKEF))


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_ranks_with_other_settings_are_named(graph: bool) -> None:
    model, compression = Linear(SHAPES), TopKEF(ratio=0.1 + 0.1 * hvd.rank())
    with pytest.raises(PlanMismatchError, match=r'ranks disagree on settings: \["ratio", 0\.'):
        model.exchange(compression, [tf.ones(s) for s in SHAPES], graph=graph)


def test_ranks_with_other_variables_are_named() -> None:
    model = Linear(SHAPES if hvd.rank() else [(30, 21), (7,)])
    with pytest.raises(PlanMismatchError, match=r"ranks disagree on shapes: .*\[30, 2"):
        model.exchange(TopKEF(), [tf.ones(v.shape) for v in model.variables])


def test_a_variable_without_a_fixed_shape_is_refused() -> None:
    growing = tf.Variable(tf.zeros([3]), shape=tf.TensorShape([None]), name="growing")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(growing * 2)
    tape = hvd.DistributedGradientTape(tape, compression=TopKEF())
    with pytest.raises(ShapeChangedError, match=r"growing.*not fixed"):
        tape.gradient(loss, [growing])


def test_another_ranks_payload_is_refused_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in PyTorch: the digest in the payload's header is compared in every step."""
    compression = TopKEF(**SPARSE)
    model, _ = trained(compression, 1)
    before = residuals(compression)
    state = compression._living_states()[0]
    (cached,) = state._plans.values()
    if hvd.rank() == 1:
        state._functions.clear()
        for bucket in cached.plan.buckets:
            monkeypatch.setitem(bucket.__dict__, "header", bucket.header[:12] + bytes(12))
    with pytest.raises(PlanMismatchError, match="bucket 0, rank "):
        trained(compression, 1, first=1, model=model)
    assert all(np.array_equal(a, b) for a, b in zip(residuals(compression), before, strict=True))


def test_join_is_refused_while_a_state_lives() -> None:
    model, _ = trained(TopKEF(**SPARSE), 1)
    keep = TopKEF(**SPARSE)
    trained(keep, 1, model=model)
    with pytest.raises(UnsupportedOperationError, match="joined rank cannot take part"):
        hvd.join()


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("exchange", ["sharded", "allgather"])
def test_what_was_loaded_waits_for_the_step_that_asks_for_it(exchange: str) -> None:
    """A variable without a gradient, a save in between, and then both."""
    first, second, third = (TopKEF(**SPARSE, exchange=exchange) for _ in range(3))
    _model, _ = trained(first)
    other, state = Linear(SHAPES), first.state_dict()
    second.load_state_dict(state)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(other.variables[0] * noise(hvd.rank(), 30, SHAPES[0]))
    tape = hvd.DistributedGradientTape(tape, compression=second)
    assert tape.gradient(loss, other.variables)[1] is None
    again = second.state_dict()
    assert set(again["residuals"]) == set(state["residuals"])
    third.load_state_dict(again)
    _, expected = trained(second, 1, first=4, model=other)
    assert all(map(np.array_equal, trained(third, 1, first=4)[1], expected))


@pytest.mark.slow
def test_a_variable_in_two_lists_under_two_names_is_refused() -> None:
    """Its residual is split by its name: read by another, elements would go astray."""
    compression, model = TopKEF(**SPARSE, exchange="sharded"), Linear([(600,), (600,)])
    mine = [noise(hvd.rank(), i, (600,)) for i in range(2)]
    model.exchange(compression, mine)
    kept = model.variables
    model.variables = [kept[1], tf.Variable(kept[0], name="other")]
    with pytest.raises(ShapeChangedError, match=r"is split as .*names of their own"):
        model.exchange(compression, mine)
