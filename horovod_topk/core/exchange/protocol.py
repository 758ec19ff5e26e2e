"""The protocol of an exchange: how the payloads of all buckets cross the network.

An `Exchange` defines which rank keeps which residuals, and how many bytes are sent. For each bucket
it makes a `BucketExchange`, which sends and receives that bucket step after step:

    send      encode, and start the first collective
    advance   start the next collective when the one before is done; called once for every bucket in
              each of the exchange stages, before the first bucket is received
    receive   wait for the last collective, and decode its result

Residuals and other state are in arenas, which `swap` commits.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.codec.momentum import NO_MOMENTS, OptimizerMoments
from horovod_topk.core.plan.buckets import BucketPlan, Plan, TensorSpec, lay_out
from horovod_topk.core.plan.nodes import Location, Nodes
from horovod_topk.core.state.residual import Arenas, Squares
from horovod_topk.errors import TensorTooLargeError
from horovod_topk.methods.dense import Dense
from horovod_topk.methods.protocol import Piece

Array = TypeVar("Array")
Received = TypeVar("Received", covariant=True)

LARGEST_SPLIT = 2**31 - 1  # Horovod counts elements and bytes of a collective in int32


class Pending(Protocol[Received]):
    """A started collective."""

    def wait(self) -> Received:
        """Block until the collective is done and return its result."""


def wait_for_dropped(unwanted: list[Pending[Any]]) -> None:
    """Wait for collectives of a dropped step, whose memory is about to be written, and forget them.

    A collective that fails, because a rank is lost, is ignored.
    """
    for pending in unwanted:
        with contextlib.suppress(RuntimeError):
            pending.wait()
    unwanted.clear()


class Collective(Protocol[Array]):
    """A communicator: Horovod's, torch's, or a test's."""

    @property
    def rank(self) -> int:
        """This process' rank among those that exchange, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks that exchange."""

    @property
    def location(self) -> Location:
        """The host and local rank of this process."""

    def allgather(
        self, payload: Array, name: str, counts: Sequence[int] | None = None
    ) -> Pending[Array]:
        """Start to gather a uint8 array in rank order.

        Must not block. `name` is equal on all ranks, and unique among running collectives.
        counts: bytes of each rank; None: as many as this rank's.
        """

    def alltoall(self, payloads: Array, name: str) -> Pending[Array]:
        """Start to send the p-th of `size` equal stretches to rank p; receives them in rank order.

        As `allgather` otherwise.
        """

    def reduce_scatter(self, array: Array, counts: Sequence[int], name: str) -> Pending[Array]:
        """Start to add arrays element by element; rank p gets a stretch of counts[p] elements.

        Arrays are added in rank order, in whatever order they arrive. As `allgather` otherwise.
        PyTorch's `wait` raises PayloadError if a rank has sent another number of elements; other
        implementations may not notice, as plans are agreed on beforehand.
        """

    def allreduce(self, array: Array, name: str) -> Pending[Array]:
        """Start to add arrays element by element, in the library's order.

        `array` may be written. As `allgather` otherwise.
        """

    def can_split(self, groups: Sequence[Sequence[int]]) -> bool:
        """Whether this rank can make these groups by `split`."""

    def split(self, groups: Sequence[Sequence[int]]) -> Sequence[Collective[Array] | None]:
        """Make a collective for each group of ranks; None for groups without this rank.

        A collective: all ranks call it with the same groups.
        """


@dataclass(frozen=True)
class Storage(Generic[Array]):
    """Memory of one bucket that lasts from step to step; the caller owns it."""

    residuals: Sequence[Arenas[Array]]  # one for each plan of `Exchange.holders`
    owned: Sequence[Arenas[Array]] = ()  # owner's residuals, one for each plan of `Exchange.owned`
    velocity: Arenas[Array] | None = None  # with momentum correction
    states: Mapping[str, Arenas[Array]] = field(default_factory=dict)  # the method's own, by name


class BucketExchange(abc.ABC, Generic[Array]):
    """The exchange of one bucket, sent and received step after step.

    Attributes:
        stages: how many times `advance` is called before `receive`.
    """

    stages = 0

    def __init__(self, arenas: Sequence[Arenas[Array]], codec: PayloadCodec[Array]) -> None:
        self._kept, self._codec, self._ops = arenas, codec, codec.ops
        self._name = ""  # of the step under way
        self._pending: Pending[Array] | None = None  # the last collective of the step
        self._unwanted: list[Pending[Array]] = []  # collectives of a step that was dropped

    @abc.abstractmethod
    def send(
        self, gradients: Sequence[Array], name: str, moments: OptimizerMoments[Array] = NO_MOMENTS
    ) -> None:
        """Encode gradients and start the first collective; writes no gradient and no residual.

        moments: of the optimizer; the new velocities are written to it.
        """

    def advance(self) -> None:  # most exchanges have a single stage
        """Start the next collective if there is one; waits for the data that it needs."""

    def drain(self) -> None:
        """Wait for running collectives, and drop their results.

        Starts only collectives that ranks which go on with the step wait for; their flags end it.
        A collective that fails, because a rank is lost, is ignored.
        """
        pending, self._pending = self._pending, None
        with contextlib.suppress(RuntimeError):
            if pending is not None:
                pending.wait()

    def abort(self, name: str) -> None:
        """Send flags for all tensors in a step that this rank does not go on with.

        Does not wait for these collectives.
        """
        raise NotImplementedError(f"{type(self).__name__} carries no arrays of rounds")

    @abc.abstractmethod
    def receive(self, targets: Sequence[Array], gain: float = 1.0) -> Sequence[bool]:
        """Wait for the last collective, write `gain` times its result, and return all ranks' flags.

        Called once after each `send`.

        Raises:
            PayloadError, PlanMismatchError: the result is not payloads of this bucket.
        """

    def _result(self) -> Array:
        """Wait for the last collective, and forget it."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.wait()

    def swap(self) -> None:
        """Make the elements that were not sent the residual."""
        for arenas in self._kept:
            arenas.swap()

    def encoded(self) -> Sequence[tuple[Arenas[Array], Array]]:
        """Arenas with the payload of each; (): this rank's gradients are not encoded alone."""
        return ()

    def squares(self, *, committed: bool) -> Squares:
        """Sums of squares of the last step that was sent, as far as known. Waits for the device.

        committed: whether that step was committed.
        """
        squares = self._codec.squares
        return sum(squares(*pair, committed=committed) for pair in self.encoded()) or Squares()


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in one step."""

    selected: int  # values passed to collectives
    payload_bytes: int  # bytes passed to collectives: values, indices, headers
    sent_bytes: int  # bytes sent over the network
    dense_bytes: int  # bytes that a ring allreduce of the dense gradients would send
    between_bytes: int | None  # part of `sent_bytes` to other nodes; None: nodes are not known
    node_bytes: int | None  # sent to other nodes by all ranks of the busiest node


class Exchange(abc.ABC, Generic[Array]):
    """The exchange of all buckets over one collective, as the compressor uses it.

    Args:
        collective: all ranks.
        nodes: the ranks of each node, if known; for `traffic`.
        because: why this exchange was selected, in one line; empty: the user named it.
    """

    def __init__(
        self, collective: Collective[Array], nodes: Nodes | None = None, because: str = ""
    ) -> None:
        self.collective, self.nodes, self.because = collective, nodes, because
        self._counted: dict[tuple[bytes, int], Traffic] = {}  # by plan digest and number of ranks

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """The value of the setting `exchange` that names it."""

    @property
    def ranks(self) -> int:
        """Number of ranks that exchange."""
        return self.collective.size

    @property
    def rank(self) -> int:
        """This process' rank among them."""
        return self.collective.rank

    @property
    def owner(self) -> Mapping[str, object]:
        """The owner of this rank's shards: rank, number of ranks and nodes, for state dicts."""
        return {"ranks": self.ranks, "rank": self.rank}

    @property
    def parts(self) -> int:
        """Number of owners that each tensor is split among; 0: there are no owners."""
        return 0

    @property
    def part(self) -> int | None:
        """This rank's number among the owners; None: it is no owner."""
        return None

    def holders(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """Plans whose arenas together hold this rank's residuals of a bucket."""
        return (bucket,)

    def owned(self, bucket: BucketPlan) -> Sequence[BucketPlan]:
        """The plan of this rank's shards of a bucket as an owner; empty if it owns none."""
        return ()

    @abc.abstractmethod
    def of(
        self, bucket: BucketPlan, own: Storage[Array], codec: PayloadCodec[Array]
    ) -> BucketExchange[Array]:
        """Make the exchange of a bucket, with this rank's memory for it."""

    def traffic(self, plan: Plan) -> Traffic:
        """Bytes that this rank sends in a step; cached, as every step reads them."""
        key = plan.digest, self.ranks  # ranks of an elastic job may change
        if key not in self._counted:
            self._counted[key] = self._count(plan)
        return self._counted[key]

    @abc.abstractmethod
    def buffer_bytes(self, plan: Plan) -> int:
        """Bytes of memory for payloads, also those received, and for sums."""

    @abc.abstractmethod
    def _count(self, plan: Plan) -> Traffic:
        """Bytes that this rank sends in a step, computed anew."""

    def _in_a_ring(self, sent_bytes: int, rank: int) -> int:
        """Part of what a rank sends to the next one in a ring that goes to another node."""
        assert self.nodes is not None
        return sent_bytes if (rank + 1) % self.ranks not in self.nodes.of(rank) else 0

    def _traffic(
        self,
        plan: Plan,
        selected: int,
        payload_bytes: int,
        sent_bytes: int,
        between: Callable[[int], int],
    ) -> Traffic:
        """Make `Traffic`; between: returns the bytes that a rank sends to other nodes."""
        dense = sum(bucket.dense_bytes for bucket in plan.buckets)
        dense_bytes = ring_allreduce_bytes(dense, self.ranks)
        mine, busiest = None, None
        if self.nodes is not None:
            mine = between(self.rank)
            busiest = max(sum(map(between, node)) for node in self.nodes.kinds)
        return Traffic(selected, payload_bytes, sent_bytes, dense_bytes, mine, busiest)


def plan_of_arrays(
    bucket: BucketPlan,
    counts: Sequence[int],
    identity: object,
    dtype: str = "",
    measures: tuple[str, ...] = (),
) -> BucketPlan:
    """The plan of arrays that are sent whole, one for each tensor of a bucket.

    identity: what readers must have in common; see `lay_out`.
    dtype: of the arrays; empty: that of the bucket's residuals.
    """
    parts = []
    for position, (piece, count) in enumerate(zip(bucket.tensors, counts, strict=True)):
        kind = dtype or bucket.residual_dtype, piece.spec.device
        parts.append(Piece(TensorSpec(piece.spec.name, (count,), *kind), count, position))
    own = bucket.ordinal, parts, "direct", Dense(), bucket.reduction
    return lay_out(*own, identity=identity, measures=measures)


def ordered_sum(rows: Any, count: int) -> Any:
    """Add up `count` rows of any framework in rank order: the end of every reduce-scatter.

    The order of libraries' own reduce-scatters is not stated, or depends on other tensors. The
    first row may be overwritten.
    """
    total = rows[0]
    for rank in range(1, count):
        total += rows[rank]
    return total


def ring_allreduce_bytes(dense_bytes: int, ranks: int) -> int:
    """Bytes a rank sends in a ring allreduce: 2 (P - 1) / P of the data (Patarasuk, Yuan 2009)."""
    return 2 * (ranks - 1) * dense_bytes // ranks


def check_gathered(total: int, name: str) -> None:
    """Refuse to gather more bytes than Horovod can count: it would write to wrong addresses."""
    if total > LARGEST_SPLIT:
        raise TensorTooLargeError(
            f"each rank receives {total} bytes in the allgather {name}, and Horovod can count "
            f"{LARGEST_SPLIT}",
            cure="Send less (a smaller ratio; set_ratio(1.0) and a dense warm-up send all), make "
            "smaller buckets with groups=, or pass exchange='sharded'",
        )


def check_split(bucket: BucketPlan, size: int, unit: str) -> None:
    """Refuse a bucket that is too large for an alltoall or a reduce-scatter."""
    if size > LARGEST_SPLIT:
        largest = max(bucket.tensors, key=lambda tensor: tensor.spec.numel).spec
        raise TensorTooLargeError(
            f"each owner gets {size} {unit} of its bucket, at most {LARGEST_SPLIT} can be sent",
            tensor=largest.name,
            cure="Split the parameter or start more ranks; with torch DDP exchange='allgather' has "
            "no such limit",
        )
