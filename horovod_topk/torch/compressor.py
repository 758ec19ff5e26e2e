"""`TopKEF`: what a user passes as `compression=`."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from horovod.torch.compression import Compressor

from horovod_topk.core.front import Front
from horovod_topk.elastic import Keeper
from horovod_topk.errors import NotAttachedError, OutsideOptimizerError
from horovod_topk.torch.collective import HorovodTalk
from horovod_topk.torch.scaling import check_scaler
from horovod_topk.torch.state import OptimizerState


class TopKEF(Front, Compressor):  # type: ignore[misc]  # Horovod has no annotations
    """Top-K gradient compression with error feedback, for PyTorch's Horovod.

    In each step a rank sends the largest elements of each gradient tensor. The rest stays on the
    rank, as a residual, and is added to the next gradient. Pass the class (default settings) or an
    instance as `hvd.DistributedOptimizer(compression=...)`. Each optimizer has a state of its own,
    also when several share one instance; `TopKEF.of(optimizer)` returns it.

    Gradients may be float16, bfloat16, float32 or float64, of any shape. Residuals are float32, and
    float64 for float64 gradients.

    Args:
        ratio: share of each tensor's elements that a rank sends in a step, in (0, 1].
        values: format in which values are sent: "float32" (float64 for float64 gradients),
            "float16", "bfloat16", "int8", "int4" or "sign". The rounding error stays in the
            residual. With "sign" it is so large that training may diverge (docs/frontier.md).
        indices: format in which indices are sent: "packed" (compressed), "plain" (16 or 32 bits
            each), or "auto": plain on accelerators, packed elsewhere.
        exchange: how payloads travel between ranks: "allgather"; "sharded", in which each rank
            adds up one shard, so that its bytes hardly grow with the number of ranks;
            "hierarchical", dense within a node and sparse between nodes, which needs
            `hvd.init(process_sets="dynamic")`; or "auto": the one of these that sends the fewest
            bytes from the busiest node.
        gather_ratio: for "sharded", the share of a shard's elements that its owner sends back, in
            (0, 1]. None: the same as `ratio`.
        selection: how the largest elements are found: "exact", or "sampled", which estimates a
            threshold from a sample and is faster.
        min_numel: tensors with fewer elements are sent whole, in the same payload.
        clip_norm: clip each rank's gradients before they are added to the residual, so that the
            norm of the applied gradient is at most about this (`horovod_topk.core.clipping`).
            None: off.
        warmup: larger ratios for the first steps. A number of steps: the ratio goes down through
            0.25, 0.0625 and so on until it reaches `ratio` after that many steps. Pairs
            (until, ratio): that ratio until so many steps are committed. None: off.
        momentum: the momentum for momentum correction with masking (`horovod_topk.core.momentum`),
            which replaces the optimizer's own. "optimizer": take over the momentum of
            `torch.optim.SGD`, `Adam` or `AdamW`, and set its `momentum` or `betas[0]` to 0. A
            number: give the optimizer a momentum of 0 yourself. 0: off. With it, exchanged
            gradients are velocities, up to 1 / (1 - momentum) times larger than gradients: clip
            with `clip_norm`.
        nesterov: whether that momentum is Nesterov's.
        follow_lr: when the learning rate of a parameter group changes, multiply its residuals by
            old rate / new rate, so that each gradient counts at the rate at which it was computed
            (`horovod_topk.core.rates`).
        ratios: a ratio for some tensors, instead of `ratio` and `gather_ratio`. A mapping or a
            sequence of pairs. A key is a pattern of tensor names as in `fnmatch` ("head.*"), or a
            function of a tensor's name and shape that returns a bool. A value is a ratio or
            "dense". The first key that matches a tensor is used; a pattern that matches no tensor
            is an error. Tensors below `min_numel` are sent whole in any case.
        name: prefix of the names of the collectives, the same on all ranks. None: derived from the
            tensors and settings.
        commit_dir: for elastic jobs, a folder that all ranks can read. Each commit writes this
            rank's residuals there, so that another rank can take them over if this one is lost
            (`horovod_topk.torch.elastic`).
        grad_scaler: the `torch.amp.GradScaler` that scales the loss, if there is one. Residuals are
            then kept without the scale, so that they stay right when the scale changes.

    Raises:
        ConfigError, UnknownSettingError: a setting is out of its range, does not fit another one,
            or does not exist.

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
        self._keeper: Keeper | None = None

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Return the error-feedback state of a distributed optimizer.

        Args:
            optimizer: what `hvd.DistributedOptimizer(..., compression=TopKEF)` returned, with the
                class or an instance.

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
        """Refuse to compress a single tensor: a tensor outside an optimizer has no residual.

        Raises:
            OutsideOptimizerError: always.
        """
        raise OutsideOptimizerError(
            f"TopKEF was asked to compress one tensor of shape {list(tensor.shape)} by itself",
            cure="Pass it to hvd.DistributedOptimizer(compression=...), not to hvd.allreduce",
        )

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        """Return the tensor as it is: gradients are decoded before Horovod calls this."""
        return tensor

    def attached(self, state: OptimizerState) -> None:
        """Remember an optimizer's state; called by the seam.

        Raises:
            ConfigError: an elastic job's state keeps what is owed, and not all ranks exchange.
        """
        if self._keeper is not None:
            state.keep_with(self._keeper)
        self._states.add(state)

    def keep(self, name: str) -> Keeper:
        """Keep what is owed through an elastic job; called by `horovod_topk.torch.elastic`.

        Args:
            name: of the keeper's collectives, the same on all ranks.
        """
        self._keeper = Keeper(self._living_states, HorovodTalk(), name, self.commit_dir)
        for state in self._living_states():
            state.keep_with(self._keeper)
        return self._keeper

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
