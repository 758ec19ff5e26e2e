"""State variables: flat tf.Variables beside the model's, which outlive tapes and traces."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import tensorflow as tf

from horovod_topk.core.plan.buckets import TensorSpec
from horovod_topk.errors import ShapeChangedError
from horovod_topk.ops.tensorflow import Array, Buffer
from horovod_topk.tensorflow.planning import unwrap


class Forgets(Protocol):
    """An object that keeps data for variables until it is told to forget them."""

    def forget(self, key: Any) -> None:
        """Delete the data of a key."""
        ...


def watched(variable: Any, owner: Forgets, key: object) -> object:
    """Have `owner` forget a key when a variable is deleted, as long as the result is kept.

    Neither keeps the other alive: the data that an optimizer keeps is deleted with the optimizer,
    also where its model exists longer and gets another optimizer.
    """
    this = weakref.ref(owner)

    def forget(_: object) -> None:
        living = this()
        if living is not None:
            living.forget(key)

    return weakref.ref(variable, forget)


@dataclass(frozen=True)
class VariablePiece:
    """`core.state.named_state.Piece` that holds one state variable."""

    variable: Any
    parts: int = 1
    first: int = 0

    @property
    def numel(self) -> int:
        """`Piece.numel`."""
        return int(self.variable.shape[0])

    def read(self) -> Array:
        """`Piece.read`: a copy."""
        return Buffer(self.variable.read_value())

    def write(self, source: Array) -> None:
        """`Piece.write`."""
        self.variable.assign(tf.cast(source.value, self.variable.dtype))


@dataclass(frozen=True)
class RowPiece:
    """`core.state.named_state.Piece` that holds a row of a variable which all tensors share."""

    variable: Any
    row: int
    numel: int
    parts: int = 1
    first: int = 0

    def read(self) -> Array:
        """`Piece.read`: a copy."""
        return Buffer(self.variable[self.row, : self.numel])

    def write(self, source: Array) -> None:
        """`Piece.write`."""
        if self.numel:
            values = tf.cast(source.value, self.variable.dtype)
            self.variable.scatter_nd_update([[self.row]], values[tf.newaxis])


@dataclass(frozen=True)
class _Entry:
    pieces: Sequence[Any]
    order: object
    watch: object  # the result of `watched`


class StateVariables:
    """Flat state variables of each model variable, as long as both exist."""

    def __init__(self) -> None:
        self._of: dict[int, _Entry] = {}

    def forget(self, key: int) -> None:
        """Delete the state variables of a variable that was deleted."""
        self._of.pop(key, None)

    def of(
        self, variable: Any, spec: TensorSpec, sizes: Sequence[int], order: object = None
    ) -> Sequence[Any]:
        """State variables of one model variable, zeros at first, float32 (float64 for float64).

        Args:
            variable: the model's variable.
            spec: the spec of its gradient.
            sizes: elements of each state variable: of the whole tensor, or of each shard.
            order: identifies how the tensor is split into shards, and the reduction.

        Raises:
            ShapeChangedError: earlier gradients had another precision, or other shards.
        """
        variable, dtype = unwrap(variable), spec.residual_dtype
        key = id(variable)
        if key not in self._of:
            pieces = apart(_zeros, sizes, dtype, variable.device)
            self._of[key] = _Entry(pieces, order, watched(variable, self, key))
        entry = self._of[key]
        if entry.order != order:
            raise ShapeChangedError(
                f"its residual is split as {entry.order}, these gradients as {order} (name, "
                "ranks, this rank, reduction)",
                tensor=spec.name,
                cure="Give variables that are in several lists, process sets or reductions names "
                "of their own, or each its own TopKEF(name=...)",
            )
        for piece in entry.pieces:
            if piece.dtype != dtype:
                raise ShapeChangedError(
                    f"its gradient is {spec.dtype}, its residual {piece.dtype.name}",
                    tensor=spec.name,
                    cure="Give it gradients of one dtype throughout, or use another "
                    "TopKEF(name=...)",
                )
        return entry.pieces


@dataclass(frozen=True)
class Stores:
    """All state variables of one optimizer, or of all tapes of equal settings."""

    residuals: StateVariables = field(default_factory=StateVariables)
    owned: StateVariables = field(default_factory=StateVariables)  # owner's residuals
    velocities: StateVariables = field(default_factory=StateVariables)
    methods: dict[str, StateVariables] = field(  # the method's state, by name
        default_factory=lambda: defaultdict(StateVariables)
    )


def _zeros(sizes: Sequence[int], dtype: str, device: str) -> Sequence[Any]:
    with tf.device(device):
        return [
            tf.Variable(tf.zeros([size], dtype), trainable=False, name="topkef_residual")
            for size in sizes
        ]


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread of its own, where no graph is being built.

    If variables are made while a tf.function is traced, TensorFlow traces it once more.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()
