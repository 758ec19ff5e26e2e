"""One line of the output of `horovod-topk doctor`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Any

from horovod_topk.cli.lines import hanging

WIDTH = 22  # columns of the first column


@dataclass(frozen=True)
class Finding:
    """One line of output: a fact, and the cure if something is wrong."""

    name: str
    found: str
    cure: str = ""  # empty: nothing is wrong

    def lines(self) -> list[str]:
        """Return the lines to print."""
        texts = {f"{self.name:<{WIDTH}}": self.found, f"{'':<{WIDTH}}cure: ": self.cure}
        return [hanging(text, head, WIDTH) for head, text in texts.items() if text]


def is_installed(module: str) -> bool:
    """Whether a module can be imported; does not import it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # something hides it
        return False


def imported(module: str) -> Any:
    """A module, or None if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def version(*distributions: str, module: str = "") -> str | None:
    """The version of the first of these distributions that is installed; imports nothing.

    module: if none is installed, use the distribution that this module belongs to.
    """
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if module and is_installed(module):
        owners = importlib.metadata.packages_distributions().get(module, [])
        return importlib.metadata.version(owners[0]) if owners else "of unknown version"
    return None
