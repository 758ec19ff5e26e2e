"""The cells, fixed before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from horovod_topk.cli.models import MODELS

HOSTS = (2, 4, 8)
RATES = ("100mbit", "300mbit", "1gbit")
LEAST, MOST = 3, 15  # repeats of a step
SETTLED = 10  # warm-up steps: memory is touched, residuals fill, thresholds settle


@dataclass(frozen=True)
class Cell:
    """Number of hosts, rate of their links, and the model whose gradients they exchange."""

    hosts: int
    rate: str
    model: str | None = None  # None: a cell for fitting constants

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.hosts}:{self.rate}:{self.model or 'fit'}"


FITTED = (Cell(3, "200mbit"), Cell(6, "200mbit"), Cell(3, "600mbit"))
GUESSED = tuple(Cell(hosts, rate, model) for model, rate, hosts in product(MODELS, RATES, HOSTS))
CELLS = {cell.name: cell for cell in (*FITTED, *GUESSED)}
