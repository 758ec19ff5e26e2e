"""Residuals at learning rates that change: Karimireddy et al. 2019, Zheng et al. 2019.

An optimizer takes p -= lr * (what is exchanged), and residuals are in units of gradients. Error
feedback as its theory has it keeps updates instead, lr * e, each gradient at the rate at which it
was computed. In units of gradients that is, where the rate goes from lr to lr',

    e' = e * lr / lr'        before a' = e' + g

(Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback,
algorithm 1), so that with a rate that changes from step to step, at the rates of the steps,

    sum of lr * applied + lr * mean of the residuals  =  sum of lr * mean gradient

Without it the last rate multiplies the whole residual, and a gradient that waited while the rate
fell counts for less. It is done once, before a step's first bucket is sent: what is kept is the
pair of e and its rate, and a step that is rolled back leaves both as it found them.

Velocities of momentum correction stay as they are. Heavy-ball momentum, as PyTorch has it, takes
p -= lr * v with v = m v + g: what a gradient still adds to later steps through v is not late, and
counts at the rates of those later steps, with and without compression. What of v should have been
applied already is in e. So it is with Zheng et al., and if everything is sent the
rates change nothing.

The factors of a run multiply to (largest rate) / (present rate), and e grows by no more: lr * e,
what it will change, does not grow at all. Rates below `SMALLEST`, 0 among them, and what is no
number are not followed: e stays in units of the last rate that was, and what such a step sends of
it is applied at that step's rate. Values that are sent saturate, and the residual keeps the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Protocol

from horovod_topk.errors import StateDictError

RATES = "rates"  # of a state dict: learning rates by tensor, where residuals follow them
LARGEST = "largest_rates"  # of a state dict: the largest of them so far
SMALLEST = 1e-12  # that is followed; keeps float32 residuals from overflowing


class Followed(Protocol):
    """Learning rates that residuals follow, by tensor name, of tensors that have had one."""

    def saved(self) -> dict[str, dict[str, float]]:
        """Return the rates for a state dict: `RATES`, the units of residuals, and `LARGEST`."""
        ...

    def load(self, saved: Mapping[str, Mapping[str, float]]) -> None:
        """Replace all rates by those that `saved` returned; tensors left out have none."""
        ...


class Rates:
    """Learning rates of this rank's optimizer, and those in whose units residuals are.

    Args:
        now: gives those of a step that begins now; on this rank alone, as nobody is asked.
    """

    def __init__(self, now: Callable[[], Mapping[str, float]]) -> None:
        self._now = now
        self.units: dict[str, float] = {}
        self.largest: dict[str, float] = {}

    def saved(self) -> dict[str, dict[str, float]]:
        """`Followed.saved`."""
        return {RATES: dict(self.units), LARGEST: dict(self.largest)}

    def load(self, saved: Mapping[str, Mapping[str, float]]) -> None:
        """`Followed.load`."""
        self.units = dict(saved.get(RATES, {}))
        self.largest = self.units | dict(saved.get(LARGEST, {}))

    def decay(self, name: str) -> float:
        """A tensor's present rate as a share of its largest one; 1 where there is none."""
        return self.units[name] / self.largest[name] if name in self.largest else 1.0

    def turn(self) -> dict[str, float]:
        """Take on the present rates.

        Returns:
            What residuals are to be multiplied by, of tensors whose rate has changed.
        """
        now = {name: rate for name, rate in self._now().items() if _is_rate(rate)}
        changed = {name for name in now.keys() & self.units.keys() if now[name] != self.units[name]}
        factors = {name: self.units[name] / now[name] for name in sorted(changed)}
        self.units |= now
        self.largest |= {n: max(rate, self.largest.get(n, rate)) for n, rate in now.items()}
        return factors


def rates_of(state: Mapping[str, Any], key: str = RATES) -> dict[str, float]:
    """Learning rates of a state dict by tensor name; none where nobody noted them.

    key: `RATES` or `LARGEST`.

    Raises:
        StateDictError: one is no rate that can be followed.
    """
    rates = state.get(key, {})
    if not isinstance(rates, Mapping) or not all(map(_is_rate, rates.values())):
        raise StateDictError(
            f"{key!r} of the state dict are no learning rates: {rates!r}",
            cure="Pass what state_dict() of a TopKEF compressor returned",
        )
    return {name: float(rate) for name, rate in rates.items()}


def is_followed(rate: Any) -> Any:
    """Whether residuals follow a learning rate: a number, or a scalar of an array library."""
    return (rate >= SMALLEST) & (rate < math.inf)


def _is_rate(rate: object) -> bool:
    return isinstance(rate, Real) and bool(is_followed(float(rate)))
