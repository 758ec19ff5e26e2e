"""Simulated backward: it sleeps, as a process does whose GPU works, or takes a core's time."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

BLOCK = bytes(1 << 16)  # hashing it leaves the interpreter to other threads, as PyTorch's work does
SLEEP, CPU = "sleep", "cpu"


@dataclass(frozen=True)
class Compute:
    """What a step's backward costs beside its gradients."""

    kind: str  # SLEEP or CPU
    seconds: float  # of a step, spread evenly over its matrices

    @classmethod
    def of(cls, text: str) -> Compute:
        """Of "sleep:0.2" or "cpu:0.2".

        Raises:
            ValueError: it is neither.
        """
        kind, _, seconds = text.partition(":")
        try:
            found = cls(kind, float(seconds))
        except ValueError:
            found = cls("", 0.0)
        if found.kind not in (SLEEP, CPU) or not 0 <= found.seconds < 3600:
            raise ValueError(
                f"--compute {text!r}: write sleep:0.2 or cpu:0.2, in seconds a step, below 3600"
            )
        return found

    def work(self, share: float) -> None:
        """A share of a step's."""
        if self.kind == SLEEP:
            time.sleep(share * self.seconds)
        else:
            _occupy(share * self.seconds)


def _occupy(seconds: float) -> None:
    """Works until this thread has had so much of a core, however long that takes."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        hashlib.blake2b(BLOCK)
