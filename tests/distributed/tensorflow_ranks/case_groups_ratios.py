"""Ratios that some variables have of their own, between real ranks."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from tapes import Linear, Perceptron, noise, step_of

from horovod_topk.errors import ConfigError
from plain import PlainTopKEF as TopKEF

SHAPES = [(60, 50), (70, 30), (50,)]  # each of 4 owners has a part
WAYS = pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])


def flat_and_long(name: str, shape: tuple[int, ...]) -> bool:
    return shape == (50,)


def grouped(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": RULES, "min_numel": 0, **settings})


RULES = {"v#2": "dense", flat_and_long: 0.3, "*": 0.05}


def gradients(rank: int, step: int) -> list[Any]:
    return [noise(rank, 10 * step + i, shape).numpy() for i, shape in enumerate(SHAPES)]


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


@pytest.mark.slow
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


@pytest.mark.slow
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
