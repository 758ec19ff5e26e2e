"""What an exchange is: how the payloads of all buckets cross the network.

An `Exchange` says who keeps residuals of what and how many bytes travel. For each bucket it makes a
`BucketExchange`, which sends and receives that bucket step after step:

    send      encode, and start the first collective
    advance   start the next collective when the one before is done; as often as the bucket with
              the most `stages` has, and each time for every bucket, before the first is received
    receive   wait for the last collective, and decode what it brings

What a rank keeps lies in arenas: they take part in the commit (`swap`) or do not.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from horovod_topk.core.codec import PayloadCodec
from horovod_topk.core.nodes import Location, Nodes
from horovod_topk.core.plan import BucketPlan, Plan
from horovod_topk.core.residual import Arenas, Squares
from horovod_topk.errors import TensorTooLargeError
from horovod_topk.ops import Ops, Velocities

Array = TypeVar("Array")
Given = TypeVar("Given", contravariant=True)
Received = TypeVar("Received", covariant=True)

LARGEST_SPLIT = 2**31 - 1  # Horovod's splits are of 32 bits


class Pending(Protocol[Received]):
    """A collective under way."""

    def wait(self) -> Received:
        """Block until it is done and return its result."""
        ...


class Collective(Protocol[Array]):
    """A communicator: Horovod's, mpi4py's, or a test's."""

    @property
    def rank(self) -> int:
        """This process among those that exchange, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many exchange."""
        ...

    @property
    def location(self) -> Location:
        """Where this process runs."""
        ...

    def allgather(
        self, payload: Array, name: str, counts: Sequence[int] | None = None
    ) -> Pending[Array]:
        """Start to gather a uint8 array in rank order.

        Must not block. `name` is equal on all ranks, and unique among collectives under way.
        counts: bytes of each rank; None: as many as of this one.
        """
        ...

    def alltoall(self, payloads: Array, name: str) -> Pending[Array]:
        """Start to send the p-th of `size` equal stretches to rank p; what comes is in rank order.

        As `allgather` otherwise.
        """
        ...

    def reduce_scatter(self, array: Array, counts: Sequence[int], name: str) -> Pending[Array]:
        """Start to add up arrays element by element; rank p gets a stretch of counts[p] elements.

        They are added in rank order, whatever arrives first, and whatever else is under way. As
        `allgather` otherwise. `wait` of PyTorch's raises PayloadError if a rank has sent another
        number; other implementations may not notice, as plans are agreed on beforehand.
        """
        ...

    def allreduce(self, array: Array, name: str) -> Pending[Array]:
        """Start to add up arrays element by element, in an order of the library's own.

        `array` may be written. As `allgather` otherwise.
        """
        ...

    def can_split(self, groups: Sequence[Sequence[int]]) -> bool:
        """Whether `split` will work here, if it does on every rank."""
        ...

    def split(self, groups: Sequence[Sequence[int]]) -> Sequence[Collective[Array] | None]:
        """A collective for each group of ranks, None for those without this one. A collective."""
        ...


class BucketExchange(Protocol[Given]):
    """One bucket, sent and received step after step."""

    @property
    def stages(self) -> int:
        """How often it has to advance before it can be received."""
        ...

    def send(
        self, gradients: Sequence[Given], name: str, velocities: Velocities[Any] | None = None
    ) -> None:
        """Encode gradients and start the first collective; writes no gradient and no residual.

        velocities: corrects the gradients' momentum, and gets new velocities.
        """
        ...

    def advance(self) -> None:
        """Start the next collective if there is one; waits for what it needs."""
        ...

    def drain(self) -> None:
        """Let what is under way come to its end, and forget it.

        Starts nothing but what ranks that go on with the step wait for: flags that end it.
        """
        ...

    def receive(self, targets: Sequence[Given], gain: float = 1.0) -> Sequence[bool]:
        """Wait for the last collective and write `gain` times what it brings.

        Once for each `send`.

        Returns:
            Which tensors any rank flagged.

        Raises:
            PayloadError, PlanMismatchError: it is not payloads of this bucket.
        """
        ...

    def swap(self) -> None:
        """What was not sent becomes the residual."""
        ...

    def squares(self, *, committed: bool) -> Squares:
        """Of what was sent last, as far as they are known. Waits for the device.

        committed: whether that step was committed.
        """
        ...

    def encoded(self) -> Sequence[tuple[Arenas[Any], Any]]:
        """Arenas, with the payload of each; (): gradients are not encoded by themselves."""
        ...


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank and step."""

    selected: int  # values handed to collectives
    payload_bytes: int  # their bytes, and all that travels with them
    sent_bytes: int  # sent for them
    dense_bytes: int  # sent by a ring allreduce of the dense gradients instead
    between_bytes: int | None  # of `sent_bytes`, those to other nodes; None: nodes are not known
    node_bytes: int | None  # that leave the busiest node, of all its ranks together


class Exchange(Protocol[Array]):
    """What the compressor asks of an exchange."""

    @property
    def ranks(self) -> int:
        """How many ranks exchange."""
        ...

    @property
    def rank(self) -> int:
        """This one among them."""
        ...

    @property
    def kind(self) -> str:
        """The setting that names it."""
        ...

    @property
    def because(self) -> str:
        """Why it was chosen, or what became of it, in one line; empty: it was asked for."""
        ...

    @property
    def owner(self) -> Mapping[str, object]:
        """Whose the residuals of shards are: this rank's, of how many, on which nodes."""
        ...

    @property
    def nodes(self) -> Nodes | None:
        """Who shares a node, if that is known."""
        ...

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """Plans whose arenas together hold this rank's residuals of a bucket."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether a rank keeps residuals of its own gradients."""
        ...

    @property
    def parts(self) -> int:
        """Owners that each tensor is split among; 0: there are none."""
        ...

    @property
    def part(self) -> int | None:
        """Which of the owners this rank is; None: none."""
        ...

    def owned(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """The plan of what this rank owns of a bucket for all ranks, if it owns something."""
        ...

    def of(
        self,
        bucket: BucketPlan,
        residuals: Sequence[Arenas[Array]],
        owned: Sequence[Arenas[Array]],
        states: Mapping[str, Arenas[Array]],
        ops: Ops[Array],
        codec: PayloadCodec[Array],
    ) -> BucketExchange[Array]:
        """What sends and receives a bucket.

        residuals: one for each of `holders`.
        owned: one for each of `owned`.
        states: the method's own, by name.
        """
        ...

    def traffic(self, plan: Plan) -> Traffic:
        """Bytes of a step."""
        ...

    def buffer_bytes(self, plan: Plan) -> int:
        """Bytes of memory for payloads, those of other ranks too, and for sums."""
        ...


class Over(abc.ABC, Generic[Array]):
    """What exchanges over a collective have in common.

    Args:
        collective: all ranks.
        nodes: who shares a node, if that is known; for `traffic`.
        because: `Exchange.because`.
    """

    def __init__(
        self, collective: Collective[Array], nodes: Nodes | None = None, because: str = ""
    ) -> None:
        self._collective = collective
        self.nodes = nodes
        self.because = because
        self._counted: dict[tuple[bytes, int], Traffic] = {}  # by their plan's digest

    @property
    def collective(self) -> Collective[Array]:
        """All ranks."""
        return self._collective

    @property
    def ranks(self) -> int:
        """How many ranks exchange."""
        return self._collective.size

    @property
    def rank(self) -> int:
        """This one among them."""
        return self._collective.rank

    @property
    def owner(self) -> Mapping[str, object]:
        """This rank, of how many."""
        return {"ranks": self.ranks, "rank": self.rank}

    def traffic(self, plan: Plan) -> Traffic:
        """Bytes of a step; counted once, as every step asks."""
        key = plan.digest, self.ranks  # those of an elastic job come and go
        if key not in self._counted:
            self._counted[key] = self._count(plan)
        return self._counted[key]

    @abc.abstractmethod
    def buffer_bytes(self, plan: Plan) -> int:
        """`Exchange.buffer_bytes`."""

    @abc.abstractmethod
    def _count(self, plan: Plan) -> Traffic:
        """Bytes of a step."""

    def _is_at_an_edge(self, rank: int) -> bool:
        """Whether the next rank in a ring of all is on another node."""
        assert self.nodes is not None
        return (rank + 1) % self.ranks not in self.nodes.of(rank)

    def _traffic(
        self,
        plan: Plan,
        selected: int,
        payload_bytes: int,
        sent_bytes: int,
        between: Callable[[int], int],
    ) -> Traffic:
        """between: bytes that a rank sends to other nodes."""
        dense = sum(bucket.dense_bytes for bucket in plan.buckets)
        dense_bytes = ring_allreduce_bytes(dense, self.ranks)
        mine, busiest = None, None
        if self.nodes is not None:
            mine = between(self.rank)
            busiest = max(sum(map(between, node)) for node in self.nodes.ranks)
        return Traffic(selected, payload_bytes, sent_bytes, dense_bytes, mine, busiest)


def ring_allreduce_bytes(dense_bytes: int, ranks: int) -> int:
    """Bytes a rank sends in a ring allreduce: 2 (P - 1) / P of the data (Patarasuk, Yuan 2009)."""
    return 2 * (ranks - 1) * dense_bytes // ranks


def check_split(bucket: BucketPlan, size: int, unit: str) -> None:
    """Refuse what an alltoall or a reduce-scatter cannot split.

    Raises:
        TensorTooLargeError: it is.
    """
    if size > LARGEST_SPLIT:
        largest = max(bucket.tensors, key=lambda tensor: tensor.spec.numel).spec
        raise TensorTooLargeError(
            f"each owner gets {size} {unit} of its bucket, at most {LARGEST_SPLIT} can be sent",
            tensor=largest.name,
            cure="Split the parameter, start more ranks, or pass exchange='allgather'",
        )
