"""State of elastic jobs in TensorFlow, tf-keras and Keras: variables and residuals.

    from horovod_topk.tensorflow import TopKEF
    from horovod_topk.tensorflow.elastic import TensorFlowState, run

    topk = TopKEF(ratio=0.01)
    variables = [*model.variables, *optimizer.variables]
    state = TensorFlowState(variables, compression=topk, commit_dir="/shared/run", batch=0)

    @run
    def train(state): ...

Build the model and the optimizer first. Use this state instead of Horovod's `TensorFlowState`: in
eager mode Horovod's state broadcasts variables when it is created but not when ranks have changed,
so that a rank that joins waits for ever. `horovod_topk.elastic` says which residuals are kept in
which case.
"""

from __future__ import annotations

import functools
import logging
import os
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
from horovod_topk.tensorflow.compressor import Compressor
from horovod_topk.tensorflow.planning import unwrap

log = logging.getLogger("horovod_topk")

Result = TypeVar("Result")


class TensorFlowState(HandsOver, ObjectState):  # type: ignore[misc]  # Horovod has no annotations
    """An elastic state of variables, their residuals and plain attributes.

    All of them are committed and restored together.

    Args:
        variables: variables of the model and the optimizer, of TensorFlow or Keras.
        compression: the TopKEF instance that exchanges the gradients.
        commit_dir: a folder that all ranks can read. Each commit writes this rank's residuals
            there, so that another rank can take them over if this one is lost. None: no files.
        kwargs: plain attributes; all ranks take rank 0's values when ranks have changed.

    Raises:
        ConfigError: `compression` is not a TopKEF instance.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        compression: Compressor,
        commit_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(compression, Compressor):
            raise ConfigError(
                f"compression={compression!r} is no TopKEF instance",
                cure="Make one, topk = TopKEF(), and give it to the optimizer or tape and here",
            )
        self.variables = [unwrap(variable) for variable in variables]
        self._manager = compression.keep(free_name(compression.config.name), commit_dir)
        self._save_variables()
        self._manager.save()
        super().__init__(bcast_object=broadcast_object, get_rank=hvd.rank, **kwargs)

    def save(self) -> None:
        """Save copies of variables, residuals and attributes, for `restore`."""
        self._save_variables()
        self._manager.save()
        super().save()

    def restore(self) -> None:
        """Set variables, residuals and attributes to those of the last commit."""
        for variable, value in zip(self.variables, self._values, strict=True):
            variable.assign(value)
        self._manager.restore()
        super().restore()

    def sync(self) -> None:
        """Take rank 0's variables and attributes, rescale residuals together, and commit."""
        broadcast_variables(self.variables, root_rank=0)
        self._manager.reconcile()
        super().sync()
        self.save()

    def _managers(self) -> tuple[Manager]:
        return (self._manager,)

    def _save_variables(self) -> None:
        self._values = [tf.identity(variable) for variable in self.variables]


def run(train: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a training function that takes a state, as `hvd.elastic.run` does.

    When a rank fails while a tf.function exchanges payloads, TensorFlow raises its own error type.
    Horovod's wrapper does not recognise it for these collectives; this wrapper does, and restores.

    Args:
        train: a function whose first argument is the state.
    """

    @functools.wraps(train)
    def guarded(state: Any, *args: Any, **kwargs: Any) -> Result:
        try:
            return train(state, *args, **kwargs)
        except tf.errors.UnknownError as error:
            if "PyFunc" in error.message:  # raised by a script's function, or by a bad payload
                raise
            log.warning("TopKEF takes this for a lost rank: %s", error.message)
            raise HorovodInternalError(error) from error

    wrapped: Callable[..., Result] = hvd_elastic.run(guarded)
    return wrapped
