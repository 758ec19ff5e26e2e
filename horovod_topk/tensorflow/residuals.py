"""Residuals as tf.Variables that outlive tapes and traces."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from horovod_topk.core.plan import RESIDUAL_DTYPE, TensorSpec
from horovod_topk.errors import ShapeChangedError
from horovod_topk.tensorflow.planning import unwrap


class Residuals:
    """One flat residual for each variable it is asked about, as long as that variable lives."""

    def __init__(self) -> None:
        self._of: dict[int, Any] = {}

    def of(self, variable: Any, spec: TensorSpec) -> Any:
        """A variable's residual, zeros at first: [n], float32 (float64 for float64 gradients).

        Raises:
            ShapeChangedError: its gradients used to have another precision.
        """
        variable, dtype = unwrap(variable), RESIDUAL_DTYPE[spec.dtype]
        residual = self._of.get(id(variable))
        if residual is None:
            with tf.init_scope(), tf.device(variable.device):
                residual = tf.Variable(
                    tf.zeros([spec.numel], dtype), trainable=False, name="topkef_residual"
                )
            self._of[id(variable)] = residual
            weakref.finalize(variable, self._of.pop, id(variable), None)
        if residual.dtype != dtype:
            raise ShapeChangedError(
                f"its gradient is {spec.dtype}, its residual {residual.dtype.name}",
                tensor=spec.name,
                cure="Give it gradients of one dtype, or call reset() on a new TopKEF",
            )
        return residual
