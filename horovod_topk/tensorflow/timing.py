"""Seconds of each part of a step in a graph, from operations that read the clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled

from horovod_topk.core.run.timing import Seconds


class GraphTimer:
    """Notes when the parts of a step begin and end, while its graph is built."""

    def __init__(self) -> None:
        self._starts: list[Any] = []  # start time of each collective
        self._ends: list[Any] = []
        self._ready: list[Any] = []  # time at which each bucket's gradients were ready
        self._sent: list[Any] = []  # index of each bucket's first collective

    def begin(self) -> None:
        """Clear all notes, for another graph."""
        for each in (self._starts, self._ends, self._ready, self._sent):
            each.clear()

    def note_ready(self, gradients: Sequence[Any]) -> None:
        """Note that a bucket is encoded from here on; the next collective is its first."""
        self._ready.append(_after(gradients))
        self._sent.append(len(self._starts))

    def note_start(self, tensor: Any) -> None:
        """Note that a collective starts when a tensor is ready; ignored in eager mode."""
        if not tf.executing_eagerly():
            self._starts.append(_after([tensor]))

    def note_end(self, tensor: Any) -> None:
        """Note that a collective ends when a tensor is ready."""
        if not tf.executing_eagerly():
            self._ends.append(_after([tensor]))

    def seconds(self, exchanged: Sequence[Any]) -> Any:
        """[4] float64: `Seconds` of the step that exchanged these gradients.

        Exposed time lasts from the last gradient, or the start of the last collective, to the end
        of the last collective.
        """
        if not self._ends:
            return tf.zeros([4], tf.float64)
        last, done = tf.reduce_max(self._ends), _after(exchanged)
        pairs = zip(self._ready, self._sent, strict=True)
        sent = [self._starts[at] - ready for ready, at in pairs if at < len(self._starts)]
        compress = tf.add_n(sent) if sent else tf.constant(0.0, tf.float64)
        exposed = last - tf.maximum(tf.reduce_max(self._ready), tf.reduce_max(self._starts))
        parts = compress, last - tf.reduce_min(self._starts), exposed, done - last
        return tf.maximum(tf.stack(parts), 0.0)


def seconds_of(parts: Any) -> Seconds:
    """The result of `GraphTimer.seconds` as Python floats."""
    return Seconds(*map(float, parts))


def _after(tensors: Sequence[Any]) -> Any:
    """The time at which these tensors are computed, [] float64.

    It is 0 after `tf.config.experimental.enable_op_determinism()`, which forbids to read a clock.
    """
    if is_op_determinism_enabled():
        return tf.constant(0.0, tf.float64)
    with tf.control_dependencies(list(tensors)):
        return tf.timestamp()
