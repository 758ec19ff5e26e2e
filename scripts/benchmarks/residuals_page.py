"""Figures and the picture of docs/residuals.md, from the stored results."""

from __future__ import annotations

from functools import partial

import matplotlib as mpl

mpl.use("Agg")  # no display is needed to write a file
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.residuals import LR, RUNS, Record
from benchmarks.residuals_watch import karimireddy, stich, worst_case
from pages import RESULTS, Values
from pages.markdown import table

TITLES = {run.name: run.title for run in RUNS}


SOURCES = (
    ("Stich et al. 2018, Lemma 3.3, at a nearly constant learning rate", "2 / delta", stich),
    ("Karimireddy et al. 2019, Lemma 3", "2 √(1 - delta) / delta", karimireddy),
    ("the triangle inequality", "q / (1 - q), q = √(1 - delta)", worst_case),
)


def values(record: Record) -> Values:
    """The page's figures by name."""
    environment, first = record["environment"], record["runs"][0]
    machine = (
        f"Measured on {environment['date']} at {record['time']} on {environment['cpu']}, "
        f"{environment['cores']} cores shared with other work, PyTorch {environment['torch']}."
    )
    return dict(
        steps=first["steps"],
        ranks=len(first["ranks"]),
        lr=LR,
        ratio=record["ratio"],
        machine=machine,
        table=_bounds(record),
        beside=_beside(record),
        by_rank=_by_rank(record),
        picture=partial(_draw, record),
        **_reading(record),
    )


def _bounds(record: Record) -> str:
    delta = record["ratio"]
    rows = [[source, formula, f"{bound(delta):.0f}"] for source, formula, bound in SOURCES]
    return table(["", "times G", f"at delta = {delta:g}"], rows)


def worst_rank(run: Record) -> tuple[int, Record]:
    """The rank whose residual became the largest."""
    return max(enumerate(run["ranks"]), key=lambda each: each[1]["largest_residual"])


def _beside(record: Record) -> str:
    header = ["gradients", "accuracy", "rank", "G", "largest residual", "in G", "Karimireddy"]
    header += ["along the way", "measured delta: median, smallest", "Karimireddy, smallest delta"]
    return table(header, (_line(record["ratio"], run) for run in record["runs"]))


def _line(ratio: float, run: Record) -> list[str]:
    number, rank = worst_rank(run)
    largest, least = rank["largest_gradient"], rank["least_contraction"]
    return [
        TITLES[run["name"]],
        f"{100 * run['accuracy']:.2f}%",
        str(number),
        f"{largest:.3g}",
        f"{rank['largest_residual']:.3g}",
        f"{rank['largest_residual'] / largest:.2f}",
        f"{karimireddy(ratio) * largest:,.0f}",
        f"{rank['largest_bound']:,.0f}",
        f"{rank['median_contraction']:.2g}, {least:.2g}",
        f"{karimireddy(least) * largest:,.3g}",
    ]


def _by_rank(record: Record) -> str:
    header = ["", "rank", "gradient: median", "largest", "residual: largest", "at the end"]
    header += ["owner's residual: largest"]
    return table(header, (line for run in record["runs"] for line in _lines(run)))


def _lines(run: Record) -> list[list[str]]:
    return [
        [
            TITLES[run["name"]] if number == 0 else "",
            str(number),
            *(f"{rank[key]:.3g}" for key in ("median_gradient", "largest_gradient")),
            *(f"{rank[key]:.3g}" for key in ("largest_residual", "last_residual")),
            f"{rank['largest_owned']:.3g}" if rank["largest_owned"] else "",
        ]
        for number, rank in enumerate(run["ranks"])
    ]


def _reading(record: Record) -> Values:
    """The figures of the summary."""
    runs = {run["name"]: run for run in record["runs"]}
    of = {name: worst_rank(run)[1] for name, run in runs.items()}
    bound = karimireddy(record["ratio"])
    ranks = [rank for run in runs.values() for rank in run["ranks"]]
    medians = [rank["median_contraction"] for rank in ranks]
    coarse = [rank for name, run in runs.items() if "int4" in name for rank in run["ranks"]]
    idle, twin = runs["idle"]["ranks"][-1], runs["equal"]["ranks"][-1]
    return {
        "worst_share": max(
            100 * rank["largest_residual"] / (bound * rank["largest_gradient"]) for rank in ranks
        ),
        "least": 100 * min(medians),
        "most": 100 * max(medians),
        "skewed_title": TITLES["skewed"],
        "one_in": 1 / record["ratio"],
        "skewed": of["skewed"]["largest_residual"] / of["equal"]["largest_residual"],
        "skewed_gradient": _largest_gradient(runs["skewed"]) / _largest_gradient(runs["equal"]),
        "idle": idle["largest_residual"] / twin["largest_residual"],
        "int4": min(rank["least_contraction"] for rank in coarse),
    }


def _largest_gradient(run: Record) -> float:
    return max(float(rank["largest_gradient"]) for rank in run["ranks"])


def _draw(record: Record) -> str:
    """Draw the norms, and return a link to the picture."""
    runs = record["runs"]
    figure, grid = plt.subplots(1, len(runs), figsize=(3.6 * len(runs), 4), dpi=110, sharey=True)
    for axes, run in zip(grid, runs, strict=True):
        _panel(axes, run, record["every"])
    grid[0].set_ylabel("Euclidean norm")
    grid[0].legend(frameon=False, fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(RESULTS / "residuals.png")
    plt.close(figure)
    ranks = len(runs[0]["ranks"])
    title = f"Norm of residuals and gradients over the steps, {ranks} simulated ranks"
    return f"![{title}](results/residuals.png)"


def _panel(axes: Axes, run: Record, every: int) -> None:
    for number, rank in enumerate(run["ranks"]):
        steps = range(every, every * len(rank["residual"]) + 1, every)
        colour = f"C{number}"
        axes.plot(steps, rank["residual"], color=colour, linewidth=1.2, label=f"residual {number}")
        axes.plot(steps, _visible(rank["gradient"]), color=colour, linewidth=0.3, alpha=0.6)
    bound = [max(values) for values in zip(*(r["bound"] for r in run["ranks"]), strict=True)]
    axes.plot(steps, bound, color="#444444", linestyle="--", label="bound along the way")
    if any(rank["largest_owned"] for rank in run["ranks"]):
        owned = [max(values) for values in zip(*(r["owned"] for r in run["ranks"]), strict=True)]
        axes.plot(steps, owned, color="#444444", linestyle=":", label="owners' residual")
    axes.set_yscale("log")
    axes.set_title(TITLES[run["name"]], fontsize=8)
    axes.set_xlabel("step (thin: gradients)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _visible(norms: list[float]) -> list[float | None]:
    """Without the zeros of a rank that has no data: a logarithmic axis has no place for them."""
    return [norm or None for norm in norms]
