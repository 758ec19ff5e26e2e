"""Plans for the gradients of one list of variables: each is made when its gradients first come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from horovod_topk.core.agreement import agree
from horovod_topk.core.base_compressor import elastic
from horovod_topk.core.plan import Plan, TensorSpec
from horovod_topk.core.schedule import Schedule
from horovod_topk.methods.protocol import Method
from horovod_topk.tensorflow.planning import Settings, plan_of
from horovod_topk.tensorflow.state_variables import VariableState

Specs = tuple[TensorSpec, ...]


@dataclass(frozen=True)
class CachedPlan:
    """The plan for the gradients of one set of variables, and its collectives' name."""

    specs: Specs  # in the order of the variables
    plan: Plan
    prefix: str
    ordinal: int
    label: str = ""  # of the ratio level, if it is not the usual one

    @property
    def name(self) -> str:
        """The collectives' prefix, equal on all ranks."""
        return f"{self.prefix}.{self.ordinal}{self.label}"

    def at(self, ratio: float) -> CachedPlan:
        """The same at another ratio level."""
        if ratio == self.plan.config.ratio:
            return self
        schedule = Schedule(self.plan.config)  # in which ratios of single tensors are resolved
        plan = self.plan.under(schedule.settings(ratio))
        return replace(self, plan=plan, label=schedule.label(ratio))


class PlanCache:
    """Plans by the gradients that they are for.

    Args:
        config: the settings.
        settings: what was asked of Horovod.
        names: of all variables.
        state: learns of the tensors of each new plan.
    """

    def __init__(
        self, config: Method, settings: Settings, names: Sequence[str], state: VariableState
    ) -> None:
        self._config, self._settings, self._names, self._state = config, settings, names, state
        self._made: dict[Specs, CachedPlan] = {}

    def __iter__(self) -> Iterator[CachedPlan]:
        """In the order in which they were made."""
        return iter(self._made.values())

    def get(self, specs: Specs) -> CachedPlan | None:
        """The one for these gradients, if it has been made."""
        return self._made.get(specs)

    def make(
        self, specs: Specs, variables: Sequence[Any], live: Iterable[CachedPlan]
    ) -> CachedPlan:
        """A new one, on which all ranks agree.

        live: all of this process, whose names it must not have.

        Raises:
            PlanMismatchError: ranks disagree on what they exchange.
            StateDictError: what was loaded does not fit.
        """
        plan = plan_of(specs, variables, self._config, self._settings, self._names)
        prefix = self._config.name or f"topkef.{plan.digest.hex()}"
        ordinal = max((each.ordinal for each in live if each.prefix == prefix), default=-1) + 1
        by_name = {spec.name: v for spec, v in zip(specs, variables, strict=True)}
        with tf.init_scope():  # at once, also while a graph is being built
            if not elastic():  # there, ranks that join late make theirs alone
                ordinal = agree(plan, ordinal, self._state.ops, self._state.collective)
            self._state.know(plan, by_name)
        made = self._made[specs] = CachedPlan(specs, plan, prefix, ordinal)
        return made
