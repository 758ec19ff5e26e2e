"""Simulated backward: it sleeps, like a process whose GPU computes, or uses a core."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

BLOCK = bytes(1 << 16)  # hashing it releases the GIL, like PyTorch's computation
SLEEP, CPU = "sleep", "cpu"


@dataclass(frozen=True)
class Compute:
    """The simulated computation of a step's backward."""

    kind: str  # SLEEP or CPU
    seconds: float  # per step, divided evenly among its matrices
    text: str = ""  # as the user wrote it

    @classmethod
    def of(cls, text: str) -> Compute:
        """Parse "sleep:0.2" or "cpu:0.2"."""
        kind, _, seconds = text.partition(":")
        try:
            found = cls(kind, float(seconds), text)
        except ValueError:
            found = cls("", 0.0)
        if found.kind not in (SLEEP, CPU) or not 0 <= found.seconds < 3600:
            raise ValueError(f"{text!r}: write sleep:0.2 or cpu:0.2, in seconds a step, below 3600")
        return found

    def work(self, share: float) -> None:
        """Run a share of a step's computation."""
        if self.kind == SLEEP:
            time.sleep(share * self.seconds)
        else:
            _occupy(share * self.seconds)


def _occupy(seconds: float) -> None:
    """Compute until this thread has used so many seconds of a core."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        hashlib.blake2b(BLOCK)
