"""A check that no exchange is compiled by XLA, which cannot run Horovod's operations."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from horovod_topk.errors import UnsupportedOperationError


def refuse_xla() -> None:
    """Refuse to exchange gradients in a graph that XLA compiles.

    Raises:
        UnsupportedOperationError: the graph under construction is one for XLA.
    """
    if tf.executing_eagerly():
        return
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UnsupportedOperationError(
            "this training step is compiled by XLA, which cannot run Horovod's operations. Keras 3 "
            "compiles steps unless it is told not to",
            cure="Pass jit_compile=False to model.compile, or to tf.function",
        )
