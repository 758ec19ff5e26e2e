"""Learning-rate rescaling of residuals: Karimireddy et al. 2019, Zheng et al. 2019.

An optimizer applies p -= lr * (exchanged gradient), and residuals are in units of gradients. In the
theory of error feedback the residual holds updates, lr * e, each gradient at the learning rate at
which it was computed. In units of gradients this means, when the rate changes from lr to lr',

    e' = e * lr / lr'        before a' = e' + g

(Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback,
algorithm 1), so that with rates that change from step to step

    sum of lr * applied + lr * mean of the residuals  =  sum of lr * mean gradient

Without it the last rate multiplies the whole residual, and a gradient that waited while the rate
fell has less effect. Residuals are rescaled once, before a step's first bucket is sent: the state
is the pair of e and its rate, and a step that is rolled back leaves both unchanged.

Velocities of momentum correction are not rescaled. Heavy-ball momentum, as in PyTorch, applies
p -= lr * v with v = m v + g: what a gradient adds to later steps through v is not late, and is
multiplied by the rates of those later steps, with and without compression. The part of v that
should have been applied already is in e. Zheng et al. do the same, and if every element is sent,
rates change nothing.

A residual grows by a twentieth in a step at most, and less at ratios k below 0.02. It is in units
of a rate L that follows lr at once where lr rises, and not faster than that where lr falls:

    L' = max(lr', (1 - f) L)      e' = e * L / L'      f = min(1/20, 5/2 k)

In a schedule of many steps L is lr but for the last 1 / f steps or two times that. An element waits
about 1 / k steps, so that what is exchanged stays about as large as gradients are. Without this
bound the last steps of a short cycle exchange ever larger gradients, which clipping cuts down; and
where the rate then rises again, the optimizer's momentum and Adam's mean square still hold them, in
units of the lowest rate: SGD diverges. What waits while the rate falls faster is applied at the
lower rate of the step that sends it, as without rescaling: its weight moves less far than in
theory.

A rate of 0 freezes weights, and says nothing of how large updates will be: it is ignored, as are
negative and infinite rates, NaN, and L below 1e-12: e stays in the units that it has. Values that
are sent saturate, and the residual keeps the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Protocol

from horovod_topk.errors import StateDictError
from horovod_topk.methods.protocol import Method

RATES = "rates"  # key in a state dict: learning rates by tensor, with learning-rate rescaling
LARGEST = "largest_rates"  # key in a state dict: the largest learning rates so far
SMALLEST = 1e-12  # smaller units are ignored, so that float32 residuals do not overflow
FASTEST = 0.05  # the units of residuals fall by this share in a step, at most,
PER_RATIO = 2.5  # and by this many times the ratio


def fall_of(config: Method, name: str) -> float:
    """Return the share to which the units of a tensor's residual fall in a step, at most.

    config: the settings, with `ratios` resolved.
    """
    ratio = config.own.get(name, min(config.ratio, config.ratio_back))
    return 1.0 - min(FASTEST, PER_RATIO * ratio)


class RateUnits(Protocol):
    """Learning rates that residuals are rescaled by, by tensor name."""

    def saved(self) -> dict[str, dict[str, float]]:
        """Return the rates for a state dict: `RATES`, the units of residuals, and `LARGEST`."""

    def load(self, saved: Mapping[str, Mapping[str, float]]) -> None:
        """Replace all rates by those that `saved` returned; tensors left out have none."""


class Rates:
    """This rank's present learning rates, and the rates in whose units residuals are.

    Args:
        now: returns the learning rates of the step that begins now, without communication.
    """

    def __init__(
        self,
        now: Callable[[], Mapping[str, float]],
        fall: Callable[[str], float] = lambda _: 1.0 - FASTEST,
    ) -> None:
        self._now, self._fall = now, fall
        self.units: dict[str, float] = {}
        self.largest: dict[str, float] = {}
        self._before: dict[str, float] = {}  # units at the end of the last committed step,
        self._committed = 0  # and the number of that step
        self._present: Mapping[str, float] = {}

    def shared(self) -> tuple[float, ...]:
        """Return the rates that `rescalings` has read, in the order of tensors: equal on all ranks.

        A scheduler that drives a copy of the optimizer on some ranks leaves them different.
        """
        return tuple(self._present.values())

    def saved(self) -> dict[str, dict[str, float]]:
        """`RateUnits.saved`."""
        return {RATES: dict(self.units), LARGEST: dict(self.largest)}

    def load(self, saved: Mapping[str, Mapping[str, float]]) -> None:
        """`RateUnits.load`."""
        self.units = dict(saved.get(RATES, {}))
        self._before = dict(self.units)
        self.largest = self.units | dict(saved.get(LARGEST, {}))

    def decay(self, name: str) -> float:
        """Return the rate in whose units a residual is, divided by the largest so far; or 1."""
        return self.units[name] / self.largest[name] if name in self.units else 1.0

    def rescalings(self, committed: int) -> dict[str, float]:
        """Note the units that present rates give; return the factors by which residuals change.

        committed: number of committed steps; a step that is tried again has the same units.
        """
        if committed != self._committed:
            self._before, self._committed = dict(self.units), committed
        factors, self._present = dict[str, float](), self._now()
        for name, rate in self._present.items():
            known = self._before.get(name, 0.0), self.largest.get(name, 0.0)
            unit, largest, is_known = next_units(rate, *known, self._fall(name), max)
            if is_known:
                now = self.units.get(name, unit)
                self.units[name], self.largest[name] = unit, largest
                if now != unit:
                    factors[name] = now / unit
        return factors


def next_units(
    rate: Any, before: Any, largest: Any, fall: Any, maximum: Callable[[Any, Any], Any]
) -> tuple[Any, Any, Any]:
    """Return L', the largest rate, and whether they count: of numbers, or arrays of a framework.

    before: L, in whose units the residual is; 0: not known.
    largest: the largest rate before the step; 0: not known.
    """
    unit = maximum(rate, fall * before)
    return unit, maximum(rate, largest), (rate > 0.0) & is_unit(unit)


def rates_of(state: Mapping[str, Any], key: str = RATES) -> dict[str, float]:
    """Learning rates of a state dict by tensor name; empty if it has none.

    key: `RATES` or `LARGEST`.
    """
    rates = state.get(key, {})
    if not isinstance(rates, Mapping) or not all(map(_is_rate, rates.values())):
        raise StateDictError(
            f"{key!r} of the state dict are no learning rates: {rates!r}",
            cure="Pass what state_dict() of a TopKEF compressor returned",
        )
    return {name: float(rate) for name, rate in rates.items()}


def is_unit(rate: Any) -> Any:
    """Return whether residuals can be in units of a rate: a number, or a library's float64."""
    return (rate >= SMALLEST) & (rate <= sys.float_info.max)


def _is_rate(rate: object) -> bool:
    return isinstance(rate, Real) and bool(is_unit(rate))
