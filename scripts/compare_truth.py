"""Known truths: how often the verdict of `horovod-topk compare` is right where the truth is known.

Runs are made up: a loss that falls with the square root of steps, as far as a seed's own data and
weights let it, with noise of a run's own; a step takes a time that varies from run to run. The rule
sees of them what it sees of real runs. Prints the tables of docs/compare.md.

    python scripts/compare_truth.py [--comparisons 400]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from horovod_topk.cli.compare.curves import Metric
from horovod_topk.cli.compare.records import DONE, Cell, Point, Record
from horovod_topk.cli.compare.uncertainty import BETTER, UNCLEAR, WORSE
from horovod_topk.cli.compare.verdict import FASTER, NOT, PAYS, UNKNOWN, judge
from pages.markdown import table

LOSS = Metric("loss", higher_is_better=False)
STEPS, REPORTS = 1000, 20
OF_SEED, OF_RUN, OF_TIME = 0.05, 0.01, 0.03  # relative spreads: loss by seed, by run; time by run


@dataclass(frozen=True)
class Truth:
    """What is true of a compressor beside dense, and what the rule should say."""

    name: str
    progress: float  # steps of dense that a step is worth
    seconds: float  # of a step, dense's being 1
    quality: str  # BETTER, WORSE or UNCLEAR
    verdict: str


TRUTHS = (
    Truth("dense by another name", 1.0, 1.0, UNCLEAR, UNKNOWN),
    Truth("drops one gradient in ten", 0.9, 1.0, WORSE, NOT),
    Truth("a fast network: 1.3 times slower, as good", 1.0, 1.3, UNCLEAR, NOT),
    Truth("a slow network: 5 times faster, as good", 1.0, 0.2, UNCLEAR, PAYS),
    Truth("a slow network: 5 times faster, worse", 0.7, 0.2, WORSE, FASTER),
)


def run(seed: int, level: float, truth: tuple[float, float], draw: np.random.Generator) -> Record:
    """A made-up run. level: the loss of this seed's data and weights, times the usual one."""
    progress, seconds = truth
    pace = seconds * np.exp(OF_TIME * draw.normal())
    steps = np.linspace(STEPS / REPORTS, STEPS, REPORTS)
    values = (
        level * (1 + 30 / np.sqrt(steps * progress)) * np.exp(OF_RUN * draw.normal(size=REPORTS))
    )
    points = tuple(
        Point(int(step), float(step * pace), {"loss": float(value)})
        for step, value in zip(steps, values, strict=True)
    )
    return Record(Cell("", seed, (), (), ()), DONE, points=points)


def words(truth: Truth, seeds: int, comparisons: int) -> tuple[Counter[str], Counter[str]]:
    """The verdicts of so many comparisons, and what they say of quality at equal steps."""
    draw = np.random.default_rng(1)
    verdicts, qualities = Counter[str](), Counter[str]()
    for _ in range(comparisons):
        levels = np.exp(OF_SEED * draw.normal(size=seeds))
        own, float32, fp16 = (
            {seed: run(seed, level, kind, draw) for seed, level in enumerate(levels)}
            for kind in ((truth.progress, truth.seconds), (1.0, 1.0), (1.0, 1.0))
        )
        verdict = judge(own, {"float32": float32, "fp16": fp16}, LOSS)
        verdicts[verdict.word] += 1
        qualities[verdict.beside["float32"].steps.word] += 1
    return verdicts, qualities


def made_up_table(seeds: int, comparisons: int) -> str:
    """How often each word was said."""
    kinds, grades = (PAYS, FASTER, NOT, UNKNOWN), (BETTER, WORSE, UNCLEAR)
    found = list[Sequence[str]]()
    for truth in TRUTHS:
        verdicts, qualities = words(truth, seeds, comparisons)
        cells = [_cell(qualities, each, truth.quality, comparisons) for each in grades]
        more = [_cell(verdicts, each, truth.verdict, comparisons) for each in kinds]
        found.append((truth.name, *cells, "", *more))
    return table(("truth", *grades, "verdict:", *kinds), found)


def _cell(counted: Counter[str], word: str, right: str, comparisons: int) -> str:
    share = f"{100 * counted[word] / comparisons:.1f}%"
    return f"**{share}**" if word == right else share


def main() -> None:
    """Print a table for each number of seeds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--comparisons", type=int, default=400)
    args = parser.parse_args()
    for seeds in (3, 5, 8):
        print(f"{seeds} seeds, {args.comparisons} comparisons\n")
        print(made_up_table(seeds, args.comparisons), "\n")


if __name__ == "__main__":
    main()
