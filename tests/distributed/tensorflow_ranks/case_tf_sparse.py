"""Embeddings and local variables, where momentum is corrected or gradients are clipped."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kerasses import LIBRARIES, Words, distributed
from proof import assert_ranks_equal

from horovod_topk.errors import ConfigError
from plain import PlainTopKEF as TopKEF

BOTH = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
WITHHELD: dict[str, tuple[dict[str, Any], str]] = {
    "momentum": ({"momentum": 0.9}, "momentum of 0.9"),
    "clip_norm": ({"clip_norm": 0.1}, "clip_norm=0.1"),
}
SETTINGS = pytest.mark.parametrize("setting", WITHHELD)


def sgd(library: Any, momentum: float = 0.0) -> Any:
    return library.optimizers.SGD(0.05, momentum=momentum)


@pytest.mark.one_in(5)
@BOTH
@SETTINGS
def test_it_is_refused_before_anything_has_changed(library: Any, setting: str) -> None:
    given, lost = WITHHELD[setting]
    words = Words(library, distributed(library, sgd(library), TopKEF(**given)))
    before = words.weights()
    with pytest.raises(ConfigError, match="sparse_as_dense=True") as caught:
        words.fit()
    assert "embedding" in (caught.value.tensor or "")
    assert lost in str(caught.value)
    assert all(map(np.array_equal, words.weights(), before))


@pytest.mark.parametrize("setting", ["momentum", "clip_norm"])
def test_a_tape_refuses_it_too(setting: str) -> None:
    table = tf.Variable(tf.ones([9, 4]), name="table")
    with pytest.raises(ConfigError, match=r"'table'.*sparse_as_dense=True"):
        exchanged(table, TopKEF(**WITHHELD[setting][0]))
    exchanged(table, TopKEF())  # and where nothing is lost, it takes Horovod's way


def exchanged(table: Any, compression: TopKEF, **options: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [hvd.rank(), 5]) * 3.0)
    tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
    return tape.gradient(loss, [table])[0]


def test_a_tapes_momentum_as_dense() -> None:
    """Three equal gradients g are g, 1.9 g and 2.71 g with momentum."""
    table, compression = tf.Variable(tf.ones([9, 4])), TopKEF(ratio=1.0, momentum=0.9)
    steps = [exchanged(table, compression, sparse_as_dense=True).numpy() for _ in range(3)]
    expected = np.zeros((9, 4), np.float32)
    expected[: hvd.size()], expected[5] = 3 / hvd.size(), 3
    for factor, each in zip((1, 1.9, 2.71), steps, strict=True):
        assert np.allclose(each, factor * expected)


@pytest.mark.slow
@pytest.mark.one_in(9)
@pytest.mark.one_in(5, first=2)
@BOTH
@pytest.mark.parametrize("scaled", [False, True], ids=["", "loss scale"])
def test_as_dense_it_has_its_momentum(library: Any, scaled: bool) -> None:
    """Where all is sent, what SGD itself makes of dense gradients; without momentum it is not."""
    optimizer = sgd(library)
    if scaled:
        kind = keras.optimizers if library is keras else tf_keras.mixed_precision
        optimizer = kind.LossScaleOptimizer(optimizer, initial_scale=8.0)
    compression = TopKEF(ratio=1.0, momentum=0.9)
    way = distributed(library, optimizer, compression, sparse_as_dense=True)
    ours = Words(library, way).fit().weights()
    assert_ranks_equal(ours)
    dense = [
        Words(library, distributed(library, optimizer, hvd.Compression.none)).fit().weights()
        for optimizer in (sgd(library, m) for m in (0.9, 0.0))
    ]
    for mine, theirs in zip(ours, dense[0], strict=True):
        assert np.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not np.allclose(ours[0], dense[1][0], rtol=1e-2, atol=1e-3)
