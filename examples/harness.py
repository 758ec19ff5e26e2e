"""What the examples share, so that each of them reads as an ordinary Horovod training script.

Arguments, the compression they name, a rank's share of the batches, a learning-rate schedule,
and the record of a run: a progress bar, a summary and a JSON file, all three from rank 0 alone.
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
from typing import Any

import horovod
import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

SPLITS = ("held-out", "validation")


def arguments(
    description: str | None, *, steps: int, batch_size: int, lr: float, optimizer: str = "sgd"
) -> argparse.ArgumentParser:
    """A parser with the arguments of every example, at this example's defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--compression", choices=("none", "fp16", "topk"), default="none", help="of gradients")
    add("--ratio", type=float, default=0.01, help="part of the gradient that topk sends")
    add("--optimizer", choices=("sgd", "adamw"), default=optimizer)
    add("--lr", type=float, default=lr, help="peak learning rate (default: %(default)s)")
    add("--batch-size", type=int, default=batch_size, help="per rank (default: %(default)s)")
    add("--steps", type=int, default=steps, help="default: %(default)s")
    add("--seed", type=int, default=0, help="of the initial weights and of the order of batches")
    add("--json", type=Path, metavar="PATH", help="write the run's history here")
    return parser


def add_evaluation(parser: argparse.ArgumentParser, *, every: int) -> None:
    """Adds the arguments of the examples that train on real data."""
    parser.add_argument("--evaluate-every", type=int, default=every, metavar="STEPS")
    parser.add_argument(
        "--evaluate-on",
        choices=SPLITS,
        default="held-out",
        help="choose learning rates on validation, report on held-out (default: %(default)s)",
    )


def threads() -> int:
    """OMP_NUM_THREADS, or else this rank's fair share of its machine's cores."""
    share = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    return int(os.environ.get("OMP_NUM_THREADS", share))


def compression(args: argparse.Namespace) -> Any:
    """What `hvd.DistributedOptimizer` takes as its `compression`."""
    if args.compression == "topk":
        # Imported here and not above, so that the other two run a Horovod nobody has touched.
        from horovod_topk.torch import TopKEF

        return TopKEF(ratio=args.ratio)
    return getattr(hvd.Compression, args.compression)


def optimizer(args: argparse.Namespace, model: nn.Module) -> Optimizer:
    """The optimizer the arguments name, before Horovod wraps it."""
    if args.optimizer == "adamw":
        return AdamW(model.parameters(), lr=args.lr)
    return SGD(model.parameters(), lr=args.lr, momentum=0.9)


def warmup_cosine(steps: int, warmup: float = 0.05) -> Callable[[int], float]:
    """The factor of the learning rate at a step, for `LambdaLR`.

    It rises linearly over the first `warmup` of the run, then falls as a cosine, to zero.
    """
    rising = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        falling = (step - rising) / max(1, steps - rising)
        return min((step + 1) / rising, 0.5 * (1 + math.cos(math.pi * max(0.0, falling))))

    return factor


def batches(*columns: Tensor, batch_size: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Endless batches of this rank's share of the rows, shuffled anew each epoch.

    The order depends on the seed and the number of ranks, and on nothing else.
    """
    rows = TensorDataset(*columns)
    share: DistributedSampler[Any] = DistributedSampler(
        rows, num_replicas=hvd.size(), rank=hvd.rank(), seed=seed, drop_last=True
    )
    loader = DataLoader(rows, batch_size=None, sampler=BatchSampler(share, batch_size, True))
    if not len(loader):
        raise SystemExit(f"--batch-size {batch_size}: a rank has only {len(share)} examples")
    epoch = 0
    while True:
        share.set_epoch(epoch)
        yield from loader
        epoch += 1


@torch.no_grad()
def mean_over_rows(score: Callable[..., Tensor], *columns: Tensor, batch_size: int = 256) -> float:
    """The mean of `score(*columns)`, one value a row, with the rows shared out among the ranks."""
    share = [column[hvd.rank() :: hvd.size()] for column in columns]
    total = torch.zeros(2, dtype=torch.float64)
    for batch in zip(*(column.split(batch_size) for column in share), strict=True):
        scores = score(*batch)
        total += torch.tensor([scores.double().sum(), len(scores)])
    total = hvd.allreduce(total, op=hvd.Sum, name="mean_over_rows")
    return (total[0] / total[1]).item()


def allreduce_bytes(model: nn.Module, compression: str) -> int:
    """Bytes a rank sends in a ring allreduce of the gradients: 2 (P - 1) / P times their size."""
    size = sum(
        p.numel() * (2 if compression == "fp16" else p.element_size())
        for p in model.parameters()
        if p.requires_grad
    )
    return round(2 * (hvd.size() - 1) / hvd.size() * size)


def sent_bytes(args: argparse.Namespace, model: nn.Module, optimizer: Optimizer) -> int:
    """Bytes a rank sends in a step, with the compression the arguments name."""
    if args.compression == "topk":
        from horovod_topk.torch import TopKEF

        return TopKEF.of(optimizer).stats().sent_bytes
    return allreduce_bytes(model, args.compression)


def cpu_model() -> str:
    """The processor's name, as the kernel gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def environment() -> dict[str, Any]:
    """What a reader of the figures needs to know of the machine and the software."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "horovod": horovod.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def describe(args: argparse.Namespace, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The run's settings and the bytes it sends, for its JSON file. Paths are left out."""
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "data")}
    return {
        "config": settings | {"ranks": hvd.size()},
        "parameters": sum(p.numel() for p in model.parameters()),
        "sent_bytes": sent_bytes(args, model, optimizer),
        "dense_bytes": allreduce_bytes(model, "none"),
        "environment": environment(),
    }


def traffic(result: dict[str, Any]) -> str:
    """One clause on the bytes of a run, for its summary."""
    sent, dense = result["sent_bytes"], result["dense_bytes"]
    if not sent:
        return "nothing to exchange (one rank)"
    return f"{sent:,} bytes a step and rank ({dense / sent:.1f}x fewer than dense float32)"


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Writes a run's result from rank 0, an entry a line, if a path was given."""
    if path is not None and hvd.rank() == 0:
        entries = (f'"{key}": {json.dumps(value)}' for key, value in result.items())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{\n" + ",\n".join(entries) + "\n}\n")


class Run:
    """The record of one training run.

    >>> run = Run(args, model, optimizer)
    >>> for inputs, targets in run.steps(batches):
    ...     ...                                    # forward, backward, optimizer.step()
    ...     if run.stepped(loss):                  # true where an evaluation is due
    ...         run.evaluated(accuracy=...)
    >>> run.finish()
    """

    def __init__(self, args: argparse.Namespace, model: nn.Module, optimizer: Optimizer) -> None:
        self._args, self._model, self._optimizer = args, model, optimizer
        self._bar = tqdm(total=args.steps, unit="step", mininterval=0.5, disable=hvd.rank() != 0)
        self._history: dict[str, list[float]] = {}  # column -> a value each evaluation
        self._losses: list[float] = []  # of this rank, since the last evaluation
        self._seconds: list[float] = []  # of each step, evaluations not counted
        self._started = 0.0

    def steps(self, batches: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Hands out a batch for each step of the run, and times the steps."""
        source = iter(batches)
        for _ in range(self._args.steps):
            self._started = time.perf_counter()
            yield next(source)

    def stepped(self, loss: Tensor) -> bool:
        """Notes the end of a step; true where an evaluation is due, and after the last step."""
        self._losses.append(loss.item())
        self._seconds.append(time.perf_counter() - self._started)
        self._bar.update()
        step = len(self._seconds)
        return step % self._args.evaluate_every == 0 or step == self._args.steps

    def evaluated(self, **scores: float) -> None:
        """Notes scores on unseen data, and the training loss since the evaluation before."""
        loss = hvd.allreduce(torch.tensor(self._losses), name="losses").mean().item()
        self._losses.clear()
        row = {"step": len(self._seconds), "loss": loss} | scores
        for column, value in row.items():
            self._history.setdefault(column, []).append(round(value, 5))
        self._bar.set_postfix({column: f"{row[column]:.4f}" for column in ("loss", *scores)})

    def finish(self) -> None:
        """Prints the summary and writes the JSON file, both from rank 0."""
        self._bar.close()
        result = describe(self._args, self._model, self._optimizer)
        result["seconds_per_step"] = round(statistics.median(self._seconds), 6)
        result["history"] = self._history
        write_json(self._args.json, result)
        if hvd.rank() == 0:
            print(self._summary(result), flush=True)

    def _summary(self, result: dict[str, Any]) -> str:
        args = self._args
        name = f"topk at {args.ratio:g}" if args.compression == "topk" else args.compression
        scores = (
            f"{args.evaluate_on} {column.replace('_', ' ')} {values[-1]:.4f}"
            for column, values in self._history.items()
            if column not in ("step", "loss")
        )
        return (
            f"{name}, ranks: {hvd.size()}, steps: {args.steps}; {', '.join(scores)}; "
            f"{traffic(result)}; {1e3 * result['seconds_per_step']:.1f} ms a step"
        )
