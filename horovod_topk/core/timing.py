"""Seconds that a rank spends in the parts of a step, measured on the host without waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from horovod_topk.core.exchange import Collective

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

    @property
    def cost(self) -> float:
        """What the step would save without an exchange: all but what backward hides."""
        return self.compress_seconds + self.exposed_seconds + self.decompress_seconds

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.compress_seconds + other.compress_seconds,
            self.exchange_seconds + other.exchange_seconds,
            self.exposed_seconds + other.exposed_seconds,
            self.decompress_seconds + other.decompress_seconds,
        )


@dataclass
class StepTimer:
    """The parts of the step under way, in seconds of `time.perf_counter`.

    Whoever calls a step's functions adds to it, and the collectives that were made with it.
    """

    compressing: float = 0.0
    decompressing: float = 0.0
    exposed: float = 0.0  # while it waits, a rank neither compresses nor decompresses
    first: float = 0.0  # when its first collective was started; 0: none was
    last: float = 0.0  # when the last one ended that was waited for

    def begin(self) -> None:
        """Forget the step before."""
        self.compressing = self.decompressing = self.exposed = self.first = 0.0

    @property
    def seconds(self) -> Seconds:
        """Those of the step so far."""
        exchange = max(0.0, self.last - self.first) if self.first else 0.0
        return Seconds(self.compressing, exchange, self.exposed, self.decompressing)


class Timed(Collective[Array], Protocol):
    """A collective that notes when it is started, and how long it is waited for."""

    @property
    def timer(self) -> StepTimer:
        """What it adds to."""
        ...
