"""Momentum correction: Lin et al. 2018 (Deep Gradient Compression), sections 3.1, 3.2.

An optimizer's momentum works on the gradients that are applied. An element that is sent once in a
hundred steps arrives as the sum of a hundred gradients, and momentum repeats this large value over
many later steps. So each rank keeps a velocity u of its own gradients, and compresses u:

    correct      u' = m u + g
    compensate   a  = e + u'         with `nesterov`: e + m u' + g
    mask         u' = 0              for the elements of a that were sent

Without masking this is heavy-ball momentum with delayed gradients, which diverges near the largest
learning rate at which dense training is stable. Tensors that are sent whole are not masked, so that
at ratio 1 the sum over steps is that of heavy-ball momentum. The optimizer itself has no momentum:
p -= lr * (exchanged velocity).

Velocities are kept, committed and rolled back as residuals are, in two arenas a bucket.
`momentum="auto"` corrects no velocities, but adapts the optimizer's steps
(`horovod_topk.updates`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from horovod_topk.core.plan.buckets import Plan
from horovod_topk.core.state.residual import Arenas
from horovod_topk.errors import UnsupportedDtypeError
from horovod_topk.methods.protocol import Method
from horovod_topk.ops import Ops, Velocities

Array = TypeVar("Array")


@dataclass(frozen=True)
class OptimizerMoments(Generic[Array]):
    """The moments of an optimizer with which a bucket is sent; by default none."""

    velocities: Velocities[Array] | None = None  # for momentum correction; they are updated
    # Adam's mean squares, to select by: for each gradient an array of its shape and any float
    # dtype, or None. Empty: there are none.
    squares: Sequence[Array | None] = ()


NO_MOMENTS: OptimizerMoments[Any] = OptimizerMoments()


def velocities(
    config: Method, before: Sequence[Array], after: Sequence[Array]
) -> Velocities[Array]:
    """Combine velocities before and after a step, flat, with the momentum of the settings."""
    return Velocities(before, after, config.momentum, config.nesterov)


def velocities_of(config: Method, arenas: Arenas[Array], ops: Ops[Array]) -> Velocities[Array]:
    """Velocities of a bucket in the step that begins.

    arenas: `residual` has the velocities of the previous step, `candidate` gets the new ones.
    """
    before, after = (
        [ops.view(u, tensor.start, tensor.stop) for tensor in arenas.plan.tensors]
        for u in (arenas.residual, arenas.candidate)
    )
    return velocities(config, before, after)


def correct(
    gradients: Sequence[Array], own: Velocities[Array] | None, ops: Ops[Array]
) -> Sequence[Array]:
    """Velocities to send in place of gradients, flat; writes the new velocities to `own.after`.

    Without velocities (None) the gradients are returned. Kernels give bitwise the same result.
    """
    if own is None:
        return gradients
    sent: list[Array] = []
    for before, after, gradient in zip(own.before, own.after, gradients, strict=True):
        ops.update_velocity(before, own.factor, gradient, after)
        sent.append(ops.clone(after) if own.nesterov else after)
        if own.nesterov:
            ops.update_velocity(after, own.factor, gradient, sent[-1])
    return sent


def check_dtypes(plan: Plan) -> None:
    """Refuse gradients whose dtype differs from their residual's: velocities have that dtype."""
    for bucket in plan.buckets:
        for tensor in bucket.tensors:
            if tensor.spec.dtype != bucket.residual_dtype:
                raise UnsupportedDtypeError(
                    f"momentum= was given, whose velocity is {bucket.residual_dtype}, and the "
                    f"gradient is {tensor.spec.dtype}",
                    tensor=tensor.spec.name,
                    cure="Keep parameters in float32, under torch.autocast if need be, or leave "
                    "momentum to the optimizer",
                )
