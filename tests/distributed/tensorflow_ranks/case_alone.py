"""World size 1: nothing to exchange, and TopKEF says so."""

from __future__ import annotations

import logging
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kerasses import LIBRARIES, Words, distributed, fit, same
from proof import assert_same_history
from tapes import FEW, train

from horovod_topk.errors import ConfigError
from horovod_topk.tensorflow import LocalSteps, Outer
from plain import PlainTopKEF as TopKEF

pytestmark = pytest.mark.world_size(1)


def test_trains_as_without_compression(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "horovod_topk"):
        ours = train(TopKEF(ratio=0.01), steps=FEW, embedding=True, absent=True)
    dense = train(hvd.Compression.none, steps=FEW, embedding=True, absent=True)
    assert_same_history(ours, dense)
    assert "TopKEF does not compress anything: world size 1" in caplog.text


def test_stats_say_that_it_is_inactive() -> None:
    compression = TopKEF(ratio=0.01)
    model = fit(keras, keras.optimizers.SGD(0.05), compression)
    stats = compression.stats()
    assert not stats.active
    assert "world size 1" in stats.skipped["*"]
    assert (stats.ranks, stats.steps, stats.sent_bytes, stats.reduction) == (1, 0, 0, 1.0)
    assert compression.state_dict() == {}
    compression.load_state_dict({})
    assert same(model, fit(keras, keras.optimizers.SGD(0.05), hvd.Compression.none))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_not_lost(library: Any, nesterov: bool) -> None:
    """Without sparsity, momentum correction is the momentum of SGD; also under a loss scale."""
    compression = TopKEF(momentum=(0.9, "nesterov") if nesterov else 0.9)
    ours = fit(library, library.optimizers.SGD(0.05), compression)
    sgd = library.optimizers.SGD(0.05, momentum=0.9, nesterov=nesterov)
    theirs = fit(library, sgd, hvd.Compression.none)
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        assert np.allclose(mine, other, rtol=1e-4, atol=1e-5)
    kind = keras.optimizers if library is keras else tf_keras.mixed_precision
    settings = {"initial_scale": 8.0, "dynamic_growth_steps": 3}
    scaled = kind.LossScaleOptimizer(library.optimizers.SGD(0.05), **settings)
    again = TopKEF(momentum=(0.9, "nesterov") if nesterov else 0.9)
    assert same(ours, fit(library, scaled, again))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("library", "kind"), [(keras, "Adam"), (tf_keras, "SGD")])
def test_a_momentum_is_left_to_the_optimizer(library: Any, kind: str) -> None:
    settings = {"momentum": 0.9} if kind == "SGD" else {}
    two = [getattr(library.optimizers, kind)(0.01, **settings) for _ in range(2)]
    ours = fit(library, two[0], TopKEF(momentum="auto"), epochs=1)
    assert same(ours, fit(library, two[1], hvd.Compression.none, epochs=1))
    assert not TopKEF.of(ours.optimizer).active


@pytest.mark.one_in(2)
@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
def test_gradients_are_clipped_here_too(library: Any) -> None:
    """To the norm that the library itself clips to; also under a loss scale."""
    optimizers = library.optimizers
    ours = fit(library, optimizers.SGD(0.5), TopKEF(clip_norm=0.1), epochs=1)
    theirs = optimizers.SGD(0.5, global_clipnorm=0.1)
    expected = fit(library, theirs, hvd.Compression.none, epochs=1).get_weights()
    for mine, other in zip(ours.get_weights(), expected, strict=True):
        assert np.allclose(mine, other, rtol=1e-4, atol=1e-6)
    kind = keras.optimizers if library is keras else tf_keras.mixed_precision
    scaled = kind.LossScaleOptimizer(optimizers.SGD(0.5), initial_scale=8.0)
    assert same(ours, fit(library, scaled, TopKEF(clip_norm=0.1), epochs=1))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
@pytest.mark.parametrize("setting", ["momentum", "clip_norm"])
def test_a_sparse_gradient_is_not_left_out(library: Any, setting: str) -> None:
    """Refused where it would be; as dense it is what the library itself makes of a dense one."""
    theirs = {"momentum": 0.9} if setting == "momentum" else {"global_clipnorm": 0.1}
    ours = {"momentum": 0.9} if setting == "momentum" else {"clip_norm": 0.1}
    sgd = library.optimizers.SGD
    words = Words(library, distributed(library, sgd(0.5), TopKEF(**ours)))
    with pytest.raises(ConfigError, match="sparse_as_dense=True"):
        words.fit()
    as_dense = [
        distributed(library, optimizer, compression, sparse_as_dense=True)
        for optimizer, compression in (
            (sgd(0.5), TopKEF(**ours)),
            (sgd(0.5, **theirs), hvd.Compression.none),
        )
    ]
    weights = [Words(library, optimizer).fit().weights() for optimizer in as_dense]
    for mine, other in zip(*weights, strict=True):
        assert np.allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_local_steps_are_the_outer_optimizer_alone() -> None:
    v = tf.Variable([8.0, 4.0])
    local = LocalSteps(None, [v], every=2, compression=TopKEF(ratio=1.0), outer=Outer(lr=0.5))
    for _ in range(4):
        v.assign_sub([2.0, 0.0])
        local.step()
    assert v.numpy().tolist() == [4.0, 4.0]
    assert local.rounds == TopKEF.of(local).stats().steps == 2


def test_local_steps_without_a_name_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    v = tf.Variable([8.0, 4.0])
    LocalSteps(None, [v])
    assert "LocalSteps was deleted before its first step" in caplog.text
    caplog.clear()
    local = LocalSteps(None, [v])
    local.step()
    del local
    assert not caplog.text
