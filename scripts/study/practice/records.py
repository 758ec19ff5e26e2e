"""Results on disk, a JSON line a run, and the ranks that train them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import launch
from study.frontier import agenda as sweeps
from study.practice import agenda
from study.practice.agenda import Trial

PATH = launch.ROOT / "docs" / "results" / "practice.jsonl"
LIMIT_SECONDS = 3 * 3600.0

Record = dict[str, Any]


def read(path: Path = PATH) -> dict[Trial, Record]:
    """What has been found so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = map(json.loads, lines)
    return {Trial(**record.pop("trial")): record for record in records}


def finish() -> None:
    """Starts two ranks, which train what has no result yet.

    Raises:
        RunFailedError: a rank failed; the results so far stay.
    """
    if all(trial in read() for trial in agenda.trials()):
        return
    rates = [f"{sweeps.sweep(series):g}" for series in (sweeps.DIGITS, sweeps.DIGITS_ADAMW)]
    launch.run(
        "scripts/practice.py",
        ["--as-rank", *rates],
        ranks=agenda.RANKS,
        limit_seconds=LIMIT_SECONDS,
        echo=True,
    )


def finish_as_rank(sgd: float, adamw: float) -> None:
    """On every rank: trains what has no result yet; rank 0 writes it down."""
    import harness  # the ranks alone need Horovod
    import horovod.torch as hvd
    import torch
    from tqdm import tqdm

    from study.practice.training import train

    hvd.init()
    torch.set_num_threads(1)  # sums keep their order from run to run
    known = hvd.broadcast_object(read(), root_rank=0)
    missing = [trial for trial in agenda.trials() if trial not in known]
    versions = {"torch": torch.__version__}
    for trial in (bar := tqdm(missing, unit="run", disable=hvd.rank() > 0)):
        bar.set_postfix_str(f"{trial.name} {trial.ratio or 'dense'}")
        lr = adamw if trial.loop.optimizer == "adamw" else sgd
        record = {"trial": asdict(trial), "lr": lr, **train(trial, lr)}
        if hvd.rank() == 0:
            _append(record | {"environment": harness.environment(versions)})


def _append(record: Record) -> None:
    with PATH.open("a") as file:
        file.write(json.dumps(record) + "\n")
