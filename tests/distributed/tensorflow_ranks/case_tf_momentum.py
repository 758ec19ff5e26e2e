"""Momentum correction between real ranks: instead of SGD's momentum, and never besides it."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kerasses import LIBRARIES, distributed, fit
from proof import Array, assert_ranks_equal
from tapes import Linear, noise

from horovod_topk.errors import ConfigError, StateDictError, UnsupportedDtypeError
from plain import PlainTopKEF as TopKEF

SHAPES = [(30, 20), (7,)]
SPARSE = {"ratio": 0.1, "min_numel": 0, "momentum": 0.9}
BOTH = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


def gradients_of(rank: int, step: int) -> list[Array]:
    return [noise(rank, 10 * step + i, shape).numpy() for i, shape in enumerate(SHAPES)]


def take(model: Linear, compression: TopKEF, step: int, graph: bool = True) -> list[Array]:
    return model.exchange(compression, gradients_of(hvd.rank(), step), graph=graph)


@pytest.mark.slow
@pytest.mark.one_in(4, first=2)
@BOTH
@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_at_ratio_one_it_is_the_momentum_of_sgd(library: Any, exchange: str) -> None:
    dense = fit(library, library.optimizers.SGD(0.05, momentum=0.9), hvd.Compression.none)
    compression = TopKEF(ratio=1.0, momentum=0.9, exchange=exchange)
    ours = fit(library, library.optimizers.SGD(0.05), compression)
    for mine, theirs in zip(ours.get_weights(), dense.get_weights(), strict=True):
        assert np.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert_ranks_equal(ours.get_weights())


@BOTH
def test_a_momentum_of_the_optimizer_is_refused(library: Any) -> None:
    sgd = library.optimizers.SGD(0.05, momentum=0.9)
    with pytest.raises(ConfigError, match=r"has momentum=0\.9: it would be applied twice"):
        distributed(library, sgd, TopKEF(**SPARSE))
    with pytest.raises(ConfigError, match=r"has beta_1=0\.9: it would be applied twice"):
        distributed(library, library.optimizers.Adam(), TopKEF(**SPARSE))
    scaler = (
        tf_keras.mixed_precision.LossScaleOptimizer
        if library is tf_keras
        else keras.optimizers.LossScaleOptimizer
    )
    with pytest.raises(ConfigError, match="applied twice"):
        distributed(library, scaler(sgd), TopKEF(**SPARSE))


@pytest.mark.slow
def test_what_does_not_fit_is_refused() -> None:
    model, plain = Linear(SHAPES), TopKEF(ratio=0.1, min_numel=0)
    take(model, plain, 0)
    compression = TopKEF(**SPARSE)
    other = Linear(SHAPES)
    take(other, compression, 0)
    with pytest.raises(StateDictError, match="lacks velocities"):
        compression.load_state_dict(plain.state_dict())
    assert other.variables
    half = Linear(SHAPES, "float16")
    with pytest.raises(UnsupportedDtypeError, match="velocity is float32"):
        half.exchange(compression, [tf.ones(s, tf.float16) for s in SHAPES])
