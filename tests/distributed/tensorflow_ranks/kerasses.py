"""One small model for Keras 3 and for tf-keras, and ways to train it."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_tfkeras
import keras
import numpy as np
import tf_keras

import horovod_topk.tensorflow.keras as hvd_keras

EXAMPLES, BATCH = 64, 8  # batches of one size, so that a graph is traced once


def data(rank: int | None = None, count: int = EXAMPLES) -> tuple[Any, Any]:
    """A rank's examples: 20 numbers, one of 10 classes."""
    random = np.random.default_rng(hvd.rank() if rank is None else rank)
    return random.standard_normal((count, 20)).astype(np.float32), random.integers(0, 10, count)


def model_of(library: Any, seed: int = 0) -> Any:
    """A perceptron with the same weights wherever the seed is the same."""
    library.utils.set_random_seed(seed)
    layers = library.layers
    return library.Sequential(
        [layers.Input((20,)), layers.Dense(33, activation="tanh"), layers.Dense(10)]
    )


def compiled(
    library: Any, optimizer: Any, *, eager: bool = False, seed: int = 0, metrics: Any = ()
) -> Any:
    """The model, ready for `fit`; `optimizer` is distributed already."""
    model = model_of(library, seed)
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    options: dict[str, Any] = {} if library is tf_keras else {"jit_compile": False}
    options["metrics"] = [*metrics]
    model.compile(optimizer=optimizer, loss=loss, run_eagerly=eager, **options)
    return model


def distributed(library: Any, optimizer: Any, compression: Any, **options: Any) -> Any:
    """An optimizer that exchanges: Horovod's own way for tf-keras, ours for Keras 3."""
    way = hvd_tfkeras if library is tf_keras else hvd_keras
    return way.DistributedOptimizer(optimizer, compression=compression, **options)


def fit(
    library: Any,
    optimizer: Any,
    compression: Any,
    *,
    epochs: int = 2,
    eager: bool = False,
    seed: int = 0,
    callbacks: Any = (),
    examples: int = EXAMPLES,
    metrics: Any = (),
    **options: Any,
) -> Any:
    """A model after `model.fit` on this rank's data; 8 steps an epoch."""
    wrapped = distributed(library, optimizer, compression, **options)
    model = compiled(library, wrapped, eager=eager, seed=seed, metrics=metrics)
    model.fit(
        *data(count=examples),
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return model


def same(one: Any, other: Any) -> bool:
    """Whether two models have equal weights."""
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


class Words:
    """A model with an embedding, whose gradient is sparse, to be trained by an optimizer.

    Args:
        library: Keras 3 or tf-keras.
        optimizer: distributed already.
    """

    def __init__(self, library: Any, optimizer: Any) -> None:
        library.utils.set_random_seed(0)
        layers = library.layers
        self.model = library.Sequential(
            [layers.Input((4,)), layers.Embedding(50, 8), layers.Flatten(), layers.Dense(3)]
        )
        options = {} if library is tf_keras else {"jit_compile": False}
        self.model.compile(optimizer=optimizer, loss="mse", **options)

    def fit(self, epochs: int = 2, batches: int = 5) -> Words:
        """Train on this rank's data."""
        random = np.random.default_rng(hvd.rank())
        tokens, targets = random.integers(0, 50, (40, 4)), random.standard_normal((40, 3))
        count = 8 * batches
        self.model.fit(
            tokens[:count], targets[:count], batch_size=8, epochs=epochs, verbose=0, shuffle=False
        )
        return self

    def weights(self) -> list[Any]:
        """Copies."""
        return list(self.model.get_weights())


LIBRARIES = {"Keras 3": keras, "tf-keras": tf_keras}
