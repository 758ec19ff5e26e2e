"""The updates of optimizers on compressed gradients, as formulas.

An element that is sent once in a hundred steps arrives as the sum of a hundred gradients. Momentum
would spread this large value over the next ten steps, and so delay it once more. So ranks exchange
gradients without any momentum, and each element has a momentum of its own at the optimizer: the
more often it arrives, the more it has. An element that always arrives has the optimizer's own.

Every function stands under the line of mathematics that it computes, for arrays of any framework,
element by element, or for numbers. G is the exchanged gradient, g what the optimizer adds to its
moments: G, negated by `maximize`, with coupled weight decay.

How often an element arrives, phi, is kept as a code of 8 bits, q = 255 phi^(1/4), rounded to
nearest. Each step changes q by one at least, so that phi gets to 0 and to 1.

**SGD** applies every gradient once, whenever it arrives: a gradient moves its weight by lr c / (1 -
mu) in all, as in dense SGD but for c. mu B is what earlier gradients have still to move, divided by
lr / (1 - mu), as in dense SGD: training may go on either way, also from a checkpoint.

Large steps are taken at once where dense SGD spreads them over ten steps, so that training would
diverge near the largest learning rate at which dense SGD is stable. Two factors keep it stable.
Elements that arrive in nearly every step have the largest gradients; they move less, by c, while
the learning rate is near its largest value. And a tensor's gradient that is suddenly larger than
those of the last steps is scaled down to 1.5 times their mean norm n. No element of a tensor that
is sent whole moves less for arriving often. Steps in which G is 0 leave n as it is. Where residuals
grow because the learning rate has fallen (`core.state.learning_rates`), n grows as much. n counts
gradients that were scaled down as large as they were, so that a lasting change is followed.

**Adam** divides by the root of a mean square v of gradients. As what was not sent adds up, quick
changes of a gradient cancel out before they are sent, so that v misses them and steps are too
large. A gradient that stays the same adds up: its sum over T steps has T times the energy of the T
gradients, and steps are too small. So gradients in the first moment are multiplied by c.

An element that waits for T steps, or first arrives in step T, has a G of up to sqrt(T) times
sqrt(v). Dense Adam takes ten steps for what its weight then moves in one or two. So no weight moves
by more than a fifth of its tensor's rms in a step, or by lr if that is more. This fifth grows to
its full size over the first 1 / (1 - beta1)^2 steps: until then dense Adam, too, moves by at most
lr a weight whose gradient first arrives.

Which elements a rank sends depends on v, too: those with the largest |e + g| v^(-1/4), with e its
residual. By magnitude alone small gradients, whose weights move as far, would wait for long, and by
|e + g| / sqrt(v) nearly all elements would wait equally long. v counts as 1/256 to 1/128 of its
mean, at least (`horovod_topk.ops.Ops.weighted`). Owners of sums select by the same rule.

A tensor's elements are in two classes, those with phi > 1/2 before the step and the others. Error
feedback loses no gradient, so it is known how much of a class's energy (sum of squares) it takes
away: as much as what a rank selects, s, has less than its gradients g. s is not rounded yet, and r
is its rounding error, which is sent later. Where a gradient stays the same, sums have more energy
than the gradients: D is negative then. Energy that is taken away counts as common to the ranks:
noise of single ranks does not cancel out, and so is sent later. Energy that is gained does not:
ranks send the same element in different steps, and an R-th of a rank's energy is in the mean of
their gradients. Where tensors have owners, D also has what an owner's own error feedback takes
away, one step later. E and D fade as fast as v, so that c estimates the root of v, divided by the
root that it would have with dense gradients. In a large tensor energies, norms and rms are those of
a sample: evenly spaced blocks, at most 32,768 elements and at least a third of that.

**Other optimizers** make their own step with the exchanged gradients, and what it changes, d = p' -
p, is corrected when it has ended. `FAMILIES` differ in what they do with a gradient.

A mean of gradients, as Adam's m, is a momentum: an element that arrives rarely would wait for it
once more. Before the step m moves towards G, so that the step's own m' = beta1 m + (1 - beta1) G is
that of Adam's rule above but for c. A root of squares, of any kind, misses the energy that error
feedback takes away, as Adam's v does: d is multiplied by c. The largest magnitude of the last
gradients is that of a sum of 1 / phi of them, which is phi^(-1/2) times too large if they are
independent: d is divided by phi^(1/2). A sign has no size that could be corrected: until the next
arrival its element moves by lr a step, however old the gradient is. A matrix that mixes elements
has, beside the gradient, the noise of which elements arrived, and a wait of 1 / phi steps outlasts
the mean that could remove it. So signs and matrices need elements that arrive often, and have a
larger `ratio` by default. So do optimizers whose mean of gradients has a scale of its own,
or is kept in few bits, so that it cannot be moved.

All select as Adam does, by a mean square that is kept for them. No weight moves further in a step
than by lr or a fifth of its tensor's rms, unless the optimizer is not known: where its step is
linear, a limit would lose gradients. An element that always arrives has the optimizer's
own step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from horovod_topk.ops.coding import ALWAYS, FREE

RATE = 0.1  # weight of the present step in phi
OFTEN = 0.5  # phi above which an element arrives often
LEAST = 0.1  # smallest c of Adam
MOST = 1.0, 2.0  # largest c of Adam, of elements that arrive often and of others
FARTHEST = 0.2  # share of a tensor's rms that Adam may move its weights by in a step
SLOWEST = 1e-30  # smaller learning rates count as this one: far is divided by them
UNLIMITED = 2.0  # Adam's first m is half of this limit
CUT = 0.5  # SGD: what an element that always arrives loses at the largest learning rate
SPIKE = 1.5  # SGD: largest norm of a tensor's gradient, divided by the mean of earlier ones
NORM_RATE = 0.05  # weight of the present step in n
BETA2 = 0.99  # of the mean square that is kept for optimizers with a step of their own
RAREST = 0.01  # smaller phi stretch a change as this one


class Verbs(Protocol):
    """What the formulas need of a framework beside + - * / and comparisons."""

    def root(self, array: Any, /) -> Any:
        """Square roots, correctly rounded."""

    def where(self, condition: Any, one: Any, other: Any, /) -> Any:
        """`one` where a condition holds, else `other`."""


class Numbers:
    """`Verbs` for Python's numbers."""

    root = staticmethod(math.sqrt)
    where = staticmethod(lambda is_so, one, other: one if is_so else other)


NUMBERS = Numbers()


# Arrivals, of both optimizers.


def code_after(code: int, arrives: bool) -> int:
    """phi' = phi + ([G is not 0] - phi) / 10."""
    phi = (code / ALWAYS) ** 4
    exact = ALWAYS * (phi + (arrives - phi) * RATE) ** 0.25
    nearest = int(exact + 0.5)
    return min(ALWAYS, max(nearest, code + 1)) if arrives else max(0, min(nearest, code - 1))


AFTER = tuple(tuple(code_after(code, a) for code in range(ALWAYS + 1)) for a in (False, True))


def share(code: Any) -> Any:
    """phi^(1/4) = q / 255."""
    return code * (1.0 / ALWAYS)


def arrives_often(code: Any) -> Any:
    """phi > 1/2."""
    return code >= math.ceil(ALWAYS * OFTEN**0.25)


def code_of(phi: Any, root: Callable[[Any], Any]) -> Any:
    """q = 255 phi^(1/4), not rounded."""
    return root(root(phi)) * float(ALWAYS)


# SGD.


@dataclass(frozen=True)
class Sgd:
    """Numbers of one SGD step of a tensor."""

    momentum: float  # mu
    rate: float  # lr
    decay: float  # of weights, coupled
    nesterov: bool
    cut: float  # of an element that always arrives


def cut_of(decay: Any) -> Any:
    """cut = 1/2 (lr / largest lr so far)^2."""
    return CUT * decay**2


def sgd(weight: Any, momentum: Any, g: Any, share: Any, of: Sgd) -> tuple[Any, Any]:
    """Return the weight and the momentum buffer after a step.

    g: as SGD adds it, with weight decay. share: phi'^(1/4).
    """
    total = sgd_total(momentum, g, share, of)
    step = sgd_step(total, share, of)
    if of.nesterov:
        step = g + step * of.momentum  # p' = p - lr (g + mu M)
    return weight - step * of.rate, sgd_left(total, share)


def sgd_total(momentum: Any, g: Any, share: Any, of: Sgd) -> Any:
    """S = mu B + c g, c = 1 - cut phi'."""
    phi = share * share * (share * share)
    return momentum * of.momentum + (1.0 - phi * of.cut) * g


def sgd_step(total: Any, share: Any, of: Sgd) -> Any:
    """M = (1 - b) S / (1 - mu), b = mu phi'^(1/4); p' = p - lr M."""
    return (1.0 - share * of.momentum) * (1.0 / (1.0 - of.momentum)) * total


def sgd_left(total: Any, share: Any) -> Any:
    """B' = b S / mu."""
    return share * total


def norm_after(before: Any, norm: Any) -> Any:
    """n' = n + (|G| - n) / 20."""
    return before + (norm - before) * NORM_RATE


def largest_norm(before: Any) -> Any:
    """3/2 n; L = min(1, 3/2 n / |G|) G."""
    return before * SPIKE


# Adam and AdamW.


@dataclass(frozen=True)
class Adam:
    """Numbers of one Adam step of a tensor; s_t = 1 - beta1^t, and z_t = 1 - beta2^t."""

    beta1: float
    beta2: float
    again: float  # s_t / s_(t-1)
    now: float  # s_t
    decay: float  # of weights, coupled
    stays: float  # 1 - lr * decay, decoupled
    rate: float  # lr / s_t
    scale: float  # 1 / sqrt(z_t)
    eps: float
    most: float  # s_t / sqrt(z_t)
    reach: float  # min(1, t (1 - beta1)^2) / (5 lr)


def adam_of(
    betas: tuple[Any, Any],
    step: Any,
    rate: Any,
    decays: tuple[float, float],
    eps: float,
    verbs: Verbs = NUMBERS,
) -> Adam:
    """Numbers of step t; the first one is Adam's own: m' = (1 - beta1) g.

    Args:
        betas: beta1 and beta2 of the moments.
        step: t, from 1.
        rate: lr.
        decays: of weights, coupled and decoupled.
        eps: added to sqrt(v).
        verbs: the framework's, if numbers are arrays of it.
    """
    (beta1, beta2), (coupled, decoupled), where = betas, decays, verbs.where
    now, root, is_first = 1.0 - beta1**step, verbs.root(1.0 - beta2**step), step < 1.5
    again = now / where(is_first, 1.0, 1.0 - beta1 ** (step - 1.0))
    grown = (1.0 - beta1) ** 2 * step
    reach = where(grown < 1.0, grown, 1.0) * FARTHEST / where(rate > SLOWEST, rate, SLOWEST)
    return Adam(
        beta1=where(is_first, 0.0, beta1),
        beta2=beta2,
        again=where(is_first, 0.0, again),
        now=now,
        decay=coupled,
        stays=1.0 - rate * decoupled,
        rate=rate / now,
        scale=1.0 / root,
        eps=eps,
        most=where(is_first, UNLIMITED * now / root, now / root),
        reach=reach,
    )


def far(rms: Any, of: Adam, verbs: Verbs) -> Any:
    """far = max(1, min(1, t (1 - beta1)^2) rms / 5 / lr); `FREE` at most, also if rms is NaN."""
    reach = rms * of.reach
    reach = verbs.where(reach < 1.0, 1.0, reach)
    return verbs.where(reach < FREE, reach, FREE)


def adam(
    weight: Any,
    moments: tuple[Any, Any, Any],
    g: Any,
    share: Any,
    factor: Any,
    rms: Any,
    of: Adam,
    verbs: Verbs,
) -> tuple[Any, Any, Any, Any]:
    """Return the weight, both moments and amsgrad's largest second moment after a step.

    Args:
        weight: p.
        moments: m, v, and the largest v or None.
        g: as Adam adds it, with coupled weight decay.
        share: phi'^(1/4).
        factor: c of each element's class; 1 in the first step.
        rms: root mean square of the tensor's weights.
        of: the step's numbers.
        verbs: the framework's.
    """
    moment, square, largest = moments
    square = adam_square(square, g, of)
    root = verbs.root(square)
    moment = adam_moment(moment, g, share, factor, of)
    moment = adam_limited(moment, root * (far(rms, of, verbs) * of.most), verbs)
    if largest is not None:
        largest = verbs.where(largest > square, largest, square)
        root = verbs.root(largest)
    return adam_step(weight, moment, root, of), moment, square, largest


def adam_square(square: Any, g: Any, of: Adam) -> Any:
    """v' = beta2 v + (1 - beta2) g^2."""
    return square * of.beta2 + g * g * (1.0 - of.beta2)


def adam_moment(moment: Any, g: Any, share: Any, factor: Any, of: Adam) -> Any:
    """m' = s_t (b m / s_(t-1) + (1 - b) c g), b = beta1 phi'^(1/2)."""
    b = share * share * of.beta1
    return b * of.again * moment + (1.0 - b) * (factor * of.now) * g


def adam_limited(moment: Any, limit: Any, verbs: Verbs) -> Any:
    """|m'| <= far s_t sqrt(v' / z_t)."""
    moment = verbs.where(moment > limit, limit, moment)
    return verbs.where(moment < -limit, -limit, moment)


def adam_step(weight: Any, moment: Any, root: Any, of: Adam) -> Any:
    """p' = (1 - lr decay) p - lr / s_t m' / (sqrt(v' / z_t) + eps)."""
    return weight * of.stays - moment / (root * of.scale + of.eps) * of.rate


def energy_after(energy: Any, now: Any, fading: Any) -> Any:
    """E' = beta2 E + sum of G^2; D' = beta2 D + sum of g^2 - sum of s^2 + sum of r^2."""
    return energy * fading + now


def factor_of(share: Any) -> Any:
    """c^2 = 1 - 0.99 D" / (E' + D"), so that c = sqrt(E' / (E' + D")) nears 0.1."""
    return share * (LEAST**2 - 1.0) + 1.0


# Corrections of the step that another optimizer makes itself.


@dataclass(frozen=True)
class Family:
    """Optimizers whose own step uses a gradient that arrives late in the same way."""

    uses: str  # what a step does with the gradient
    stems: tuple[str, ...]  # parts of the names of their classes, in lower case
    is_damped: bool = False  # c multiplies what a step changes: that of `own_sign` for signs
    is_stretched: bool = False  # phi^(-1/2) multiplies what a step changes
    has_mean: bool = False  # a state, such as `exp_avg`, is a mean of gradients: Adam's m
    ratio: float | None = None  # the default for them; None: that of the compressor
    is_limited: bool = True  # the size of a step does not follow that of the gradient
    is_sign: bool = False  # a step is the sign of beta1 m + (1 - beta1) G


LINEAR = Family("is linear in the gradient", ("sgd", "asgd"))
SIGN = Family(
    "takes the sign",
    ("lion", "signsgd", "signum", "tiger", "rprop"),
    is_damped=True,
    is_sign=True,
    ratio=0.1,
)
MATRIX = Family(
    "divides by roots of matrices", ("muon", "dion", "shampoo", "soap", "kron"), ratio=1.0
)
SCALED = Family(
    "scales the mean by an estimate", ("dadapt", "prodigy", "adopt"), is_damped=True, ratio=0.1
)
TRUST = Family(
    "sets a tensor's step by its weights", ("lamb", "lars"), is_damped=True, has_mean=True
)
LARGEST = Family(
    "divides by the largest magnitude",
    ("adamax",),
    is_damped=True,
    is_stretched=True,
    has_mean=True,
)
COMPACT = Family("keeps its means in few bits", ("8bit", "4bit", "fp8"), is_damped=True, ratio=0.1)
FACTORED = Family("divides by factored mean squares", ("adafactor", "came"), is_damped=True)
MEAN = Family(
    "divides a mean by a root of squares",
    ("adam", "adan", "adab", "yogi"),
    is_damped=True,
    has_mean=True,
)
SQUARES = Family("divides by a root of squares", ("ada", "rmsprop", "ftrl"), is_damped=True)
UNKNOWN = Family("is not known", (), is_limited=False)  # it may be linear
QUICK, QUICK_RATIO = 0.5, 0.25
FAMILIES = SIGN, MATRIX, SCALED, TRUST, LARGEST, COMPACT, FACTORED, MEAN, SQUARES, LINEAR


def family_of(optimizer: object) -> Family:
    """The first family with a stem in the name of an optimizer's class, or of a base class."""
    for kind in type(optimizer).__mro__:
        for family in FAMILIES:
            if any(stem in kind.__name__.lower() for stem in family.stems):
                return family
    return UNKNOWN


def default_ratio(family: Family, beta1: float | None) -> float | None:
    """The default ratio of an optimizer of a family; None: that of the compressor.

    A first beta of at most 0.5, which forgets within two steps, is that of networks which train
    against each other: there a goal has moved when a gradient arrives late.
    """
    quick = beta1 is not None and beta1 <= QUICK
    return max(QUICK_RATIO, family.ratio or 0.0) if quick else family.ratio


def own_square(square: Any, g: Any) -> Any:
    """v' = beta2 v + (1 - beta2) G^2."""
    return square * BETA2 + g * g * (1.0 - BETA2)


def own_mean(mean: Any, g: Any, share: Any, began: float) -> Any:
    """m = w m + (1 - w) s_(t-1) G, w = phi'^(1/2), before m' = beta1 m + (1 - beta1) G."""
    w = share * share
    return w * mean + (1.0 - w) * began * g


def own_sign(g: Any, mean: Any, square: Any, share: Any, beta1: float, verbs: Verbs) -> Any:
    """c = |u| / (u^2 + pi v / 2)^(1/2), u = beta1 m / (1 - beta1), where G = 0 and phi' < 1; or 1.

    Dense training takes the sign of beta1 m + (1 - beta1) g in each step, and gradients of mean
    square v turn it now and then. c is about the mean of these signs, by which an element moves
    while it waits: the sign of m alone would move it further.
    """
    u, one = mean * (beta1 / (1.0 - beta1)), mean * 0.0 + 1.0
    whole = u * u + square * (math.pi / 2.0)
    left = verbs.where(whole > 0.0, u * u, one) / verbs.where(whole > 0.0, whole, one)
    return verbs.where(g == 0.0, verbs.where(share < 1.0, verbs.root(left), one), one)


def own_weight(
    before: Any, now: Any, factor: Any, share: Any, farthest: Any, of: Family, verbs: Verbs
) -> Any:
    """Return the weight after the corrected step: p + d', and p' itself where d' is d.

    Args:
        before: p.
        now: p'.
        factor: c of each element, or of its class.
        share: phi'^(1/4).
        farthest: max(lr, rms / 5).
        of: the optimizer's family.
        verbs: the framework's.
    """
    change = now - before
    corrected = own_change(change, factor, share, of, verbs)
    if of.is_limited:
        corrected = own_limited(corrected, farthest, share, verbs)
    return verbs.where(corrected == change, now, before + corrected)


def own_change(change: Any, factor: Any, share: Any, of: Family, verbs: Verbs) -> Any:
    """d' = c d; where d divides by a largest magnitude, d' = c d / max(phi', 1/100)^(1/2)."""
    if of.is_damped:
        change = change * factor
    if of.is_stretched:
        root, least = share * share, math.sqrt(RAREST)
        change = change / verbs.where(root > least, root, root * 0.0 + least)
    return change


def own_limited(change: Any, farthest: Any, share: Any, verbs: Verbs) -> Any:
    """|d'| <= max(lr, rms / 5), where phi' < 1."""
    limited = verbs.where(change > farthest, farthest, change)
    limited = verbs.where(limited < -farthest, -farthest, limited)
    return verbs.where(share < 1.0, limited, change)
