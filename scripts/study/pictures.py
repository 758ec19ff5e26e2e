"""Pictures of studies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # no display is needed to write a file
from matplotlib import pyplot as plt

from horovod_topk.cli.compare.picture import draw
from horovod_topk.cli.compare.result import Found
from study.results import Row

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
TICKS = (-1, 0, 0.5, 1, 2, 5, 10, 20, 50, 100)
LABELS = {"accuracy": "points of accuracy below dense", "bits_per_byte": "% of bits above dense"}


def scatter(path: Path, title: str, rows: Sequence[Row]) -> None:
    """What each setting costs against the bytes it sends; a line for each kind of setting."""
    figure, axes = plt.subplots(figsize=(9.5, 4.8), dpi=120)
    kinds: dict[tuple[str, str, bool], list[Row]] = {}
    for row in rows:
        settings = row.asked.settings
        kind = settings.get("exchange", "allgather"), settings["values"]
        if math.isfinite(row.cost):
            kinds.setdefault((*kind, bool(settings["momentum"])), []).append(row)
    for (exchange, values, adapted), found in sorted(kinds.items()):
        found.sort(key=lambda row: row.sent_bytes)
        axes.errorbar(
            [row.sent_bytes for row in found],
            [row.cost for row in found],
            yerr=list(zip(*(row.reach for row in found), strict=True)),
            color=COLOURS[values],
            linestyle=LINES[exchange],
            marker="^" if adapted else MARKERS[exchange],
            markersize=4,
            markerfacecolor=COLOURS[values] if exchange == "allgather" else "white",
            capsize=2,
            label=f"{exchange}{', the default' * adapted} {values}",
        )
    axes.axhline(0.0, color="#444444", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=2)
    axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("bytes a step and rank")
    axes.set_ylabel(LABELS[rows[0].metric])
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def bars(path: Path, tolerance: float, rows: Mapping[str, Sequence[Row]]) -> None:
    """What each loop costs, with its standard error, at each ratio."""
    figure, axes = plt.subplots(figsize=(7.5, 6), dpi=110)
    names = [row.name.split(" @ ")[0] for row in next(iter(rows.values()))]
    for number, (ratio, found) in enumerate(rows.items()):
        places = [place + 0.3 * (number - 0.5) for place in range(len(found))]
        errors = [row.reach[0] for row in found]
        costs = [row.cost for row in found]
        axes.errorbar(costs, places, xerr=errors, fmt="o", capsize=3, label=f"ratio {ratio}")
    axes.axvline(0, color="#444444", linewidth=0.8)
    axes.axvline(tolerance, color="#444444", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(names)), [name.replace("`", "") for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("symlog", linthresh=2)  # spikes cost a hundred times as much as the rest
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"points of accuracy below dense (dashed: {tolerance:g})")
    axes.legend(frameon=False)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def curves(path: Path, found: Found) -> None:
    """All runs of a case, against steps and against bytes."""
    draw(path, [found], timed=False)


def dots(path: Path, found: Mapping[str, Sequence[Row]]) -> None:
    """What each cell costs against how many times fewer bytes it sends; diverged runs on top."""
    figure, axes = plt.subplots(figsize=(9.5, 4.8), dpi=120)
    top = 30.0
    for place, (name, rows) in enumerate(found.items()):
        costs = [min(row.cost, top) for row in rows]
        axes.plot(
            [row.reduction for row in rows],
            costs,
            linestyle="none",
            marker="o^sD"[place % 4],
            markersize=4,
            alpha=0.7,
            label=f"{name} ({len(rows)} cells)",
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=2)
    axes.set_ylim(-5, top * 1.2)
    axes.set_yticks([-4, -2, -1, 0, 1, 2, 4, 10, 30])
    axes.get_yaxis().set_major_formatter("{x:g}")
    axes.set_xlabel("times fewer bytes than a ring allreduce of float32")
    axes.set_ylabel("cost beside dense: % bits a byte, or points")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def panels(path: Path, cases: Mapping[str, Sequence[Row]]) -> None:
    """What each compressor costs against how many times fewer bytes it sends; a panel a case."""
    figure, grid = plt.subplots(
        2, -(-len(cases) // 2), figsize=(10.5, 8), dpi=110, layout="constrained"
    )
    names = list(dict.fromkeys(row.name for rows in cases.values() for row in rows))
    for axes, (title, rows) in zip(grid.flat, cases.items(), strict=False):
        for row in rows:
            place = names.index(row.name)
            beyond = not row.cost < TICKS[-1]
            axes.plot(
                row.reduction,
                TICKS[-1] if beyond else row.cost,
                marker="x" if beyond else "o^sDvP"[place // 10],
                color=f"C{place % 10}",
                linestyle="none",
                label=row.name,
            )
        axes.axhline(0.0, color="#444444", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("symlog", linthresh=2)
        axes.set_xticks([2, 4, 8, 16, 32, 64, 128], ["2", "4", "8", "16", "32", "64", "128"])
        axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.set_yticks([], minor=True)
        axes.set_xlim(1.5, 160)
        axes.set_ylim(-5, 1.3 * TICKS[-1])
        axes.set_title(title, fontsize=10)
        axes.set_ylabel(LABELS[rows[0].metric], fontsize=8)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        "times fewer bytes than a ring allreduce of float32 (cross: over 100, or diverged)"
    )
    shown, unused = list(grid.flat[: len(cases)]), grid.flat[len(cases) :]
    for axes in unused:
        axes.remove()
    handles = {h.get_label(): h for axes in reversed(shown) for h in axes.get_lines()[:-1]}
    figure.legend(
        handles.values(), handles.keys(), frameon=False, fontsize=8, loc="outside right upper"
    )
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
