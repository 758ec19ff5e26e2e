"""World size 1: nothing to exchange, and TopKEF says so."""

from __future__ import annotations

import logging

import horovod.tensorflow as hvd
import keras
import pytest
from kerasses import fit, same
from proof import assert_same_history
from tapes import train

from horovod_topk.tensorflow import TopKEF

pytestmark = pytest.mark.world_size(1)


def test_trains_as_without_compression(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "horovod_topk"):
        ours = train(TopKEF(ratio=0.01), embedding=True, absent=True)
    assert_same_history(ours, train(hvd.Compression.none, embedding=True, absent=True))
    assert "TopKEF does not compress *: world size 1" in caplog.text


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
