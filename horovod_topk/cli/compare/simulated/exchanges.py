"""Exchanges of simulated ranks, dense and compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from horovod_topk.config import fields_of
from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.exchange.loopback import Loopback
from horovod_topk.core.exchange.protocol import Exchange as Route
from horovod_topk.core.exchange.protocol import Traffic, ring_allreduce_bytes
from horovod_topk.core.exchange.selection import choose, make_exchange
from horovod_topk.core.plan.buckets import Plan, make_plan
from horovod_topk.core.plan.nodes import Location, Nodes
from horovod_topk.core.run.follower import Followers
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.core.run.substitute import Substitute
from horovod_topk.core.state.learning_rates import Rates, fall_of
from horovod_topk.methods import METHODS, Method
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch_training.gradients import spec_of
from horovod_topk.torch_training.optimizer_settings import fit_momentum
from horovod_topk.torch_training.own_steps import updates_of
from horovod_topk.torch_training.updates import moments
from horovod_topk.updates.tracker import Rule, Tracker

Gradients = list[Tensor]  # gradients of one rank, in the order of the model's parameters


class Dense:
    """Horovod's own allreduce: the mean of the ranks' gradients, added in rank order."""

    def __init__(self, model: nn.Module, ranks: int, dtype: torch.dtype | None = None) -> None:
        sizes = [
            (p.numel(), p.element_size() if dtype is None else dtype.itemsize)
            for p in model.parameters()
        ]
        self._values = sum(count for count, _ in sizes)
        self._bytes = sum(count * size for count, size in sizes)
        self._full = sum(p.numel() * p.element_size() for p in model.parameters())
        self._ranks, self._dtype = ranks, dtype

    def mean(self, gradients: list[Gradients]) -> Gradients:
        """The gradients that every rank applies, from each rank's, which are overwritten."""
        full = [each.dtype for each in gradients[0]]
        if self._dtype is not None:
            gradients = [[each.to(self._dtype) for each in of_rank] for of_rank in gradients]
        first, *others = gradients
        for other in others:
            torch._foreach_add_(first, other)
        torch._foreach_div_(first, self._ranks)
        return [each.to(dtype) for each, dtype in zip(first, full, strict=True)]

    def traffic(self) -> Traffic:
        """Bytes that a rank sends in a step."""
        sent = ring_allreduce_bytes(self._bytes, self._ranks)
        dense = ring_allreduce_bytes(self._full, self._ranks)
        return Traffic(self._values, self._bytes, sent, dense, between_bytes=None, node_bytes=None)

    def report(self, losses: Sequence[float]) -> None:
        """Tell each rank's guard its loss: there is none."""


def compressed(
    model: nn.Module | Part, optimizer: torch.optim.Optimizer, ranks: int, asked: Substitute
) -> Compressed:
    """Make the exchange of a compressor of this package for an optimizer."""
    method = METHODS[asked.name]
    settings, deferred = fields_of(method, {**method.for_training, **asked.settings}, asked.name)
    config = method(**settings)
    config, rule, _ = fit_momentum(optimizer, config, deferred)
    if "follow_lr" in deferred:
        config = replace(config, follow_lr=True)
    names = {p: name for name, p in model.named_parameters()}
    followers = None
    if rule is not None:
        followers = Tracker(rule, TorchOps(), lambda: moments(optimizer, names))
    made = Compressed(model, ranks, config, rule, followers)
    if rule is not None:
        updates = updates_of(rule, optimizer, names, made.compressors[0])
        optimizer.register_step_pre_hook(lambda it, *_: updates.begin(it))
        optimizer.register_step_post_hook(lambda it, *_: updates.end(it))
    if config.follow_lr:
        made.attach(optimizer)
    return made


class Compressed:
    """One compressor for each rank, over one loopback network."""

    def __init__(
        self,
        model: nn.Module | Part,
        ranks: int,
        config: Method,
        rule: Rule | None = None,
        followers: Followers | None = None,
    ) -> None:
        self._positions = {name: i for i, (name, _) in enumerate(model.named_parameters())}
        ops = TorchOps()
        wire = Loopback(ranks, ops, locations=pairs_of(ranks))
        plan = plan_of(model, config)
        plan = plan.under(plan.config, rule)  # whose rules for ratios are applied
        routes = [exchange_of(plan, wire, rank) for rank in range(ranks)]
        self._plan = plan
        self.compressors = [
            StepRunner(plan, ops, PayloadCodec(ops), route, "simulated", followers=followers)
            for route in routes
        ]
        first, *others = self.compressors
        for each in others:
            each.share_with(first)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Rescale residuals by the learning rate of the optimizer's first parameter group."""
        group = optimizer.param_groups[0]
        for each in self.compressors:
            each.rates = Rates(
                lambda: dict.fromkeys(self._positions, float(group["lr"])),
                partial(fall_of, self._plan.config),
            )

    def mean(self, gradients: list[Gradients]) -> Gradients:
        """`Dense.mean`: exchange and commit as Horovod's optimizer with a compressor does."""
        pairs = list(zip(self.compressors, map(self.in_buckets, gradients), strict=True))
        for compressor, buckets in pairs:
            for ordinal, bucket in buckets.items():
                compressor.launch(ordinal, bucket)
        for compressor, _ in pairs * self.compressors[0].step.stages:
            compressor.step.advance()
        for compressor, buckets in pairs:
            compressor.step.finish(buckets)
        for compressor, _ in pairs:
            compressor.commit()
        return gradients[0]

    def traffic(self) -> Traffic:
        """`Dense.traffic`."""
        return self.compressors[0].traffic()

    def report(self, losses: Sequence[float]) -> None:
        """Tell each rank's guard its loss."""
        for compressor, loss in zip(self.compressors, losses, strict=True):
            compressor.guard.report(loss)

    def in_buckets(self, gradients: Gradients) -> dict[int, list[Tensor]]:
        """Split a rank's gradients into the plan's buckets, by ordinal."""
        return {
            bucket.ordinal: [gradients[self._positions[t.spec.name]] for t in bucket.tensors]
            for bucket in self._plan.buckets
        }


class Part:
    """The parameters of a model that one of its optimizers has."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._named = [(name, p) for name, p in model.named_parameters() if id(p) in own]

    def named_parameters(self) -> Sequence[tuple[str, Tensor]]:
        """As a module's."""
        return self._named

    def parameters(self) -> list[Tensor]:
        """As a module's."""
        return [p for _, p in self._named]


class Several:
    """An exchange for each optimizer of a model."""

    def __init__(self, model: nn.Module, parts: list[Part], exchanges: list[Compressed]) -> None:
        at = {id(p): i for i, p in enumerate(model.parameters())}
        self._places = [[at[id(p)] for p in part.parameters()] for part in parts]
        self._exchanges = exchanges

    def mean(self, gradients: list[Gradients]) -> Gradients:
        """`Dense.mean`."""
        for places, each in zip(self._places, self._exchanges, strict=True):
            own = each.mean([[of_rank[i] for i in places] for of_rank in gradients])
            for i, gradient in zip(places, own, strict=True):
                gradients[0][i] = gradient
        return gradients[0]

    def traffic(self) -> Traffic:
        """`Dense.traffic`: the sum."""
        every = [astuple(each.traffic()) for each in self._exchanges]
        sums: Any = (None if None in of else sum(of) for of in zip(*every, strict=True))
        return Traffic(*sums)

    def report(self, losses: Sequence[float]) -> None:
        """Tell each rank's guard its loss."""
        for each in self._exchanges:
            each.report(losses)


Exchange = Dense | Compressed | Several  # of all ranks' gradients


def pairs_of(ranks: int) -> list[Location]:
    """The locations of ranks on nodes of two."""
    return [Location(f"node{rank // 2}", rank % 2, rank // 2 * 2) for rank in range(ranks)]


def exchange_of(plan: Plan, wire: Loopback[Tensor], rank: int) -> Route[Tensor]:
    """Make a rank's exchange from the plan; nodes have two ranks where nodes matter."""
    kind, because, collective = plan.config.exchange, "", wire.collective(rank)
    pairs = Nodes(tuple(tuple(range(p, min(p + 2, wire.size))) for p in range(0, wire.size, 2)))
    if kind == "auto":
        kind, because = choose(plan, collective, pairs, can_split=True)
        return make_exchange(kind, collective, pairs, because)
    nodes = pairs if kind == "hierarchical" else None
    return make_exchange(kind, collective, nodes, in_rounds=plan.config.in_rounds)


def counted_bytes(traffic: Traffic) -> int:
    """Bytes that a rank sends, or, where nodes are known, that leave a node.

    Both are comparable with a ring allreduce's bytes: in a ring from node to node they are equal.
    """
    return traffic.sent_bytes if traffic.node_bytes is None else traffic.node_bytes


def plan_of(model: nn.Module | Part, config: Method) -> Plan:
    """The plan that a compressor makes for the model's optimizer, with averaged gradients."""
    return make_plan([spec_of(*each) for each in reversed(list(model.named_parameters()))], config)
