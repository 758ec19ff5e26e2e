"""Residuals as tf.Variables that outlive tapes and traces."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from horovod_topk.core.plan import RESIDUAL_DTYPE, TensorSpec
from horovod_topk.errors import ShapeChangedError
from horovod_topk.tensorflow.planning import unwrap


class Residuals:
    """One flat residual for each variable it is asked about, as long as that variable lives."""

    def __init__(self) -> None:
        self._of: dict[int, Any] = {}
        self._dealt: dict[int, object] = {}

    def of(self, variable: Any, spec: TensorSpec, dealt: object = None) -> Any:
        """A variable's residual, zeros at first: [n], float32 (float64 for float64 gradients).

        dealt: how its elements are dealt out to owners, which orders them.

        Raises:
            ShapeChangedError: its gradients used to have another precision, or were dealt out
                otherwise.
        """
        variable, dtype = unwrap(variable), RESIDUAL_DTYPE[spec.dtype]
        residual = self._of.get(id(variable))
        if residual is None:
            residual = apart(_zeros, spec.numel, dtype, variable.device)
            self._of[id(variable)] = residual
            self._dealt[id(variable)] = dealt
            weakref.finalize(variable, self._of.pop, id(variable), None)
            weakref.finalize(variable, self._dealt.pop, id(variable), None)
        if self._dealt[id(variable)] != dealt:
            raise ShapeChangedError(
                f"its residual is dealt out as {self._dealt[id(variable)]}, these gradients as "
                f"{dealt} (name, ranks, this rank, reduction)",
                tensor=spec.name,
                cure="Give variables that are in several lists, process sets or reductions names "
                "of their own, or each its own TopKEF(name=...)",
            )
        if residual.dtype != dtype:
            raise ShapeChangedError(
                f"its gradient is {spec.dtype}, its residual {residual.dtype.name}",
                tensor=spec.name,
                cure="Give it gradients of one dtype throughout, or use another TopKEF(name=...)",
            )
        return residual


@dataclass(frozen=True)
class Stores:
    """All that is kept for variables, each where `Residuals` finds it again."""

    residuals: Residuals = field(default_factory=Residuals)
    owned: Residuals = field(default_factory=Residuals)  # of this rank's shards
    velocities: Residuals = field(default_factory=Residuals)
    units: Residuals = field(default_factory=Residuals)  # learning rates, [1] float64


def _zeros(numel: int, dtype: str, device: str) -> Any:
    with tf.device(device):
        return tf.Variable(tf.zeros([numel], dtype), trainable=False, name="topkef_residual")


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function where no graph is being built: what is traced is a thread's own.

    A tf.function that sees a variable made while it traces would trace once more.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()
