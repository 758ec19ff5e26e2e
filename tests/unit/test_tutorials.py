"""The notebooks of docs/tutorials run, and show what they show when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).parents[2] / "docs/tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LIMIT_SECONDS = 180  # of a cell; a notebook takes about a minute on two cores

pytestmark = [pytest.mark.tools, pytest.mark.timeout(2 * LIMIT_SECONDS)]


def texts(notebook: Any) -> list[str]:
    """What each cell of code printed or returned, but for pictures."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            found.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    """Its own asserts hold, and every cell with an output still has one."""
    stored = nbformat.read(path, as_version=4)
    assert texts(stored) and all(cell.metadata == {} for cell in stored.cells)
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=LIMIT_SECONDS, resources=place).execute()
    assert len(texts(notebook)) == len(texts(stored))


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3
