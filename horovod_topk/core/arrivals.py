"""What an optimizer's step needs to know of elements that arrive rarely, or with delay.

An element that is sent once in a hundred steps arrives as the sum of a hundred gradients. Momentum
would spread this large value over the next ten steps, and so delay it once more. So ranks exchange
gradients without any momentum, and each element has a momentum of its own at the optimizer: the
more often it arrives, the more it has. An element that always arrives has the optimizer's momentum.

    phi' = phi + ([G is not 0] - phi) / 10    how often an element arrives
    b    = momentum phi'^(1/4)                SGD
    b    = beta1 phi'^(1/2)                   Adam

G is the exchanged gradient.

**SGD** applies every gradient once, whenever it arrives: a gradient moves its weight by lr c / (1 -
momentum) in all, as in dense SGD but for c. The exchange gives users limited gradients L. R is what
earlier ones have still to move, and M what SGD applies in place of its momentum buffer:

    L  = min(1, 3/2 n / |G|) G                |G|: the norm of a tensor
    M  = (1 - b) (R + c L) / (1 - momentum)
    R' = b (R + c L)
    c  = 1 - 1/2 phi' (lr / largest lr so far)^2
    n' = n + (|G| - n) / 20

In c, lr is the rate in whose units residuals are: it falls by a twentieth in a step at most.

Large steps are taken at once where dense SGD spreads them over ten steps, so that training would
diverge near the largest learning rate at which dense SGD is stable. Two factors keep it stable.
Elements that arrive in nearly every step have the largest gradients; they move less while the
learning rate is near its largest value. And a tensor's gradient that is suddenly larger than those
of the last steps is scaled down to 1.5 times their mean norm. No element of a tensor that is sent
whole moves less for arriving often, and while everything is sent at full precision phi is 1.

Steps in which a tensor's G is 0 leave n as it is. Where residuals grow because the learning rate
has fallen (`horovod_topk.core.rates`), n grows as much, since G may. n counts gradients that were
scaled down as large as they were, so that a lasting change is followed; the second of two spikes
is limited less.

**Adam** divides by the root of a mean square v of gradients. As what was not sent adds up, quick
changes of a gradient cancel out before they are sent, so that v misses them and steps are too
large. A gradient that stays the same adds up: its sum over T steps has T times the energy of the T
gradients, and steps are too small. So Adam's first moment m is corrected; v is its own:

    m'   = b m + (1 - b) c G                  c: of its tensor and class
    |m'| <= far sqrt(v)
    far  = max(1, rms(p) / 5 / lr)            rms(p): root mean square of the tensor's weights
    p    = p - lr m' / sqrt(v)

with v that of the step, divided by 1 - beta2^t. An element that waits for T steps, or first arrives
in step T, has a G of up to sqrt(T) times sqrt(v). Dense Adam takes ten steps for what its weight
then moves in one or two. So no weight moves by more than a fifth of its tensor's rms in a step, or
by lr if that is more. This is no limit where learning rates are small for the weights, and it keeps
training stable where they are large. In the first 1 / (1 - beta1)^2 steps, 100 of them with beta1 =
0.9, far is 1: until then dense Adam, too, moves by at most lr a weight whose gradient first
arrives.

Which elements a rank sends depends on v, too: those with the largest |e + g| v^(-1/4), with e its
residual. Adam divides by sqrt(v), so that a weight whose gradients are small moves as far as one
whose gradients are large. By magnitude alone small gradients would wait for long, and by |e + g| /
sqrt(v) nearly all elements would wait equally long. v counts as 1/256 to 1/128 of its mean, at
least, or elements that have never arrived would come before all others
(`horovod_topk.ops.Ops.weighted`). Owners of sums select by the same rule.

A tensor's elements are split into two classes, those with phi > 1/2 before the step and the others.
Error feedback loses no gradient, so it is known how much of a class's energy (sum of squares) it
takes away: as much as what a rank selects, s, has less than its gradients g. s is not rounded yet,
and r is its rounding error, which is sent later. Where a gradient stays the same, sums have more
energy than the gradients: D is negative then.

    E' = beta2 E + sum of G^2
    D' = beta2 D + sum of g^2 - sum of s^2 + sum of r^2    on each of R ranks
    D" = mean of D' over ranks, divided by R where it is negative
    c  = sqrt(E' / (E' + D"))

c is 0.1 at least, and 1 at most for elements that arrive often, 2 for the others. (The formula is
c^2 = 1 - 0.99 D" / (E' + D"), so that c nears 0.1.) E and D fade as fast as Adam's mean square v,
so that c estimates the root of v, divided by the root that it would have with dense gradients.
Large gradients of the first steps, which are sent late and partly cancel out, count as long as in
dense training. Energy that is taken away counts as common to the ranks: noise of single ranks does
not cancel out, as it differs from step to step, and so is sent later. Energy that is gained does
not: ranks send the same element in different steps, and an R-th of a rank's energy is in the mean
of their gradients. Where tensors have owners, D also has what an owner's own error feedback takes
away, one step later.

Each rank sends D' with its payload, so that all ranks compute a step's c from the step's own
numbers. phi, E and c are states of the method that are equal on all ranks; D is a state of each
rank. In a large tensor energies are those of a sample: evenly spaced blocks, at most 32,768
elements and at least a third of that. Tensors that are sent whole have these states too, as some of
their elements may be rounded to zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from horovod_topk.config import ADAM, SGD
from horovod_topk.methods.protocol import Method, Piece

Array = TypeVar("Array")

ARRIVALS, ENERGY, LOST, FACTORS = "arrivals", "energy", "lost", "factors"  # states: phi, E, D, c
NORMS = "norms"  # SGD's n
OF_ADAM = (ARRIVALS, ENERGY, FACTORS, LOST)
OF_SGD = (ARRIVALS, NORMS, FACTORS)  # FACTORS: min(1, 3/2 n / |G|)
RANGES = {  # the values that a state can have; a rank's D is negative where energy is gained
    ARRIVALS: (0.0, 1.0),
    ENERGY: (0.0, math.inf),
    FACTORS: (0.0, 2.0),
    LOST: (-math.inf, math.inf),
    NORMS: (0.0, math.inf),
}
STATES = tuple(RANGES)
SHARED = (ARRIVALS, ENERGY, FACTORS, NORMS)  # equal on all ranks
CLASSES = 2  # of elements: those that arrive often, and the others
OFTEN = 0.5  # phi above which an element arrives often
RATE = 0.1  # weight of the present step in phi
LEAST = 0.1  # smallest c of Adam
MOST = 1.0, 2.0  # largest c of Adam, of each class
FARTHEST = 0.2  # share of a tensor's rms that Adam may move its weights by in a step
SLOWEST = 1e-30  # smaller learning rates count as this one: far is divided by them
FREE = 2.0**20  # far is at most this, and so finite
LOSS = 0.5  # SGD: what an element that always arrives loses at the largest learning rate
SPIKE = 1.5  # SGD: largest norm of a tensor's gradient, divided by the mean of earlier ones
NORM_RATE = 0.05  # weight of the present step in n
LIMIT = (1.0 - RATE) * OFTEN  # what phi' has to be above, less what arrived in the step


def arrived_often(arrivals: Any, has_arrived: Any) -> Any:
    """Whether an element arrived often before a step.

    Args:
        arrivals: phi after the step.
        has_arrived: 1 for elements that arrived in the step, 0 for others.
    """
    return arrivals - RATE * has_arrived > LIMIT


def is_young(beta1: Any, step: Any) -> Any:
    """Whether weights move by at most lr in Adam's step number `step`; they count from 1."""
    return (1.0 - beta1) ** 2 * step <= 1.0


@dataclass(frozen=True)
class Arrived(Generic[Array]):
    """What Adam's step needs to know of one tensor in the exchanged step."""

    arrivals: Array  # phi of each element after the step, flat
    factors: Array  # c of each class


@dataclass(frozen=True)
class ArrivedToSgd(Generic[Array]):
    """What SGD's step needs to know of one tensor in the exchanged step."""

    arrivals: Array  # phi of each element after the step, flat
    loss: Any  # what an element that always arrives loses: a number, in a graph a scalar
    begins: Any = 0.0  # 1 in the first step that is committed, in a graph


def states(config: Method) -> tuple[str, ...]:
    """Names of the states that an optimizer's step depends on with these settings."""
    return {ADAM: OF_ADAM, SGD: OF_SGD, None: ()}[config.by_arrivals]


def elements(name: str, numel: int, config: Method) -> int:
    """Number of elements of a state for a tensor of `numel` elements."""
    if name == ARRIVALS or not numel:
        return numel
    return CLASSES if config.follows_energies else 1


def selecting(config: Method, pieces: Sequence[Piece]) -> set[str]:
    """Names of the gradients of which ranks or owners send some elements only.

    They are equal on all ranks, also where some of them own no shard.
    """
    legs = "direct", "gather"
    return {
        piece.spec.name
        for piece in pieces
        if not all(config.piece(piece, leg).sends_all for leg in legs)
    }


def followed(pieces: Sequence[Piece]) -> list[int]:
    """Positions of the tensors that have these states: those with any elements."""
    return [position for position, piece in enumerate(pieces) if piece.spec.numel]


def measures(pieces: Sequence[Piece]) -> tuple[str, ...]:
    """Names of the numbers that a payload of these pieces carries: D' of each class."""
    names = [pieces[position].spec.name for position in followed(pieces)]
    return tuple(f"{name}:{LOST}{i}" for name in names for i in range(CLASSES))
