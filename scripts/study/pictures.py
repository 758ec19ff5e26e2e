"""Pictures of studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # no display is needed to write a file
from matplotlib import pyplot as plt

from study.results import Row

TICKS = (-1, 0, 0.5, 1, 2, 5, 10, 20, 50, 100)
LABELS = {"accuracy": "points of accuracy below dense", "bits_per_byte": "% of bits above dense"}


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
