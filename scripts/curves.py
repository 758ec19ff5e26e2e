"""Pictures of training runs: one curve against steps, and the same against bytes sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display is needed to write a file
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Run = Mapping[str, Any]  # what an example writes with --json

COLOURS = ("#444444", "#d1495b", "#1f77b4", "#2e933c")


def draw(
    path: Path,
    title: str,
    curves: Mapping[str, Sequence[Run]],
    *,
    column: str = "loss",
    label: str = "training loss",
    log: bool = False,
    timed: bool = False,
) -> None:
    """Writes a PNG with `column` of the runs' histories, against steps and against bytes.

    Args:
        path: of the PNG.
        title: above both panels.
        curves: the runs behind each entry of the legend; runs differ in their seed alone.
        column: of the histories.
        label: of the vertical axis.
        log: whether that axis is logarithmic.
        timed: whether a third panel shows it against seconds: steps times the median step.
    """
    count = 3 if timed else 2
    figure, panels = plt.subplots(1, count, figsize=(5 * count, 4), sharey=True, dpi=120)
    by_steps, by_bytes, *by_seconds = panels
    for (name, runs), colour in zip(curves.items(), COLOURS, strict=False):
        for number, run in enumerate(runs):
            steps, values = run["history"]["step"], run["history"][column]
            style = {"color": colour, "alpha": 0.8, "label": None if number else name}
            by_steps.plot(steps, values, **style)
            for panel in by_seconds:
                panel.plot([step * run["seconds_per_step"] for step in steps], values, **style)
            by_bytes.plot([step * run["sent_bytes"] for step in steps], values, **style)
    _dress(by_steps, "steps")
    _dress(by_bytes, "bytes sent by a rank (logarithmic)")
    for panel in by_seconds:
        _dress(panel, "seconds, without evaluations")
    by_steps.set_ylabel(label)
    by_steps.set_yscale("log" if log else "linear")
    by_bytes.set_xscale("log")
    by_bytes.legend(frameon=False)
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _dress(axes: Axes, label: str) -> None:
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
