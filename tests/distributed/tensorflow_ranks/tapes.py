"""Small models of plain variables, and ways to train them through `DistributedGradientTape`.

Data depends on (rank, step) and nothing else, so that any rank can work out what another one saw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_topk.core.run.stats import StepCounters
from horovod_topk.tensorflow import TopKEF

Array = np.ndarray[Any, Any]
STEPS = 15
FEW = 4  # all with batches of one size, so that a graph is traced once


def noise(rank: int, step: int, shape: Sequence[int], dtype: str = "float32") -> Any:
    """Standard normal numbers that depend on (rank, step) alone."""
    return tf.cast(np.random.default_rng([rank, step]).standard_normal(shape), dtype)


def batch_size(step: int) -> int:
    """A smaller batch now and then, as at the end of an epoch: a second trace."""
    return 6 if step % 5 == 4 else 8


@dataclass
class Perceptron:
    """Variables of 1 to 660 elements, and none; `loss(x, y)`."""

    dtype: str = "float32"
    embedding: bool = False  # with a sparse gradient before it
    absent: bool = False  # with a variable that takes no part
    variables: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        shapes = [(20, 33), (33,), (33, 10), (10,), (), (0,)]
        shapes += [(40, 20)] * self.embedding + [(7, 3)] * self.absent
        initial = [0.3 * noise(99, i, shape, self.dtype) for i, shape in enumerate(shapes)]
        self.variables = [tf.Variable(each, name=f"v{i}") for i, each in enumerate(initial)]

    def loss(self, x: Any, y: Any) -> Any:
        """Mean squared error of a small network on noise."""
        first, shift, second, offset, scale, nothing = self.variables[:6]
        if self.embedding:
            tokens = tf.cast(tf.minimum(tf.abs(x[:, :3]) * 10, 39), tf.int32)
            x = x + tf.reduce_sum(tf.gather(self.variables[6], tokens), 1)
        out = tf.tanh(x @ first + shift) @ second * (1 + scale) + offset
        return tf.reduce_mean((out - y) ** 2) + tf.reduce_sum(nothing)


def step_of(
    model: Any, compression: Any, options: dict[str, Any] | None = None, rate: float = 0.05
) -> Callable[..., list[Any]]:
    """One step of gradient descent; returns the exchanged gradients."""

    def step(x: Any, y: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        tape = hvd.DistributedGradientTape(tape, compression=compression, **(options or {}))
        gradients = tape.gradient(loss, model.variables)
        for variable, gradient in zip(model.variables, gradients, strict=True):
            if gradient is not None:
                variable.assign_sub(rate * tf.convert_to_tensor(gradient))
        return [g for g in gradients if g is not None]

    return step


def train(
    compression: Any,
    *,
    graph: bool = True,
    steps: int = STEPS,
    options: dict[str, Any] | Callable[[Any], dict[str, Any]] | None = None,
    **model_options: Any,
) -> list[list[Array]]:
    """The variables after every step."""
    model = Perceptron(**model_options)
    asked = options(model) if callable(options) else options
    step = step_of(model, compression, asked)
    run = tf.function(step, autograph=False) if graph else step
    history = []
    for position in range(steps):
        size = batch_size(position)
        run(*batch(position, size, model.dtype))
        history.append([variable.numpy() for variable in model.variables])
    return history


def batch(step: int, size: int, dtype: str = "float32") -> tuple[Any, Any]:
    """This rank's inputs and targets."""
    rank = hvd.rank()
    return noise(rank, step, (size, 20), dtype), noise(rank, 500 + step, (size, 10), dtype)


class Linear:
    """Variables whose gradients are whatever is asked for: `loss(*gradients)`."""

    def __init__(self, shapes: Sequence[Sequence[int]], dtype: str = "float32") -> None:
        self.variables = [tf.Variable(tf.zeros(shape, dtype), name="v") for shape in shapes]
        self._traced: Any = None  # the compression of the graph
        self._graph: Callable[..., list[Any]]

    def loss(self, *gradients: Any) -> Any:
        """Its derivative by a variable is that gradient, bit for bit."""
        pairs = zip(self.variables, gradients, strict=True)
        return tf.add_n([tf.reduce_sum(variable * gradient) for variable, gradient in pairs])

    def exchange(
        self, compression: Any, gradients: Sequence[Any], *, graph: bool = False, **options: Any
    ) -> list[Array]:
        """What this rank gets for these gradients.

        graph: in a tf.function, which is traced once for as long as the compression is the same.
        """

        def step(*mine: Any) -> list[Any]:
            with tf.GradientTape() as tape:
                loss = self.loss(*mine)
            tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
            return list(tape.gradient(loss, self.variables))

        if graph and (options or self._traced is not compression):
            self._traced, self._graph = compression, tf.function(step, autograph=False)
        exchanged = (self._graph if graph else step)(*map(tf.convert_to_tensor, gradients))
        return [each.numpy() for each in exchanged]


class Run:
    """Steps of a model under one compressor, in one tf.function or in eager mode."""

    shapes = (30, 20), (7,)

    def __init__(self, compression: Any, graph: bool) -> None:
        self.compression, self.seen = compression, list[StepCounters]()
        self._model, self._graph = Linear(self.shapes), graph
        if isinstance(compression, TopKEF):
            compression.on_step(self.seen.append)

    def take(self, step: int, factor: float = 1.0) -> list[Array]:
        """Exchange this rank's gradients of a step; returns what it applies."""
        shapes = enumerate(self.shapes)
        mine = [factor * noise(hvd.rank(), 10 * step + i, shape) for i, shape in shapes]
        return self._model.exchange(self.compression, mine, graph=self._graph)


def equal(ours: Sequence[Array], theirs: Sequence[Array]) -> bool:
    """Whether all arrays are equal to the bit, the sign of zero aside."""
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
