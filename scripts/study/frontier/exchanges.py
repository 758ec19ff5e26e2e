"""What P ranks do with their gradients between backward and step, dense and compressed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from horovod_topk.core.codec import PayloadCodec
from horovod_topk.core.compressor import Compressor
from horovod_topk.core.exchange import Exchange as Way
from horovod_topk.core.exchange import Traffic, ring_allreduce_bytes
from horovod_topk.core.exchange.selection import make_exchange
from horovod_topk.core.nodes import Nodes
from horovod_topk.core.plan import Plan, make_plan
from horovod_topk.core.rates import Rates
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch.planning import spec_of
from study.frontier.loopback import Collective, Loopback

Gradients = list[Tensor]  # of one rank, in the order of the model's parameters


class Exchange(Protocol):
    """Both of the below."""

    def mean(self, gradients: list[Gradients]) -> Gradients:
        """What every rank applies, given each one's gradients, which are overwritten."""
        ...

    def traffic(self) -> Traffic:
        """Bytes a rank sends in a step."""
        ...


class Dense:
    """An allreduce: the mean of the ranks' gradients."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self._bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self._values = sum(p.numel() for p in model.parameters())
        self._ranks = ranks

    def mean(self, gradients: list[Gradients]) -> Gradients:
        """`Exchange.mean`."""
        first, *others = gradients
        for other in others:
            torch._foreach_add_(first, other)
        torch._foreach_div_(first, self._ranks)
        return first

    def traffic(self) -> Traffic:
        """`Exchange.traffic`."""
        sent = ring_allreduce_bytes(self._bytes, self._ranks)
        return Traffic(self._values, self._bytes, sent, sent, between_bytes=None, node_bytes=None)


class Compressed:
    """TopKEF: a compressor a rank, over one loopback network."""

    def __init__(self, model: nn.Module, ranks: int, config: TopK) -> None:
        self._positions = {name: i for i, (name, _) in enumerate(model.named_parameters())}
        ops, wire, plan = TorchOps(), Loopback(ranks), plan_of(model, config)
        ways = [exchange_of(config.exchange, wire, rank) for rank in range(ranks)]
        self._plan = plan
        self.compressors = [
            Compressor(plan, ops, PayloadCodec(ops), way, "simulated") for way in ways
        ]

    def follow(self, lr: Callable[[], float]) -> None:
        """Have residuals follow what is the learning rate of all parameters."""
        for each in self.compressors:
            each.rates = Rates(lambda: dict.fromkeys(self._positions, lr()))

    def mean(self, gradients: list[Gradients]) -> Gradients:
        """`Exchange.mean`: as Horovod's optimizer with TopKEF exchanges and commits."""
        pairs = list(zip(self.compressors, map(self._in_buckets, gradients), strict=True))
        for compressor, buckets in pairs:
            for ordinal, bucket in buckets.items():
                compressor.launch(ordinal, bucket)
        for compressor, _ in pairs * self.compressors[0].step.stages:
            compressor.step.advance()
        for compressor, buckets in pairs:
            for ordinal, bucket in buckets.items():
                compressor.step.finish(ordinal, bucket)
        for compressor, _ in pairs:
            compressor.commit()
        return gradients[0]

    def traffic(self) -> Traffic:
        """`Exchange.traffic`."""
        return self.compressors[0].traffic()

    def _in_buckets(self, gradients: Gradients) -> dict[int, list[Tensor]]:
        return {
            bucket.ordinal: [gradients[self._positions[t.spec.name]] for t in bucket.tensors]
            for bucket in self._plan.buckets
        }


def exchange_of(kind: str, wire: Loopback, rank: int) -> Way[Tensor]:
    """A rank's exchange by its name; `hierarchical` has nodes of two ranks."""
    pairs = Nodes(tuple((first, first + 1) for first in range(0, wire.size, 2)))
    return make_exchange(kind, Collective(wire, rank), pairs if kind == "hierarchical" else None)


def counted_bytes(traffic: Traffic) -> int:
    """Bytes that a rank sends, or, where nodes are known, that leave a node.

    Compared with a ring allreduce's: where it runs from node to node, these are as many.
    """
    return traffic.sent_bytes if traffic.node_bytes is None else traffic.node_bytes


def plan_of(model: nn.Module, config: TopK) -> Plan:
    """The plan that TopKEF makes for an optimizer of the model's parameters, gradients averaged."""
    return make_plan([spec_of(*each) for each in reversed(list(model.named_parameters()))], config)
