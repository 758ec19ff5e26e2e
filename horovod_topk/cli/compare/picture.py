"""A picture of quality against steps, time and bytes: three panels for each variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_topk.cli.canvas import panels
from horovod_topk.cli.compare.records import DONE
from horovod_topk.cli.compare.result import Found, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#444444", "#999999", "#d1495b", "#1f77b4", "#2e933c", "#bb8800", "#8d6a9f", "#17889b")


def draw(path: Path, every: Sequence[Found]) -> None:
    """Write a picture with a thin line for each seed, and a colour for each compressor."""
    timed = not any(found.settings.simulated for found in every)
    names = ("steps", "seconds", "bytes") if timed else ("steps", "bytes")
    size = (4.4 * len(names), 4 * len(every))
    with panels(path, len(every), len(names), size) as rows:
        for found, row_of_axes in zip(every, rows, strict=True):
            axes = dict(zip(names, row_of_axes, strict=True))
            for number, row in enumerate(found.rows):
                _curves(axes, found, row, COLOURS[number % 8])
            _dress(axes, found)


def _curves(axes: Mapping[str, Axes], found: Found, row: Row, colour: str) -> None:
    label: str | None = row.name
    for run in found.runs[row.name].values():
        curve = run.curve(found.metric.name)
        if run.status != DONE or not curve:
            continue
        steps, seconds, values = zip(*curve, strict=True)
        sent = [step * (row.bytes or 0) for step in steps]
        style: dict[str, Any] = {"color": colour, "alpha": 0.75, "linewidth": 1.2, "label": label}
        for name, at in (("steps", steps), ("seconds", seconds), ("bytes", sent)):
            if name in axes and (name != "bytes" or row.bytes):
                axes[name].plot(at, values, **style)
        label = None


def _dress(axes: Mapping[str, Axes], found: Found) -> None:
    settings = found.settings
    variant = "".join(f", {name}={value}" for name, value in found.variant)
    network = f", {settings.network}" if settings.network else ""
    ranks = "simulated ranks" if settings.simulated else "ranks"
    axes["steps"].set_ylabel(found.metric.name)
    title = settings.title or settings.script.stem
    axes["steps"].set_title(f"{title}{variant}, {settings.ranks} {ranks}{network}", fontsize=10)
    for name, each in axes.items():
        each.set_xlabel("bytes sent by a rank" if name == "bytes" else name)
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    if found.budget is not None and "seconds" in axes:
        axes["seconds"].axvline(found.budget, color="#bb8800", linewidth=0.8, linestyle=":")
    if axes["bytes"].has_data():
        axes["bytes"].set_xscale("log")
    axes["steps"].legend(frameon=False, fontsize=8)
