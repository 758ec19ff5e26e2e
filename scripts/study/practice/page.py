"""docs/practice.md and its picture, made from docs/results/practice.jsonl and nothing else."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # no display is needed to write a file
from matplotlib import pyplot as plt

import launch
from study.markdown import LEAST_FOR_ERROR, filled, spread, standard_error, table
from study.practice import agenda, records
from study.practice.agenda import RATIOS, SEEDS, WAYS, Trial, Way
from study.practice.records import Record

PAGE = launch.ROOT / "docs" / "practice.md"
PICTURE = launch.ROOT / "docs" / "results" / "practice.png"
TOLERANCE = 0.5  # points of accuracy
TICKS = (-1, 0, 1, 2, 5, 20, 50, 100)

TEXT = """\
# Clipping, half precision, skewed data, restarts

<!-- Written by `make practice` from docs/results/. Change scripts/study/practice instead. -->

What TopKEF costs in training loops as people write them, on {ranks} real ranks (Gloo, CPU). Each
line compares TopKEF with dense gradients in the same loop. The task is an easy one: a CNN on small
handwritten digits. On a small byte GPT the default costs 10 to 50% ([accuracy.md](accuracy.md),
[frontier.md](frontier.md)).

{verdict}

"Cost" is dense's held-out accuracy minus TopKEF's, in points: mean and standard error over {seeds},
paired by seed. One of the 450 held-out images is 0.22 points. Bold: more than {tolerance:g} points.

{table}

![Points of accuracy that each loop costs with TopKEF, {ranks} real ranks](results/practice.png)

- *Spikes*: in every {spike_every}th step the last rank's loss is {spike:g} times as large. Without
  clipping they ruin dense training too.
- *Clipped after the exchange*: `optimizer.synchronize()`, `clip_grad_norm_(..., {norm:g})`,
  `optimizer.skip_synchronize()`. `clip_norm` clips on each rank before gradients enter the
  residual; dense is clipped after the exchange in the same line.
- *Restarted*: model, optimizer, schedule and residuals are saved at step {restart}, built anew and
  loaded. {restarted} of {restarts} runs ended with the same weights as the uninterrupted run, to
  the bit.
- *float16* uses PyTorch's `GradScaler` with a growth interval of 100 steps instead of 2,000.
  {overflowed} of {halves} runs had steps that overflowed, {overflows} in all. All ranks skip such a
  step.
- *Skewed shards*: each of the two ranks has five or six of the ten digits.
- *A rank without data* takes part in the exchange with a loss of zero.

Settings: `examples/pytorch_digits.py`'s network, {steps:,} steps, {batch} examples a rank and step.
Learning rate {sgd:g}, for AdamW {adamw:g}: dense's best ones ([frontier.md](frontier.md)); nothing
is tuned for TopKEF. In every run all ranks ended with the same weights, to the bit.

{machine}. Command: `make practice`.
"""


@dataclass(frozen=True)
class Line:
    """A way at one ratio."""

    way: Way
    ratio: float
    dense: list[float]  # accuracy in percent, seed by seed
    costs: list[float]  # points, seed by seed
    reduction: float

    @property
    def cost(self) -> float:
        """The mean over seeds."""
        return statistics.mean(self.costs)


def complete(known: dict[Trial, Record]) -> list[int]:
    """The seeds that have every run."""
    return [s for s in SEEDS if all(t in known for t in agenda.trials() if t.seed == s)]


def lines(known: dict[Trial, Record]) -> list[Line]:
    """Every way at every ratio, over the seeds that are complete."""
    seeds = complete(known)
    return [
        _line(
            way,
            ratio,
            [(known[Trial(way.dense, None, s)], known[Trial(name, ratio, s)]) for s in seeds],
        )
        for name, way in WAYS.items()
        for ratio in RATIOS
    ]


def _line(way: Way, ratio: float, pairs: list[tuple[Record, Record]]) -> Line:
    dense = [100 * a["accuracy"] for a, _ in pairs]
    costs = [100 * (a["accuracy"] - b["accuracy"]) for a, b in pairs]
    first = pairs[0][1]
    return Line(way, ratio, dense, costs, first["dense_bytes"] / first["sent_bytes"])


def write() -> Path:
    """Writes the page and the picture.

    Raises:
        ValueError: fewer than three seeds are complete, so that there is no standard error.
    """
    found_so_far = records.read()
    seeds = complete(found_so_far)
    if len(seeds) < LEAST_FOR_ERROR:
        found = f"{len(seeds)} of {len(SEEDS)} seeds are complete"
        raise ValueError(f"{found}: {LEAST_FOR_ERROR} are needed; run make practice")
    known = {trial: record for trial, record in found_so_far.items() if trial.seed in seeds}
    found = lines(known)
    _draw(found)
    rates = {trial.loop.optimizer: record["lr"] for trial, record in known.items()}
    again = [trial for trial in known if trial.way and trial.way.restart]
    same = sum(_same(known, trial) for trial in again)
    scaled = [r for trial, r in known.items() if trial.way and trial.loop.precision == "float16"]
    PAGE.write_text(
        TEXT.format(
            steps=agenda.STEPS,
            ranks=agenda.RANKS,
            batch=agenda.BATCH_SIZE,
            sgd=rates["sgd"],
            adamw=rates["adamw"],
            seeds=_seeds(seeds),
            machine=_machine(known),
            tolerance=TOLERANCE,
            table=_table(found),
            verdict=_verdict(found),
            spike_every=agenda.SPIKE_EVERY,
            spike=agenda.SPIKE,
            norm=agenda.NORM,
            restart=agenda.RESTART_AT,
            restarted=same,
            restarts=len(again),
            overflowed=sum(record["overflows"] > 0 for record in scaled),
            halves=len(scaled),
            overflows=sum(record["overflows"] for record in scaled),
        )
    )
    return PAGE


def _seeds(complete: list[int]) -> str:
    missing = len(SEEDS) - len(complete)
    return f"{len(complete)} seeds" + (f" ({missing} more have not been run)" if missing else "")


def _same(known: dict[Trial, Record], trial: Trial) -> bool:
    """Whether a restarted run ended as the one that was not."""
    whole = known[Trial("plain", trial.ratio, trial.seed)]
    return bool(whole["weights"] == known[trial]["weights"])


def _machine(known: dict[Trial, Record]) -> str:
    last = list(known.values())[-1]["environment"]
    return (
        f"{len(known)} runs on {last['cpu']}, {last['cores']} shared cores, Python "
        f"{last['python']}, PyTorch {last['torch']}, Horovod {last['horovod']}, {last['date']}"
    )


def _table(found: list[Line]) -> str:
    header = ["", "dense"]
    header += [word for r in RATIOS for word in (f"cost at {r:g}", "fewer bytes")]
    rows = ([line for line in found if line.way is way] for way in WAYS.values())
    return table(header, map(_row, rows))


def _row(row: list[Line]) -> list[str]:
    """A way's, at all ratios."""
    cells = [row[0].way.title, f"{statistics.mean(row[0].dense):.2f}%"]
    for line in row:
        mark = "**" if line.cost > TOLERANCE else ""
        cells += [f"{mark}{spread(line.costs, '+')}{mark}", f"{line.reduction:.0f}x"]
    return cells


def _verdict(found: list[Line]) -> str:
    """How many loops are within the tolerance, and which of the first ratio are not."""
    first, *others = RATIOS
    beyond = [f"{each.way.title} ({each.cost:+.2f})" for each in _beyond(found, first)]
    more = f" The others: {'; '.join(beyond)}." if beyond else ""
    rest = [f"At ratio {ratio:g}, {_counted(found, ratio)} do." for ratio in others]
    cost = (
        f"**At ratio {first:g}, {_counted(found, first)} loops cost {TOLERANCE:g} points or less.**"
    )
    return filled(" ".join([cost + more, *rest]))


def _beyond(found: list[Line], ratio: float) -> list[Line]:
    return [line for line in found if line.ratio == ratio and line.cost > TOLERANCE]


def _counted(found: list[Line], ratio: float) -> str:
    total = sum(line.ratio == ratio for line in found)
    return f"{total - len(_beyond(found, ratio))} of {total}"


def _draw(found: list[Line]) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 6), dpi=110)
    ways = list(WAYS.values())
    for shift, ratio in zip((-0.15, 0.15), RATIOS, strict=True):
        of_this = [line for line in found if line.ratio == ratio]
        errors = [standard_error(line.costs) for line in of_this]
        places = [ways.index(line.way) + shift for line in of_this]
        costs = [line.cost for line in of_this]
        axes.errorbar(costs, places, xerr=errors, fmt="o", capsize=3, label=f"ratio {ratio:g}")
    axes.axvline(0, color="#444444", linewidth=0.8)
    axes.axvline(TOLERANCE, color="#444444", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(ways)), [way.title.replace("`", "") for way in ways], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("symlog", linthresh=2)  # spikes cost a hundred times as much as the rest
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"points of accuracy below dense (dashed: {TOLERANCE:g}), 2 real ranks")
    axes.legend(frameon=False)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE)
    plt.close(figure)
