"""The exchanges that are planned and measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """Settings of TopKEF, or what stands for none and for dense."""

    exchange: str
    values: str

    @property
    def name(self) -> str:
        """As `horovod_topk.cost.strategies` calls it."""
        return f"{self.exchange} {self.values}".strip()


NONE, DENSE = Exchange("none", ""), Exchange("allreduce", "float32")
STRATEGIES = (NONE, DENSE, Exchange("allgather", "float32"), Exchange("sharded", "int8"))
