"""`TopKEF`: what a user passes as `compression=`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from horovod_topk.config import TopKConfig
from horovod_topk.core.front import Front
from horovod_topk.core.stats import StepCounters
from horovod_topk.elastic import Keeper
from horovod_topk.errors import ConfigError, NotAttachedError, OutsideOptimizerError
from horovod_topk.tensorflow import archive
from horovod_topk.tensorflow.collective import HorovodTalk
from horovod_topk.tensorflow.memory import Memory
from horovod_topk.tensorflow.planning import Settings
from horovod_topk.tensorflow.state import OptimizerState


class TopKEF(Front, Compressor, tf.train.experimental.PythonState):  # type: ignore[misc]
    """Top-K gradient sparsification with error feedback.

    Give an instance or the class (defaults) to `hvd.DistributedGradientTape(compression=...)` or
    `hvd.DistributedOptimizer(compression=...)`. An optimizer has residuals of its own. Those of
    tapes belong to the settings and the variables, and live as long as these: tapes and traces, and
    instances with equal settings, may come and go.

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
        name: prefix of the collectives' names, equal on all ranks; derived from the plan if None.

    Raises:
        ConfigError, UnknownSettingError: see the message.

    Example:
        >>> compression = TopKEF(ratio=0.001)
        >>> tape = hvd.DistributedGradientTape(tape, compression=compression)

    Source: Stich et al. 2018 (Sparsified SGD with Memory); Karimireddy et al. 2019 (Error
    Feedback Fixes SignSGD); Lin et al. 2018 (Deep Gradient Compression) for `clip_norm`.
    """

    framework = "tensorflow"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.warmup is not None:
            raise ConfigError(
                f"warmup={self.config.warmup!r} is for PyTorch alone: a tf.function keeps the "
                "payloads it was traced with",
                cure="Leave it out, and train the first steps with another TopKEF(ratio=...), "
                "whose state_dict() the next one loads",
            )
        if self.config.momentum:
            raise ConfigError(
                f"momentum={self.config.momentum}: momentum correction is for PyTorch alone yet",
                cure="Leave momentum to the optimizer",
            )
        self._states: weakref.WeakSet[OptimizerState] = weakref.WeakSet()
        self._callbacks: list[Callable[[StepCounters], None]] = []
        self._keeper: Keeper | None = None
        self._waiting: list[Mapping[str, Any]] = []  # loaded before there was a state to take them

    @staticmethod
    def of(optimizer: Any) -> OptimizerState:
        """The state behind a distributed optimizer or gradient tape, also when the class was given.

        Raises:
            NotAttachedError: it was not built with `compression=TopKEF`, or has exchanged nothing
                yet.
        """
        exchange: Any = getattr(optimizer, "_allreduce_grads", None)
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
        return super().active if len(self._states) else bool(hvd.size() > 1)

    @property
    def place(self) -> tuple[int, int]:
        """As `OptimizerState.place`; before the first step this process among all."""
        return super().place if len(self._states) else (hvd.rank(), hvd.size())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `OptimizerState.load_state_dict`; before the first step it is kept until then."""
        if len(self._states):
            super().load_state_dict(state)
        else:
            self._waiting = [state]

    def on_step(self, callback: Callable[[StepCounters], None]) -> None:
        """As `OptimizerState.on_step`; before the first step it is kept until then."""
        if len(self._states):
            super().on_step(callback)
        else:
            self._callbacks.append(callback)

    def state_of(
        self, variables: Sequence[Any], settings: Settings, memory: Memory | None
    ) -> OptimizerState:
        """The state for a list of variables, made when first asked for; called by the seam.

        Args:
            variables: all of them, in order.
            settings: what was asked of Horovod.
            memory: the optimizer's own, or None for a tape: these share one for equal settings.
        """
        memory = _of_tapes.setdefault(self.config, Memory()) if memory is None else memory
        state = memory.state_of(self.config, variables, settings)
        if state not in self._states:
            self._states.add(state)
            if self._keeper is not None:
                state.keep_with(self._keeper)
            for callback in self._callbacks:
                state.on_step(callback)
            self._callbacks.clear()
            if self._waiting:
                with tf.init_scope():
                    state.load_state_dict(self._waiting.pop(0))
        return state

    def keep(self, name: str) -> Keeper:
        """Keep what is owed through an elastic job; called by `horovod_topk.tensorflow.elastic`.

        Args:
            name: of the keeper's collectives, the same on all ranks.
        """
        self._keeper = Keeper(self._living_states, HorovodTalk(), name, self.commit_dir)
        for state in self._living_states():
            state.keep_with(self._keeper)
        return self._keeper

    def serialize(self) -> bytes:
        """All residuals as bytes, for tf.train.Checkpoint."""
        return archive.pack([*(s.state_dict() for s in self._living_states()), *self._waiting])

    def deserialize(self, data: bytes) -> None:
        """Take on residuals from a tf.train.Checkpoint; states yet to come take theirs then.

        Raises:
            StateDictError: a residual does not fit; nothing has changed.
        """
        saved, states = archive.unpack(data), self._living_states()
        for state, residuals in zip(states, saved, strict=False):
            state.check_state_dict(residuals)
        for state, residuals in zip(states, saved, strict=False):
            state.load_state_dict(residuals)
        self._waiting = list(saved[len(states) :])

    @staticmethod
    def _check_scaler(scaler: object) -> None:
        if scaler is not None:
            raise ConfigError(
                f"grad_scaler={scaler!r} is for PyTorch alone",
                cure="Leave it out: horovod_topk.tensorflow.keras exchanges gradients without the "
                "loss scale by itself; under tf-keras use mixed_bfloat16, or unscale gradients "
                "before they are exchanged",
            )

    def _living_states(self) -> list[OptimizerState]:
        return sorted(self._states, key=lambda state: state.created)


# What tapes keep: they come and go, and so may the compressors they are given.
_of_tapes: dict[TopKConfig, Memory] = {}
