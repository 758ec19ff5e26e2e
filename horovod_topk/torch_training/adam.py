"""Adapts steps of Adam and AdamW to compressed gradients; see `horovod_topk.core.arrivals`.

Before a step of the optimizer its first moment is prepared, so that the optimizer's own code then
computes the one that is wanted:

    m_t = s_t (b m_(t-1) / s_(t-1) + (1 - b) c G),  b = beta1 phi^(1/2),  s_t = 1 - beta1^t
    |m_t| <= far s_t sqrt(v_t / (1 - beta2^t)),     far = max(1, rms(p) / 5 / lr)

m_t is what Adam divides by s_t, so that steps have no bias to correct. The first step is Adam's
own. far is 1 in the first steps. Nothing else of the optimizer changes: between exchange and step
gradients are gradients, and its state dict has its own moments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from horovod_topk.core.arrivals import FARTHEST, FREE, LIMIT, RATE, SLOWEST, Arrived, is_young
from horovod_topk.core.compressor import Compressor
from horovod_topk.core.momentum import Momentum
from horovod_topk.ops.torch_moments import Moment, Numbers, prepare, undo
from horovod_topk.torch_training.added import added_by, applies_nothing, versions
from horovod_topk.torch_training.group_settings import betas_of, not_a_number, number_in


@dataclass(frozen=True)
class _Prepared:
    """A prepared first moment, and what shows whether the optimizer's step has used it."""

    moment: Moment
    numbers: Numbers
    counter: Any  # the optimizer's number of steps: [], it is written
    count: int  # its value before the step
    versions: tuple[int, ...]  # of the gradients

    @property
    def is_unused(self) -> bool:
        """Whether no step has used it and its gradient is unchanged. Waits for the device."""
        return float(self.counter) == self.count and self.versions == _versions(self.moment)


class AdamSteps:
    """Prepares the steps of one Adam or AdamW.

    Args:
        names: names of parameters; parameters without one are not compressed.
        arrived: returns the arrivals of the exchanged step by tensor name; empty if the step is not
            to be changed.
    """

    def __init__(
        self, names: Mapping[Any, str], arrived: Callable[[], Mapping[str, Arrived[Tensor]]]
    ) -> None:
        self._names, self._arrived = names, arrived
        self._prepared: list[_Prepared] = []

    @torch.no_grad()
    def prepare(self, optimizer: Any) -> None:
        """Prepare the first moments for the optimizer's step, once gradients are exchanged."""
        self.undo()  # what a step that raised has left
        if applies_nothing(optimizer):
            return
        arrived = self._arrived()
        for group in optimizer.param_groups if arrived else ():
            beta1, beta2 = _betas(optimizer, group)
            rate = number_in(optimizer, group, "lr")
            known = [p for p in group["params"] if self._names.get(p) in arrived]
            known = [p for p in known if p.grad is not None and "exp_avg" in optimizer.state[p]]
            for step, alike in _by_step(known, optimizer) if beta1 else ():
                if not step:  # the first step is to come, as a skipped one does not count
                    continue
                before, now = 1.0 - beta1**step, 1.0 - beta1 ** (step + 1)
                unit = now / beta1 / math.sqrt(1.0 - beta2 ** (step + 1))  # where far and v are 1
                largest = _largest(alike, unit, None if is_young(beta1, step + 1) else rate)
                gradients = _added(optimizer, group, alike)
                moments = [
                    _moment(optimizer.state[p], added, p.grad, arrived[self._names[p]], most)
                    for p, added, most in zip(alike, gradients, largest, strict=True)
                ]
                numbers = Numbers(beta1, before, now, RATE, LIMIT, beta2)
                prepare(moments, numbers)
                self._prepared += [
                    _Prepared(each, numbers, optimizer.state[p]["step"], step, _versions(each))
                    for p, each in zip(alike, moments, strict=True)
                ]

    def restore(self) -> None:
        """Note that the step has ended. Adam's first moments need no change after it."""
        self._prepared.clear()

    @torch.no_grad()
    def undo(self) -> None:
        """After a step that has raised, turn prepared first moments back into Adam's own.

        Those that the step has not changed become what they were before, to rounding, unless their
        gradient has been changed since; those that were limited become 0.
        """
        for each in self._prepared:
            if each.is_unused:
                undo([each.moment], each.numbers)
        self._prepared.clear()


def _versions(each: Moment) -> tuple[int, ...]:
    return versions(each.added, each.gradient)


def _moment(
    state: Mapping[str, Any],
    added: Tensor,
    gradient: Tensor,
    arrived: Arrived[Tensor],
    most: Tensor,
) -> Moment:
    """Return a parameter's first moment, and what it is prepared from."""
    own = state["exp_avg"], added, gradient, arrived.arrivals, arrived.factors
    return Moment(*own, state["exp_avg_sq"], most)


def _largest(parameters: Sequence[Any], unit: float, rate: float | None) -> Sequence[Tensor]:
    """Return the largest |m'| of each parameter where v is 1: far times `unit`, [].

    rate: the learning rate; None: no weight may move by more than that.
    """
    if rate is None:
        places = [(p.device, p.dtype) for p in parameters]
        made = {
            place: torch.full((), unit, device=place[0], dtype=place[1]) for place in set(places)
        }
        return [made[place] for place in places]
    ops: Any = torch  # operations on lists of tensors have no annotations
    norms = ops._foreach_norm(parameters)
    of_rms = FARTHEST / max(rate, SLOWEST)
    fars = ops._foreach_mul(norms, [of_rms / max(1, p.numel()) ** 0.5 for p in parameters])
    ops._foreach_clamp_min_(fars, 1.0)
    ops._foreach_clamp_max_(fars, FREE)
    ops._foreach_mul_(fars, unit)
    found: Sequence[Tensor] = fars
    return found


def arrived(compressor: Compressor[Tensor]) -> dict[str, Arrived[Tensor]]:
    """The arrivals of a compressor's last step, by tensor name; empty if it was not compressed."""
    return {} if compressor.step.flagged else compressor.step.arrivals()


def second_moments(optimizer: Callable[[], Any], names: Mapping[Any, str]) -> dict[str, Momentum]:
    """Return beta 2 and the mean square v of each parameter for the next step, by tensor name.

    optimizer: returns the Adam or AdamW.
    """
    found, adam = dict[str, Momentum](), optimizer()
    for group in adam.param_groups:
        _, beta2 = _betas(adam, group)
        for p in group["params"]:
            name = names.get(p)
            if name is not None:
                squares = adam.state.get(p, {}).get("exp_avg_sq")
                found[name] = Momentum(beta2, squares)
    return found


def _betas(optimizer: Any, group: Mapping[str, Any]) -> tuple[float, float]:
    """Both betas of a parameter group.

    Raises:
        ConfigError: they are not two numbers any more.
    """
    match betas_of(group):
        case [float(beta1), float(beta2)]:
            return beta1, beta2
    raise not_a_number(optimizer, group, "betas")


def _added(optimizer: Any, group: Mapping[str, Any], parameters: Sequence[Any]) -> list[Tensor]:
    """Gradients as the optimizer adds them to its first moments: with L2 decay, or negated."""
    gradients = added_by(optimizer, group, parameters)
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))
    decay = 0.0 if decoupled else group["weight_decay"]
    if decay:
        pairs = zip(gradients, parameters, strict=True)
        gradients = [gradient.add(p.detach(), alpha=decay) for gradient, p in pairs]
    return gradients


def _by_step(parameters: Sequence[Any], optimizer: Any) -> Iterator[tuple[int, list[Any]]]:
    """Group parameters by the number of steps that the optimizer has made with each."""
    if not parameters:
        return
    steps = [optimizer.state[p]["step"] for p in parameters]
    where = steps[0].device
    at_once = where.type != "cpu"  # one wait for the device instead of one a parameter
    counts = torch.stack([s.to(where) for s in steps]).tolist() if at_once else map(float, steps)
    pairs = sorted(zip(map(int, counts), range(len(parameters)), strict=True))
    for step, alike in itertools.groupby(pairs, key=lambda pair: pair[0]):
        yield step, [parameters[at] for _, at in alike]
