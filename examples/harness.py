"""Code that all examples share: command-line arguments, a learning rate, the record of a run.

The record of a run is a progress bar, a summary and a JSON file, all from rank 0. This file imports
no framework; torch_harness.py and tensorflow_harness.py have the code that needs one.
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

from tqdm import tqdm

import horovod_topk
from horovod_topk.cli import launcher
from horovod_topk.cli.doctor.finding import version
from horovod_topk.cli.machine import cpu_model
from horovod_topk.cli.options import parse_ratios
from horovod_topk.config import DEFERRED, check_settings
from horovod_topk.errors import TopKError
from horovod_topk.methods.topk import TopK

SPLITS = ("held-out", "validation")

Batch = TypeVar("Batch")
Describe = Callable[[], dict[str, Any]]  # see `describe`


def arguments(
    description: str | None, *, steps: int, batch_size: int, lr: float, optimizer: str = "sgd"
) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every example, with this example's defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--compression",
        choices=("none", "fp16", "topk"),
        default="none",
        help="how gradients are compressed (default: %(default)s)",
    )
    add(
        "--ratio",
        type=float,
        help="topk: share of each gradient's elements to send (default: that of the optimizer)",
    )
    add(
        "--values",
        default=TopK.values,
        help="topk: format of values, such as int8 (default: %(default)s)",
    )
    add("--exchange", default="allgather", help="topk: how payloads travel (default: allgather)")
    add(
        "--ratios",
        nargs="+",
        default=(),
        metavar="PATTERN=RATIO",
        help="topk: ratios for some tensors, as in 'head.*=dense'; the first match is used",
    )
    add(
        "--momentum",
        type=momentum,
        default=TopK.for_training["momentum"],
        help="topk: a momentum for momentum correction, 0 for none, or 'auto' to adapt the "
        "optimizer's own (default: auto)",
    )
    add(
        "--optimizer",
        choices=("sgd", "adamw"),
        default=optimizer,
        help="default: %(default)s",
    )
    add("--lr", type=float, default=lr, help="peak learning rate (default: %(default)s)")
    add(
        "--batch-size",
        type=positive,
        default=batch_size,
        help="examples per rank and step (default: %(default)s)",
    )
    add("--steps", type=positive, default=steps, help="training steps (default: %(default)s)")
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of the initial weights and of the order of batches",
    )
    add("--json", type=Path, metavar="PATH", help="write the run's history here")
    return parser


def add_evaluation(parser: argparse.ArgumentParser, *, every: int) -> None:
    """Add the arguments of the examples that train on real data."""
    parser.add_argument(
        "--evaluate-every",
        type=positive,
        default=every,
        metavar="STEPS",
        help="steps between two evaluations (default: %(default)s)",
    )
    parser.add_argument(
        "--evaluate-on",
        choices=SPLITS,
        default="held-out",
        help="data to evaluate on; choose learning rates on validation, report results on held-out "
        "(default: %(default)s)",
    )


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; end with usage and the reason if TopKEF would refuse a setting."""
    args = parser.parse_args()
    if args.compression == "topk":
        try:
            check_settings(TopK, topk_settings(args))
        except (ValueError, TopKError) as error:
            parser.error(str(error))
    return args


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number above 0")
    return int(text)


def momentum(text: str) -> float | str:
    """Parse a momentum: a number, or "auto" for the optimizer's own."""
    return text if text in DEFERRED["momentum"] else float(text)


def check_launcher(hvd: Any) -> None:
    """End with a cure if `hvd.init()` would abort because no launcher started this script.

    Horovod with Open MPI's wheel does so, unless OPAL_PREFIX is set; see horovod_topk.cli.launcher.
    """
    problem = launcher.problem(hvd)
    if problem is not None:
        raise SystemExit(problem)


def process_sets(args: argparse.Namespace) -> str | None:
    """Return `process_sets` for `hvd.init`: "dynamic" for exchanges over nodes, else None."""
    return "dynamic" if args.exchange in ("hierarchical", "auto") else None


def topk_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of TopKEF that the arguments give, for any framework."""
    own = parse_ratios(args.ratios)
    named = {name: getattr(args, name) for name in ("values", "exchange", "momentum")}
    ratio = "auto" if args.ratio is None else args.ratio
    if own:
        ratio = {"*": TopK.ratio if args.ratio is None else args.ratio, **dict(own)}
    return {"ratio": ratio, **named}


def own_momentum(args: argparse.Namespace) -> float:
    """Return the optimizer's momentum (AdamW: first beta); 0 if TopKEF is given it instead."""
    corrected = args.compression == "topk" and args.momentum not in (0, *DEFERRED["momentum"])
    return 0.0 if corrected else 0.9


def threads(local_size: int) -> int:
    """Return a rank's threads: OMP_NUM_THREADS, or its share of the machine's cores."""
    share = max(1, len(os.sched_getaffinity(0)) // local_size)
    return int(os.environ.get("OMP_NUM_THREADS", share))


def warmup_cosine(steps: int, warmup: float = 0.05) -> Callable[[int], float]:
    """Return a function from a step to the factor of the learning rate.

    The factor rises linearly over the first `warmup` (a share) of the steps, then falls as a cosine
    to zero.
    """
    rising = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        falling = (step - rising) / max(1, steps - rising)
        return min((step + 1) / rising, 0.5 * (1 + math.cos(math.pi * max(0.0, falling))))

    return factor


def ring_bytes(size: int, ranks: int) -> int:
    """Return the bytes that a rank sends in a ring allreduce: 2 (P - 1) / P times `size`."""
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
    """Return the run's settings and the bytes it sends, for its JSON file, without paths."""
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "data")}
    return {
        "config": settings | {"ranks": ranks},
        "parameters": parameters,
        "sent_bytes": sent_bytes,
        "dense_bytes": dense_bytes,
        "environment": environment(versions),
    }


def environment(versions: dict[str, str]) -> dict[str, Any]:
    """Return the machine, the versions and the date, for readers of the figures."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
        "horovod": version("horovod") or "none",
        "date": time.strftime("%Y-%m-%d"),
    }


def traffic(result: dict[str, Any]) -> str:
    """Return one clause about the bytes of a run, for its summary."""
    sent, dense = result["sent_bytes"], result["dense_bytes"]
    if not sent and result["config"]["ranks"] == 1:
        return "nothing to exchange (one rank)"
    if not sent:
        return "bytes not counted: HOROVOD_TOPK_COMPRESSION has Horovod exchange the gradients"
    return f"{sent:,} bytes a step and rank ({dense / sent:.1f}x fewer than dense float32)"


def summary(result: dict[str, Any]) -> str:
    """Return one line about a finished run."""
    config, history = result["config"], result["history"]
    topk = config["compression"] == "topk"
    name = config["compression"]
    if topk:
        ratios = " ".join(["", *config["ratios"]])
        ratio = config["ratio"] or TopK.ratio
        name = f"topk at {ratio:g}{ratios}, {config['values']}, {config['exchange']}"
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
    """Write a run's result as JSON, one entry a line, if there is a path. For rank 0 only."""
    if path is not None:
        entries = (f'"{key}": {json.dumps(value)}' for key, value in result.items())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{\n" + ",\n".join(entries) + "\n}\n")


class Run:
    """The record of one training run. It is told of each step and of each evaluation.

    Args:
        args: the arguments of the command line.
        rank: this rank; rank 0 prints and writes, the others only count.
        describe: returns the JSON file's entries beside the history; called at the end.
    """

    def __init__(self, args: argparse.Namespace, rank: int, describe: Describe) -> None:
        self._args, self._rank, self._describe = args, rank, describe
        self._bar = tqdm(total=args.steps, unit="step", mininterval=0.5, disable=rank != 0)
        self._history: dict[str, list[float]] = {}  # column -> a value each evaluation
        self._seconds: list[float] = []  # of each step, evaluations not counted
        self._started = 0.0

    @property
    def done(self) -> bool:
        """Whether all steps are done."""
        return len(self._seconds) == self._args.steps

    def begin_step(self) -> None:
        """Start the clock of a step."""
        self._started = time.perf_counter()

    def end_step(self) -> None:
        """Stop the clock, and move the progress bar."""
        self._seconds.append(time.perf_counter() - self._started)
        self._bar.update()

    def add(self, *, loss: float, **scores: float) -> None:
        """Record scores on unseen data, and the training loss since the last evaluation."""
        row = {"step": len(self._seconds), "loss": loss} | scores
        for column, value in row.items():
            self._history.setdefault(column, []).append(round(value, 5))
        horovod_topk.report(**row)  # to `horovod-topk compare`; otherwise nothing happens
        self._bar.set_postfix({column: f"{row[column]:.4f}" for column in ("loss", *scores)})

    def finish(self) -> None:
        """Print the summary and write the JSON file, on rank 0."""
        self._bar.close()
        result = self._describe()
        result["seconds_per_step"] = round(statistics.median(self._seconds), 6)
        result["history"] = self._history
        if self._rank == 0:
            write_json(self._args.json, result)
            print(summary(result), flush=True)


class Loop(Run):
    """The record of a hand-written training loop.

    >>> for inputs, targets in run.steps(batches):
    ...     ...                                    # forward, backward, optimizer.step()
    ...     if run.stepped(loss):                  # true where an evaluation is due
    ...         run.evaluated(accuracy=...)
    >>> run.finish()

    Args:
        args, rank, describe: as in `Run`.
        mean: returns the mean of the losses of all ranks.
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
        """Yield a batch for each step of the run, and time the steps."""
        source = iter(batches)
        while not self.done:
            self.begin_step()
            yield next(source)

    def stepped(self, loss: float) -> bool:
        """Record the end of a step; return whether an evaluation is due now."""
        self._losses.append(loss)
        self.end_step()
        return self.done or len(self._seconds) % self._args.evaluate_every == 0

    def evaluated(self, **scores: float) -> None:
        """Record scores on unseen data, and the mean training loss since the last evaluation."""
        self.add(loss=self._mean(self._losses), **scores)
        self._losses.clear()
