"""`TopKEF`: what a user passes as `compression=`."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from horovod.torch.compression import Compressor

from horovod_topk.core.base_compressor import BaseCompressor
from horovod_topk.elastic import Manager
from horovod_topk.errors import NotAttachedError, OutsideOptimizerError
from horovod_topk.torch.collective import HorovodTalk
from horovod_topk.torch.scaling import check_scaler
from horovod_topk.torch.state import OptimizerState


class TopKEF(BaseCompressor, Compressor):  # type: ignore[misc]  # Horovod has no annotations
    """Top-K gradient sparsification with error feedback.

    Give the class (defaults) or an instance to `hvd.DistributedOptimizer(compression=...)`. Each
    optimizer has a state of its own, also when two share one instance.

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
        warmup: larger ratios for the first steps: a number of steps, over which 0.25, 0.0625 and so
            on come down to `ratio`, or pairs (until, ratio), each for the steps until so many have
            been committed; None: off.
        momentum: of momentum correction with masking (`horovod_topk.core.momentum`), instead of
            the optimizer's own: "optimizer" takes over that of `torch.optim.SGD`, `Adam` or
            `AdamW`, whose `momentum` or `betas[0]` is 0 then; or pass a number. 0: off.
        nesterov: whether that is Nesterov's.
        follow_lr: multiply residuals by old / new learning rate where that of their parameter group
            changes, so that what waits counts at the rate at which it was computed
            (`horovod_topk.core.rates`).
        ratios: ratios of some tensors, instead of `ratio` and `gather_ratio`: a mapping, or pairs,
            of a pattern of names as in `fnmatch` ("head.*"), or a function of a tensor's name and
            shape that returns a bool, and a ratio or "dense". The first that holds wins. A pattern
            that matches nothing is an error; tensors below `min_numel` are dense in any case.
        name: prefix of the collectives' names, equal on all ranks; derived from the plan if None.
        commit_dir: a folder that all ranks of an elastic job can read, where each commit keeps what
            this rank owes, for another one if it is lost (`horovod_topk.torch.elastic`).
        grad_scaler: the `torch.amp.GradScaler` that scales the loss, if one does: residuals are
            then kept in unscaled units, and a change of its scale changes nothing that is owed.

    Raises:
        ConfigError, UnknownSettingError: see the message.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(
        ...     optimizer,
        ...     named_parameters=model.named_parameters(),
        ...     compression=TopKEF(ratio=0.001),
        ... )

    Source: Stich et al. 2018 (Sparsified SGD with Memory); Karimireddy et al. 2019 (Error
    Feedback Fixes SignSGD); Lin et al. 2018 (Deep Gradient Compression) for `clip_norm`,
    `warmup` and `momentum`; Zheng et al. 2019 (Blockwise Momentum SGD with Error-Feedback) for
    `follow_lr`.
    """

    framework = "torch"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin()

    def _begin(self) -> None:
        self._states: weakref.WeakSet[OptimizerState] = weakref.WeakSet()
        self._manager: Manager | None = None

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> OptimizerState:
        """The state behind a distributed optimizer, also when the class was passed.

        Raises:
            NotAttachedError: the optimizer was not built with `compression=TopKEF`.
        """
        state = getattr(optimizer, "_topkef", None)
        if not isinstance(state, OptimizerState):
            raise NotAttachedError(
                f"{type(optimizer).__name__} was not built with compression=TopKEF",
                cure="Pass what hvd.DistributedOptimizer(..., compression=TopKEF) returned",
            )
        return state

    @staticmethod
    def compress(tensor: torch.Tensor) -> NoReturn:
        """Refuse: a tensor without a name and an optimizer has no residual.

        Raises:
            OutsideOptimizerError: always.
        """
        raise OutsideOptimizerError(
            f"TopKEF was asked to compress one tensor of shape {list(tensor.shape)} by itself",
            cure="Pass it to hvd.DistributedOptimizer(compression=...), not to hvd.allreduce",
        )

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        """Return the tensor: gradients are decoded before Horovod asks."""
        return tensor

    def attached(self, state: OptimizerState) -> None:
        """Remember an optimizer's state; called by the seam.

        Raises:
            ConfigError: an elastic job's state keeps what is owed, and not all ranks exchange.
        """
        if self._manager is not None:
            state.keep_with(self._manager)
        self._states.add(state)

    def keep(self, name: str) -> Manager:
        """Keep what is owed through an elastic job; called by `horovod_topk.torch.elastic`.

        Args:
            name: of the manager's collectives, the same on all ranks.
        """
        self._manager = Manager(self._living_states, HorovodTalk(), name, self.commit_dir)
        for state in self._living_states():
            state.keep_with(self._manager)
        return self._manager

    def set_ratio(self, ratio: float | None) -> None:
        """As `OptimizerState.set_ratio`, of the one optimizer behind this instance."""
        state = self._only_state()
        assert isinstance(state, OptimizerState)
        state.set_ratio(ratio)

    @staticmethod
    def _check_scaler(scaler: object) -> None:
        check_scaler(scaler)

    def _living_states(self) -> list[OptimizerState]:
        return list(self._states)
