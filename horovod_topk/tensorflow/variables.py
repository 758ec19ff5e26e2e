"""State variables: flat tf.Variables beside the model's, which outlive tapes and traces."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import tensorflow as tf

from horovod_topk.core.plan.buckets import BucketPlan, TensorSpec
from horovod_topk.errors import ShapeChangedError
from horovod_topk.ops.tensorflow import Array, Buffer
from horovod_topk.tensorflow.planning import unwrap

Row = tuple[Any, int]  # a tf.Variable, and the number of its row
Key = TypeVar("Key")
Value = TypeVar("Value")


class Kept(dict[Key, Value]):
    """Values by key, each of which is deleted with the first of its variables.

    Variables do not keep it alive: what an optimizer keeps is deleted with the optimizer, also
    where its model exists longer and gets another optimizer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watches: dict[Key, list[object]] = {}

    def keep(self, key: Key, value: Value, variables: Iterable[Any]) -> None:
        """Keep a value as long as all of these variables exist."""
        this = weakref.ref(self)

        def forget(_: object) -> None:
            if (living := this()) is not None:
                living.pop(key, None)
                living._watches.pop(key, None)

        self[key] = value
        self._watches[key] = [weakref.ref(unwrap(each), forget) for each in variables]


@dataclass(frozen=True)
class VariablePiece:
    """`core.state.named_state.StoredArray` that holds a stretch of a flat state variable."""

    variable: Any
    start: int
    numel: int
    parts: int = 1
    first: int = 0

    @property
    def stop(self) -> int:
        """The element after the last one."""
        return self.start + self.numel

    def value(self) -> Any:
        """The stretch, in a graph or eagerly."""
        value = self.variable.value()
        return value if self.is_all else value[self.start : self.stop]

    def read(self) -> Array:
        """`Piece.read`: a copy."""
        return Buffer(self.variable.read_value()[self.start : self.stop])

    def write(self, source: Array) -> None:
        """`Piece.write`."""
        self.assign(tf.cast(source.value, self.variable.dtype))

    def assign(self, value: Any) -> None:
        """Replace the stretch, in a graph or eagerly."""
        if self.is_all:
            self.variable.assign(value, read_value=False)
        elif self.numel:
            bounds: Any = {"begin": [self.start], "end": [self.stop], "strides": [1]}
            tf.raw_ops.ResourceStridedSliceAssign(ref=self.variable.handle, value=value, **bounds)

    @property
    def is_all(self) -> bool:
        """Whether it is the whole variable."""
        return bool(self.numel == self.variable.shape[0])

    def shares(self, other: VariablePiece) -> bool:
        """Whether both are of one variable."""
        return self.variable is other.variable


@dataclass
class _Entry:
    pieces: Sequence[VariablePiece]
    order: object
    load: int = 0  # number of the last load that the stretches have taken on; 0: of none


class StateVariables:
    """Stretches of flat state variables for each model variable, as long as both exist.

    The tensors of a bucket share a state variable, so that a graph reads and assigns few. Another
    bucket may have some of them, in the trace of a step where others have no gradient.
    """

    def __init__(self) -> None:
        self._of = Kept[int, _Entry]()

    def has(self, variable: Any) -> bool:
        """Whether there are stretches for a model variable."""
        return id(unwrap(variable)) in self._of

    def take_on(self, keys: Mapping[str, int], load: int) -> list[str]:
        """Note a load; return the names of the variables that have not taken it on before.

        Lists of variables that share a residual load it once: training has changed the residual
        before the second list meets the load.

        Args:
            keys: ids of the model's variables, by name.
            load: number of the load; a later one has a larger number.
        """
        found = {name: self._of[key] for name, key in keys.items() if key in self._of}
        new = [name for name in keys if name not in found or found[name].load < load]
        for entry in found.values():
            entry.load = max(entry.load, load)
        return new

    def of(
        self, variables: Sequence[Any], holders: Sequence[BucketPlan], orders: Sequence[object] = ()
    ) -> list[Sequence[VariablePiece]]:
        """The stretches of each model variable, zeros at first, one for each holder.

        Args:
            variables: the model's variables, one for each tensor of a bucket.
            holders: plans of the bucket that together hold the tensors, whole or in shards.
            orders: identify how each tensor is split into shards, and the reduction.
        """
        inner = list(map(unwrap, variables))
        each: Sequence[object] = orders or [None] * len(inner)
        new = [at for at, variable in enumerate(inner) if id(variable) not in self._of]
        made = list[Any]()
        for plan in holders if new else ():
            zeros = partial(tf.zeros, [plan.numel], plan.residual_dtype)
            made.append(own_variable(zeros, inner[0].device, name="topkef_residual"))
        for at in new:
            variable, pieces = inner[at], list[VariablePiece]()
            for holder, array in zip(holders, made, strict=True):
                tensor = holder.tensors[at]
                place = tensor.start, tensor.numel, holder.parts, tensor.first
                pieces.append(VariablePiece(array, *place))
            self._of.keep(id(variable), _Entry(pieces, each[at]), [variable])
        found = [self._of[id(variable)] for variable in inner]
        for at, entry in enumerate(found):
            self._check(entry, each[at], [holder.tensors[at].spec for holder in holders])
        return [entry.pieces for entry in found]

    @staticmethod
    def _check(entry: _Entry, order: object, specs: Sequence[TensorSpec]) -> None:
        for piece, spec in zip(entry.pieces, specs, strict=False):
            if entry.order != order:
                raise ShapeChangedError(
                    f"its residual is split as {entry.order}, these gradients as {order} (name, "
                    "ranks, this rank, reduction)",
                    tensor=spec.name,
                    cure="Give variables that are in several lists, process sets or reductions "
                    "names of their own, or each its own TopKEF(name=...)",
                )
            if piece.variable.dtype != spec.residual_dtype:
                raise ShapeChangedError(
                    f"its gradient is {spec.dtype}, its residual {piece.variable.dtype.name}",
                    tensor=spec.name,
                    cure="Give it gradients of one dtype throughout, or use another "
                    "TopKEF(name=...)",
                )


class RateVariables:
    """A row of two learning rates for each model variable, as long as both exist; zeros at first.

    Lists of variables that have a variable in common share its row, like its residual.
    """

    def __init__(self) -> None:
        self._of = Kept[int, Row]()

    def of(self, variables: Sequence[Any]) -> list[Row]:
        """The rows of some model variables; rows that are made together share a variable."""
        inner = list(map(unwrap, variables))
        new = {id(variable): variable for variable in inner if id(variable) not in self._of}
        made = own_variable(lambda: tf.zeros([len(new), 2], tf.float64)) if new else None
        for at, (key, variable) in enumerate(new.items()):
            self._of.keep(key, (made, at), [variable])
        return [self._of[id(variable)] for variable in inner]


@dataclass(frozen=True)
class Stores:
    """All state variables of one optimizer, or of all tapes of equal settings."""

    residuals: StateVariables = field(default_factory=StateVariables)
    rates: RateVariables = field(default_factory=RateVariables)  # residuals are in units of them
    owned: StateVariables = field(default_factory=StateVariables)  # owner's residuals
    velocities: StateVariables = field(default_factory=StateVariables)
    methods: dict[str, StateVariables] = field(  # the method's state, by name
        default_factory=lambda: defaultdict(StateVariables)
    )


def own_variable(initial: Any, device: str = "cpu", **settings: Any) -> Any:
    """Make a variable that is not trained, in a thread of its own, where no graph is being built.

    If variables are made while a tf.function is traced, TensorFlow traces it once more.

    initial: its value, or a function that returns it; settings: of tf.Variable.
    """

    def make() -> Any:
        with tf.device(device):
            value = initial() if callable(initial) else initial
            return tf.Variable(value, trainable=False, **settings)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
