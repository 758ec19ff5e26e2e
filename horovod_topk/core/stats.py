"""What compression did, in numbers a user can check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class StepCounters:
    """One step, without touching a device. Handed to the callbacks of `on_step`."""

    step: int  # steps that ended so far, this one included
    committed: bool  # False: rolled back, the residuals are as before the step
    payload_bytes: int  # bytes handed to collectives by this rank
    sent_bytes: int  # bytes this rank sends for them
    dense_bytes: int  # bytes this rank would send in a ring allreduce of the dense gradients
    flagged: tuple[str, ...]  # tensors with a non-finite gradient on some rank


@dataclass(frozen=True)
class Stats:
    """Totals and norms; see `TopKEF.stats`."""

    active: bool  # False: nothing is compressed, `skipped` says why
    ranks: int  # world size of the process set
    exchange: str  # how payloads travel
    buckets: int  # payloads a step
    steps: int  # committed steps
    rolled_back: int  # steps exchanged and then not taken
    elements: int  # gradient elements of all planned tensors
    selected: int  # values sent a step and rank
    payload_bytes: int  # bytes handed to collectives a step and rank
    sent_bytes: int  # bytes a rank sends a step
    dense_bytes: int  # bytes a rank sends a step in the ring allreduce that this replaces
    residual_norm: float  # Euclidean, over all tensors of this rank
    gradient_norm: float  # Euclidean, this rank's last gradient
    skipped: Mapping[str, str]  # tensor (or "*") -> why it is not compressed
    late: Mapping[str, int]  # tensor -> steps in which its gradient held its bucket back

    @property
    def reduction(self) -> float:
        """How many times fewer bytes a rank sends than a dense ring allreduce would."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0
