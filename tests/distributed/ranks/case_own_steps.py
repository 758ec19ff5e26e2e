"""Optimizers with a step of their own: corrected on every rank alike, also after a restart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from plain import PlainTopKEF as TopKEF
from resuming import assert_resumes
from training import Setup

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "Adafactor": torch.optim.Adafactor,
    "Adam without momentum": partial(torch.optim.Adam, betas=(0.0, 0.99)),
}


def adapted(**settings: Any) -> TopKEF:
    return TopKEF(**{"ratio": 0.1, "min_numel": 0, "momentum": "auto"} | settings)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restart_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    """With arrivals and mean squares; and the ranks have the same weights."""
    setup = Setup(optimizer=OPTIMIZERS[name])
    assert_resumes(lambda: setup.start(adapted()), tmp_path)


class Failing(torch.optim.RAdam):
    """Raises in its step, before it has changed anything."""

    fails = False

    @classmethod
    def of(cls) -> Setup:
        return Setup(optimizer=partial(cls, lr=0.01))

    def step(self, closure: Any = None) -> Any:
        if type(self).fails or Failing.fails:
            raise RuntimeError("on purpose")
        return super().step(closure)
