"""Axes that are written to a picture file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def kinds() -> set[str]:
    """File types that Matplotlib can write, by their suffixes."""
    from matplotlib.backend_bases import FigureCanvasBase

    return set(FigureCanvasBase.get_supported_filetypes())


@contextmanager
def panels(
    path: Path,
    rows: int,
    columns: int,
    size: tuple[float, float],
    dpi: int = 110,
    scale: Literal["row", "none"] = "row",
) -> Iterator[Any]:
    """Yield rows of axes, and write the picture on exit in the format of the file's suffix.

    size: width and height in inches; scale: axes that share one scale upwards.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=size, dpi=dpi, sharey=scale, squeeze=False
    )
    try:
        yield axes
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    finally:
        pyplot.close(figure)


@contextmanager
def canvas(path: Path, width: float) -> Iterator[Axes]:
    """Yield one pair of axes, `width` inches wide and 5 high, as `panels` does."""
    with panels(path, 1, 1, (width, 5), dpi=150) as ((axes,),):
        yield axes
