"""What the examples share, whatever their framework: arguments, a schedule, the record of a run.

The record is a progress bar, a summary and a JSON file, all three from rank 0 alone. What needs a
framework is in torch_harness.py and tensorflow_harness.py; this file imports neither.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import horovod
from tqdm import tqdm

from horovod_topk.cli.processor import cpu_model
from horovod_topk.cli.ratios import parse_ratios
from horovod_topk.config import TopKConfig
from horovod_topk.core.base_compressor import COMPACT, TAKE_OVER
from horovod_topk.errors import TopKError

SPLITS = ("held-out", "validation")

Batch = TypeVar("Batch")
Describe = Callable[[], dict[str, Any]]  # see `describe`


def arguments(
    description: str | None, *, steps: int, batch_size: int, lr: float, optimizer: str = "sgd"
) -> argparse.ArgumentParser:
    """A parser with the arguments of every example, at this example's defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--compression",
        choices=("none", "fp16", "topk", "compact"),
        default="none",
        help="of gradients; compact is topk with the settings of TopKEF.compact()",
    )
    add("--ratio", type=float, default=TopKConfig.ratio, help="part of the gradient topk sends")
    add("--values", default=TopKConfig.values, help="how, such as int8 (default: %(default)s)")
    add("--exchange", default="allgather", help="how its payloads travel (default: allgather)")
    add(
        "--ratios",
        nargs="+",
        default=(),
        metavar="PATTERN=RATIO",
        help="of some tensors, as in 'head.*=dense'; the first that matches wins",
    )
    add(
        "--momentum",
        type=momentum,
        default=TopKConfig.momentum,
        help="of momentum correction in topk, or 'optimizer' to take over its own (default: off)",
    )
    add("--optimizer", choices=("sgd", "adamw"), default=optimizer)
    add("--lr", type=float, default=lr, help="peak learning rate (default: %(default)s)")
    add("--batch-size", type=positive, default=batch_size, help="per rank (default: %(default)s)")
    add("--steps", type=positive, default=steps, help="default: %(default)s")
    add("--seed", type=int, default=0, help="of the initial weights and of the order of batches")
    add("--json", type=Path, metavar="PATH", help="write the run's history here")
    return parser


def add_evaluation(parser: argparse.ArgumentParser, *, every: int) -> None:
    """Adds the arguments of the examples that train on real data."""
    parser.add_argument("--evaluate-every", type=positive, default=every, metavar="STEPS")
    parser.add_argument(
        "--evaluate-on",
        choices=SPLITS,
        default="held-out",
        help="choose learning rates on validation, report on held-out (default: %(default)s)",
    )


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What was given, after a look at what TopKEF would refuse; usage and the reason, if it does.

    `compact` is spelt out, as topk with what it stands for where nothing else was given.
    """
    args = parser.parse_args()
    if args.compression == "compact":
        args.compression = "topk"
        for name, value in COMPACT.items():
            if getattr(args, name) == parser.get_default(name):
                setattr(args, name, value)
    if args.compression == "topk":
        known = 0.9 if args.momentum == TAKE_OVER else args.momentum  # any that is valid
        settings = vars(args) | {"momentum": known}
        try:
            TopKConfig(**topk_settings(argparse.Namespace(**settings)))
        except (ValueError, TopKError) as error:
            parser.error(str(error))
    return args


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number above 0")
    return int(text)


def momentum(text: str) -> float | str:
    """A number, or the word that takes over the optimizer's."""
    return text if text == TAKE_OVER else float(text)


def process_sets(args: argparse.Namespace) -> str | None:
    """What `hvd.init` is told: an exchange over nodes needs process sets, and others none."""
    return "dynamic" if args.exchange in ("hierarchical", "auto") else None


def topk_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the arguments say of TopKEF, of either framework."""
    named = ("ratio", "values", "exchange", "momentum")
    return {name: getattr(args, name) for name in named} | {"ratios": parse_ratios(args.ratios)}


def own_momentum(args: argparse.Namespace) -> float:
    """The optimizer's, of AdamW its first beta: 0 where TopKEF applies it, corrected."""
    corrected = args.compression == "topk" and args.momentum not in (0, TAKE_OVER)
    return 0.0 if corrected else 0.9


def threads(local_size: int) -> int:
    """OMP_NUM_THREADS, or else a rank's fair share of its machine's cores."""
    share = max(1, len(os.sched_getaffinity(0)) // local_size)
    return int(os.environ.get("OMP_NUM_THREADS", share))


def warmup_cosine(steps: int, warmup: float = 0.05) -> Callable[[int], float]:
    """The factor of the learning rate at a step.

    It rises linearly over the first `warmup` of the run, then falls as a cosine, to zero.
    """
    rising = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        falling = (step - rising) / max(1, steps - rising)
        return min((step + 1) / rising, 0.5 * (1 + math.cos(math.pi * max(0.0, falling))))

    return factor


def ring_bytes(size: int, ranks: int) -> int:
    """Bytes a rank sends in a ring allreduce of `size` bytes: 2 (P - 1) / P times as many."""
    return round(2 * (ranks - 1) / ranks * size)


def describe(
    args: argparse.Namespace,
    *,
    ranks: int,
    parameters: int,
    sent_bytes: int,
    dense_bytes: int,
    versions: dict[str, str],
) -> dict[str, Any]:
    """The run's settings and the bytes it sends, for its JSON file. Paths are left out."""
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "data")}
    return {
        "config": settings | {"ranks": ranks},
        "parameters": parameters,
        "sent_bytes": sent_bytes,
        "dense_bytes": dense_bytes,
        "environment": environment(versions),
    }


def environment(versions: dict[str, str]) -> dict[str, Any]:
    """What a reader of the figures needs to know of the machine and the software."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
        "horovod": horovod.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def traffic(result: dict[str, Any]) -> str:
    """One clause on the bytes of a run, for its summary."""
    sent, dense = result["sent_bytes"], result["dense_bytes"]
    if not sent:
        return "nothing to exchange (one rank)"
    return f"{sent:,} bytes a step and rank ({dense / sent:.1f}x fewer than dense float32)"


def summary(result: dict[str, Any]) -> str:
    """One line on a finished run."""
    config, history = result["config"], result["history"]
    topk = config["compression"] == "topk"
    name = config["compression"]
    if topk:
        ratios = " ".join(["", *config["ratios"]])
        name = f"topk at {config['ratio']:g}{ratios}, {config['values']}, {config['exchange']}"
    scores = (
        f"{config['evaluate_on']} {column.replace('_', ' ')} {values[-1]:.4f}"
        for column, values in history.items()
        if column not in ("step", "loss")
    )
    return (
        f"{name}, ranks: {config['ranks']}, steps: {config['steps']}; {', '.join(scores)}; "
        f"{traffic(result)}; {1e3 * result['seconds_per_step']:.1f} ms a step"
    )


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Writes a run's result, an entry a line, if a path was given. For rank 0 alone."""
    if path is not None:
        entries = (f'"{key}": {json.dumps(value)}' for key, value in result.items())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{\n" + ",\n".join(entries) + "\n}\n")


class Run:
    """The record of one training run, told of each step and of each evaluation.

    Args:
        args: of the command line.
        rank: 0 prints and writes, the others only count.
        describe: what the JSON file says of the run beside its history; asked for at the end.
    """

    def __init__(self, args: argparse.Namespace, rank: int, describe: Describe) -> None:
        self._args, self._rank, self._describe = args, rank, describe
        self._bar = tqdm(total=args.steps, unit="step", mininterval=0.5, disable=rank != 0)
        self._history: dict[str, list[float]] = {}  # column -> a value each evaluation
        self._seconds: list[float] = []  # of each step, evaluations not counted
        self._started = 0.0

    @property
    def done(self) -> bool:
        """Whether all steps are."""
        return len(self._seconds) == self._args.steps

    def begin_step(self) -> None:
        """Starts the clock."""
        self._started = time.perf_counter()

    def end_step(self) -> None:
        """Stops it, and moves the bar."""
        self._seconds.append(time.perf_counter() - self._started)
        self._bar.update()

    def add(self, *, loss: float, **scores: float) -> None:
        """Notes scores on unseen data, and the training loss since they were last noted."""
        row = {"step": len(self._seconds), "loss": loss} | scores
        for column, value in row.items():
            self._history.setdefault(column, []).append(round(value, 5))
        self._bar.set_postfix({column: f"{row[column]:.4f}" for column in ("loss", *scores)})

    def finish(self) -> None:
        """Prints the summary and writes the JSON file, both from rank 0."""
        self._bar.close()
        result = self._describe()
        result["seconds_per_step"] = round(statistics.median(self._seconds), 6)
        result["history"] = self._history
        if self._rank == 0:
            write_json(self._args.json, result)
            print(summary(result), flush=True)


class Loop(Run):
    """The record of a training loop that is written out.

    >>> for inputs, targets in run.steps(batches):
    ...     ...                                    # forward, backward, optimizer.step()
    ...     if run.stepped(loss):                  # true where an evaluation is due
    ...         run.evaluated(accuracy=...)
    >>> run.finish()

    Args:
        args, rank, describe: as `Run`.
        mean: the mean of every rank's losses.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        rank: int,
        describe: Describe,
        mean: Callable[[list[float]], float],
    ) -> None:
        super().__init__(args, rank, describe)
        self._mean = mean
        self._losses: list[float] = []  # of this rank, since the last evaluation

    def steps(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Hands out a batch for each step of the run, and times the steps."""
        source = iter(batches)
        while not self.done:
            self.begin_step()
            yield next(source)

    def stepped(self, loss: float) -> bool:
        """Notes the end of a step; true where an evaluation is due, and after the last step."""
        self._losses.append(loss)
        self.end_step()
        return self.done or len(self._seconds) % self._args.evaluate_every == 0

    def evaluated(self, **scores: float) -> None:
        """Notes scores on unseen data, and the training loss since the evaluation before."""
        self.add(loss=self._mean(self._losses), **scores)
        self._losses.clear()
