"""docs/residuals.md and its picture, made from docs/results/residuals.json and nothing else."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # no display is needed to write a file
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import launch
from study.markdown import filled, table
from study.residuals import bounds, records
from study.residuals.agenda import LR, RUNS
from study.residuals.records import Record

PAGE = launch.ROOT / "docs" / "residuals.md"
PICTURE = launch.ROOT / "docs" / "results" / "residuals.png"
TITLES = {run.name: run.title for run in RUNS}

INTRODUCTION = """\
# How large residuals become

<!-- Written by `make residuals` from docs/results/residuals.json; see scripts/study/residuals. -->

A residual that kept growing would mean that the model is trained on older and older gradients. This
page measures the norm of each rank's residual over a training run, `stats().residual_norm`, and
compares it with the bounds of theory. **Ranks are simulated**: {ranks} in one process on a CPU, as
in [frontier.md](frontier.md). There is one seed.

{reading}

![Norm of residuals and gradients over the steps, {ranks} simulated ranks](results/residuals.png)

Thick lines are residuals, thin lines gradients, and the dotted line is the largest residual of an
owner.

The model of `examples/pytorch_digits.py`, {steps:,} steps, 16 examples a rank and step, SGD with
momentum 0.9, learning rate {lr:g}; plain error feedback in float32, ratio {ratio:g}. {machine}"""

BOUNDS = """\
## Measured norms and bounds

Top-K sends k of n elements e + g, the residual plus the gradient. It removes at least the share
delta = k / n of their squares: ||e'||² ≤ (1 - delta) ||e + g||². If no gradient has a norm above G,
the norm of the residual is therefore bounded:

{table}

The first two bounds hold for expected squares, the third for every run. They are stated here in
units of gradients, as residuals are.

Each line of the next table is about the rank with the largest residual.

- *G* is the largest norm of its gradients; *in G* is the largest residual divided by G.
- *Along the way* is the third bound, computed step by step with the gradients' real norms.
- *Measured delta* is the share of the squares that a step really removed. It includes the rounding
  of int4, which k / n does not.
- The last column is Karimireddy's bound with the smallest measured delta."""

SOURCES = (
    ("Stich et al. 2018, Lemma 3.3, at a nearly constant learning rate", "2 / delta", bounds.stich),
    ("Karimireddy et al. 2019, Lemma 3", "2 √(1 - delta) / delta", bounds.karimireddy),
    ("the triangle inequality", "q / (1 - q), q = √(1 - delta)", bounds.worst_case),
)

RANKS = "## Rank by rank"

READING = """\
- The largest residual was {worst_share:.1f}% of Karimireddy's bound. The bound covers the worst
  case, in which all elements are equally large. In fact a few elements hold most of the squares: by
  sending one element in {one_in:.0f}, a step removed {least:.2g}% to {most:.2g}% of the squares
  (medians of the ranks).
- With {skewed_title} the residual became {skewed:.1f} times as large as with equal shards. The
  largest gradient was {skewed_gradient:.1f} times as large.
- In a step without data a rank adds nothing to its residual and still sends from it. The largest
  residual of that rank was {idle:.2f} times that of the same rank with data in every step. The rank
  must take part in the exchange, with a zero gradient.
- With int4 values the smallest measured delta was {int4:.2g}. With `sharded`, owners have a
  residual too, in units of the mean gradient: `stats().owned_norm`.
- **In your own job**, watch `stats().residual_norm` divided by `stats().gradient_norm`: it should
  level off. If it keeps growing, the ratio is too small for your data. Raise it, or send the whole
  residual with `set_ratio(1.0)`. (With `exchange="hierarchical"` only owners have a residual: watch
  `owned_norm`.)"""


def write() -> Path:
    """Writes the page and the picture."""
    record = records.read()
    _draw(record)
    parts = [_introduction(record), _bounds(record), _beside(record), RANKS, _by_rank(record)]
    PAGE.write_text("\n\n".join(parts) + "\n")
    return PAGE


def _introduction(record: Record) -> str:
    environment, first = record["environment"], record["runs"][0]
    machine = (
        f"Measured on {environment['date']} at {record['time']} on {environment['cpu']}, "
        f"{environment['cores']} cores shared with other work, PyTorch {environment['torch']}."
    )
    return INTRODUCTION.format(
        steps=first["steps"],
        ranks=len(first["ranks"]),
        lr=LR,
        ratio=record["ratio"],
        machine=machine,
        reading=_reading(record),
    )


def _bounds(record: Record) -> str:
    delta = record["ratio"]
    rows = [[source, formula, f"{bound(delta):.0f}"] for source, formula, bound in SOURCES]
    return BOUNDS.format(table=table(["", "times G", f"at delta = {delta:g}"], rows))


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
        f"{bounds.karimireddy(ratio) * largest:,.0f}",
        f"{rank['largest_bound']:,.0f}",
        f"{rank['median_contraction']:.2g}, {least:.2g}",
        f"{bounds.karimireddy(least) * largest:,.3g}",
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


def _reading(record: Record) -> str:
    runs = {run["name"]: run for run in record["runs"]}
    of = {name: worst_rank(run)[1] for name, run in runs.items()}
    bound = bounds.karimireddy(record["ratio"])
    ranks = [rank for run in runs.values() for rank in run["ranks"]]
    medians = [rank["median_contraction"] for rank in ranks]
    coarse = [rank for name, run in runs.items() if "int4" in name for rank in run["ranks"]]
    idle, twin = runs["idle"]["ranks"][-1], runs["equal"]["ranks"][-1]
    text = READING.format(
        worst_share=max(
            100 * rank["largest_residual"] / (bound * rank["largest_gradient"]) for rank in ranks
        ),
        least=100 * min(medians),
        most=100 * max(medians),
        skewed_title=TITLES["skewed"],
        one_in=1 / record["ratio"],
        skewed=of["skewed"]["largest_residual"] / of["equal"]["largest_residual"],
        skewed_gradient=_largest_gradient(runs["skewed"]) / _largest_gradient(runs["equal"]),
        idle=idle["largest_residual"] / twin["largest_residual"],
        int4=min(rank["least_contraction"] for rank in coarse),
    )
    return filled(text)


def _largest_gradient(run: Record) -> float:
    return max(float(rank["largest_gradient"]) for rank in run["ranks"])


def _draw(record: Record) -> None:
    runs = record["runs"]
    figure, grid = plt.subplots(1, len(runs), figsize=(3.6 * len(runs), 4), dpi=110, sharey=True)
    for axes, run in zip(grid, runs, strict=True):
        _panel(axes, run, record["every"])
    grid[0].set_ylabel("Euclidean norm")
    grid[0].legend(frameon=False, fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(PICTURE)
    plt.close(figure)


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
