"""What an optimizer owes ends with it, also where its model lives on and gets another one."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from kerasses import BATCH, LIBRARIES, compiled, data, distributed
from tapes import Linear, noise

from horovod_topk.errors import NotAttachedError
from horovod_topk.tensorflow.compressor import unpacked
from plain import PlainTopKEF as TopKEF

SPARSE = {"ratio": 0.1, "min_numel": 0}
BOTH = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


def recompiled(library: Any, model: Any, compression: TopKEF) -> None:
    optimizer = distributed(library, library.optimizers.SGD(0.05), compression)
    options = {} if library is tf_keras else {"jit_compile": False}
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, **options)


def fit(model: Any, epochs: int = 1) -> None:
    model.fit(*data(), batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)


def twice_compiled(library: Any, compression: TopKEF) -> Any:
    """A model whose first optimizer has gone after 8 steps, and whose second one took 16."""
    model = compiled(library, distributed(library, library.optimizers.SGD(0.05), compression))
    fit(model)
    recompiled(library, model, compression)
    fit(model, epochs=2)
    return model


def kept() -> int:
    """How many residuals there are in this process."""
    gc.collect()
    names = (v.name for v in gc.get_objects() if isinstance(v, tf.Variable))
    return sum(name.startswith("topkef_residual") for name in names)


def equal(one: Any, other: Any) -> bool:
    a, b = one["residuals"], other["residuals"]
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@BOTH
def test_residuals_end_with_their_optimizer(library: Any) -> None:
    compression, before = TopKEF(**SPARSE), kept()
    model = twice_compiled(library, compression)
    assert kept() - before == 1, "of the bucket"
    for _ in range(2):
        recompiled(library, model, compression)
        fit(model)
        assert kept() - before == 1, "of the bucket"


@pytest.mark.slow
@pytest.mark.one_in(2, first=1)
@BOTH
def test_the_one_that_lives_answers(library: Any) -> None:
    compression = TopKEF(**SPARSE)
    model = twice_compiled(library, compression)
    assert compression.stats().steps == TopKEF.of(model.optimizer).steps == 16
    first = TopKEF.of(model.optimizer)  # a state that is held has no optimizer for that
    recompiled(library, model, compression)
    fit(model)
    assert compression.stats().steps == 8
    assert first.steps == 16


@pytest.mark.slow
@pytest.mark.one_in(9)
@BOTH
@pytest.mark.parametrize("way", ["state dict", "checkpoint"])
def test_what_is_loaded_waits_for_the_optimizer_to_come(library: Any, way: str) -> None:
    """And is not given to the one before. What is saved is that of the one that lives."""
    compression = TopKEF(**SPARSE)
    model = twice_compiled(library, compression)
    saved, data = compression.state_dict(), compression.serialize()
    assert equal(unpacked(data)[0], TopKEF.of(model.optimizer).state_dict())
    recompiled(library, model, compression)
    if way == "checkpoint":
        compression.deserialize(data)
    else:
        compression.load_state_dict(saved)
    gradients = [tf.zeros(v.shape) for v in model.trainable_variables]
    exchange = model.optimizer._allreduce_grads
    exchange(gradients, model.trainable_variables)  # the largest of what is owed leave
    now, moved = TopKEF.of(model.optimizer).state_dict()["residuals"], 0
    for name, e in saved["residuals"].items():
        left = now[name].numpy() != 0
        assert np.array_equal(now[name].numpy()[left], e.numpy()[left])
        moved += int(left.sum())
    assert moved > 500


@pytest.mark.slow
def test_two_that_live_are_two() -> None:
    compression = TopKEF(**SPARSE)
    both = [
        compiled(keras, distributed(keras, keras.optimizers.SGD(0.05), compression))
        for _ in range(2)
    ]
    for model in both:
        fit(model)
    with pytest.raises(NotAttachedError, match="2 optimizers"):
        compression.stats()
    assert len(unpacked(compression.serialize())) == 2


@pytest.mark.slow
@BOTH
def test_some_of_the_variables_are_of_the_same_state(library: Any) -> None:
    """Freezing some layers restarts neither the count of steps nor the warm-up."""
    compression = TopKEF(**SPARSE)
    optimizer = distributed(library, library.optimizers.SGD(0.05), compression)
    variables = [tf.Variable(tf.zeros(shape), name="v") for shape in ((60, 50), (7,), (40, 9))]
    for places in ([0, 1, 2], [1, 2], [2, 0], [0, 1, 2]):
        own = [variables[at] for at in places]
        given = [noise(0, at, variables[at].shape) for at in places]
        optimizer._allreduce_grads(given, own)
    assert compression.stats().steps == TopKEF.of(optimizer).steps == 4
    assert len(unpacked(compression.serialize())) == 1


def test_tapes_made_anew_are_one() -> None:
    """With compressors made anew, too: what they owe is the variables'."""
    model, shapes = Linear([(60, 50), (7,)]), [(60, 50), (7,)]
    for step in range(3):
        compression = TopKEF(**SPARSE)
        model.exchange(compression, [noise(1, 2 * step + i, s) for i, s in enumerate(shapes)])
        gc.collect()
        assert compression.stats().steps == step + 1
    assert len(unpacked(compression.serialize())) == 1
