"""Constants of a machine and its network: measured, or set by the user.

Units are seconds, bytes and bit/s. Constants are stored as JSON, so that they can be used and
checked on other machines. `horovod-topk plan --measure` measures them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from horovod_topk.cost.quantities import is_number, is_whole

REFERENCE = Path(__file__).with_name("reference.json")
DEVICES = ("cpu", "cuda")
NO_MACHINE = (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Network:
    """Cost of moving bytes (Hockney 1994; Thakur, Rabenseifner, Gropp 2005)."""

    bandwidth: float  # bit/s of a node's network card, each way, headers included
    latency: float  # s for each of the messages that wait for one another
    overhead: float  # s for a collective: waiting for Horovod's cycle, and its bookkeeping
    goodput: float = 1.0  # share of the bandwidth that a stream of packets reaches
    copy: float = 0.0  # s of a core for each byte that a rank sends
    add: float = 0.0  # s of a core for each byte that is added to another
    local_bandwidth: float | None = None  # bit/s of each rank within its node; None: no limit


@dataclass(frozen=True)
class Kernels:
    """Cost of computation beside the model itself, on one core or one accelerator."""

    encode: float  # s per element: compensate, select, write the payload and the residual
    clear: float  # s per element: fill a gradient with zeros before decoding
    decode: float  # s per received entry
    multiply: float  # s per multiply-add of PowerSGD's thin matrices
    triad: float  # s per element: `r += g`, which reads two arrays and writes one


@dataclass(frozen=True)
class Machine:
    """A network, and the processors of its ranks."""

    network: Network
    kernels: Kernels
    cores: float | None = None  # cores that ranks share; None: enough for all
    crowd: int | None = None  # ranks that share them; None: those of a node
    origin: str = "given"  # source of the constants, for the reader
    device: str = "cpu"  # device that the kernels were measured on: "cpu" or "cuda"

    def __post_init__(self) -> None:
        for part in (self.network, self.kernels):
            for field in fields(part):
                _check(field.name, getattr(part, field.name))
        _check("cores", self.cores)
        if self.device not in DEVICES:
            raise ValueError(f"device={self.device!r}: give one of {', '.join(DEVICES)}")
        if not isinstance(self.origin, str):
            raise ValueError(
                f"origin={self.origin!r}: give a text that says where constants are from"
            )
        if self.crowd is not None and not is_whole(self.crowd, least=1):
            raise ValueError(
                f"crowd={self.crowd!r}: a whole number of ranks shares the cores, 1 or more"
            )

    def slowdown(self, ranks_per_node: int) -> float:
        """The factor by which a rank's computation takes longer as ranks share cores."""
        if self.cores is None:
            return 1.0
        return max(1.0, (self.crowd or ranks_per_node) / self.cores)


LEAST = {"bandwidth": 1.0, "goodput": 1e-6, "local_bandwidth": 1.0, "cores": 0.01}  # above 0
MOST = 1e18
OPTIONAL = ("local_bandwidth", "cores")
SHARES = ("goodput",)


def _check(name: str, value: object) -> None:
    if value is None and name in OPTIONAL:
        return
    limit = "above 0" if name in LEAST else "0 or more"
    limit += " and 1 at most" if name in SHARES else f" and {MOST:g} at most"
    if not is_number(value) or not _fits(name, value):
        raise ValueError(f"{name}={value!r}: give a number that is {limit}")


def _fits(name: str, value: float) -> bool:
    least, most = LEAST.get(name, 0.0), 1.0 if name in SHARES else MOST
    return least <= value <= most


def write(machine: Machine, path: Path) -> None:
    """Write a machine as JSON."""
    path.write_text(json.dumps(asdict(machine), indent=1) + "\n")


def read(path: Path) -> Machine:
    """Read a machine from a file of `write`."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        network, kernels = Network(**found.pop("network")), Kernels(**found.pop("kernels"))
        return Machine(network, kernels, **found)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except NO_MACHINE as error:
        raise ValueError(
            f"{path} has no machine's constants ({error}): `horovod-topk plan --measure` can write "
            "such a file"
        ) from error
