"""Seconds that a rank spends in the parts of a step, measured on the host without waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from horovod_topk.core.exchange.protocol import Collective

Array = TypeVar("Array")


@dataclass(frozen=True)
class Seconds:
    """Seconds of one step, or of several added up; 0 where they are not known.

    On an accelerator, the host starts work and goes on: its seconds count where the host waits.
    """

    compress_seconds: float = 0.0  # encoding
    exchange_seconds: float = 0.0  # from the start of the first collective to the end of the last
    exposed_seconds: float = 0.0  # waiting in collectives, which backward has not hidden
    decompress_seconds: float = 0.0  # decoding, and what owners do between two collectives

    @property
    def cost(self) -> float:
        """Seconds that compression and exchange add to a step: all that backward does not hide."""
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
    """Measures the parts of the present step, in seconds of `time.perf_counter`.

    `Step` adds the seconds of encoding and decoding, its collectives add the rest.
    """

    compressing: float = 0.0
    decompressing: float = 0.0
    exposed: float = 0.0  # waiting in collectives; not part of the two above
    first: float = 0.0  # when the step's first collective was started; 0: none was
    last: float = 0.0  # when the last collective ended that the rank waited for

    def begin(self) -> None:
        """Start timing a new step."""
        self.compressing = self.decompressing = self.exposed = self.first = 0.0

    @property
    def seconds(self) -> Seconds:
        """Seconds of the step so far."""
        exchange = max(0.0, self.last - self.first) if self.first else 0.0
        return Seconds(self.compressing, exchange, self.exposed, self.decompressing)


class Timed(Collective[Array], Protocol):
    """A collective that adds its start and its waiting time to a `StepTimer`."""

    @property
    def timer(self) -> StepTimer:
        """The timer that gets this collective's start and waiting time."""
