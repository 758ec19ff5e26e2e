"""Ratios that some variables have of their own, between real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from proof import ErrorFeedback, assert_ranks_equal, assert_same_history
from tapes import FEW, Linear, Perceptron, noise, step_of, train

from horovod_topk.errors import ConfigError, PlanMismatchError
from plain import PlainTopKEF as TopKEF

SHAPES = [(60, 50), (70, 30), (50,)]  # each of 4 owners has a part
OWN = [0.05, 1.0, 0.3]
WAYS = pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])


def flat_and_long(name: str, shape: tuple[int, ...]) -> bool:
    return shape == (50,)


def grouped(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": RULES, "min_numel": 0, **settings})


RULES = {"v#2": "dense", flat_and_long: 0.3, "*": 0.05}


def gradients(rank: int, step: int) -> list[Any]:
    return [noise(rank, 10 * step + i, shape).numpy() for i, shape in enumerate(SHAPES)]


@WAYS
@pytest.mark.world_size(2, 3)
def test_each_variable_is_as_the_formulas_have_it_at_its_ratio(graph: bool) -> None:
    model, compression = Linear(SHAPES), grouped()
    formulas = [ErrorFeedback(hvd.size(), ratio) for ratio in OWN]
    for step in range(6):
        everyone = [gradients(rank, step) for rank in range(hvd.size())]
        exchanged = model.exchange(compression, everyone[hvd.rank()], graph=graph)
        for i, (ours, formula) in enumerate(zip(exchanged, formulas, strict=True)):
            (theirs,) = formula.exchange([[each[i]] for each in everyone])
            assert np.array_equal(ours, theirs)
    assert compression.stats().ratios == {"v#2": 1.0, "v#3": 0.3}
    owed = [bool(e.numpy().any()) for e in compression.state_dict()["residuals"].values()]
    assert owed == [True, False, True]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_all_variables_dense_equal_dense(exchange: str) -> None:
    dense = train(hvd.Compression.none, steps=FEW)
    ours = train(grouped(ratio={"?*": "dense", "*": 0.05}, exchange=exchange), steps=FEW)
    assert_same_history(ours, dense)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("values", ["float32", "int8"])
def test_owners_send_all_of_it_back(values: str) -> None:
    model = Linear(SHAPES)
    compression = grouped(exchange="sharded", ratio={**RULES, "*": (0.05, 0.1)}, values=values)
    exchanged = [model.exchange(compression, gradients(hvd.rank(), step)) for step in range(3)][-1]
    assert_ranks_equal(exchanged)
    kinds = compression.state_dict(), compression.state_dict()["owned"]
    owed = [bool(kind["residuals"]["v#2"].numpy().any()) for kind in kinds]
    assert owed == [values == "int8"] * 2
    assert np.count_nonzero(exchanged[1]) == exchanged[1].size or values == "int8"
    assert np.count_nonzero(exchanged[0]) < exchanged[0].size / 5


def test_a_checkpoint_carries_a_run_over(tmp_path: Path) -> None:
    first, second = grouped(values="int4"), grouped(values="int4")
    model, other = Linear(SHAPES), Linear(SHAPES)
    for step in range(3):
        model.exchange(first, gradients(hvd.rank(), step))
    path = tf.train.Checkpoint(compression=first).save(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(compression=second).restore(path).assert_consumed()
    expected = model.exchange(first, gradients(hvd.rank(), 3))
    assert all(map(np.array_equal, other.exchange(second, gradients(hvd.rank(), 3)), expected))


def test_a_compressor_made_anew_in_each_step_keeps_what_is_owed() -> None:
    """Its predicate is another function of the same code."""
    model, again = Linear(SHAPES), Linear(SHAPES)
    kept = TopKEF(ratio={lambda name, shape: len(shape) == 1: 0.3, "*": 0.05}, min_numel=0)
    for step in range(3):
        anew = TopKEF(ratio={rule(1): 0.3, "*": 0.05}, min_numel=0)
        ours = again.exchange(anew, gradients(hvd.rank(), step))
        theirs = model.exchange(kept, gradients(hvd.rank(), step))
        assert all(map(np.array_equal, ours, theirs))
    assert anew.stats().steps == 3


@pytest.mark.one_in(2)
@WAYS
def test_one_that_cannot_be_known_again_is_refused_when_it_would_forget(graph: bool) -> None:
    """Nothing but the names of a list has changed, if they have."""

    def anew(names: list[str], **other: Any) -> TopKEF:
        return grouped(ratio={lambda name, _: name in names: 0.3, "*": 0.05}, **other)

    model, first = Linear(SHAPES), anew(["v"])
    for step in range(2):  # one that is made once is one
        model.exchange(first, gradients(hvd.rank(), step), graph=graph)
    with pytest.raises(ConfigError, match=r"Build TopKEF.* once"):
        model.exchange(anew(["v"]), gradients(hvd.rank(), 2), graph=graph)
    model.exchange(first, gradients(hvd.rank(), 2), graph=graph)
    assert first.stats().steps == 3
    for other in (Linear(SHAPES), anew(["v"])), (model, anew(["v"], values="int8")):
        other[0].exchange(other[1], gradients(hvd.rank(), 3), graph=graph)


def rule(dimensions: int) -> Any:
    return lambda name, shape: len(shape) == dimensions


@pytest.mark.one_in(2)
@WAYS
def test_variables_without_a_gradient_of_ours_may_be_named(graph: bool) -> None:
    """One has a sparse gradient, one none: patterns of theirs are no mistakes."""
    model = Perceptron(embedding=True, absent=True)
    compression = grouped(ratio={"v6": "dense", "v7": 0.5, "v0": 0.3})
    step = step_of(model, compression)
    (tf.function(step) if graph else step)(noise(hvd.rank(), 0, (8, 20)), noise(9, 1, (8, 10)))
    assert compression.stats().ratios == {"v0": 0.3}


@WAYS
def test_a_pattern_that_matches_no_variable_is_refused(graph: bool) -> None:
    with pytest.raises(ConfigError, match=r"'head\*' matches none of 3 tensors.* 'v#3'"):
        Linear(SHAPES).exchange(
            grouped(ratio={"head*": "dense"}), gradients(hvd.rank(), 0), graph=graph
        )


@pytest.mark.world_size(2, 3)
def test_ranks_that_differ_are_told_of_which_variable() -> None:
    last = hvd.size() - 1
    compression = grouped(ratio={"v#2": 0.5 if hvd.rank() == last else 0.25})
    with pytest.raises(PlanMismatchError, match="ranks disagree on ratios:") as raised:
        Linear(SHAPES).exchange(compression, gradients(hvd.rank(), 0))
    assert '["v#2", 0.25] on rank' in str(raised.value)
    assert f'["v#2", 0.5] on rank {last}' in str(raised.value)
