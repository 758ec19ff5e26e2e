"""The ways that gradients of one list of variables take: each is made when it is first taken."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from horovod_topk.config import TopKConfig
from horovod_topk.core.agreement import agree
from horovod_topk.core.choice import exchange_of
from horovod_topk.core.codec import TopK
from horovod_topk.core.front import elastic
from horovod_topk.core.momentum import check_dtypes
from horovod_topk.core.plan import Plan, TensorSpec
from horovod_topk.core.route import Collective
from horovod_topk.core.state_dict import check_origin, check_owner, check_state
from horovod_topk.core.stats import describe
from horovod_topk.ops.tensorflow import Array, TensorFlowOps
from horovod_topk.tensorflow.dicts import as_buffers, has_residuals, without
from horovod_topk.tensorflow.graph import Route, Transport
from horovod_topk.tensorflow.kept import Kept
from horovod_topk.tensorflow.planning import Settings, plan_of
from horovod_topk.tensorflow.residuals import Residuals, Stores
from horovod_topk.tensorflow.shares import Shares

log = logging.getLogger("horovod_topk")

Specs = tuple[TensorSpec, ...]


class Routes:
    """Routes by what they carry, and what was loaded for residuals that none has made yet.

    Attributes:
        shares: which rank keeps what; None before there is a route.
        transport: chosen with it.
        waiting: a state dict, or what is left of it.
    """

    def __init__(
        self,
        config: TopKConfig,
        settings: Settings,
        names: Sequence[str],
        stores: Stores,
        ops: TensorFlowOps,
        collective: Collective[Array],
    ) -> None:
        self._config, self._settings = config, settings
        self._names, self._stores = names, stores
        self._ops, self._collective = ops, collective
        self._made: dict[Specs, Route] = {}
        self._taken = set[str]()  # names that have had theirs of what was loaded
        self.shares: Shares | None = None
        self.transport: Transport | None = None
        self.waiting: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[Route]:
        """In the order in which they were made."""
        return iter(self._made.values())

    def get(self, specs: Specs) -> Route | None:
        """The one for these gradients, if it has been made."""
        return self._made.get(specs)

    def specs(self) -> dict[str, TensorSpec]:
        """What is known of tensors, by name."""
        return {spec.name: spec for route in self for spec in route.specs}

    def kept(self) -> Kept:
        """All variables, in the order of those whose gradients they are of."""
        return Kept.of(self, self._names)

    def make(self, specs: Specs, variables: Sequence[Any], live: Iterable[Route]) -> Route:
        """A new one, on which all ranks agree; it takes on what was loaded for its residuals.

        live: all routes of this process, whose names it must not have.

        Raises:
            PlanMismatchError: ranks disagree on what they exchange.
            StateDictError: what was loaded does not fit.
        """
        plan = plan_of(specs, variables, self._config, self._settings, self._names)
        prefix = self._config.name or f"topkef.{plan.digest.hex()}"
        ordinal = _free_ordinal(prefix, live)
        with tf.init_scope():  # at once, also while a graph is being built
            if not elastic():  # there, ranks that join late make theirs alone
                ordinal = agree(plan, ordinal, self._ops, self._collective)
            shares = self._settle(plan)
            new = self._variables(specs, variables, plan, shares)
            kept = new.residuals, new.owned, new.velocities, new.units
            route = Route(specs, plan, prefix, ordinal, *kept)
            self._take_on_waiting(route, shares)
        log.info("TopKEF %s: %s", route.name, plan.summary())
        self._made[specs] = route
        return route

    def check(self, state: Mapping[str, Any], specs: Sequence[TensorSpec], shares: Shares) -> None:
        """Refuse a state dict that does not fit these tensors; StateDictError."""
        check_origin(state, specs, self._settings.reduction)
        check_owner(shares.owner, state.get("owned"))
        check_state(as_buffers(state), specs if shares.keeps else (), self._ops)
        if shares.has_owners:
            check_state(as_buffers(state["owned"]), shares.owned(specs), self._ops)
        if self._config.momentum:
            check_state(as_buffers(state["velocity"]), specs, self._ops)

    def _settle(self, plan: Plan) -> Shares:
        """Choose the exchange, with all ranks, unless it is chosen."""
        if self.shares is None:
            ops, collective = self._ops, self._collective
            exchange = exchange_of(plan, ops, collective)
            log.info("TopKEF: %s", describe(exchange))
            self.transport = Transport(ops, TopK(ops), collective, exchange)
            self.shares = Shares(exchange, ops)
        return self.shares

    def _variables(
        self, specs: Specs, variables: Sequence[Any], plan: Plan, shares: Shares
    ) -> Kept:
        """What a route keeps."""
        stores, momentum = self._stores, self._config.momentum
        follows = self._config.follow_lr
        if momentum:
            check_dtypes(plan)
        pairs = list(zip(specs, variables, strict=True))
        own = zip(shares.owned(specs), variables, strict=False)  # of shards, if it has any

        def dealt(store: Residuals, each: Iterable[tuple[TensorSpec, Any]]) -> dict[str, Any]:
            return {spec.name: store.of(v, spec, shares.order(spec, plan)) for spec, v in each}

        return Kept(
            dealt(stores.residuals, pairs if shares.keeps else ()),
            dealt(stores.owned, own),
            {s.name: stores.velocities.of(v, s) for s, v in pairs if momentum},
            {s.name: stores.units.of(v, _rate_of(s)) for s, v in pairs if follows},
        )

    def _take_on_waiting(self, route: Route, shares: Shares) -> None:
        """Give residuals what was loaded for them before they were asked for, once."""
        if self.waiting is None:
            return
        new = [spec for spec in route.specs if spec.name not in self._taken]
        names = {spec.name for spec in new}
        later = {name for name in self._names if name not in names}
        now = without(self.waiting, later)
        self.check(now, new, shares)
        Kept.of([route], names).assign(now, shares)
        self._taken |= names
        rest = without(self.waiting, names)
        self.waiting = rest if has_residuals(rest) else None


def _rate_of(spec: TensorSpec) -> TensorSpec:
    """A learning rate in whose units a residual is."""
    return replace(spec, shape=(1,), dtype="float64")


def _free_ordinal(prefix: str, live: Iterable[Route]) -> int:
    """One above all of the same prefix that live."""
    return max((route.ordinal for route in live if route.prefix == prefix), default=-1) + 1
