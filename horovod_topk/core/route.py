"""The way of one bucket's payloads, step after step, from gradients to gradients.

    send      encode, and start the first collective
    advance   start what follows it, once it is done; as often as the exchange has `turns`, and
              each time every bucket, before the first is received
    receive   wait for the last collective, and decode what it brings

What each rank keeps lies in `arenas`: they take part in the commit (`swap`) or do not.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from horovod_topk.core import payload as wire
from horovod_topk.core.codec import PayloadCodec
from horovod_topk.core.nodes import Location
from horovod_topk.core.plan import BucketPlan
from horovod_topk.core.residual import Arenas
from horovod_topk.core.shards import ShardedPlan
from horovod_topk.errors import TopKError
from horovod_topk.ops import Ops

Array = TypeVar("Array")
Given = TypeVar("Given", contravariant=True)
Received = TypeVar("Received", covariant=True)


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


class Route(Protocol[Given]):
    """One bucket's way."""

    def send(self, gradients: Sequence[Given], name: str) -> None:
        """Encode gradients and start the first collective; writes no gradient and no residual."""
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

    def clear(self, arrays: Sequence[Any]) -> None:
        """Write zeros where an element was sent, but in those that were sent whole.

        arrays: flat, one for each gradient.
        """
        ...

    def swap(self) -> None:
        """What was not sent becomes the residual."""
        ...

    def gradient_norm(self, *, committed: bool) -> float:
        """Norm of the gradients sent last. Waits for the device."""
        ...


class Direct(Generic[Array]):
    """One allgather: every rank decodes every other's payload."""

    def __init__(
        self,
        bucket: BucketPlan,
        arenas: Arenas[Array],
        ops: Ops[Array],
        codec: PayloadCodec[Array],
        collective: Collective[Array],
    ) -> None:
        self._bucket, self._arenas = bucket, arenas
        self._ops, self._codec, self._collective = ops, codec, collective
        self._payload = codec.new_payload(bucket)
        self._pending: Pending[Array] | None = None

    def send(self, gradients: Sequence[Array], name: str) -> None:
        """`Route.send`."""
        self._codec.encode(self._arenas, gradients, self._payload)
        self._pending = self._collective.allgather(self._payload, name)

    def advance(self) -> None:
        """`Route.advance`."""

    def drain(self) -> None:
        """`Route.drain`. It may have failed, as where a rank of an elastic job is lost."""
        if self._pending is not None:
            with contextlib.suppress(RuntimeError):
                self._pending.wait()
        self._pending = None

    def receive(self, targets: Sequence[Array], gain: float = 1.0) -> Sequence[bool]:
        """`Route.receive`."""
        bucket, size = self._bucket, self._bucket.layout.payload_bytes
        assert self._pending is not None
        pending, self._pending = self._pending, None
        gathered = pending.wait()
        received = cast("int | None", self._ops.numel(gathered))
        ranks = self._collective.size
        if received is None:  # a graph that outlives a number of ranks, as in elastic jobs
            ranks = self._ops.rows(gathered, size)
        elif received != size * ranks:
            raise wire.wrong_length(received, size, ranks, bucket.ordinal)
        if bucket.reduction == "average":
            gain = gain * (1 / ranks)
        return self._codec.decode(bucket, gathered, gain, targets)

    def clear(self, arrays: Sequence[Array]) -> None:
        """`Route.clear`."""
        self._codec.clear(self._bucket, self._payload, arrays)

    def swap(self) -> None:
        """`Route.swap`."""
        self._arenas.swap()

    def gradient_norm(self, *, committed: bool) -> float:
        """`Route.gradient_norm`."""
        return _gradient_norm(self._codec, self._arenas, self._payload, committed)


class Sharded(Generic[Array]):
    """One alltoall of entries to their owners, and one allgather of the owners' sums or means.

    What an owner does not send back stays in its residual, in units of what is applied: of the mean
    if gradients are averaged.
    """

    def __init__(
        self,
        plan: ShardedPlan,
        arenas: Sequence[Arenas[Array]],
        owned: Arenas[Array],
        ops: Ops[Array],
        codec: PayloadCodec[Array],
        collective: Collective[Array],
    ) -> None:
        self._plan, self._arenas, self._owned = plan, arenas, owned
        self._ops, self._codec, self._collective = ops, codec, collective
        self.bucket = plan.bucket
        size, device = plan.scatter_bytes, plan.bucket.device
        self._out = ops.zeros(size * len(plan.scatter), "uint8", device)
        self._parts = [
            ops.view(self._out, p * size, (p + 1) * size) for p in range(len(plan.scatter))
        ]
        for part, scatter in zip(self._parts, plan.scatter, strict=True):
            codec.open_payload(scatter, part)
        self._back = codec.new_payload(owned.plan)
        total = ops.zeros(owned.plan.numel, owned.plan.residual_dtype, device)
        self._totals = [ops.view(total, t.start, t.stop) for t in owned.plan.tensors]
        self._scattered: Pending[Array] | None = None
        self._pending: Pending[Array] | None = None
        self._unwanted: list[Pending[Array]] = []  # of a step that was forgotten
        self._aborted = False  # whether that is also what was sent to owners

    def send(self, gradients: Sequence[Array], name: str) -> None:
        """`Route.send`."""
        if self._aborted:
            self._settle()
        self._codec.encode_shards(self._arenas, gradients, self._parts)
        self._name = name
        self._scattered = self._collective.alltoall(self._out, f"{name}.scatter")

    def advance(self) -> None:
        """Add up what came for this rank's shards, and send the largest of it to all."""
        if self._scattered is None:
            return
        scattered, self._scattered = self._scattered, None
        arrived, arrive = scattered.wait(), self._plan.arrive[self._collective.rank]
        self._settle()
        try:
            self._check(arrived, arrive)
            scale = _scale(arrive, self._collective.size)
            self._codec.decode(arrive, arrived, scale, self._totals)
        except TopKError:  # the others wait for this rank, and have to hear of it
            self._flag_all()
            self._pending = self._gather()
            raise
        self._codec.encode(self._owned, self._totals, self._back)
        self._pending = self._gather()

    def drain(self) -> None:
        """`Route.drain`. Ranks that go on with the step are sent flags: they will roll it back.

        That is not waited for, as ranks may come here in orders of their own.
        """
        if self._pending is not None:
            self._pending.wait()
        if self._scattered is not None:
            self._scattered.wait()
            self._settle()  # all ranks sent it before what has just arrived
            self._flag_all()
            self._unwanted.append(self._gather())
        self._scattered = self._pending = None

    def abort(self, name: str) -> None:
        """Take part in a step that this rank does not go on with: say that all is flagged.

        Nothing is waited for here.
        """
        self._settle()
        self._name, self._aborted = name, True
        for part, scatter in zip(self._parts, self._plan.scatter, strict=True):
            self._flag(scatter, part)
        self._unwanted.append(self._collective.alltoall(self._out, f"{name}.scatter"))
        self._flag_all()
        self._unwanted.append(self._gather())

    def receive(self, targets: Sequence[Array], gain: float = 1.0) -> Sequence[bool]:
        """`Route.receive`."""
        self.advance()
        assert self._pending is not None
        pending, self._pending = self._pending, None
        gathered = pending.wait()
        self._check(gathered, self._plan.gather[0])
        return self._codec.decode(self._plan.result, gathered, gain, targets)

    def clear(self, arrays: Sequence[Array]) -> None:
        """`Route.clear`: where it was sent to an owner."""
        for scatter, part in zip(self._plan.scatter, self._parts, strict=True):
            self._codec.clear(scatter, part, arrays)

    def swap(self) -> None:
        """`Route.swap`."""
        for arenas in (*self._arenas, self._owned):
            arenas.swap()

    def gradient_norm(self, *, committed: bool) -> float:
        """`Route.gradient_norm`."""
        pairs = zip(self._arenas, self._parts, strict=True)
        return math.hypot(*(_gradient_norm(self._codec, *pair, committed) for pair in pairs))

    def _gather(self) -> Pending[Array]:
        return self._collective.allgather(self._back, f"{self._name}.gather")

    def _settle(self) -> None:
        """Wait for what reads the memory that is about to be written."""
        for pending in self._unwanted:
            pending.wait()
        self._unwanted.clear()
        self._aborted = False

    def _flag_all(self) -> None:
        """Say in the payload to all that every tensor is non-finite."""
        self._flag(self._owned.plan, self._back)

    def _flag(self, plan: BucketPlan, payload: Array) -> None:
        layout, flags = plan.layout, (1 << len(plan.gradients)) - 1
        self._ops.store_bytes(
            payload, layout.flags_at, flags.to_bytes(layout.flags_bytes, "little")
        )

    def _check(self, received: Array, each: BucketPlan) -> None:
        count, ordinal = self._ops.numel(received), self._plan.bucket.ordinal
        ranks, size = self._collective.size, each.layout.payload_bytes
        if count != size * ranks:
            raise wire.wrong_length(count, size, ranks, ordinal)


def _scale(bucket: BucketPlan, ranks: int) -> float:
    return 1 / ranks if bucket.reduction == "average" else 1.0


def _gradient_norm(
    codec: PayloadCodec[Array], arenas: Arenas[Array], payload: Array, committed: bool
) -> float:
    before, after = arenas.residual, arenas.candidate
    if committed:
        before, after = after, before
    return codec.gradient_norm(arenas.plan, before, after, payload)
