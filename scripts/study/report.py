"""docs/accuracy.md and its pictures, made from the results on disk and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import launch
from study import classification, language_model, results, trials
from study.markdown import (
    NAMES,
    OPTIMIZERS,
    differences,
    filled,
    reduction,
    score,
    scores_of,
    table,
)
from study.results import Comparison, Result
from study.trials import Task

PAGE = launch.ROOT / "docs" / "accuracy.md"
SHORT_STEPS = 4000  # the longest run of the language model that counts as short

# As the examples name them among the versions, and as they are called.
FRAMEWORKS = {
    "torch": "PyTorch",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "tf_keras": "tf-keras",
}

INTRODUCTION = """\
# Accuracy with the default: ratio {ratio:g}

<!-- Written by `make accuracy` from docs/results/. Change scripts/study/ instead of this page. -->

Each task is trained twice from the same initial weights, on the same batches: with Horovod's dense
gradients and with `TopKEF(ratio={ratio:g})`, the default. **Ranks are real**: {ranks} processes,
started by `horovodrun`, exchange gradients over Gloo on the CPUs of one machine. Models are small
(227 to 284 thousand parameters)."""

READING = """\
**The default is not for language models, nor for short runs.** On the byte GPT it needed {worst}
more bits a byte than dense in runs of at most {steps:,} steps{longer}.
At dense's best learning rate for 4,000 steps it needed 21% to 53% more (four simulated ranks;
[frontier.md](frontier.md), which also has settings that lose far less).

Longer runs lose less. At ratio {ratio:g} an element is sent once in {wait:,.0f} steps on average
and waits in the residual until then. Near the largest learning rate at which dense is stable, the
default loses more ([other learning rates](#other-learning-rates))."""

IN_SHORT = """\
Difference: TopKEF's final score minus dense's, on held-out data. Accuracy is in points (more is
better), bits a byte in % of dense's (fewer is better). Three seeds or more are a mean with its
standard error; two seeds are two values."""

METHOD = """\
## How it was measured

- The learning rate is the best one for *dense*, from a
  [sweep on validation data](#denses-learning-rates). Nothing is tuned for TopKEF. The rate rises
  linearly over the first 5% of the steps, then falls to zero as a cosine.
- SGD has momentum 0.9 and no weight decay. AdamW has PyTorch's defaults.
- "Fewer bytes" compares the bytes that a rank sends in a step with those of a dense ring allreduce,
  at {ranks} ranks and in the payload format of that day. Today's format sends fewer bytes for the
  same values: 67 times fewer for the digits, 43 for the byte GPT ([frontier.md](frontier.md),
  columns P=2).
- The digits are a CNN on images of 8 x 8 pixels. The byte CNN tells which package of Python's
  standard library 64 bytes come from. The byte GPT predicts the next byte of that library's files.
- The digits networks of Keras 3 and tf-keras start from equal weights and see equal batches. Their
  scores came out equal.
- Every run that was made is on this page.
- Other work shared the machine's cores, so this page has no times: see [network.md](network.md).

`make accuracy` makes the missing runs and writes this page. A run with a file in `docs/results/` is
not repeated, except with `make accuracy ARGS=--force`."""

SWEEP = """\
## Dense's learning rates

Final scores on validation data with dense gradients, one run a seed. The comparisons above use
other data and other seeds. The best rate on average is in bold (of two equal ones, the smaller). If
it lies at the edge of the grid, the grid grows. The comparisons use that rate at every length,
although longer runs may prefer another one: at 4,000 steps the byte GPT with SGD prefers 0.1, where
the default loses twice as much as on this page ([frontier.md](frontier.md), four simulated
ranks)."""


def write() -> Path:
    """Writes the page and its pictures; parts whose runs are not finished say so."""
    classifiers = [task for task in trials.TASKS if task.column == "accuracy"]
    language_models = [task for task in trials.TASKS if task.column == "bits_per_byte"]
    parts = [
        INTRODUCTION.format(ratio=trials.RATIO, ranks=trials.RANKS),
        *_in_short(),
        METHOD.format(ranks=trials.RANKS),
        _machine(_finished()),
        *(classification.section(task, steps) for task in classifiers for steps in task.steps),
        *classification.elsewhere(classifiers),
        language_model.section(language_models),
        SWEEP,
        *map(_sweep, trials.TASKS),
    ]
    PAGE.write_text("\n\n".join(parts) + "\n")
    return PAGE


def _in_short() -> list[str]:
    """What a reader should take from the page: a line a comparison, and what they say."""
    wanted = [(task, steps) for task in trials.TASKS for steps in task.steps]
    found = [each for each in (results.comparison(*run) for run in wanted) if each]
    header = ["task", "optimizer", "steps", "seeds", "dense", NAMES["topk"], "difference"]
    rows = table([*header, "fewer bytes"], map(_line, found))
    return [*_reading(found), IN_SHORT, rows]


def _line(found: Comparison) -> list[str]:
    task = found.task
    scores = (scores_of(task, found.scores(runs)) for runs in (found.dense, found.topk))
    return [
        task.title,
        OPTIMIZERS[task.optimizer],
        f"{found.steps:,}",
        str(len(task.seeds)),
        *scores,
        differences(found),
        reduction(found.topk[0]),
    ]


def _reading(found: Sequence[Comparison]) -> list[str]:
    """Names the loss of the language model; nothing before it has been run."""
    of_all = [each for each in found if each.task.column == "bits_per_byte"]
    short = [each for each in of_all if each.steps <= SHORT_STEPS]
    if not short:
        return []
    gaps = [gap for each in short for gap in each.gaps]
    rest = [each for each in of_all if each.steps > SHORT_STEPS]
    longer = "".join(
        f", and {differences(each)} in {each.steps:,} steps ({OPTIMIZERS[each.task.optimizer]})"
        for each in rest
    )
    text = READING.format(
        worst=f"{min(gaps):.0%} to {max(gaps):.0%}",
        steps=max(each.steps for each in short),
        longer=longer,
        ratio=trials.RATIO,
        wait=1 / trials.RATIO,
    )
    return [filled(text)]


def _finished() -> list[Result]:
    return results.load(
        trial
        for task in trials.TASKS
        for lr in results.sweep_scores(task)
        for trial in trials.sweep(task, lr) + trials.comparison(task, lr)
    )


def _machine(finished: list[Result]) -> str:
    """The machines behind the results and the frameworks on each, as the runs noted them."""
    form = "{cpu}, {cores} cores, Python {python}, Horovod {horovod} on Gloo, CPU only"
    found = [run["environment"] for run in finished]
    on_machine: dict[str, set[str]] = {}
    for each in found:
        on_machine.setdefault(form.format(**each), set()).add(_framework(each))
    machines = [f"{name} ({'; '.join(sorted(on_machine[name]))})" for name in sorted(on_machine)]
    dates = sorted({each["date"] for each in found})
    days = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
    return f"Machine: {', '.join(machines)}. Date: {days}."


def _framework(found: dict[str, Any]) -> str:
    """What an environment trains with, for example "TensorFlow 2.20.0 with Keras 3.15.1"."""
    return " with ".join(f"{FRAMEWORKS[key]} {found[key]}" for key in FRAMEWORKS if key in found)


def _sweep(task: Task) -> str:
    chosen = results.chosen(task)
    title = f"{task.title}, {OPTIMIZERS[task.optimizer]}, {task.sweep_steps:,} steps"
    unit = task.column.replace("_", " ")
    rows = [
        [f"**{lr:g}**" if lr == chosen else f"{lr:g}", *_of_seeds(task, runs)]
        for lr in trials.LADDER
        if (runs := results.load(trials.sweep(task, lr)))
    ]
    header = ["learning rate", *(f"seed {seed}" for seed in task.sweep_seeds)]
    return f"### {title}: {unit}\n\n{table(header, rows)}"


def _of_seeds(task: Task, runs: list[Result]) -> list[str]:
    """Final scores; of a rate that the grid left out again, of some seeds alone."""
    found = {run["config"]["seed"]: run for run in runs}
    return [
        score(task, results.final_score(task, found[seed])) if seed in found else "-"
        for seed in task.sweep_seeds
    ]
