"""Momentum correction: Lin et al. 2018 (Deep Gradient Compression), sections 3.1, 3.2.

An optimizer's momentum sees what is applied: an element that is sent once in a hundred steps
arrives with a hundred steps' gradients at once, and its velocity then carries it on, long after the
gradients that it came from. So each rank keeps a velocity u of its own gradients, and sparsifies
that:

    correct      u' = m u + g
    compensate   a  = e + u'         with `nesterov`: e + m u' + g
    damp         u' = (1 - d) u'     where a was sent

A velocity that loses nothing (d = 0) is heavy-ball momentum of what is sent late: near the largest
learning rate that dense training stands it diverges. The paper's masking, d = 1, makes all steps
smaller, as a lower learning rate does. `velocity_kept` gives 1 - d. With SGD, "auto" is

    d = 1/2 min(1, |u'| / |a|) (lr / largest lr so far)^2

Elements that are sent in nearly every step have a small residual, and lose half of their velocity.
They are where gradients are largest, and so where a large learning rate makes training unstable
first. Elements that have waited lose little. Where the learning rate falls, stability is no longer
at stake, and velocities keep all. With Adam and AdamW, which divide by the size of what they are
given, "auto" is masking. Tensors that are sent whole are not damped, so that at ratio 1 the sum
over steps is that of heavy-ball momentum.

The optimizer itself has no momentum then: p -= lr * (what is applied). A momentum that was taken
over from it (`taken_over`) leaves users what they know: they are given 1 - m times what is applied,
which has the size of a gradient, and the optimizer's step multiplies by 1 / (1 - m), weight decay
included. Its value may differ from tensor to tensor and from step to step.

Velocities are kept, committed and rolled back as residuals are, in two arenas a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from horovod_topk.config import AUTO
from horovod_topk.core.plan import BucketPlan, Plan
from horovod_topk.core.residual import Arenas
from horovod_topk.errors import UnsupportedDtypeError
from horovod_topk.methods.protocol import Method
from horovod_topk.ops import Ops, Velocities

Array = TypeVar("Array")

LOSS = 0.5  # of the velocity of an element that is sent in every step, at the largest learning rate


@dataclass(frozen=True)
class Momentum:
    """What one tensor's velocity is multiplied by in a step."""

    factor: float  # m, in [0, 1)
    nesterov: bool


class Momenta:
    """The momentum of every tensor in the step under way.

    Args:
        config: `momentum` and `nesterov` for all tensors and steps.
        now: gives those of a step that begins now, by tensor name, if an optimizer has them.
        velocities: gives what a momentum has gathered that the optimizer has had for a while, flat,
            by tensor name.
    """

    def __init__(
        self,
        config: Method,
        now: Callable[[], Mapping[str, Momentum]] | None = None,
        velocities: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._common, self._now = Momentum(config.momentum, config.nesterov), now
        self.velocities = velocities
        self._own: Mapping[str, Momentum] = {}
        self._plain = False  # whether velocities are sent as they are

    def turn(self, *, plain: bool = False) -> None:
        """Take on the present values, before a step's first bucket is sent.

        plain: whether velocities are sent as they are in this step, Nesterov's too.
        """
        self._plain = plain
        if self._now is not None:
            self._own = self._now()

    def of(self, name: str) -> Momentum:
        """One tensor's."""
        own = self._own.get(name, self._common)
        return replace(own, nesterov=False) if self._plain else own


class Correction(Generic[Array]):
    """What is done to one bucket's gradients and velocities.

    Args:
        config: of the plan.
        momenta: of the tensors.
        decay: gives a tensor's learning rate as a share of its largest one so far; in a graph as a
            scalar.
        ops: of the arrays.
    """

    def __init__(
        self, config: Method, momenta: Momenta, decay: Callable[[str], float], ops: Ops[Array]
    ) -> None:
        self._config, self._momenta, self._decay, self._ops = config, momenta, decay, ops

    def units(self, bucket: BucketPlan) -> list[float]:
        """What users are given of what is applied, for each tensor."""
        if not self._config.taken_over:
            return [1.0] * len(bucket.tensors)
        return [1.0 - self._momenta.of(tensor.spec.name).factor for tensor in bucket.tensors]

    def of(self, arenas: Arenas[Array]) -> Velocities[Array]:
        """The velocities of a bucket in the step that begins; the candidate is to become theirs.

        arenas: as residual, the velocities of the step before.
        """
        before, after = (self._views(arenas.plan, u) for u in (arenas.residual, arenas.candidate))
        names = [tensor.spec.name for tensor in arenas.plan.tensors]
        momenta = [self._momenta.of(name) for name in names]
        return velocities(momenta, before, after, self._losses(names), is_graded(self._config))

    def _losses(self, names: Sequence[str]) -> list[float]:
        """Largest share of its velocity that a sent element loses, for each tensor."""
        if is_graded(self._config):
            return [LOSS * self._decay(name) ** 2 for name in names]
        return [1.0 - float(self._config.velocity_kept)] * len(names)

    def _views(self, bucket: BucketPlan, arena: Array) -> list[Array]:
        return [self._ops.view(arena, tensor.start, tensor.stop) for tensor in bucket.tensors]


def velocities(
    momenta: Sequence[Momentum],
    before: Sequence[Array],
    after: Sequence[Array],
    losses: Sequence[float],
    graded: bool,
) -> Velocities[Array]:
    """Velocities of tensors with these momenta."""
    factors, nesterov = [m.factor for m in momenta], [m.nesterov for m in momenta]
    return Velocities(before, after, factors, nesterov, losses, graded)


def correct(
    gradients: Sequence[Array], own: Velocities[Array] | None, ops: Ops[Array]
) -> Sequence[Array]:
    """What is sent in place of the gradients, flat; `own.after` becomes the new velocities.

    None is no correction. This is the definition that kernels follow to the bit.
    """
    if own is None:
        return gradients
    sent: list[Array] = []
    tensors = zip(own.before, own.after, own.factors, own.nesterov, gradients, strict=True)
    for before, after, m, is_nesterov, gradient in tensors:
        ops.update_velocity(before, m, gradient, after)
        sent.append(ops.clone(after) if is_nesterov else after)
        if is_nesterov:
            ops.update_velocity(after, m, gradient, sent[-1])
    return sent


def is_graded(config: Method) -> bool:
    """Whether elements that waited longer lose a smaller share of their velocity when sent."""
    return config.velocity_kept == AUTO


def check_dtypes(plan: Plan) -> None:
    """Refuse gradients that no velocity can be kept for.

    Raises:
        UnsupportedDtypeError: a gradient has another dtype than its residual.
    """
    for bucket in plan.buckets:
        _check_dtypes(bucket)


def _check_dtypes(bucket: BucketPlan) -> None:
    for tensor in bucket.tensors:
        if tensor.spec.dtype != bucket.residual_dtype:
            raise UnsupportedDtypeError(
                f"momentum= was given, whose velocity is {bucket.residual_dtype}, and the gradient "
                f"is {tensor.spec.dtype}",
                tensor=tensor.spec.name,
                cure="Keep parameters in float32, under torch.autocast if need be, or leave "
                "momentum to the optimizer",
            )
