"""docs/accuracy.md and its pictures, made from the results on disk and from nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import launch
from study import classification, language_model, results, trials
from study.markdown import OPTIMIZERS, score, table
from study.results import Result
from study.trials import Task

PAGE = launch.ROOT / "docs" / "accuracy.md"

# As the examples name them among the versions, and as they are called.
FRAMEWORKS = {
    "torch": "PyTorch",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "tf_keras": "tf-keras",
}

INTRODUCTION = """\
# Accuracy at ratio {ratio:g}

<!-- Written by `make accuracy` from docs/results/. Change scripts/study/ instead of this page. -->

Each task is trained with Horovod's dense gradients and with `TopKEF(ratio={ratio:g})`, on {ranks}
ranks, from the same initial weights, on the same batches in the same order, with the same settings.
The learning rate is the one that suits *dense* best, in a sweep of as many steps as is said there;
nothing is tuned for TopKEF. It rises linearly over the first 5% of a run's steps and falls to zero
as a cosine over the rest. SGD has momentum 0.9 and no weight decay, AdamW has PyTorch's defaults.
Every run made for these tables is in them.

Other work shared the machine's cores: compare accuracies and bytes here, not milliseconds.

`make accuracy` makes it all again. A run that has its file in `docs/results/` is not repeated,
unless with `make accuracy ARGS=--force`."""

SWEEP = """\
## Dense's learning rates

Final scores on validation data with dense gradients, one run a seed. No table further down uses
these data or these seeds. A grid grows while its best rate lies on its edge; the rate in bold, the
best on average, of equals the smaller, is the one used below, for longer runs too. What suits dense
best in 1,000 steps need not in 4,000: of the byte language model with SGD that is 0.1 there, where
the defaults lose twice as much as below ([frontier.md](frontier.md), on four ranks)."""


def write() -> Path:
    """Writes the page and its pictures; parts whose runs are not finished say so."""
    classifiers = [task for task in trials.TASKS if task.column == "accuracy"]
    language_models = [task for task in trials.TASKS if task.column == "bits_per_byte"]
    parts = [
        INTRODUCTION.format(ratio=trials.RATIO, ranks=trials.RANKS),
        _machine(_finished()),
        SWEEP,
        *map(_sweep, trials.TASKS),
        *(classification.section(task, steps) for task in classifiers for steps in task.steps),
        *classification.elsewhere(classifiers),
        language_model.section(language_models),
    ]
    PAGE.write_text("\n\n".join(parts) + "\n")
    return PAGE


def _finished() -> list[Result]:
    return results.load(
        trial
        for task in trials.TASKS
        for lr in results.sweep_scores(task)
        for trial in trials.sweep(task, lr) + trials.comparison(task, lr)
    )


def _machine(finished: list[Result]) -> str:
    """The machines behind the results and the frameworks on each, as the runs noted them."""
    form = "{cpu}, {cores} cores, Python {python}, Horovod {horovod} on Gloo"
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
