"""What is trained: tasks, the grid of dense's learning rates, and the runs that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

RANKS = 2
RATIO = 0.01
COMPRESSIONS = ("none", "topk")

# The learning rates that a sweep may try: 1, 2, 5, 10, ...
LADDER = tuple(float(f"{digit}e{exponent}") for exponent in range(-6, 2) for digit in (1, 2, 5))


@dataclass(frozen=True)
class Task:
    """One example with one optimizer. Its dense sweep and its comparison share all but seeds."""

    title: str  # in the report
    script: str  # the example
    optimizer: str
    column: str  # of the histories: the score on unseen data
    higher_is_better: bool
    steps: tuple[int, ...]  # lengths of the compared runs
    sweep_steps: int  # length of the sweep's runs, one of `steps`
    evaluations: int  # of a run, evenly spaced
    seeds: tuple[int, ...]  # of the compared runs
    grid: tuple[float, ...]  # learning rates to try at first
    sweep_seeds: tuple[int, ...]  # not among `seeds`

    @property
    def name(self) -> str:
        """On the command line; PyTorch's have no prefix."""
        return self.script.removeprefix("pytorch_").removesuffix(".py").replace("_", "-")

    @property
    def example(self) -> str:
        """The script, from the repository's root."""
        return f"examples/{self.script}"

    @property
    def key(self) -> str:
        """Names the task in files."""
        return f"{self.name}-{self.optimizer}"


@dataclass(frozen=True)
class Trial:
    """One run of a task."""

    task: Task
    evaluate_on: str  # "validation" in a sweep, "held-out" in a comparison
    compression: str
    lr: float
    steps: int
    seed: int

    @property
    def name(self) -> str:
        """Unique among trials, and made of all that tells them apart."""
        kind = "sweep" if self.evaluate_on == "validation" else self.compression
        return f"{self.task.key}-{kind}-{self.steps}steps-lr{self.lr:g}-seed{self.seed}"

    @property
    def arguments(self) -> list[str]:
        """What the example is called with."""
        options = {
            "--compression": self.compression,
            "--ratio": RATIO,
            "--optimizer": self.task.optimizer,
            "--lr": f"{self.lr:g}",
            "--steps": self.steps,
            "--seed": self.seed,
            "--evaluate-every": self.steps // self.task.evaluations,
            "--evaluate-on": self.evaluate_on,
        }
        if self.compression != "topk":
            del options["--ratio"]
        return [str(word) for option in options.items() for word in option]


def sweep(task: Task, lr: float) -> list[Trial]:
    """Dense runs at one learning rate, scored on validation data."""
    return [
        Trial(task, "validation", "none", lr, task.sweep_steps, seed) for seed in task.sweep_seeds
    ]


def compared(task: Task, lr: float, steps: int, compression: str) -> list[Trial]:
    """Runs scored on held-out data, one a seed."""
    return [Trial(task, "held-out", compression, lr, steps, seed) for seed in task.seeds]


def comparison(task: Task, lr: float) -> list[Trial]:
    """All runs that compare compression with dense, at dense's learning rate."""
    return [
        trial
        for steps, compression in product(task.steps, COMPRESSIONS)
        for trial in compared(task, lr, steps, compression)
    ]


def _classification(
    title: str,
    script: str,
    steps: tuple[int, ...],
    sweep_steps: int,
    evaluations: int,
    grid: tuple[float, ...],
    sweep_seeds: tuple[int, ...],
) -> Task:
    return Task(
        title=title,
        script=script,
        optimizer="sgd",
        column="accuracy",
        higher_is_better=True,
        steps=steps,
        sweep_steps=sweep_steps,
        evaluations=evaluations,
        seeds=(0, 1, 2, 3, 4),
        grid=grid,
        sweep_seeds=sweep_seeds,
    )


def _language_model(optimizer: str, steps: tuple[int, ...], grid: tuple[float, ...]) -> Task:
    return Task(
        title="Byte GPT",
        script="pytorch_bytelm.py",
        optimizer=optimizer,
        column="bits_per_byte",
        higher_is_better=False,
        steps=steps,
        sweep_steps=1000,
        evaluations=10,
        seeds=(0, 1),
        grid=grid,
        sweep_seeds=(100,),
    )


def _digits(title: str, script: str, grid: tuple[float, ...], sweep_seeds: tuple[int, ...]) -> Task:
    return _classification(title, script, (1000,), 1000, 50, grid, sweep_seeds)


TASKS = (
    _digits("PyTorch digits", "pytorch_digits.py", (0.01, 0.02, 0.05, 0.1, 0.2), (100, 101)),
    _digits("TensorFlow digits", "tensorflow_digits.py", (0.05, 0.1, 0.2), (100, 101)),
    _digits("Keras 3 digits", "keras_digits.py", (0.05, 0.1, 0.2), (100, 101)),
    _digits("tf-keras digits", "tfkeras_digits.py", (0.05, 0.1, 0.2), (100, 101)),
    _classification(
        "Byte CNN",
        "pytorch_snippets.py",
        steps=(1000, 6000, 12000),
        sweep_steps=6000,
        evaluations=20,
        grid=(0.02, 0.05, 0.1, 0.2),
        sweep_seeds=(100,),
    ),
    _language_model("sgd", (1000, 4000, 16000), grid=(0.1, 0.2, 0.5)),
    _language_model("adamw", (1000, 4000), grid=(0.002, 0.005, 0.01)),
)
