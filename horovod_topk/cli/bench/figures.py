"""Statistics of a run: the time of each exchange beyond a step without one."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from horovod_topk.cli.bench.methods import DENSE, FSDP, FSDP_NONE, NONE
from horovod_topk.cli.reading import fits
from horovod_topk.cost.quantities import is_number

Result = dict[str, Any]  # the results of a run, as --json writes them
COMPARED: Mapping[str, Any] = {  # keys that a picture of runs needs, and their types
    "model": str,
    "ranks": int,
    "hosts": int,
    "compute": str | None,
    "rate": Annotated[float | None, lambda rate: rate is None or rate > 0],
}
NO_RESULT = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
GIVE = "Give files that --json has written"


@dataclass(frozen=True)
class Figures:
    """The figures of one method in one run."""

    name: str
    what: str
    step: float  # seconds, median
    exchange: float  # seconds beyond the step without exchange (`base_of`), median over rounds
    least: float  # smallest exchange time of the rounds
    most: float
    cpu: float | None  # seconds of a core for a rank's exchange; None: not measured
    bytes: float | None  # bytes that left a host's card in a step

    def faster(self, other: Figures | None) -> float | None:
        """The other method's exchange time divided by this one's; None if one is not positive."""
        if other is None or self.exchange <= 0 or other.exchange <= 0:
            return None
        return other.exchange / self.exchange

    def fewer(self, other: Figures | None) -> float | None:
        """The other method's bytes divided by this one's; None if not known."""
        if other is None or not self.bytes or other.bytes is None:
            return None
        return other.bytes / self.bytes


def read_result(path: Path) -> Result:
    """Read a file that --json has written."""
    try:
        found: Result = json.loads(path.read_text())
        problem = _problem(found)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        reason = "no such file" if missing else error.strerror
        raise ValueError(f"--beside {path}: {reason}. {GIVE}") from error
    except NO_RESULT as error:
        problem = f" ({error!r})"
    if problem:
        raise ValueError(f"--beside {path} holds no results{problem}: {GIVE[:1].lower()}{GIVE[1:]}")
    return found


def _problem(found: Result) -> str:
    """Why a picture cannot show what a file has; empty: it can."""
    numbers = [n for one in figures(found).values() for n in (one.step, one.least, one.most)]
    if missing := [name for name in COMPARED if name not in found]:
        return f", as it lacks {', '.join(missing)}"
    wrong = [name for name, kind in COMPARED.items() if not fits(kind, found[name])]
    if wrong or not all(map(is_number, numbers)):
        return f" ({', '.join(wrong) or 'seconds'}: of a wrong type)"
    return ""


def figures(result: Result) -> dict[str, Figures]:
    """The figures of each method by name, in the order of the run."""
    methods = {each["name"]: each for each in result["methods"]}
    return {name: _figures(each, methods[base_of(name)]) for name, each in methods.items()}


def base_of(name: str) -> str:
    """The method that has no exchange: for FSDP2 the one that sends nothing between nodes."""
    return FSDP_NONE if name.startswith(FSDP) and name != FSDP_NONE else NONE


def _figures(method: dict[str, Any], none: dict[str, Any]) -> Figures:
    """A method's figures; steps of the same round are compared, as load varies."""
    beyond = _beyond(method, none, "seconds")
    return Figures(
        method["name"],
        method["what"],
        statistics.median(method["seconds"]),
        statistics.median(beyond),
        min(beyond),
        max(beyond),
        statistics.median(_beyond(method, none, "cpu")) if method.get("cpu") else None,
        method["bytes"],
    )


def _beyond(method: dict[str, Any], none: dict[str, Any], what: str) -> list[float]:
    return [each - alone for each, alone in zip(method[what], none[what], strict=True)]


def dense_of(found: dict[str, Figures], name: str = "") -> Figures | None:
    """The figures of a method's baseline: dense, or DDP's, or for FSDP2 its own; None: none."""
    if name.startswith(FSDP):
        return None if name == FSDP_NONE else found.get(FSDP)
    return found.get(DENSE, found.get("ddp"))
