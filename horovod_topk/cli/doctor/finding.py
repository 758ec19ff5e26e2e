"""One line of what `horovod-topk doctor` found."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass

WIDTH = 22  # of the first column


@dataclass(frozen=True)
class Finding:
    """What is there, and what to do where that is not as it should be."""

    name: str
    found: str
    cure: str = ""  # empty: nothing is amiss

    def lines(self) -> list[str]:
        """As they are printed."""
        cure = [f"{'':<{WIDTH}}cure: {self.cure}"] if self.cure else []
        return [f"{self.name:<{WIDTH}}{self.found}", *cure]


def is_installed(module: str) -> bool:
    """Whether it can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def version(*distributions: str) -> str | None:
    """Of the first of these that is installed, without importing it."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
