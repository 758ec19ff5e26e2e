"""Residuals as tf.Variables that outlive tapes and traces."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import tensorflow as tf

from horovod_topk.core.plan import RESIDUAL_DTYPE, TensorSpec
from horovod_topk.errors import ShapeChangedError
from horovod_topk.tensorflow.planning import unwrap


class Forgets(Protocol):
    """What keeps something for variables."""

    def forget(self, key: Any) -> None:
        """Keep it no longer."""
        ...


def watched(variable: Any, owner: Forgets, key: object) -> object:
    """Has `owner` forget a key when a variable ends, as long as it keeps what this returns.

    Neither keeps the other alive: what an optimizer keeps ends with the optimizer, also where its
    model lives on and is given another one.
    """
    this = weakref.ref(owner)

    def forget(_: object) -> None:
        living = this()
        if living is not None:
            living.forget(key)

    return weakref.ref(variable, forget)


@dataclass(frozen=True)
class _Kept:
    """A residual."""

    residual: Any
    dealt: object
    watch: object  # ends it with its variable


class Residuals:
    """One flat residual for each variable it is asked about, as long as both of them live."""

    def __init__(self) -> None:
        self._of: dict[int, _Kept] = {}

    def forget(self, key: int) -> None:
        """End the residual of a variable that is no more."""
        self._of.pop(key, None)

    def of(self, variable: Any, spec: TensorSpec, dealt: object = None) -> Any:
        """A variable's residual, zeros at first: [n], float32 (float64 for float64 gradients).

        dealt: how its elements are dealt out to owners, which orders them.

        Raises:
            ShapeChangedError: its gradients used to have another precision, or were dealt out
                otherwise.
        """
        variable, dtype = unwrap(variable), RESIDUAL_DTYPE[spec.dtype]
        key = id(variable)
        if key not in self._of:
            residual = apart(_zeros, spec.numel, dtype, variable.device)
            self._of[key] = _Kept(residual, dealt, watched(variable, self, key))
        kept = self._of[key]
        if kept.dealt != dealt:
            raise ShapeChangedError(
                f"its residual is dealt out as {kept.dealt}, these gradients as {dealt} (name, "
                "ranks, this rank, reduction)",
                tensor=spec.name,
                cure="Give variables that are in several lists, process sets or reductions names "
                "of their own, or each its own TopKEF(name=...)",
            )
        if kept.residual.dtype != dtype:
            raise ShapeChangedError(
                f"its gradient is {spec.dtype}, its residual {kept.residual.dtype.name}",
                tensor=spec.name,
                cure="Give it gradients of one dtype throughout, or use another TopKEF(name=...)",
            )
        return kept.residual


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
