"""One picture a group: what each point costs against the bytes it sends."""

from __future__ import annotations

import math

import matplotlib as mpl

mpl.use("Agg")  # no display is needed to write a file
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from study.frontier import agenda
from study.frontier.cells import RANKS
from study.frontier.measured import UNIT, Group, Measured
from study.frontier.records import FOLDER

COLOURS = {
    "float32": "#444444",
    "float16": "#8d6a9f",
    "bfloat16": "#c98bb9",
    "int8": "#1f77b4",
    "int4": "#2e933c",
    "sign": "#d1495b",
}
LINES = {"allgather": "-", "sharded": "--", "hierarchical": ":"}
MARKERS = {"allgather": "o", "sharded": "s", "hierarchical": "D"}
TICKS = (0, 0.5, 1, 2, 5, 10, 20, 50, 100)
LABELS = {"digits": "points of accuracy below dense", "bytelm": "% of bits a byte above dense"}


def link(group: Group) -> str:
    """Draws the group's picture; returns the link to it."""
    series = group.series
    name = f"frontier-{series.workload}-{series.optimizer}-{group.shards}.png"
    title = f"{group.name}, {series.steps:,} steps, {RANKS} simulated ranks"
    figure, axes = plt.subplots(figsize=(9.5, 4.8), dpi=120)
    _goals(axes, group)
    lines: dict[tuple[str, str, float], list[Measured]] = {}
    for each in group.points:
        point = each.point
        lines.setdefault((point.exchange, point.values, point.momentum), []).append(each)
    for _, points in sorted(lines.items()):
        _line(axes, points[0].point, [each for each in points if math.isfinite(each.cost)])
    _dress(axes, group)
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(FOLDER / name)
    plt.close(figure)
    return f"![Quality against bytes: {title}](results/{name})"


def _line(axes: Axes, kind: agenda.Point, points: list[Measured]) -> None:
    colour = COLOURS[kind.values]
    axes.errorbar(
        [each.sent_bytes for each in points],
        [each.cost for each in points],
        yerr=list(zip(*(each.reach for each in points), strict=True)) if points else None,
        color=colour,
        linestyle=LINES[kind.exchange],
        marker="^" if kind.momentum else MARKERS[kind.exchange],
        markersize=4,
        markerfacecolor=colour if kind.exchange == "allgather" else "white",
        capsize=2,
        label=f"{agenda.way(kind)} {kind.values}",
    )


def _goals(axes: Axes, group: Group) -> None:
    """The tolerance, and the reductions that are asked for."""
    axes.axhline(0.0, color="#444444", linewidth=0.8)
    axes.axhline(group.tolerance, color="#bb8800", linewidth=0.8, linestyle=":")
    dense_bytes = group.points[0].sent_bytes * group.points[0].reduction
    for goal in agenda.GOALS:
        axes.axvline(dense_bytes / goal, color="#bb8800", linewidth=0.8, linestyle=":")
        where = {"xycoords": ("data", "axes fraction"), "fontsize": 8, "color": "#bb8800"}
        axes.annotate(f" {goal:g}x", (dense_bytes / goal, 0.97), **where)


def _dress(axes: Axes, group: Group) -> None:
    workload = group.series.workload
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=2 * group.tolerance)
    axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("bytes a step and rank")
    tolerance = f"{group.tolerance:g} {UNIT[workload]}".replace(" %", "%")
    axes.set_ylabel(f"{LABELS[workload]} (dotted: {tolerance})")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
