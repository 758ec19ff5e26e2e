"""A cache of plans for one list of variables: one plan for each set of their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from horovod_topk.core.control.schedule import Schedule
from horovod_topk.core.exchange.agreement import agree
from horovod_topk.core.exchange.membership import elastic
from horovod_topk.core.plan.buckets import Plan, TensorSpec
from horovod_topk.methods.protocol import Method
from horovod_topk.tensorflow.planning import Settings, plan_of
from horovod_topk.tensorflow.state_variables import VariableState

Specs = tuple[TensorSpec, ...]


@dataclass(frozen=True)
class CachedPlan:
    """The plan for one set of gradients, and the name of its collectives."""

    specs: Specs  # in the order of the variables
    plan: Plan
    prefix: str
    ordinal: int

    @property
    def name(self) -> str:
        """The prefix of the collectives' names, equal on all ranks."""
        return f"{self.prefix}.{self.ordinal}"

    def at(self, ratio: float) -> CachedPlan:
        """The same plan at another ratio level."""
        if ratio == self.plan.config.ratio:
            return self
        schedule = Schedule(self.plan.config)  # config: ratios of single tensors are resolved
        return replace(self, plan=self.plan.under(schedule.settings(ratio), self.plan.follows))


class PlanCache:
    """Plans by the specs of the gradients that they are for.

    Args:
        config: the method's settings.
        settings: the user's arguments to Horovod.
        names: names of all variables.
        state: makes state variables for the tensors of each new plan.
    """

    def __init__(
        self, config: Method, settings: Settings, names: Sequence[str], state: VariableState
    ) -> None:
        self._config, self._settings, self._names, self._state = config, settings, names, state
        self._made: dict[Specs, CachedPlan] = {}

    def __iter__(self) -> Iterator[CachedPlan]:
        """The plans in the order in which they were made."""
        return iter(self._made.values())

    def get(self, specs: Specs) -> CachedPlan | None:
        """The plan for these gradients, or None if it is not made yet."""
        return self._made.get(specs)

    def make(
        self, specs: Specs, variables: Sequence[Any], live: Iterable[CachedPlan]
    ) -> CachedPlan:
        """Make a new plan, on which all ranks agree.

        live: all plans of this process; the new plan gets another name.

        Raises:
            PlanMismatchError: ranks disagree on what they exchange.
            StateDictError: the loaded state dict does not fit.
        """
        plan = plan_of(specs, variables, self._config, self._settings, self._names)
        prefix = self._config.name or f"topkef.{plan.digest.hex()}"
        ordinal = max((each.ordinal for each in live if each.prefix == prefix), default=-1) + 1
        by_name = {spec.name: v for spec, v in zip(specs, variables, strict=True)}
        with tf.init_scope():  # run eagerly, also while a graph is being built
            if not elastic():  # in elastic jobs, ranks that join late make their plans alone
                ordinal = agree(plan, ordinal, self._state.ops, self._state.collective)
            self._state.know(plan, by_name)
        made = self._made[specs] = CachedPlan(specs, plan, prefix, ordinal)
        return made
