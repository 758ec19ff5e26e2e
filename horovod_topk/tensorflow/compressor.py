"""Compressors for Horovod's TensorFlow optimizers and tapes, passed as `compression=`."""

from __future__ import annotations

import gc
import json
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compressor as HorovodCompressor

from horovod_topk import reporting
from horovod_topk.core.control.schedule import Schedule
from horovod_topk.core.run.attached import Attached, ByHorovod
from horovod_topk.core.run.base_compressor import OverHorovod, on_class_too
from horovod_topk.core.run.stats import StepCounters
from horovod_topk.core.run.substitute import horovods
from horovod_topk.core.state.state_dict import nested, parts_of
from horovod_topk.elastic import Manager
from horovod_topk.errors import NotAttachedError
from horovod_topk.methods.protocol import Method
from horovod_topk.methods.topk import Presets, TopK
from horovod_topk.tensorflow.adapting import Adapted, adapted_to, find_adapted
from horovod_topk.tensorflow.collective import HorovodTalk
from horovod_topk.tensorflow.memory import Memory
from horovod_topk.tensorflow.planning import TapeSettings
from horovod_topk.tensorflow.scaling import check_scaler, is_scaler
from horovod_topk.tensorflow.state import LOADS, OptimizerState


class Compressor(OverHorovod, HorovodCompressor, tf.train.experimental.PythonState):  # type: ignore[misc]
    """A compression method for TensorFlow's Horovod; each of its subclasses has one.

    Pass the class (default settings) or an instance as `compression=` of
    `hvd.DistributedGradientTape`, of `hvd.DistributedOptimizer` (tf-keras) or of
    `horovod_topk.tensorflow.keras.DistributedOptimizer` (Keras 3).

    The residuals of an optimizer are deleted with it. The residuals of tapes belong to the
    variables and the settings: a new tape may be made in every step, and a tf.function may be
    traced again. To save them: `tf.train.Checkpoint(model=model, compression=compression)`, one a
    rank.

    Gradients may be float16, bfloat16, float32 or float64, of static shape. Residuals are float32,
    and float64 for float64 gradients. Sparse gradients (tf.IndexedSlices) are exchanged by Horovod,
    uncompressed, unless `sparse_as_dense=True` is passed with `compression=`; with `momentum` or
    `clip_norm` they are an error without it. A tf.function has a branch for each ratio of `warmup`.
    With a tape, the optimizer is not known until `adapt(optimizer)` tells it: `momentum` has to be
    a number, and `follow_lr` is off.

    Args:
        grad_scaler: for tapes only, the `LossScaleOptimizer` (of Keras 3 or tf-keras) that scales
            the loss. Residuals are then kept without the scale, so that they stay right when the
            scale changes. A distributed optimizer finds its loss scale by itself.

    Raises:
        ConfigError, UnknownSettingError: a setting is out of its range, does not fit another one,
            or does not exist.

    Example:
        >>> compression = TopKEF(ratio=0.001).adapt(optimizer)
        >>> tape = hvd.DistributedGradientTape(tape, compression=compression)
    """

    framework = adapter = "tensorflow"
    horovod = hvd
    takers = (
        "hvd.DistributedGradientTape(compression=...) or to "
        "hvd.DistributedOptimizer(compression=...)"
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin()

    def _begin(self) -> None:
        # Each state with the memory that holds it: that of an optimizer, deleted with it, or of
        # tapes; the state of local steps holds itself.
        self._states: weakref.WeakKeyDictionary[OptimizerState, weakref.ref[Any]]
        self._states = weakref.WeakKeyDictionary()
        self._manager: Manager | None = None
        self._adapted: list[weakref.ref[Adapted]] = []  # kept by their optimizers
        self._calls: list[Callable[[OptimizerState], None]] = []  # before the first state, for all
        # State dicts that were loaded before a state existed, each with the number of its load.
        self._waiting: list[tuple[int, Mapping[str, Any]]] = []

    @on_class_too
    def adapt(self, optimizer: Any, variables: Iterable[Any] | None = None) -> Compressor:
        """Tell gradient tapes which optimizer applies their gradients.

        The optimizer is changed in place: `apply` and `apply_gradients` do with exchanged gradients
        what a distributed optimizer does. Call it on every rank, once, after `hvd.init()`.

            compression = TopKEF(ratio=0.01).adapt(optimizer)
            tape = hvd.DistributedGradientTape(tape, compression=compression)

        Args:
            optimizer: of Keras 3 or tf-keras, legacy or not, or a `LossScaleOptimizer` around one.
            variables: the variables that it updates, if there are several optimizers; None: all.

        Returns:
            This compressor.

        Raises:
            ConfigError, UnsupportedOperationError: optimizer and settings cannot be combined; the
                optimizer has not changed.
        """
        if horovods() is None:
            adapted = adapted_to(optimizer, self, variables)
            others = [each for each in self.adapted if each is not adapted]
            self._adapted = [weakref.ref(each) for each in (*others, adapted)]
        return self

    @property
    def adapted(self) -> list[Adapted]:
        """The adapted optimizers that still exist, in the order of `adapt`."""
        return [each for known in self._adapted if (each := known()) is not None]

    @staticmethod
    def of(optimizer: Any = None) -> OptimizerState:
        """Return the error-feedback state of a distributed optimizer or gradient tape.

        Before the first step there is none: call `load_state_dict`, `on_step` and `set_ratio` of
        the `TopKEF` instance then.

        Args:
            optimizer: the result of `DistributedOptimizer(..., compression=TopKEF)` or
                `DistributedGradientTape(..., compression=TopKEF)`, or `LocalSteps`.

        Raises:
            NotAttachedError: the optimizer was not built with `compression=TopKEF`, or has
                exchanged nothing yet.
        """
        if name := horovods():
            return ByHorovod(name, "tensorflow")  # type: ignore[return-value]
        if isinstance(own := getattr(optimizer, "_topkef", None), Attached):
            return own  # type: ignore[return-value]
        holder = optimizer.inner_optimizer if is_scaler(optimizer) else optimizer
        adapted = find_adapted(optimizer)
        exchange: Any = getattr(holder, "_allreduce_grads", adapted)
        if not isinstance(getattr(exchange, "compressor", None), Compressor):
            raise NotAttachedError(
                f"{type(optimizer).__name__} was not built with compression=TopKEF",
                cure="Pass what hvd.DistributedOptimizer(..., compression=TopKEF) or "
                "hvd.DistributedGradientTape(..., compression=TopKEF) returned, or the optimizer "
                "that TopKEF(...).adapt got",
            )
        state = exchange.state
        if not isinstance(state, OptimizerState):
            raise NotAttachedError(
                f"{type(optimizer).__name__} has not exchanged a gradient yet",
                cure="Ask after the first step; give TopKEF(...) itself what load_state_dict needs "
                "before it",
            )
        return state

    @property
    def active(self) -> bool:
        """Whether gradients are compressed; before the first step: whether other ranks exist."""
        return super().active if self._living_states() else bool(hvd.size() > 1)

    @property
    def rank_and_ranks(self) -> tuple[int, int]:
        """This rank and the number of ranks that exchange; before the first step, of all ranks."""
        return super().rank_and_ranks if self._living_states() else (hvd.rank(), hvd.size())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's residuals, as `OptimizerState.load_state_dict`.

        Before the first step the state dict is kept, and loaded in that step.
        """
        if horovods() or self._found_states():
            super().load_state_dict(state)
        else:
            self._waiting = [(next(LOADS), state)]

    def on_step(self, callback: Callable[[StepCounters], None]) -> None:
        """Call `callback` at the end of every step, as `OptimizerState.on_step`.

        It may be given before the first step, for all optimizers that use this instance.
        """
        if horovods() or self._found_states():
            super().on_step(callback)
        else:
            self._calls.append(lambda state: state.on_step(callback))

    def set_ratio(self, ratio: float | None) -> None:
        """Send another share of elements from the next step on, as `OptimizerState.set_ratio`.

        It may be called before the first step, for all optimizers that use this instance.
        """
        if horovods() or self._found_states():
            super().set_ratio(ratio)
        else:
            if ratio is not None:
                Schedule(self.config).check(ratio)
            self._calls.append(lambda state: state.set_ratio(ratio))

    def state_of(
        self, variables: Sequence[Any], config: Method, settings: TapeSettings, memory: Memory
    ) -> OptimizerState:
        """Return the state for a list of variables; the first call creates it.

        Patched optimizers and tapes call it.
        """
        state = memory.state_of(config, variables, settings)
        if state not in self._states:
            self._states[state] = weakref.ref(memory)
            reporting.watch(state)
            with tf.init_scope():
                self._begin_state(state)
        return state

    def _begin_state(self, state: OptimizerState) -> None:
        """Apply earlier calls, such as `set_ratio`, to a state that has just been created."""
        if self._manager is not None:
            state.keep_with(self._manager)
        for call in self._calls:
            call(state)
        if self._waiting:
            load, saved = self._waiting.pop(0)
            state.load_state_dict(saved, load)

    def attached(self, state: Any) -> None:
        """Remember the state of `LocalSteps`, which exists as long as that."""
        self._states[state] = weakref.ref(state)
        reporting.watch(state)
        self._begin_state(state)

    def keep(self, name: str, commit_dir: str | os.PathLike[str] | None) -> Manager:
        """Keep residuals through an elastic job; called by `horovod_topk.tensorflow.elastic`."""
        self._manager = Manager(
            self._living_states,
            HorovodTalk(),
            name,
            commit_dir,
            forget=lambda: self._waiting.clear(),
        )
        for state in self._living_states():
            state.keep_with(self._manager)
        return self._manager

    def serialize(self) -> bytes:
        """Return all residuals of this rank as bytes; tf.train.Checkpoint calls this."""
        waiting = [saved for _, saved in self._waiting]
        return _pack([*(s.state_dict() for s in self._found_states()), *waiting])

    def deserialize(self, data: bytes) -> None:
        """Load residuals from bytes; tf.train.Checkpoint calls this.

        Residuals of optimizers that have not stepped yet are loaded in their first step.

        Raises:
            StateDictError: a residual does not fit; nothing has changed.
        """
        saved, states, load = unpacked(data), self._found_states(), next(LOADS)
        for state, residuals in zip(states, saved, strict=False):
            state.check_state_dict(residuals)
        for state, residuals in zip(states, saved, strict=False):
            state.load_state_dict(residuals, load)
        self._waiting = [(load, each) for each in saved[len(states) :]]

    @staticmethod
    def _check_scaler(scaler: object) -> None:
        check_scaler(scaler)

    def _living_states(self) -> list[OptimizerState]:
        """States whose optimizer, or for tapes whose variables, still exist, oldest first.

        A user may hold the state of an optimizer that was deleted.
        """
        pairs = [(state, memory()) for state, memory in self._states.items()]
        living = [
            state
            for state, memory in pairs
            if memory is state or (isinstance(memory, Memory) and state in memory)
        ]
        return sorted(living, key=lambda state: state.created)

    def _found_states(self) -> list[OptimizerState]:
        """`_living_states` after garbage collection: optimizers are reference cycles."""
        if self._states:
            gc.collect()
        return self._living_states()


class TopKEF(Compressor, Presets, method=TopK):
    """Documented by `core.run.base_compressor.documentation`."""


def _pack(states: Sequence[Mapping[str, Any]]) -> bytes:
    """Serialise state dicts: a line of JSON, then all residuals one after another."""
    parts: list[bytes] = []
    head = [_head(state, parts) for state in states]
    return b"\n".join([json.dumps(head).encode(), b"".join(parts)])


def _head(state: Mapping[str, Any], parts: list[bytes]) -> dict[str, Any]:
    """A state dict with dtypes instead of residuals, whose bytes are appended to `parts`."""
    residuals = state.get("residuals", {})
    parts += [residual.numpy().tobytes() for residual in residuals.values()]
    dtypes = {name: residual.dtype.name for name, residual in residuals.items()}
    within = {each: _head(state[each], parts) for each in parts_of(state)}
    return {**state, "residuals": dtypes, **within}


def unpacked(data: bytes) -> list[dict[str, Any]]:
    """Restore the state dicts that `_pack` serialised."""
    line, _, rest = data.partition(b"\n")
    states, at = json.loads(line), 0
    for state in [part for each in states for part in (each, *nested(each))]:
        for name, dtype in state.get("residuals", {}).items():
            count = math.prod(state["shapes"][name])
            stop = at + count * tf.as_dtype(dtype).size
            state["residuals"][name] = tf.reshape(tf.io.decode_raw(rest[at:stop], dtype), [count])
            at = stop
    return list(states)
