"""Statistics of a run: what an exchange takes beyond the step without one."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_topk.cli.bench.methods import DENSE, NONE

Result = dict[str, Any]  # of a run, as --json writes it
COMPARED = ("model", "ranks", "hosts", "compute", "rate")  # of two runs in one picture


@dataclass(frozen=True)
class Figures:
    """Of one way in one run."""

    name: str
    what: str
    step: float  # seconds, the median
    exchange: float  # seconds beyond the step without exchange, the median over rounds
    least: float  # of the rounds' exchange
    most: float
    cpu: float | None  # seconds of a core that a rank's exchange takes; None: not measured
    bytes: float | None  # left a host's card in a step

    def faster(self, other: Figures | None) -> float | None:
        """How many times less its exchange takes; None where none is to be seen."""
        if other is None or self.exchange <= 0 or other.exchange <= 0:
            return None
        return other.exchange / self.exchange

    def fewer(self, other: Figures | None) -> float | None:
        """How many times fewer bytes it sends."""
        if other is None or not self.bytes or other.bytes is None:
            return None
        return other.bytes / self.bytes


def read_result(path: Path) -> Result:
    """Of a file that --json has written.

    Raises:
        ValueError: there is none, or it holds something else.
    """
    try:
        found: Result = json.loads(path.read_text())
        figures(found)
        missing = [name for name in COMPARED if name not in found]
    except OSError as error:
        raise ValueError(
            f"--beside {path}: {_reason(error)}. Give files that --json has written"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"--beside {path} holds no results ({error!r}): give files that --json has written"
        ) from error
    if missing:
        raise ValueError(
            f"--beside {path} holds no results, as it lacks {', '.join(missing)}: give files that "
            "--json has written"
        )
    return found


def _reason(error: OSError) -> str:
    return "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror)


def figures(result: Result) -> dict[str, Figures]:
    """By name, in the order of the run."""
    methods = {each["name"]: each for each in result["methods"]}
    return {name: _figures(each, methods[NONE]) for name, each in methods.items()}


def _figures(method: dict[str, Any], none: dict[str, Any]) -> Figures:
    """Steps of one round are compared: a neighbour on the machine meets them alike."""
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


def dense_of(found: dict[str, Figures]) -> Figures | None:
    """What others are compared with."""
    return found.get(DENSE)
