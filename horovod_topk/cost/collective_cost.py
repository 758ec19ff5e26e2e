"""The time of a collective: latency, bandwidth and the processor's work on each byte.

The model is Hockney's (1994), as Thakur, Rabenseifner and Gropp (2005) use it: a message of n bytes
takes alpha + n beta, and adding up n bytes takes n gamma. Horovod adds a time for each
collective: its background thread wakes once a cycle (1 ms by default), and the ranks agree on what
is ready by an allreduce of a few bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from horovod_topk.core.exchange.protocol import ring_allreduce_bytes
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.cost.machine import Network

# Header bytes of Ethernet, IP and TCP for each byte of data in a full packet: docs/network.md.
HEADERS = 66 / 1448


@dataclass(frozen=True)
class CollectiveCost:
    """The collectives, one after another, that exchange one piece of the gradients."""

    collectives: int
    rounds: int  # messages that wait for one another, with negotiation
    network_bytes: int  # bytes that leave the busiest node
    local_bytes: int  # bytes that a rank sends to others on its node, or receives from them
    sent_bytes: int  # bytes that a rank sends in total
    added_bytes: int = 0  # received bytes that a rank adds to its own
    ring: bool = True  # bytes within a node and between nodes are sent at the same time

    @property
    def network_bits(self) -> float:
        """Bits that leave the busiest node, with packet headers."""
        return 8 * self.network_bytes * (1 + HEADERS)

    def fused(self, other: CollectiveCost) -> CollectiveCost:
        """Return both as one collective: bytes add up, messages do not."""
        return replace(
            self,
            network_bytes=self.network_bytes + other.network_bytes,
            local_bytes=self.local_bytes + other.local_bytes,
            sent_bytes=self.sent_bytes + other.sent_bytes,
            added_bytes=self.added_bytes + other.added_bytes,
        )

    def seconds(self, network: Network, slowdown: float = 1.0) -> float:
        """Return the time in seconds."""
        waiting = self.collectives * network.overhead + self.rounds * network.latency
        between = self.network_bits / (network.goodput * network.bandwidth)
        within = 8 * self.local_bytes / network.local_bandwidth if network.local_bandwidth else 0.0
        moving = max(between, within) if self.ring else between + within
        work = self.sent_bytes * network.copy + self.added_bytes * network.add
        return waiting + moving + slowdown * work


def negotiation(ranks: int) -> int:
    """Number of messages by which ranks agree on which tensors are ready.

    Horovod 0.28.1 computes the bitwise and of all ranks' cached tensors; on Gloo that is a ring
    allreduce of a few bytes (gloo_controller.cc, CrossRankBitwiseAnd).
    """
    return 2 * (ranks - 1)


def ring_allreduce(dense_bytes: int, nodes: Nodes) -> CollectiveCost:
    """The cost of a ring allreduce: two phases of P - 1 messages (Patarasuk, Yuan 2009)."""
    ranks = sum(nodes.sizes)
    sent = ring_allreduce_bytes(dense_bytes, ranks)
    return CollectiveCost(
        collectives=1,
        rounds=2 * (ranks - 1) + negotiation(ranks),
        network_bytes=sent if len(nodes.ranks) > 1 else 0,  # a ring leaves each node once
        local_bytes=sent if max(nodes.sizes) > 1 else 0,
        sent_bytes=sent,
        added_bytes=sent // 2,
    )
