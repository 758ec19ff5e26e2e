"""Which rank keeps what of each variable's residual, and in which order.

allgather      every rank all of it, in the order of its elements
sharded        every rank all of it, shard after shard, and what is owed of the shard it owns
hierarchical   an owner what is owed of its shard, another rank nothing
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from horovod_topk.core.exchange import Exchange
from horovod_topk.core.plan import Plan, TensorSpec
from horovod_topk.core.shards import first_block, shard_numel
from horovod_topk.ops.tensorflow import Array, TensorFlowOps


class Shares:
    """What one exchange says about it.

    Attributes:
        keeps: whether a rank keeps residuals of its own gradients.
        has_owners: whether shards have owners, this rank or others.
    """

    def __init__(self, exchange: Exchange[Array], ops: TensorFlowOps) -> None:
        self._exchange, self._ops = exchange, ops
        self.keeps, self.has_owners = exchange.keeps, exchange.parts > 0
        self._parts, self._part = exchange.parts, exchange.part

    @property
    def owner(self) -> dict[str, object] | None:
        """`Exchange.owner`, if shards have owners."""
        return dict(self._exchange.owner) if self.has_owners else None

    def owned(self, specs: Iterable[TensorSpec]) -> list[TensorSpec]:
        """This rank's shards, if it owns any."""
        if self._part is None:
            return []
        return [replace(spec, shape=(self._numel(spec, self._part),)) for spec in specs]

    def order(self, spec: TensorSpec, plan: Plan) -> object:
        """What orders a residual's elements, and gives those of owners their unit."""
        if self.owner is None:
            return None
        return spec.name, tuple(map(str, self.owner.values())), plan.reduction

    def natural(self, name: str, residual: Any) -> Any:
        """A copy of a rank's own residual in the order of its tensor's elements."""
        if not self.has_owners:
            return tf.identity(residual)
        numel = residual.shape[0]
        places = self._places(name, numel)[:, tf.newaxis]
        return tf.scatter_nd(places, residual, tf.constant([numel], tf.int64))

    def dealt(self, name: str, residual: Any) -> Any:
        """The same in the order in which it is kept."""
        if not self.has_owners:
            return residual
        return tf.gather(residual, self._places(name, residual.shape[0]))

    def _numel(self, spec: TensorSpec, part: int) -> int:
        return shard_numel(spec.numel, self._parts, first_block(spec.name, self._parts, part))

    def _places(self, name: str, numel: int) -> Any:
        """Where the elements of a residual lie in its tensor: shards follow each other in it."""
        places = []
        for first in (first_block(name, self._parts, part) for part in range(self._parts)):
            own = self._ops.arange(shard_numel(numel, self._parts, first))
            places.append(self._ops.spot(own, self._parts, first).value)
        return tf.concat(places, 0)
