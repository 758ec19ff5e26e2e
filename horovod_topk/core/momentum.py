"""Momentum correction with masking: Lin et al. 2018 (Deep Gradient Compression), sections 3.1, 3.2.

An optimizer's momentum sees what is applied: an element that is sent once in a hundred steps
arrives with a hundred steps' gradients at once, and its velocity then carries it on, long after the
gradients that it came from. So each rank keeps a velocity u of its own gradients, and sparsifies
that:

    correct      u' = m u + g
    compensate   a  = e + u'         with `nesterov`: e + m u' + g
    mask         u' = 0 where a was sent, as e is

The optimizer itself has no momentum then: p -= lr * (what is applied). A weight decay that it adds
to that is 1 / (1 - m) times weaker than one that passes through a momentum. Tensors that are sent
whole are not masked, so that at ratio 1 the sum over steps is that of heavy-ball momentum.

Velocities are kept, committed and rolled back as residuals are, in two arenas a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from horovod_topk.core.plan import BucketPlan, Plan
from horovod_topk.core.residual import Arenas
from horovod_topk.errors import UnsupportedDtypeError
from horovod_topk.methods.protocol import Method
from horovod_topk.ops import Ops

Array = TypeVar("Array")


class Correction(Generic[Array]):
    """The formulas, on one bucket's velocities.

    Args:
        config: m as `momentum`, and `nesterov`.
        ops: of the arrays.
    """

    def __init__(self, config: Method, ops: Ops[Array]) -> None:
        self._factor, self._nesterov = config.momentum, config.nesterov
        self._ops = ops

    def correct(self, arenas: Arenas[Array], gradients: Sequence[Array]) -> list[Array]:
        """What is sent in place of the gradients, flat; the candidate becomes the new velocities.

        arenas: as residual, the velocities of the step before.
        """
        before, after = (self._views(arenas.plan, u) for u in (arenas.residual, arenas.candidate))
        return self.apply(
            before,
            gradients,
            after,
            lambda: self._views(arenas.plan, self._ops.clone(arenas.candidate)),
        )

    def apply(
        self,
        before: Sequence[Array],
        gradients: Sequence[Array],
        after: list[Array],
        copied: Callable[[], list[Array]] | None = None,
    ) -> list[Array]:
        """What is sent in place of the gradients, of flat arrays, one a tensor.

        Args:
            before: velocities of the step before.
            gradients: of this step.
            after: becomes the new velocities.
            copied: copies `after`, where that takes less than a copy for each.
        """
        self._accelerate(before, gradients, after)
        if not self._nesterov:
            return after
        ahead = [self._ops.clone(u) for u in after] if copied is None else copied()
        self._accelerate(after, gradients, ahead)
        return ahead

    def mask(self, arenas: Arenas[Array], clear: Callable[[Sequence[Array]], None]) -> None:
        """Forget the new velocity of what was sent.

        clear: writes zeros there; `Route.clear` of the way that it was sent.
        """
        clear(self._views(arenas.plan, arenas.candidate))

    def _accelerate(
        self, velocities: Sequence[Array], gradients: Sequence[Array], out: Sequence[Array]
    ) -> None:
        """out = m u + g."""
        for u, gradient, new in zip(velocities, gradients, out, strict=True):
            self._ops.update_velocity(u, self._factor, gradient, new)

    def _views(self, bucket: BucketPlan, arena: Array) -> list[Array]:
        return [self._ops.view(arena, tensor.start, tensor.stop) for tensor in bucket.tensors]


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
