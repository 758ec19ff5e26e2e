"""Elastic Horovod for TensorFlow, tf-keras and Keras: a state that keeps what ranks owe.

    from horovod_topk.tensorflow import TopKEF
    from horovod_topk.tensorflow.elastic import TensorFlowState, run

    topk = TopKEF(ratio=0.01)
    variables = [*model.variables, *optimizer.variables]
    state = TensorFlowState(variables, compression=topk, batch=0)

    @run
    def train(state): ...

Build model and optimizer before. Horovod's own `TensorFlowState` broadcasts variables when it is
made and not when ranks meet, where TensorFlow runs eagerly: a rank that joins waits for ever, so
this one stands in its place. What is kept, and what is not, says `horovod_topk.elastic`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import horovod.tensorflow.elastic as hvd_elastic
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.functions import broadcast_object, broadcast_variables

from horovod_topk.elastic import Manager, free_name
from horovod_topk.elastic.leaving import HandsOver
from horovod_topk.errors import ConfigError
from horovod_topk.tensorflow.compressor import TopKEF
from horovod_topk.tensorflow.planning import unwrap

log = logging.getLogger("horovod_topk")

Result = TypeVar("Result")


class TensorFlowState(HandsOver, ObjectState):  # type: ignore[misc]  # Horovod has no annotations
    """Variables, what is owed for them, and plain attributes, committed and restored together.

    Args:
        variables: of model and optimizer, TensorFlow's or Keras'.
        compression: the TopKEF of the gradients' exchange: the instance.
        kwargs: plain attributes, which rank 0 gives to all when ranks meet.

    Raises:
        ConfigError: no TopKEF was given, or the class.
    """

    def __init__(self, variables: Sequence[Any], compression: TopKEF, **kwargs: Any) -> None:
        if not isinstance(compression, TopKEF):
            raise ConfigError(
                f"compression={compression!r} is no TopKEF instance",
                cure="Make one, topk = TopKEF(), and give it to the optimizer or tape and here",
            )
        self.variables = [unwrap(variable) for variable in variables]
        self._manager = compression.keep(free_name(compression.config.name))
        self._save_variables()
        self._manager.save()
        super().__init__(bcast_object=broadcast_object, get_rank=hvd.rank, **kwargs)

    def save(self) -> None:
        """Commit."""
        self._save_variables()
        self._manager.save()
        super().save()

    def restore(self) -> None:
        """Go back to the last commit."""
        for variable, value in zip(self.variables, self._values, strict=True):
            variable.assign(value)
        self._manager.restore()
        super().restore()

    def sync(self) -> None:
        """Meet the other ranks: take rank 0's variables and attributes, and see to what is owed."""
        broadcast_variables(self.variables, root_rank=0)
        self._manager.settle()
        super().sync()
        self.save()

    def _managers(self) -> tuple[Manager]:
        return (self._manager,)

    def _save_variables(self) -> None:
        self._values = [tf.identity(variable) for variable in self.variables]


def run(train: Callable[..., Result]) -> Callable[..., Result]:
    """As `hvd.elastic.run`, for a function that takes a state.

    A payload's exchange that fails within a graph is an error of TensorFlow; Horovod's own wrapper
    knows it by names that differ from those of payloads.
    """

    @functools.wraps(train)
    def guarded(state: Any, *args: Any, **kwargs: Any) -> Result:
        try:
            return train(state, *args, **kwargs)
        except tf.errors.UnknownError as error:
            if "PyFunc" in error.message:  # a script's own, or a payload that is none
                raise
            log.warning("TopKEF takes this for a lost rank: %s", error.message)
            raise HorovodInternalError(error) from error

    wrapped: Callable[..., Result] = hvd_elastic.run(guarded)
    return wrapped
