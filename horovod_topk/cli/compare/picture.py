"""Quality against steps, time and bytes: one row of three panels a variant of the grid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_topk.cli.compare.records import DONE
from horovod_topk.cli.compare.result import Found, Row
from horovod_topk.cli.compare.settings import Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#444444", "#999999", "#d1495b", "#1f77b4", "#2e933c", "#bb8800", "#8d6a9f", "#17889b")


def draw(path: Path, settings: Settings, every: Sequence[Found]) -> None:
    """Write a picture. Each seed is a thin line; the colour is the compressor's.

    Raises:
        ModuleNotFoundError: Matplotlib, of the extra, is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(every), 3, figsize=(13, 4 * len(every)), dpi=110, sharey="row", squeeze=False
    )
    for found, axes in zip(every, panels, strict=True):
        for number, row in enumerate(found.rows):
            _curves(axes, found, row, COLOURS[number % len(COLOURS)])
        _dress(axes, settings, found)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _curves(axes: Sequence[Axes], found: Found, row: Row, colour: str) -> None:
    label: str | None = row.name
    for run in found.runs[row.name].values():
        curve = run.curve(found.metric.name)
        if run.status != DONE or not curve:
            continue
        steps, seconds, values = zip(*curve, strict=True)
        style: dict[str, Any] = {"color": colour, "alpha": 0.75, "linewidth": 1.2, "label": label}
        axes[0].plot(steps, values, **style)
        axes[1].plot(seconds, values, **style)
        if row.bytes:
            axes[2].plot([step * row.bytes for step in steps], values, **style)
        label = None


def _dress(axes: Sequence[Axes], settings: Settings, found: Found) -> None:
    variant = "".join(f", {name}={value}" for name, value in found.variant)
    network = f", {settings.network}" if settings.network else ""
    axes[0].set_ylabel(found.metric.name)
    axes[0].set_title(f"{settings.script.stem}{variant}, {settings.ranks} ranks{network}")
    for each, label in zip(axes, ("steps", "seconds", "bytes sent by a rank"), strict=True):
        each.set_xlabel(label)
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    if found.budget is not None:
        axes[1].axvline(found.budget, color="#bb8800", linewidth=0.8, linestyle=":")
    if axes[2].has_data():
        axes[2].set_xscale("log")
    axes[0].legend(frameon=False, fontsize=8)
