"""The methods compared: Horovod's own exchanges, and TopKEF's exchanges and value formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

DENSE, HALF = "Horovod, dense", "Horovod, fp16"
EXCHANGES = ("allgather", "sharded")
NODES = "hierarchical"  # where a host has several ranks
VALUES = ("float32", "int8", "int4")
SETTINGS = ({"ratio": 0.01}, {"ratio": 0.001, "min_numel": 0})  # what TopKEF is given


@dataclass(frozen=True)
class Way:
    """A method to exchange gradients."""

    exchange: str
    values: str
    ratio: float = 1.0
    min_numel: int = 1024

    @property
    def name(self) -> str:
        """As in tables and in files."""
        if self.exchange in (DENSE, HALF):
            return self.exchange
        return name_of(**asdict(self))


def name_of(exchange: str, values: str, ratio: float, min_numel: int = 1024) -> str:
    """The name of a TopKEF setting."""
    suffix = "" if min_numel else ", min_numel=0"
    return f"{exchange}, {values}, {ratio:g}{suffix}"


def ways(slots: int = 1) -> Iterator[Way]:
    """All methods for so many ranks a host, dense first."""
    yield Way(DENSE, "float32")
    yield Way(HALF, "float16")
    exchanges = EXCHANGES if slots == 1 else (*EXCHANGES, NODES)
    for settings in SETTINGS:
        for exchange in exchanges:
            for values in VALUES:
                yield Way(exchange, values, **settings)  # type: ignore[arg-type]
