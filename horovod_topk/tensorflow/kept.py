"""The variables that one state keeps from step to step, and what is loaded into them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from horovod_topk.core.rates import rates_of
from horovod_topk.tensorflow.graph import Route
from horovod_topk.tensorflow.shares import Shares


@dataclass(frozen=True)
class Kept:
    """Flat variables of some tensors, by name."""

    residuals: Mapping[str, Any]  # shard after shard if sharded
    owned: Mapping[str, Any]  # of this rank's shards
    velocities: Mapping[str, Any]  # with momentum correction
    units: Mapping[str, Any]  # learning rates, where residuals follow them: [1] float64

    @classmethod
    def of(cls, routes: Iterable[Route], names: Iterable[str]) -> Kept:
        """What routes have for these names, in their order."""
        names, routes = list(names), list(routes)

        def chosen(maps: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
            merged = {name: e for each in maps for name, e in each.items()}
            return {name: merged[name] for name in names if name in merged}

        return cls(
            chosen(route.residuals for route in routes),
            chosen(route.owned for route in routes),
            chosen(route.velocities for route in routes),
            chosen(route.units for route in routes),
        )

    def reset(self) -> None:
        """Set all to zero."""
        for variables in (self.residuals, self.owned, self.velocities, self.units):
            for variable in variables.values():
                variable.assign(tf.zeros_like(variable))

    def assign(self, state: Mapping[str, Any], shares: Shares) -> None:
        """Take on what a state dict has, once it is known to fit."""
        for name, residual in self.residuals.items():
            loaded = tf.cast(state["residuals"][name], residual.dtype)
            residual.assign(shares.dealt(name, loaded))
        for part, variables in (("owned", self.owned), ("velocity", self.velocities)):
            for name, variable in variables.items():
                variable.assign(tf.cast(state[part]["residuals"][name], variable.dtype))
        rates = rates_of(state)
        for name, unit in self.units.items():
            unit.assign([rates.get(name, 0.0)])
