"""The hierarchical exchange: dense within a node, sparse between nodes.

Of every node the first L ranks own shards, L being the ranks of the smallest node; see
`horovod_topk.core.shards`. The others take part in the sums alone.

    reduce    within a node, gradients are added up, and each owner gets the sum of its shards
    gather    between nodes, owners of the same shards exchange the largest of e + sum
    spread    within a node, its owners hand on the payloads that they have gathered

Error feedback is the owners': e lies in their memory, 1 / L of the model each, in units of a node's
sum; no other rank keeps anything. Every rank decodes all payloads, those of each shard in the order
of their ranks, to the sum or the mean over all ranks.

What is spread are payloads and not decoded gradients. That moves fewer bytes as long as a payload
of each node together are shorter than the shard that they are for, and every rank has equal bits
for the reason that it has them with an allgather: all decode the same.

A node of one rank has nothing to reduce or to spread, and one node nothing to gather: these legs
are left out.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from horovod_topk.core import payload as wire
from horovod_topk.core.codec import PayloadCodec
from horovod_topk.core.nodes import Nodes
from horovod_topk.core.residual import Arenas
from horovod_topk.core.route import Collective, Pending
from horovod_topk.core.shards import NodePlan, first_block
from horovod_topk.errors import TopKError
from horovod_topk.ops import Ops

Array = TypeVar("Array")


@dataclass(frozen=True)
class Team(Generic[Array]):
    """With whom a rank exchanges."""

    nodes: Nodes
    rank: int
    within: Collective[Array] | None  # the ranks of this node; None: this one alone
    between: Collective[Array] | None  # owners of the same shards; None: none, or this one alone

    @classmethod
    def of(cls, collective: Collective[Array], nodes: Nodes) -> Team[Array]:
        """That of this rank among all. A collective."""
        groups = nodes.groups
        found = dict(zip(groups, collective.split(groups), strict=True))
        rank = collective.rank
        lane = next((lane for lane in nodes.lanes if rank in lane), ())
        return cls(nodes, rank, found.get(nodes.of(rank)), found.get(lane))

    @property
    def lane(self) -> int | None:
        """Which shards this rank owns; None: it owns nothing."""
        position = self.nodes.position(self.rank)
        return position if position < self.nodes.owners else None

    @property
    def size(self) -> int:
        """Ranks of this node."""
        return len(self.nodes.of(self.rank))


@dataclass(frozen=True)
class _Done(Generic[Array]):
    """A collective of one."""

    result: Array

    def wait(self) -> Array:
        return self.result


class Hierarchical(Generic[Array]):
    """`horovod_topk.core.route.Route` of one bucket: `reduce`, `gather` and `spread`.

    Args:
        plan: the bucket as it is dealt out.
        owned: what this rank keeps of its node's sums, if it owns shards.
        ops, codec: of the arrays.
        team: with whom this rank exchanges.
    """

    def __init__(
        self,
        plan: NodePlan,
        owned: Arenas[Array] | None,
        ops: Ops[Array],
        codec: PayloadCodec[Array],
        team: Team[Array],
    ) -> None:
        self._plan, self._owned, self._ops, self._codec = plan, owned, ops, codec
        self._team = team
        device = plan.bucket.device
        self._out = ops.zeros(
            sum(each.numel for each in plan.sums), plan.bucket.residual_dtype, device
        )
        self._dealt = list(self._deal_out())
        count = plan.sum_bytes if owned is not None else 0
        self._back = ops.zeros(count, "uint8", device)
        if owned is not None:
            codec.open_payload(owned.plan, self._back)
        self._reduced: Pending[Array] | None = None
        self._gathered: Pending[Array] | None = None
        self._spread: Pending[Array] | None = None
        self._unwanted: list[Pending[Array]] = []  # of a step that was forgotten

    def send(self, gradients: Sequence[Array], name: str) -> None:
        """`Route.send`."""
        self._name = name
        for gradient, (firsts, outs) in zip(gradients, self._dealt, strict=True):
            self._ops.deal(gradient, firsts, outs)
        self._reduced = self._reduce()

    def advance(self) -> None:
        """Send what this rank owns between nodes, and then what has arrived within its node."""
        if self._reduced is not None:
            self._compress()
        elif self._gathered is not None:
            self._hand_on()

    def drain(self) -> None:
        """`Route.drain`. An owner's flags make the ranks that go on with the step roll it back.

        Others are not waited for, as ranks may come here in orders of their own. What has gone out
        between nodes already is handed on: other nodes have it too.
        """
        if self._reduced is not None:
            with contextlib.suppress(TopKError):  # nobody reads it
                self._reduced.wait()
            self._reduced = None
            self._unwanted += self._flag_all()
        if self._gathered is not None:
            self._hand_on()
        if self._spread is not None:
            self._spread.wait()
            self._spread = None

    def receive(self, targets: Sequence[Array], gain: float = 1.0) -> Sequence[bool]:
        """`Route.receive`."""
        plan, nodes = self._plan, self._team.nodes
        while self._spread is None:
            self.advance()
        pending, self._spread = self._spread, None
        self._arrived = pending.wait()
        payloads = nodes.owners * len(nodes.ranks)
        received = self._ops.numel(self._arrived)
        if received != plan.sum_bytes * payloads:
            ordinal = plan.bucket.ordinal
            raise wire.wrong_length(received, plan.sum_bytes, payloads, ordinal)
        ranks = sum(nodes.sizes)
        scale = 1.0 / ranks if plan.bucket.reduction == "average" else 1.0
        return self._codec.decode(plan.result, self._in_rows(), gain * scale, targets)

    def clear(self, arrays: Sequence[Array]) -> None:
        """`Route.clear`: all is sent whole, to the owners on this node."""

    def swap(self) -> None:
        """`Route.swap`."""
        if self._owned is not None:
            self._owned.swap()

    def gradient_norm(self, *, committed: bool) -> float:
        """`Route.gradient_norm`."""
        return self._ops.norm(self._out)

    # The legs.

    def _reduce(self) -> Pending[Array]:
        if self._team.within is None:
            return _Done(self._out)
        counts = [each.numel for each in self._plan.sums]
        counts += [0] * (self._team.size - len(counts))
        return self._team.within.reduce_scatter(self._out, counts, f"{self._name}.reduce")

    def _compress(self) -> None:
        assert self._reduced is not None
        pending, self._reduced = self._reduced, None
        try:
            total = pending.wait()
        except TopKError:  # the others wait for this rank, and have to hear of it
            gathered, self._spread = self._flag_all()
            self._unwanted.append(gathered)
            raise
        self._settle()
        if self._owned is None:  # made of nothing, as a graph leaves out what leads to nothing
            self._gathered = _Done(self._ops.pack_values(total, self._plan.bucket.residual_dtype))
            return
        tensors = self._owned.plan.tensors
        sums = [self._ops.view(total, t.start, t.stop) for t in tensors]
        self._codec.encode(self._owned, sums, self._back)
        self._gathered = self._gather()

    def _gather(self) -> Pending[Array]:
        if self._team.between is None:
            return _Done(self._back)
        return self._team.between.allgather(self._back, f"{self._name}.gather")

    def _hand_on(self) -> None:
        assert self._gathered is not None
        pending, self._gathered = self._gathered, None
        self._spread = self._hand_out(pending.wait())

    def _hand_out(self, payloads: Array) -> Pending[Array]:
        if self._team.within is None:
            return _Done(payloads)
        nodes = self._team.nodes
        counts = [len(nodes.ranks) * self._plan.sum_bytes] * nodes.owners
        counts += [0] * (self._team.size - len(counts))
        return self._team.within.allgather(payloads, f"{self._name}.spread", counts)

    # What else it does.

    def _deal_out(self) -> Iterator[tuple[list[int], list[Array]]]:
        """For each gradient the first blocks of its shards, and where they go in `_out`."""
        ends = list(itertools.accumulate(each.numel for each in self._plan.sums))
        parts = [
            self._ops.view(self._out, end - each.numel, end)
            for each, end in zip(self._plan.sums, ends, strict=True)
        ]
        owners = range(len(parts))
        for position, tensor in enumerate(self._plan.bucket.tensors):
            firsts = [first_block(tensor.spec.name, len(parts), owner) for owner in owners]
            places = [each.tensors[position] for each in self._plan.sums]
            yield (
                firsts,
                [self._ops.view(p, t.start, t.stop) for p, t in zip(parts, places, strict=True)],
            )

    def _flag_all(self) -> tuple[Pending[Array], Pending[Array]]:
        """Start the other legs with payloads that say that every tensor is non-finite."""
        self._settle()
        if self._owned is None:
            return self._gather(), self._hand_out(self._back)
        layout = self._owned.plan.layout
        flags = (1 << len(self._owned.plan.gradients)) - 1
        data = flags.to_bytes(layout.flags_bytes, "little")
        self._ops.store_bytes(self._back, layout.flags_at, data)
        count, size = len(self._team.nodes.ranks), self._plan.sum_bytes
        everyones = self._ops.zeros(count * size, "uint8", self._plan.bucket.device)
        for at in range(0, count * size, size):
            self._ops.store(everyones, at, self._back)
        return self._gather(), self._hand_out(everyones)

    def _settle(self) -> None:
        """Wait for what reads the memory that is about to be written."""
        for pending in self._unwanted:
            pending.wait()
        self._unwanted.clear()

    def _in_rows(self) -> Array:
        """The payloads that arrived, one for each shard and so on; they come shard after shard."""
        ops, size = self._ops, self._plan.sum_bytes
        owners, nodes = self._team.nodes.owners, len(self._team.nodes.ranks)
        if owners == 1 or nodes == 1:
            return self._arrived
        ordered = ops.zeros(owners * nodes * size, "uint8", self._plan.bucket.device)
        for position in range(owners * nodes):
            row, owner = divmod(position, owners)
            at = (owner * nodes + row) * size
            ops.store(ordered, position * size, ops.view(self._arrived, at, at + size))
        return ordered
