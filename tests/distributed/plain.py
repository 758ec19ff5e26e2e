"""Top-K as most formulas in these tests have it: 1% in float32, momentum left to the optimizer."""

from __future__ import annotations

from typing import Any

from world import TopKEF

SETTINGS = {
    "ratio": 0.01,
    "values": "float32",
    "momentum": 0,
    "follow_lr": False,
    "warmup": None,
}


class PlainTopKEF(TopKEF):
    """TopKEF with other defaults."""

    def __init__(self, *ratio: float, **settings: Any) -> None:
        ours = {k: v for k, v in SETTINGS.items() if not (ratio and k == "ratio")}
        super().__init__(*ratio, **{**ours, **settings})
