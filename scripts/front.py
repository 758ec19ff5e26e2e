"""Figures and picture of README.md, from stored results."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.network import RATES
from horovod_topk.cli.bench.figures import figures
from horovod_topk.cli.canvas import panels
from horovod_topk.cli.models import elements, specs_of
from horovod_topk.cli.options import update_rule_of
from horovod_topk.core.exchange.protocol import ring_allreduce_bytes
from horovod_topk.core.plan.buckets import Plan, make_plan
from horovod_topk.core.run.stats import planned_bytes
from horovod_topk.cost import quantities
from horovod_topk.cost.traffic import Ranks, nodes_of
from horovod_topk.methods.topk import TopK
from pages import RESULTS, Values, stored
from pages.markdown import table
from study import does_it_pay
from study.matrix import OPTIMIZERS, places
from study.results import Study

LINES = {  # method of the benchmark -> label and style
    "ddp": ("dense, float32", {"color": "#888888", "linestyle": "--"}),
    "ddp-fp16": ("dense, 16 bits", {"color": "#444444", "linestyle": "--"}),
    "powersgd": ("PowerSGD, rank 4", {"color": "#c2672f", "linestyle": "-."}),
    "ddp+topk": ("TopKEF", {"color": "#1f6fb2", "linewidth": 2.5}),
}
MODEL = "resnet50"
COLUMNS = {  # of the table of quality -> study and metrics
    "loss of five text models, %": ("default", ["bits_per_byte"]),
    "accuracy lost by a residual CNN, points": ("default", ["accuracy"]),
    "loss of four models not used for tuning, %": ("unseen", ["bits_per_byte", "mse"]),
}


def read(name: str) -> dict[str, Any]:
    """The results of the benchmark on emulated hosts."""
    return {rate: result for rate, result in stored("network").items() if rate in RATES}


def values(results: dict[str, Any]) -> Values:
    """Return the figures that the page shows, by name."""
    found = {rate: figures(result) for rate, result in results.items()}
    return {
        "picture": partial(_picture, results, RESULTS / "front.png"),
        "times": lambda rate, slow: (
            f"{found[rate][slow].exchange / found[rate]['ddp+topk'].exchange:.0f}"
        ),
        "quality": _quality,
        "elements": f"{next(iter(results.values()))['elements'] / 1e6:.1f}",
        "ratio": TopK().ratio,
        "fewer": _fewer,
        "state": _state,
    }


def _fewer(exchange: str, ranks: str) -> str:
    """Return how many times fewer bytes than dense a rank sends of a ResNet-50's gradients."""
    ways = Ranks(exchange, nodes_of(int(ranks), 1))
    dense = ring_allreduce_bytes(4 * elements(specs_of(MODEL)), int(ranks))
    return f"{dense / ways.busiest(_plan()).sent_bytes:.0f}"


def _state(residuals: str) -> str:
    """Return the bytes of a rank's state with SGD, for each parameter."""
    plan = _plan()
    numel = sum(tensor.numel for tensor in plan.tensors())
    return f"{sum(planned_bytes(plan, residuals)) / numel:.0f}"


def _plan() -> Plan:
    return make_plan(specs_of(MODEL), TopK(), update_rule=update_rule_of("sgd"))


def _picture(results: dict[str, Any], path: Path) -> str:
    """Draw the seconds of a step, and loss against hours; return a link to the picture."""
    with panels(path, 1, 2, (12, 4.5), dpi=130, scale="none") as ((left, right),):
        for name, (label, style) in LINES.items():
            rates = [result["rate"] for result in results.values()]
            seconds = [figures(result)[name].step for result in results.values()]
            left.plot(rates, seconds, marker="o", label=label, **style)
        left.set_xscale("log")
        left.set_yscale("log")
        left.set_xticks(rates, map(quantities.rate, rates))
        left.minorticks_off()
        left.set_xlabel("link of each host")
        left.set_ylabel("seconds a step, with almost no compute")
        left.legend(frameon=False)
        left.grid(alpha=0.3)
        does_it_pay.joined_of(does_it_pay.read("does-it-pay")).draw_hours(right, "100mbit")
        right.set_ylabel(does_it_pay.AXIS)
        right.legend(frameon=False)
    return f"![Seconds a step by the rate of the link; loss by hours](docs/results/{path.name})"


def _quality() -> str:
    """Tabulate what the default costs beside dense, by optimizer: the mean, and the worst run."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, metrics in COLUMNS.values():
        for place in places(Study(name)):
            row, metric = place.rows.get("default"), place.found.metric.name
            # At the largest rate at which dense is stable gains would hide costs.
            if row is not None and place.rate != "limit" and metric in metrics:
                kind = found.setdefault(str(place.options["optimizer"]), {})
                kind.setdefault(name + metrics[0], []).extend(row.costs)
    rows = []
    for optimizer in sorted(found, key=list(OPTIMIZERS).index):
        keys = [name + kind[0] for name, kind in COLUMNS.values()]
        if found[optimizer].keys() >= {*keys}:
            costs = (found[optimizer][key] for key in keys)
            rows.append([OPTIMIZERS[optimizer], *map(_said, costs)])
    return table(["mean, worst (runs)", *COLUMNS], rows)


def _said(costs: list[float]) -> str:
    return f"{statistics.mean(costs):+.1f}, {max(costs):+.1f} ({len(costs)})"
