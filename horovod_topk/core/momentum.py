"""Momentum correction: Lin et al. 2018 (Deep Gradient Compression), sections 3.1, 3.2.

An optimizer's momentum works on the gradients that are applied. An element that is sent once in a
hundred steps arrives as the sum of a hundred gradients, and momentum repeats this large value over
many later steps. So each rank keeps a velocity u of its own gradients, and compresses u:

    correct      u' = m u + g
    compensate   a  = e + u'         with `nesterov`: e + m u' + g
    damp         u' = (1 - d) u'     for the elements of a that were sent

Without damping (d = 0) this is heavy-ball momentum with delayed gradients, which diverges near the
largest learning rate at which dense training is stable. The paper's masking, d = 1, makes all steps
smaller, as a lower learning rate does. The setting `velocity_kept` is 1 - d. With SGD, "auto" is

    d = 1/2 min(1, |u'| / |a|) (lr / largest lr so far)^2

with lr the rate in whose units residuals are (`horovod_topk.core.rates`).
Elements that are sent in nearly every step have a small residual, and lose half of their velocity.
They have the largest gradients, where a large learning rate makes training unstable first. Elements
that were sent rarely lose little. When the learning rate falls, training is more stable, and
velocities are hardly damped. With Adam and AdamW, which divide by the size of the gradients they
get, "auto" is masking. `momentum="auto"` corrects no velocities, but prepares the optimizer's steps
(`horovod_topk.core.arrivals`). Tensors that are sent whole are not damped, so that at ratio 1 the
sum over steps is that of heavy-ball momentum.

The optimizer itself then has no momentum: p -= lr * (exchanged velocity). A momentum that was taken
over from it (`taken_over`) keeps gradients in their usual size: users get (1 - m) * (exchanged
velocity), and the optimizer's step multiplies by 1 / (1 - m), weight decay included. The momentum m
may differ from tensor to tensor and from step to step.

Velocities are kept, committed and rolled back as residuals are, in two arenas a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from horovod_topk.config import AUTO
from horovod_topk.core.plan import BucketPlan, Plan
from horovod_topk.core.residual import Arenas
from horovod_topk.errors import UnsupportedDtypeError
from horovod_topk.methods.protocol import Method
from horovod_topk.ops import Ops, Velocities

Array = TypeVar("Array")

LOSS = 0.5  # d of an element that is sent in every step, at the largest learning rate


@dataclass(frozen=True)
class Momentum:
    """Momentum of one tensor in a step, and what is known of Adam's second moment."""

    factor: float  # m, in [0, 1)
    nesterov: bool
    beta2: float | None = None  # only for `core.arrivals`, as `squares`
    squares: Any = field(default=None, compare=False)  # Adam's mean square of the tensor, if any


class Momenta:
    """The momentum of every tensor in the present step.

    Args:
        config: `momentum`, `nesterov` and `beta2` for all tensors and steps.
        now: returns the next step's momentum by tensor name, if an optimizer has it.
        velocities: returns the optimizer's momentum buffers, flat, by tensor name, for when
            momentum correction begins again.
    """

    def __init__(
        self,
        config: Method,
        now: Callable[[], Mapping[str, Momentum]] | None = None,
        velocities: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._common = Momentum(config.momentum, config.nesterov, config.beta2)
        self._now = now
        self.velocities = velocities
        self._own: Mapping[str, Momentum] = {}
        self._plain = False  # whether velocities are sent without Nesterov's term

    def turn(self, *, plain: bool = False) -> None:
        """Read the present values, before a step's first bucket is sent.

        plain: whether this step sends velocities without Nesterov's term.
        """
        self._plain = plain
        if self._now is not None:
            self._own = self._now()

    def of(self, name: str) -> Momentum:
        """Momentum of the tensor `name`."""
        own = self._own.get(name, self._common)
        return replace(own, nesterov=False) if self._plain else own


class Correction(Generic[Array]):
    """Computes factors of momentum correction and damping for the tensors of a bucket.

    Args:
        config: the plan's settings.
        momenta: momentum of each tensor.
        decay: returns a tensor's learning rate divided by its largest value so far; in a graph a
            scalar tensor.
        ops: operations on the arrays.
    """

    def __init__(
        self, config: Method, momenta: Momenta, decay: Callable[[str], float], ops: Ops[Array]
    ) -> None:
        self._config, self._momenta, self._decay, self._ops = config, momenta, decay, ops

    def units(self, bucket: BucketPlan) -> list[float]:
        """Factor of the gradients that users get, for each tensor: 1 - m if it was taken over."""
        if not self._config.taken_over:
            return [1.0] * len(bucket.tensors)
        return [1.0 - self._momenta.of(tensor.spec.name).factor for tensor in bucket.tensors]

    def of(self, arenas: Arenas[Array]) -> Velocities[Array]:
        """Velocities of a bucket in the step that begins.

        arenas: `residual` has the velocities of the previous step, `candidate` gets the new ones.
        """
        before, after = (self._views(arenas.plan, u) for u in (arenas.residual, arenas.candidate))
        names = [tensor.spec.name for tensor in arenas.plan.tensors]
        momenta = [self._momenta.of(name) for name in names]
        return velocities(momenta, before, after, self._losses(names), is_graded(self._config))

    def _losses(self, names: Sequence[str]) -> list[float]:
        """Largest share of its velocity that a sent element loses, for each tensor: largest d."""
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
    """Combine velocities before and after a step with the momentum of each tensor."""
    factors, nesterov = [m.factor for m in momenta], [m.nesterov for m in momenta]
    return Velocities(before, after, factors, nesterov, losses, graded)


def correct(
    gradients: Sequence[Array], own: Velocities[Array] | None, ops: Ops[Array]
) -> Sequence[Array]:
    """Velocities to send in place of gradients, flat; writes the new velocities to `own.after`.

    Without velocities (None) the gradients are returned. Kernels give bitwise the same result.
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
    """Whether damping differs by element ("auto"): elements with a large residual lose less."""
    return config.velocity_kept == AUTO


def check_dtypes(plan: Plan) -> None:
    """Refuse gradients whose dtype differs from their residual's: velocities have that dtype.

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
