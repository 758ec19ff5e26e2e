"""`TopKEF`: what a user passes as `compression=`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from horovod_topk.config import TopKConfig
from horovod_topk.core.base_compressor import BaseCompressor
from horovod_topk.core.schedule import Schedule
from horovod_topk.core.stats import StepCounters
from horovod_topk.elastic import Manager
from horovod_topk.errors import NotAttachedError, OutsideOptimizerError
from horovod_topk.tensorflow import archive
from horovod_topk.tensorflow.collective import HorovodTalk
from horovod_topk.tensorflow.memory import Memory, memory_of_tapes
from horovod_topk.tensorflow.planning import Settings
from horovod_topk.tensorflow.scaling import check_scaler, is_scaler
from horovod_topk.tensorflow.state import OptimizerState


class TopKEF(BaseCompressor, Compressor, tf.train.experimental.PythonState):  # type: ignore[misc]
    """Top-K gradient sparsification with error feedback.

    Give an instance or the class (defaults) to `hvd.DistributedGradientTape(compression=...)` or
    `hvd.DistributedOptimizer(compression=...)`. An optimizer has residuals of its own, which end
    with it. Those of tapes belong to the settings and the variables, and live as long as these:
    tapes and traces, and instances with equal settings, may come and go.

    It can be saved: `tf.train.Checkpoint(model=model, compression=compression)`, one a rank.

    Args:
        ratio: share of a tensor's elements sent each step, in (0, 1].
        values: how values are sent: "float32" (float64 for a float64 tensor), "float16",
            "bfloat16", "int8", "int4" or "sign". The residual keeps the rounding; what "sign"
            leaves is so much that training may diverge (docs/frontier.md).
        indices: "packed", "plain" (16 or 32 bits), or "auto": packed but on accelerators.
        exchange: how payloads travel: "allgather"; "sharded", whose bytes hardly grow with the
            number of ranks; "hierarchical", dense within a node and sparse between nodes, which
            needs `hvd.init(process_sets="dynamic")`; or "auto", that of these from whose busiest
            node the fewest bytes leave.
        gather_ratio: of "sharded", the share of its elements that the owner of a shard sends
            back, in (0, 1]; None: as `ratio`.
        selection: how the largest elements are found: "exact", or "sampled", by a threshold from a
            sample, which is faster.
        min_numel: tensors with fewer elements travel dense, inside their bucket's payload.
        clip_norm: clip each rank's gradients before they are added to the residual, so that the
            norm of what is applied is about this at most, as `horovod_topk.core.clipping` says.
            Sparse gradients (tf.IndexedSlices) are an error with it and with `momentum`, unless
            `sparse_as_dense=True` is given beside `compression=`.
        ratios: ratios of some tensors, instead of `ratio` and `gather_ratio`: a mapping, or pairs,
            of a pattern of names as in `fnmatch` ("head.*"), or a function of a tensor's name and
            shape that returns a bool, and a ratio or "dense". The first that holds wins. A pattern
            that matches nothing is an error; tensors below `min_numel` are dense in any case.
        warmup: larger ratios for the first steps: a number of steps, over which 0.25, 0.0625 and so
            on come down to `ratio`, or pairs (until, ratio), each for the steps until so many have
            been committed; None: off. Graphs get a branch for every ratio.
        momentum: of momentum correction with masking (`horovod_topk.core.momentum`), instead of
            the optimizer's own: "optimizer" takes over that of Keras' `SGD`, `Adam` or `AdamW`,
            whose `momentum` or `beta_1` is 0 then, but for what `get_config` and saved models say;
            or pass a number, and 0 to the optimizer, also around a tape, which does not know it.
            0: off.
        nesterov: whether that is Nesterov's.
        follow_lr: multiply residuals by old / new learning rate where that of the optimizer has
            changed since the last step (`horovod_topk.core.rates`). For distributed optimizers:
            tapes know of no learning rate.
        name: prefix of the collectives' names, equal on all ranks; derived from the plan if None.
        commit_dir: a folder that all ranks of an elastic job can read, where each commit keeps what
            this rank owes, for another one if it is lost (`horovod_topk.tensorflow.elastic`).
        grad_scaler: for tapes alone, the `LossScaleOptimizer` (of Keras 3 or tf-keras) that scales
            the loss: residuals are then kept in unscaled units, and a change of its scale changes
            nothing that is owed. Distributed optimizers find theirs by themselves.

    Raises:
        ConfigError, UnknownSettingError: see the message.

    Example:
        >>> compression = TopKEF(ratio=0.001)
        >>> tape = hvd.DistributedGradientTape(tape, compression=compression)

    Source: Stich et al. 2018 (Sparsified SGD with Memory); Karimireddy et al. 2019 (Error
    Feedback Fixes SignSGD); Lin et al. 2018 (Deep Gradient Compression) for `clip_norm`, `warmup`
    and `momentum`.
    """

    framework = "tensorflow"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin()

    def _begin(self) -> None:
        # With what holds each: an optimizer's memory, which ends with it, or that of tapes.
        self._states: weakref.WeakKeyDictionary[OptimizerState, weakref.ref[Memory]]
        self._states = weakref.WeakKeyDictionary()
        self._callbacks: list[Callable[[StepCounters], None]] = []
        self._manager: Manager | None = None
        self._asked: list[float | None] = []  # by set_ratio, before there was a state to ask
        self._waiting: list[Mapping[str, Any]] = []  # loaded before there was a state to take them

    @staticmethod
    def of(optimizer: Any) -> OptimizerState:
        """The state behind a distributed optimizer or gradient tape, also when the class was given.

        Raises:
            NotAttachedError: it was not built with `compression=TopKEF`, or has exchanged nothing
                yet.
        """
        holder = optimizer.inner_optimizer if is_scaler(optimizer) else optimizer
        exchange: Any = getattr(holder, "_allreduce_grads", None)
        if not isinstance(getattr(exchange, "compressor", None), TopKEF):
            raise NotAttachedError(
                f"{type(optimizer).__name__} was not built with compression=TopKEF",
                cure="Pass what hvd.DistributedOptimizer(..., compression=TopKEF) or "
                "hvd.DistributedGradientTape(..., compression=TopKEF) returned",
            )
        state = exchange.state
        if not isinstance(state, OptimizerState):
            raise NotAttachedError(
                f"{type(optimizer).__name__} has not exchanged a gradient yet",
                cure="Ask after the first step; give TopKEF(...) itself what load_state_dict needs "
                "before it",
            )
        return state

    @staticmethod
    def compress(tensor: Any) -> NoReturn:
        """Refuse: a tensor without a variable has no residual.

        Raises:
            OutsideOptimizerError: always.
        """
        raise OutsideOptimizerError(
            f"TopKEF was asked to compress one tensor of shape {list(tensor.shape)} by itself",
            cure="Pass it to hvd.DistributedGradientTape(compression=...) or to "
            "hvd.DistributedOptimizer(compression=...), not to hvd.allreduce",
        )

    @staticmethod
    def decompress(tensor: Any, ctx: object) -> Any:
        """Return the tensor: gradients are decoded before Horovod asks."""
        return tensor

    @property
    def active(self) -> bool:
        """As `OptimizerState.active`; before the first step whether there are other processes."""
        return super().active if self._living_states() else bool(hvd.size() > 1)

    @property
    def place(self) -> tuple[int, int]:
        """As `OptimizerState.place`; before the first step this process among all."""
        return super().place if self._living_states() else (hvd.rank(), hvd.size())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `OptimizerState.load_state_dict`; before the first step it is kept until then."""
        if self._found_states():
            super().load_state_dict(state)
        else:
            self._waiting = [state]

    def on_step(self, callback: Callable[[StepCounters], None]) -> None:
        """As `OptimizerState.on_step`; before the first step it is kept until then."""
        if self._found_states():
            super().on_step(callback)
        else:
            self._callbacks.append(callback)

    def set_ratio(self, ratio: float | None) -> None:
        """As `OptimizerState.set_ratio`; before the first step it is kept until then."""
        if self._found_states():
            state = self._only_state()
            assert isinstance(state, OptimizerState)
            state.set_ratio(ratio)
        else:
            if ratio is not None:
                Schedule(self.config).check(ratio)
            self._asked = [ratio]

    def state_of(
        self,
        variables: Sequence[Any],
        config: TopKConfig,
        settings: Settings,
        memory: Memory | None,
    ) -> OptimizerState:
        """The state for a list of variables, made when first asked for; called by the seam.

        Args:
            variables: all of them, in order.
            config: ours, maybe with the momentum of an optimizer.
            settings: what was asked of Horovod.
            memory: the optimizer's own, or None for a tape: these share one for equal settings.

        Raises:
            ConfigError: it cannot be told whether settings of a tape are those of the step before.
        """
        if memory is None:
            memory = memory_of_tapes(config, variables, settings)
        state = memory.state_of(config, variables, settings)
        if state not in self._states:
            self._states[state] = weakref.ref(memory)
            if self._manager is not None:
                with tf.init_scope():
                    state.keep_with(self._manager)
            for callback in self._callbacks:
                state.on_step(callback)
            self._callbacks.clear()
            with tf.init_scope():
                for ratio in self._asked:
                    state.set_ratio(ratio)
            self._asked.clear()
            if self._waiting:
                with tf.init_scope():
                    state.load_state_dict(self._waiting.pop(0))
        return state

    def keep(self, name: str) -> Manager:
        """Keep what is owed through an elastic job; called by `horovod_topk.tensorflow.elastic`.

        Args:
            name: of the manager's collectives, the same on all ranks.
        """
        self._manager = Manager(
            self._living_states,
            HorovodTalk(),
            name,
            commit_dir=self.commit_dir,
            forget=lambda: self._waiting.clear(),
        )
        for state in self._living_states():
            state.keep_with(self._manager)
        return self._manager

    def serialize(self) -> bytes:
        """All residuals as bytes, for tf.train.Checkpoint."""
        return archive.pack([*(s.state_dict() for s in self._found_states()), *self._waiting])

    def deserialize(self, data: bytes) -> None:
        """Take on residuals from a tf.train.Checkpoint; states yet to come take theirs then.

        Raises:
            StateDictError: a residual does not fit; nothing has changed.
        """
        saved, states = archive.unpack(data), self._found_states()
        for state, residuals in zip(states, saved, strict=False):
            state.check_state_dict(residuals)
        for state, residuals in zip(states, saved, strict=False):
            state.load_state_dict(residuals)
        self._waiting = list(saved[len(states) :])

    @staticmethod
    def _check_scaler(scaler: object) -> None:
        check_scaler(scaler)

    def _living_states(self) -> list[OptimizerState]:
        """Those whose optimizer lives, or for tapes whose variables do.

        One whose optimizer has gone may be held by a user who asked for it.
        """
        pairs = [(state, memory()) for state, memory in self._states.items()]
        living = [state for state, memory in pairs if memory is not None and state in memory]
        return sorted(living, key=lambda state: state.created)

    def _found_states(self) -> list[OptimizerState]:
        """Those alone that live in truth: optimizers are reference cycles, and may linger."""
        if self._states:
            gc.collect()
        return self._living_states()
