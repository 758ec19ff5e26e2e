"""One training step's exchange as a TensorFlow graph.

The graph encodes every bucket, exchanges, decodes, then commits the state unless a rank flagged a
tensor. All that differs from step to step is read when the graph runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from horovod_topk.core.codec.clipping import LocalClip, Scope
from horovod_topk.ops.tensorflow import Array, Buffer, TensorFlowOps
from horovod_topk.tensorflow.plan_cache import CachedPlan
from horovod_topk.tensorflow.state_variables import VariableState
from horovod_topk.updates.tracker import Moments


def step(
    cached: CachedPlan,
    gradients: Sequence[Any],
    state: VariableState,
    due: Any,
    rate: Any = None,
    moments: Mapping[str, Moments] = MappingProxyType({}),
) -> tuple[list[Any], Any, Any, Any]:
    """Exchange gradients, given in the order of `cached.specs`.

    Args:
        cached: the plan.
        gradients: one gradient for each tensor.
        state: the state variables, which a finite step updates.
        due: whether to measure `Squares` in this step, [] bool.
        rate: the learning rate, [] float64; None: it is not known. At 0, gradients are exchanged
            alone, and residuals stay as they are.
        moments: what is known of Adam's second moments, by tensor name.

    Returns:
        The exchanged gradients; one flag for each tensor, bucket by bucket, True where a rank had a
        NaN or an infinity (the state is then unchanged, bit for bit); `Squares` and the largest
        present learning rate as a share of its maximum, [4] float64, below zero where they were not
        measured; and `Seconds`, [4] float64.
    """
    plan = cached.plan
    arrays: dict[str, Array] = {
        spec.name: Buffer(_shaped(gradient, spec.shape))
        for spec, gradient in zip(cached.specs, gradients, strict=True)
    }
    if plan.config.clip_norm is not None:
        clip(list(arrays.values()), plan.config.clip_norm, plan.reduction, state.collective.size)
    of = {b.ordinal: [arrays[t.spec.name] for t in b.tensors] for b in plan.buckets}
    rates = state.rates_at(plan, rate)
    moves = None if rate is None else tf.not_equal(rate, 0.0)
    run = state.step(plan, cached.name, rates, moments, moves=moves)
    timer = state.timer
    timer.begin()
    run.turn()
    for ordinal, own in of.items():
        timer.note_ready([array.value for array in own])
        run.begin(ordinal, own)
    flagged: Any = tf.concat([run.finish(ordinal, own) for ordinal, own in of.items()], 0)

    def commit() -> None:
        run.commit()
        state.schedule_in_graphs.count()
        if rates is not None:
            rates.take_on()

    def measure() -> Any:
        squares = run.squares()
        decay = 1.0 if rates is None else rates.largest_decay
        each = squares.gradient, squares.compensated, squares.left, decay
        return tf.stack([tf.convert_to_tensor(square, tf.float64) for square in each])

    sound = tf.logical_not(tf.reduce_any(flagged))
    state.note_codes(plan, sound)
    tf.cond(sound, commit, lambda: None)
    unknown = tf.fill([4], tf.constant(-1.0, tf.float64))
    squares = tf.cond(tf.logical_and(due, sound), measure, lambda: unknown)
    exchanged = [arrays[spec.name].value for spec in cached.specs]
    return exchanged, flagged, squares, timer.seconds(exchanged)


def _shaped(gradient: Any, shape: tuple[int, ...]) -> Any:
    return gradient if gradient.shape == shape else tf.ensure_shape(gradient, shape)


def clip(gradients: Sequence[Array], clip_norm: float, reduction: str, ranks: int) -> None:
    """Clip all gradients of a rank; gradients that are not finite stay so, and are flagged."""
    local = LocalClip(clip_norm, reduction, Scope.ALL, _Norms())
    local.begin(ranks)
    local.clip(gradients)


class _Norms:
    """`core.codec.clipping.Norms` in graphs."""

    def place(self, gradients: Sequence[Array]) -> object:
        """`Norms.place`."""
        return None

    def norm(self, gradients: Sequence[Array], before: Any) -> Any:
        """`Norms.norm`."""
        squares = [tf.reduce_sum(tf.square(tf.cast(g.value, tf.float64))) for g in gradients]
        return tf.sqrt(tf.add_n(squares) + before**2)

    def reduce(self, gradients: Sequence[Array], threshold: float, norm: Any) -> None:
        """`Norms.reduce`."""
        factor, ops = tf.minimum(threshold / norm, 1.0), TensorFlowOps()
        for gradient in gradients:
            ops.write_scaled(gradient, factor, gradient, False)
