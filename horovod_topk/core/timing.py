"""Seconds that a rank spends in the parts of a step, measured on the host without waiting."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from horovod_topk.core.exchange.protocol import Collective, Pending
from horovod_topk.core.nodes import Location

Array = TypeVar("Array")


@dataclass(frozen=True)
class Seconds:
    """Seconds of one step, or of several added up; 0 where they are not known.

    On an accelerator, work that is only started counts with what waits for it.
    """

    compress_seconds: float = 0.0  # encoding
    exchange_seconds: float = 0.0  # from the start of the first collective to the end of the last
    exposed_seconds: float = 0.0  # waiting in collectives: what backward did not hide of them
    decompress_seconds: float = 0.0  # decoding, and what owners do between two collectives

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.compress_seconds + other.compress_seconds,
            self.exchange_seconds + other.exchange_seconds,
            self.exposed_seconds + other.exposed_seconds,
            self.decompress_seconds + other.decompress_seconds,
        )


@dataclass
class StepTimer:
    """Measures the parts of the step under way."""

    compressing: float = 0.0
    decompressing: float = 0.0
    exposed: float = 0.0  # as long as it waits, nothing is compressed or decompressed
    first: float | None = None  # when its first collective was started
    last: float = 0.0  # when the last one ended that was waited for

    def begin(self) -> None:
        """Forget the step before."""
        self.compressing = self.decompressing = self.exposed = 0.0
        self.first = None

    @contextlib.contextmanager
    def compress(self) -> Iterator[None]:
        """Count a block, without its waiting, as compressing."""
        began, exposed = time.perf_counter(), self.exposed
        yield
        self.compressing += time.perf_counter() - began - (self.exposed - exposed)

    @contextlib.contextmanager
    def decompress(self) -> Iterator[None]:
        """Count a block, without its waiting, as decompressing."""
        began, exposed = time.perf_counter(), self.exposed
        yield
        self.decompressing += time.perf_counter() - began - (self.exposed - exposed)

    def started(self, pending: Pending[Array]) -> Pending[Array]:
        """Measure how long a collective that was just started is waited for."""
        if self.first is None:
            self.first = time.perf_counter()
        return _TimedPending(pending, self)

    @property
    def seconds(self) -> Seconds:
        """Those of the step so far."""
        exchange = 0.0 if self.first is None else max(0.0, self.last - self.first)
        return Seconds(self.compressing, exchange, self.exposed, self.decompressing)


@dataclass(frozen=True)
class _TimedPending(Generic[Array]):
    pending: Pending[Array]
    timer: StepTimer

    def wait(self) -> Array:
        began = time.perf_counter()
        result = self.pending.wait()
        self.timer.last = time.perf_counter()
        self.timer.exposed += self.timer.last - began
        return result


@dataclass(frozen=True)
class TimedCollective(Generic[Array]):
    """A collective whose waiting is measured."""

    inner: Collective[Array]
    timer: StepTimer = field(default_factory=StepTimer)

    @property
    def rank(self) -> int:
        """`Collective.rank`."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """`Collective.size`."""
        return self.inner.size

    @property
    def location(self) -> Location:
        """`Collective.location`."""
        return self.inner.location

    def allgather(
        self, payload: Array, name: str, counts: Sequence[int] | None = None
    ) -> Pending[Array]:
        """`Collective.allgather`."""
        return self.timer.started(self.inner.allgather(payload, name, counts))

    def alltoall(self, payloads: Array, name: str) -> Pending[Array]:
        """`Collective.alltoall`."""
        return self.timer.started(self.inner.alltoall(payloads, name))

    def reduce_scatter(self, array: Array, counts: Sequence[int], name: str) -> Pending[Array]:
        """`Collective.reduce_scatter`."""
        return self.timer.started(self.inner.reduce_scatter(array, counts, name))

    def allreduce(self, array: Array, name: str) -> Pending[Array]:
        """`Collective.allreduce`."""
        return self.timer.started(self.inner.allreduce(array, name))

    def can_split(self, groups: Sequence[Sequence[int]]) -> bool:
        """`Collective.can_split`."""
        return self.inner.can_split(groups)

    def split(self, groups: Sequence[Sequence[int]]) -> Sequence[Collective[Array] | None]:
        """`Collective.split`."""
        parts = self.inner.split(groups)
        return [None if part is None else TimedCollective(part, self.timer) for part in parts]
