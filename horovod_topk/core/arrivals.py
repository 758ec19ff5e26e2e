"""What Adam's step needs to know of elements that arrive rarely, or with delay.

An element that is sent once in a hundred steps arrives as the sum of a hundred gradients. Adam
would repeat this large value over its next ten steps; and as what was not sent adds up, quick
changes of a gradient cancel out before they are sent, so that Adam's mean square misses them and
its steps are too large. So ranks exchange gradients without any momentum, and Adam's first moment m
is corrected; its mean square v is its own:

    phi' = phi + ([G is not 0] - phi) / 10            how often an element arrives
    m'   = b m + (1 - b) c G,  b = beta1 phi'^(1/4)   G: the exchanged gradient
    p    = p - lr m' / sqrt(v)                        c <= 1: of its tensor and class

with v that of the step, divided by 1 - beta2^t. While v is young, an element that first arrives in
step t is about sqrt(t) times as large as sqrt(v). Dense Adam moves its weight by 1 - beta1 times
that, and so at most by lr in the first 1 / (1 - beta1)^2 steps, 100 of them with beta1 = 0.9. In
these steps |m'| is at most sqrt(v): b is smaller than beta1, and would let weights move farther.

An element that always arrives has Adam's momentum, and the rarer one arrives, the less it has.
Which elements a rank sends depends on v, too: those with the largest |e + g| v^(-1/4), with e its
residual. Adam divides by sqrt(v), so that a weight whose gradients are small moves as far as one
whose gradients are large. By magnitude alone small gradients would wait for long, and by |e + g| /
sqrt(v) nearly all elements would wait equally long. v counts as 1/256 to 1/128 of its mean, at
least, or elements that have never arrived would come before all others
(`horovod_topk.ops.Ops.weighted`). Owners of sums select by the same rule.

A tensor's elements are split into two classes, those with phi > 1/2 before the step and the others.
Error feedback loses no gradient, so it is known how much of a class's energy (sum of squares) it
takes away: as much as what a rank selects, s, has less than its gradients g. s is not rounded yet,
and r is its rounding error, which is sent later.

    E' = beta2 E + sum of G^2
    D' = beta2 D + sum of g^2 - sum of s^2 + sum of r^2    on each rank
    c  = sqrt(E' / (E' + max(0, mean of D' over ranks)))

E and D fade as fast as Adam's mean square v, so that c estimates the root of v, divided by the root
that it would have with dense gradients. Large gradients of the first steps, which are sent late and
partly cancel out, count as long as in dense training. All energy that is taken away counts as
common to the ranks: noise of single ranks does not cancel out, as it differs from step to step, and
so is sent later. Where tensors have owners, D also has what an owner's own error feedback takes
away, one step later.

Each rank sends D' with its payload, so that all ranks compute a step's c from the step's own
numbers. phi, E and c are states of the method that are equal on all ranks; D is a state of each
rank. In a large tensor energies are those of a sample: evenly spaced blocks, at most 32,768
elements and at least a third of that. Tensors that are sent whole have these states too, as some of
their elements may be rounded to zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_topk.methods.protocol import Piece

ARRIVALS, ENERGY, LOST, FACTORS = "arrivals", "energy", "lost", "factors"  # states: phi, E, D, c
STATES = (ARRIVALS, ENERGY, FACTORS, LOST)
SHARED = (ARRIVALS, ENERGY, FACTORS)  # equal on all ranks
CLASSES = 2  # of elements: those that arrive often, and the others
OFTEN = 0.5  # phi above which an element arrives often
RATE = 0.1  # weight of the present step in phi
LEAST = 0.1  # smallest c
LIMIT = (1.0 - RATE) * OFTEN  # what phi' has to be above, less what arrived in the step


def arrived_often(arrivals: Any, has_arrived: Any) -> Any:
    """Whether an element arrived often before a step.

    Args:
        arrivals: phi after the step.
        has_arrived: 1 for elements that arrived in the step, 0 for others.
    """
    return arrivals - RATE * has_arrived > LIMIT


def is_limited(beta1: Any, step: Any) -> Any:
    """Whether TopKEF limits Adam's step number `step` to |m'| <= sqrt(v); steps count from 1."""
    return (1.0 - beta1) ** 2 * step <= 1.0


def elements(name: str, numel: int) -> int:
    """Number of elements of a state for a tensor of `numel` elements."""
    return numel if name == ARRIVALS or not numel else CLASSES


def followed(pieces: Sequence[Piece]) -> list[int]:
    """Positions of the tensors that have these states: those with any elements."""
    return [position for position, piece in enumerate(pieces) if piece.spec.numel]


def measures(pieces: Sequence[Piece]) -> tuple[str, ...]:
    """Names of the numbers that a payload of these pieces carries: D' of each class."""
    names = [pieces[position].spec.name for position in followed(pieces)]
    return tuple(f"{name}:{LOST}{i}" for name in names for i in range(CLASSES))
