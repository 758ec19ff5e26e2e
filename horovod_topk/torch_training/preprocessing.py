"""Gradient preprocessing: a bucket's local gradients are unscaled and clipped before compression.

Each bucket is preprocessed in place when it is complete, so that buckets are still sent while
backward goes on. Without settings that need preprocessing there is no `Preprocessing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from horovod_topk.core.codec.clipping import LocalClip
from horovod_topk.core.plan.buckets import Plan
from horovod_topk.methods.protocol import Method
from horovod_topk.torch_training.clipping import local_clip
from horovod_topk.torch_training.scaling import ONE, LossScale, Scaler, check_dtypes


@dataclass(frozen=True)
class Phase:
    """Counters of the exchange that are equal on all ranks."""

    committed: int  # number of committed steps before it
    ratio: float  # 1: everything is sent


@runtime_checkable
class ExchangesOwn(Protocol):
    """An optimizer whose ranks exchange something other than gradients."""

    def exchange_settings(self, config: Method, names: Mapping[Tensor, str]) -> Method:
        """Return the settings that the optimizer's exchange uses; note the parameters' names.

        Raises:
            ConfigError: the compressor's settings are not sound for this optimizer.
        """
        ...

    def before_exchange(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], phase: Phase
    ) -> None:
        """Turn the gradients of parameters into what ranks exchange, in place."""
        ...


class Preprocessing:
    """Unscales, clips and converts one optimizer's gradients before they are compressed.

    Args:
        scaler: the loss scaler that has scaled the gradients, or None.
        clip: clips the gradients, or None.
        own: the optimizer, if it exchanges something other than gradients.
    """

    def __init__(
        self,
        scaler: Scaler | None,
        clip: LocalClip[Tensor] | None,
        own: ExchangesOwn | None = None,
    ) -> None:
        self._loss_scale = None if scaler is None else LossScale(scaler)
        self._scale, self._clip, self._own = ONE, clip, own
        self._phase = Phase(0, 1.0)

    @classmethod
    def of(cls, scaler: Scaler | None, plan: Plan, optimizer: Any) -> Preprocessing | None:
        """The preprocessing that settings and optimizer need; None: none.

        Raises:
            UnsupportedDtypeError: a scaler cannot unscale these gradients.
        """
        norm = plan.config.clip_norm
        own = optimizer if isinstance(optimizer, ExchangesOwn) else None
        if scaler is None and norm is None and own is None:
            return None
        if scaler is not None:
            check_dtypes(plan)
        return cls(scaler, None if norm is None else local_clip(norm, plan.reduction), own)

    def begin(self, optimizer: Any, ranks: int, phase: Phase) -> None:
        """Note a step's loss scale and clipping threshold before its first bucket is preprocessed.

        Args:
            optimizer: the optimizer of the gradients.
            ranks: number of ranks that exchange gradients.
            phase: where the exchange of this step stands.

        Raises:
            GradientChangedError: the scaler has unscaled the gradients already.
            ConfigError: the scale is zero or not finite.
        """
        if self._loss_scale is not None:
            self._loss_scale.check_not_unscaled(optimizer)
            self._scale = self._loss_scale.now()
        if self._clip is not None:
            self._clip.begin(ranks)
        self._phase = phase

    def apply(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Unscale a bucket's gradients and clip them, in place.

        Then have the optimizer turn them into what it exchanges.
        """
        self._scale.divide(gradients)
        if self._clip is not None:
            self._clip.clip(gradients)
        if self._own is not None:
            self._own.before_exchange(parameters, gradients, self._phase)

    def gain(self, optimizer: Any) -> float:
        """The factor that exchanged gradients are multiplied by.

        Raises:
            GradientChangedError: the scaler has unscaled the gradients that were sent.
        """
        if self._loss_scale is not None:
            self._loss_scale.check_not_unscaled(optimizer)
        return self._scale.number
