"""Figures of docs/kernels.md, from the stored results of `benchmarks.kernels`."""

from __future__ import annotations

import statistics
from typing import Any

from pages import Values
from pages.markdown import table

RATIOS = (0.1, 0.01, 0.001, 0.0001)
NO_CODING = "float32, plain"  # entries that are not coded


def values(found: dict[str, Any]) -> Values:
    """The page's figures by name."""
    return found["machine"] | {
        "numel": f"{found['numel']:,}",
        "encoding": encoding_table(found["encoding"]),
        "decoding": _listed(found["decoding"]["packed"], "decode"),
        "coding": coding(found["coding"]),
        "owners": _listed(found["shards"], ""),
        "sizes": sizes_table(found["sizes"]),
        "exchange": exchange_table(found["exchange"]),
    }


def encoding_table(found: dict[str, float]) -> str:
    """Every kernel at one size."""
    floor, topk = found["r += g"], found["torch.topk"]
    rows = (
        [name, f"{ms:.1f}", f"{ms / floor:.2f}", f"{topk / ms:.0f}x"] for name, ms in found.items()
    )
    return table(["", "ms", "of `r += g`", "faster than torch.topk"], rows)


def _listed(found: dict[str, float], kind: str) -> str:
    shown = [ms for name, ms in found.items() if name.startswith(kind) and name != "r += g"]
    return ", ".join(f"{ms:.1f}" for ms in shown)


def coding(found: dict[str, dict[str, float]]) -> str:
    """The least and the largest cost of a format beyond selection, as a share of encoding."""
    base = found[NO_CODING]
    more = (sum(ms[each] - base[each] for each in ("encode", "decode")) for ms in found.values())
    shares = sorted(each / base["encode"] for each in more)[1:]  # without the base itself
    return f"{shares[0]:.0%} to {shares[-1]:.0%}"


def sizes_table(cells: list[dict[str, Any]]) -> str:
    """A row a size, a column a ratio."""
    rows = [
        [f"{numel:,}", *(_cell(cell["ms"]) for cell in cells if cell["numel"] == numel)]
        for numel in dict.fromkeys(cell["numel"] for cell in cells)
    ]
    return table(["elements", *(f"{ratio:g}" for ratio in RATIOS)], rows)


def _cell(ms: dict[str, float]) -> str:
    ours = next(iter(ms.values()))
    return f"{ours / ms['r += g']:.2f} ({ms['torch.topk'] / ours:.0f}x)"


def exchange_table(found: dict[str, list[dict[str, float]]]) -> str:
    """The time that an exchange adds: medians of runs."""
    columns = {
        "plain": "step without",
        "topk": "step with",
        "exchange": "exchange adds",
        "memory": "`r += g` and fill",
    }
    rows = (
        [selection, *(f"{statistics.median(run[each] for run in runs):.1f}" for each in columns)]
        for selection, runs in found.items()
    )
    return table(["selection", *columns.values()], rows)
