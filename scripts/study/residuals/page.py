"""docs/residuals.md and its picture, made from docs/results/residuals.json and nothing else."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # no display is needed to write a file
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import launch
from study.markdown import table
from study.residuals import bounds, records
from study.residuals.agenda import LR, RUNS
from study.residuals.records import Record

PAGE = launch.ROOT / "docs" / "residuals.md"
PICTURE = launch.ROOT / "docs" / "results" / "residuals.png"
TITLES = {run.name: run.title for run in RUNS}

INTRODUCTION = """\
# How large residuals become

<!-- Written by `make residuals` from docs/results/residuals.json; see scripts/study/residuals. -->

What a rank has not sent stays in its residual, and `stats().residual_norm` says how much that is.
A residual that grew and grew would mean that the model is trained on ever older gradients. Theory
says how large it can become; this page has what it is, also with ranks whose data differ, with a
rank that now and then has none, and with coarse values and owners.

The model of `examples/pytorch_digits.py`, {steps:,} steps, {ranks} ranks of 16 examples simulated
in one process as in [frontier.md](frontier.md) (a test finds the same weights on real ranks, to the
bit), SGD with momentum 0.9, learning rate {lr:g}, ratio {ratio:g}, one seed.

{machine}

![Norm of residuals and gradients over the steps](results/residuals.png)

Thin lines are gradients, dotted ones the largest residual of an owner."""

BOUNDS = """\
## Beside the bound

Top-K that sends k of n elements removes at least delta = k / n of the squares of what it is given:
||e'||² ≤ (1 - delta) ||e + g||². With gradients of norm at most G, and in units of gradients rather
than of steps, that bounds the residual's norm by

{table}

The first two are of expected squares; the third holds for every run. "Along the way" below is the
third with the norms that the gradients really had, step by step, instead of G at every one, at its
largest. Each line is of the rank whose residual became the largest. "Measured delta" is what a step
really removed of the squares, and the last column Karimireddy's bound with the least of these. The
bounds are of selection alone: rounding to int4 is not in k / n, it is in the measured delta."""

SOURCES = (
    ("Stich et al. 2018, Lemma 3.3, steps that hardly decay", "2 / delta", bounds.stich),
    ("Karimireddy et al. 2019, Lemma 3", "2 √(1 - delta) / delta", bounds.karimireddy),
    ("the triangle inequality", "q / (1 - q), q = √(1 - delta)", bounds.worst_case),
)

RANKS = "## Rank by rank"

READING = """\
## Reading it

- The largest residual here was {worst_share:.1f}% of Karimireddy's bound, which is of gradients
  whose elements are all alike. A few elements have most of the squares, so that a step removes
  {least:.2g} to {most:.2g} of them (medians of the ranks) with one in {one_in:.0f} elements.
- With {skewed_title} the residual became {skewed:.1f} times as large as with equal shards, at
  largest gradients {skewed_gradient:.1f} times as large.
- A step without data adds nothing, and sends on what is owed: that rank's largest residual was
  {idle:.2f} times the one that it has with data in every step. A zero gradient needs nothing
  special, but the rank has to take part in the exchange.
- Of int4 the least measured delta was {int4:.2g}. With owners there is a second residual, in units
  of the mean: `stats().owned_norm`, the column "owned" above.
- In a job of your own compare `stats().residual_norm` with `stats().gradient_norm`: both are of
  this rank's gradients. (With `exchange="hierarchical"` owners alone keep anything, of their node's
  sum, so that `residual_norm` is zero: compare `owned_norm`, which levels off alike.) What matters
  is that their ratio levels off. Where it grows for as long as one looks, the ratio is too small
  for these data: raise it, or send all that is owed with `set_ratio(1.0)`."""


def write() -> Path:
    """Writes the page and the picture."""
    record = records.read()
    _draw(record)
    parts = [_introduction(record), _bounds(record), _beside(record), RANKS, _by_rank(record)]
    PAGE.write_text("\n\n".join([*parts, _reading(record)]) + "\n")
    return PAGE


def _introduction(record: Record) -> str:
    environment, first = record["environment"], record["runs"][0]
    load = record["load"][0]
    machine = (
        f"Measured on {environment['date']} at {record['time']} on {environment['cpu']}, "
        f"{environment['cores']} cores, PyTorch {environment['torch']}; the load average was "
        f"{load:g}, of other work too, which norms do not depend on."
    )
    return INTRODUCTION.format(
        steps=first["steps"],
        ranks=len(first["ranks"]),
        lr=LR,
        ratio=record["ratio"],
        machine=machine,
    )


def _bounds(record: Record) -> str:
    delta = record["ratio"]
    rows = [[source, formula, f"{bound(delta):.0f}"] for source, formula, bound in SOURCES]
    return BOUNDS.format(table=table(["", "times G", f"at delta = {delta:g}"], rows))


def worst_rank(run: Record) -> tuple[int, Record]:
    """The rank whose residual became the largest."""
    return max(enumerate(run["ranks"]), key=lambda each: each[1]["largest_residual"])


def _beside(record: Record) -> str:
    header = ["", "accuracy", "rank", "G", "largest residual", "in G", "Karimireddy"]
    header += ["along the way", "measured delta: median, least", "bound with the least"]
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
    header = ["", "rank", "gradient: median", "largest", "residual: largest", "at the end", "owned"]
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
    return READING.format(
        worst_share=max(
            100 * rank["largest_residual"] / (bound * rank["largest_gradient"]) for rank in ranks
        ),
        least=min(medians),
        most=max(medians),
        skewed_title=TITLES["skewed"],
        one_in=1 / record["ratio"],
        skewed=of["skewed"]["largest_residual"] / of["equal"]["largest_residual"],
        skewed_gradient=_largest_gradient(runs["skewed"]) / _largest_gradient(runs["equal"]),
        idle=idle["largest_residual"] / twin["largest_residual"],
        int4=min(rank["least_contraction"] for rank in coarse),
    )


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
