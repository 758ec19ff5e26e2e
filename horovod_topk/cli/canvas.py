"""A pair of axes that is written to a picture file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def kinds() -> set[str]:
    """File types that Matplotlib can write, by their suffixes.

    Raises:
        ModuleNotFoundError: Matplotlib is not installed.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    return set(FigureCanvasBase.get_supported_filetypes())


@contextmanager
def canvas(path: Path, width: float) -> Iterator[Axes]:
    """Axes to draw on; on exit the picture is written, in the format of the file's suffix.

    Args:
        path: the file; its folder is created.
        width: width in inches; the height is 5.

    Raises:
        ModuleNotFoundError: Matplotlib, an extra, is not installed.
        OSError: the file cannot be written.
        ValueError: Matplotlib writes no files of this kind.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, 5), dpi=150)
    try:
        yield axes
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    finally:
        pyplot.close(figure)
