"""Allocation: the share of each tensor's elements that a rank sends, at the bytes of one ratio.

An element of a tensor waits about 1 / q steps if the share q of its elements is sent in a step. Let
s be the root of the mean square of the tensor's exchanged gradients, and n its number of elements.
A step lowers the loss by about s^p an element: p = 2 if weights move in proportion to gradients, as
SGD moves them, and 1 if their scale is divided out, as Adam does. What waiting costs is least if

    sum n s^p / q is least at a given sum n q:    q ~ s^(p/2)

A share is one of 17 levels, ratio * 2^(j/4) with j = -8 ... 8. All shares are multiplied by the
largest factor at which a step sends no more bytes than with one ratio for all. So bytes stay those
of the plan. L-GreCo (Markov et al. 2022, arXiv 2210.17357) minimises the error of one step instead;
with error feedback an error is delayed and not lost.

Every rank computes s from the gradients that all ranks have, after 60 committed steps, 120, 240 and
so on, and uses the allocation from the next step on. Other steps compute nothing for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from horovod_topk.core.plan.buckets import Plan
from horovod_topk.methods.protocol import SHARES, Allocation

FIRST = 60  # committed steps before the first allocation; each later one comes after twice as many
TRIES = 16  # halvings of the interval of the common factor


def is_due(committed: int) -> bool:
    """Whether shares are allocated anew after so many committed steps."""
    times, rest = divmod(committed, FIRST)
    return times > 0 and rest == 0 and times & (times - 1) == 0


class Allocator:
    """Allocates the bytes of a plan to its tensors.

    Tensors that are sent whole, or have a ratio of their own, stay as they are.

    Args:
        plan: the plan with one ratio for all tensors.
        is_linear: whether weights move in proportion to gradients.
    """

    def __init__(self, plan: Plan, *, is_linear: bool) -> None:
        config: Any = plan.config
        self._power = 2 if is_linear else 1
        self._tensors = {
            tensor.spec.name: tensor
            for tensor in plan.tensors()
            if not tensor.sends_all and tensor.spec.name not in config.own
        }
        self._bytes: dict[str, list[int]] = {name: [] for name in self._tensors}  # at each level
        directions = ("direct",) if config.ratio_back == config.ratio else ("direct", "gather")
        for j in SHARES:
            allocation = tuple((name, j) for name in self._tensors)
            at_level = replace(config, allocation=allocation)
            for name, tensor in self._tensors.items():
                pieces = [at_level.piece(tensor, each) for each in directions]
                self._bytes[name].append(sum(map(at_level.data_bytes, pieces)))

    def allocate(self, squares: Mapping[str, float]) -> Allocation | None:
        """Return the level j of each tensor; None: a sum is not finite, or all are 0.

        squares: sum of squares of each tensor's exchanged gradient.
        """
        wanted = {
            name: self._wanted(name, squares[name]) for name in self._tensors if name in squares
        }
        finite = [each for each in wanted.values() if each > -math.inf]
        if not finite or any(map(math.isnan, wanted.values())) or max(finite) == math.inf:
            return None
        names, each = [*wanted], [*wanted.values()]
        costs = [self._bytes[name] for name in names]
        budget = sum(cost[SHARES.index(0)] for cost in costs)
        low, high = SHARES[0] - max(finite), SHARES[-1] + 1 - min(finite)
        for _ in range(TRIES):
            middle = (low + high) / 2
            pairs = zip(costs, _levels(each, middle), strict=True)
            fits = sum(cost[j - SHARES[0]] for cost, j in pairs) <= budget
            low, high = (middle, high) if fits else (low, middle)
        return tuple(sorted(zip(names, _levels(each, low), strict=True)))

    def _wanted(self, name: str, square: float) -> float:
        """Return 4 log2 of s^(p/2): the level j, without the common factor."""
        mean = square / self._tensors[name].numel
        return self._power * math.log2(mean) if mean != 0.0 else -math.inf


def _levels(wanted: Sequence[float], shift: float) -> list[int]:
    least, most = SHARES[0], SHARES[-1]
    return [math.floor(max(least, min(most, each + shift))) for each in wanted]
