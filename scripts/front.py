"""Figures and picture of README.md, from stored results."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.network import RATES
from horovod_topk.cli.bench.figures import figures
from horovod_topk.cli.canvas import canvas
from horovod_topk.cost import quantities
from pages import RESULTS, Values, stored
from pages.markdown import table
from study.matrix import OPTIMIZERS, UNITS, places
from study.results import Study

LINES = {  # method of the benchmark -> label and style
    "ddp": ("dense, float32", {"color": "#888888", "linestyle": "--"}),
    "ddp-fp16": ("dense, 16 bits", {"color": "#444444", "linestyle": "--"}),
    "powersgd": ("PowerSGD, rank 4", {"color": "#c2672f", "linestyle": "-."}),
    "ddp+topk": ("TopKEF", {"color": "#1f6fb2", "linewidth": 2.5}),
}
SETS = {"default": "four models that its rules were chosen on", "unseen": "four other models"}


def read(name: str) -> dict[str, Any]:
    """The results of the benchmark on emulated hosts."""
    return {rate: result for rate, result in stored("network").items() if rate in RATES}


def values(results: dict[str, Any]) -> Values:
    """The page's figures by name."""
    found = {rate: figures(result) for rate, result in results.items()}
    return {
        "picture": partial(_picture, results, RESULTS / "front.png"),
        "seconds": lambda rate, name: f"{found[rate][name].exchange:.2f}",
        "times": lambda rate, slow: (
            f"{found[rate][slow].exchange / found[rate]['ddp+topk'].exchange:.0f}"
        ),
        "quality": _quality,
        "elements": f"{next(iter(results.values()))['elements'] / 1e6:.1f}",
    }


def _picture(results: dict[str, Any], path: Path) -> str:
    """Draw the seconds of a step, and return a link to the picture."""
    with canvas(path, 8) as axes:
        for name, (label, style) in LINES.items():
            rates = [result["rate"] for result in results.values()]
            seconds = [figures(result)[name].step for result in results.values()]
            axes.plot(rates, seconds, marker="o", label=label, **style)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(rates, map(quantities.rate, rates))
        axes.minorticks_off()
        axes.set_xlabel("link of each host")
        axes.set_ylabel("seconds a step, with almost no compute")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return f"![Seconds a step, by the rate of each host's link](docs/results/{path.name})"


def _quality() -> str:
    """Tabulate what the default costs beside dense, by optimizer: the mean, and the worst run."""
    found: dict[str, dict[str, str]] = {}
    for name in SETS:
        for optimizer, costs in _costs(name).items():
            said = f"{statistics.mean(costs):+.1f}%, {max(costs):+.1f}% ({len(costs)})"
            found.setdefault(optimizer, {})[name] = said
    order = sorted(found, key=list(OPTIMIZERS).index)
    rows = [[OPTIMIZERS[o], *(found[o].get(name, "not run") for name in SETS)] for o in order]
    return table(["mean, worst run (runs)", *SETS.values()], rows)


def _costs(name: str) -> dict[str, list[float]]:
    """What each run costs beside dense with the same seed, in per cent, by optimizer.

    Not at the largest rate at which dense is stable: gains there would hide costs.
    """
    found: dict[str, list[float]] = {}
    for place in places(Study(name)):
        row = place.rows.get("default")
        if row is not None and place.rate != "limit" and UNITS[place.found.metric.name] == "%":
            found.setdefault(str(place.options["optimizer"]), []).extend(row.costs)
    return found
