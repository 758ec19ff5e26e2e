"""Figures and the picture of docs/kernels.md, from the stored results of `benchmarks.kernels`."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from pages import RESULTS, Values
from pages.markdown import table

# Multiples of the floor, at 25 million elements and 1%.
TARGETS = {"avx512, sampled": 1.3, "avx512, exact": 2.3, "avx2, sampled": 1.6}
RATIOS = (0.1, 0.01, 0.001, 0.0001)
NO_CODING = "float32, plain"  # entries that are not coded


def values(found: dict[str, Any]) -> Values:
    """The page's figures by name."""
    return found["machine"] | {
        "numel": f"{found['numel']:,}",
        "encoding": encoding_table(found["encoding"]),
        "decoding": decoding_table(found["decoding"]),
        "coding": coding_table(found["coding"]),
        "shards": floor_table(found["shards"]),
        "momentum": floor_table(found["momentum"]),
        "sizes": sizes_table(found["sizes"]),
        "exchange": exchange_table(found["exchange"]),
        "picture": partial(picture, found["sizes"], RESULTS / "kernels.png"),
    }


def encoding_table(found: dict[str, float]) -> str:
    """Every kernel at the size of the targets."""
    floor, topk = found["r += g"], found["torch.topk"]
    rows = []
    for name, ms in found.items():
        wanted = TARGETS.get(name)
        limit = f"{wanted} at most" if wanted else ""
        rows.append([name, f"{ms:.1f}", f"{ms / floor:.2f}", limit, f"{topk / ms:.0f}x"])
    return table(["", "ms", "of `r += g`", "wanted", "faster than torch.topk"], rows)


def decoding_table(found: dict[str, dict[str, float]]) -> str:
    """Decoding against filling and reading."""
    rows = []
    for indices, ms in found.items():
        for ranks in (1, 2, 4, 8):
            ours, floor = ms[f"decode {ranks}"], ms[f"fill and read {ranks}"]
            figures = [f"{ours:.1f}", f"{floor:.1f}", f"{ours / floor:.2f}"]
            rows.append([indices, str(ranks), *figures])
    return table(["indices", "payloads", "ms", "floor, ms", "ratio (1.5 at most)"], rows)


def coding_table(found: dict[str, dict[str, float]]) -> str:
    """The cost of formats beyond selection."""
    base, rows = found[NO_CODING], []
    for name, ms in found.items():
        more = sum(ms[each] - base[each] for each in ("encode", "decode"))
        figures = [f"{ms['encode']:.1f}", f"{ms['decode']:.1f}", f"{more / base['encode']:.2f}"]
        rows.append([name, *figures])
    return table(["values, indices", "encode, ms", "decode, ms", "coding (0.25 at most)"], rows)


def floor_table(found: dict[str, float]) -> str:
    """Times, also as multiples of `r += g`."""
    floor = found["r += g"]
    rows = [[name, f"{ms:.1f}", f"{ms / floor:.2f}"] for name, ms in found.items()]
    return table(["", "ms", "of `r += g`"], rows)


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
    """The time that an exchange adds and may add: medians of runs, and each run's share."""
    columns = {
        "plain": "step without",
        "topk": "step with",
        "exchange": "exchange adds",
        "allowed": "allowed",
        "memory": "`r += g` and fill",
        "allgather": "allgather alone",
    }
    rows = []
    for selection, runs in found.items():
        medians = (statistics.median(run[column] for run in runs) for column in columns)
        shares = [run["share"] for run in runs]
        each = ", ".join(f"{share:.2f}" for share in shares)
        rows.append(
            [
                selection,
                *(f"{median:.1f}" for median in medians),
                f"{statistics.median(shares):.2f}",
                each,
            ]
        )
    return table(["selection", *columns.values(), "share of it", "in each run"], rows)


def picture(cells: list[dict[str, Any]], target: Path) -> str:
    """Draw time against size at ratio 0.01, and return a link to the picture."""
    at = [cell for cell in cells if cell["ratio"] == 0.01]
    sizes = [cell["numel"] for cell in at]
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name in at[0]["ms"]:
        axes.plot(sizes, [cell["ms"][name] for cell in at], marker="o", markersize=3, label=name)
    axes.set(xscale="log", yscale="log", xlabel="elements (float32)", ylabel="ms, one thread")
    axes.set_title("Selecting 1%")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    return "![time against size](results/kernels.png)"
