"""A comparison from its first run to its report."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from horovod_topk.cli.compare.picture import draw
from horovod_topk.cli.compare.records import DONE, Cell, Record, Store
from horovod_topk.cli.compare.result import Found, found_in
from horovod_topk.cli.compare.run import check_network, run
from horovod_topk.cli.compare.settings import Settings
from horovod_topk.cli.compare.table import table


def main(settings: Settings, args: argparse.Namespace) -> int:
    """Run what has not been run, print, and write; the exit status: 1 if the first run failed."""
    store = Store(args.out or Path(f"compare-{settings.script.stem}"))
    if settings.network is not None and not args.no_runs:
        check_network()
    if not args.no_runs:
        with alone(store.folder):
            if not run_all(settings, store, retry=args.retry):
                return 1
    every = results(settings, store)
    if not every:
        raise ValueError(f"{store.folder} has no runs of these settings. Leave out --no-runs")
    print("\n\n\n".join(table(settings, found) for found in every))
    if args.json is not None:
        args.json.write_text(json.dumps([summary(f) for f in every], indent=1) + "\n")
    if args.picture is not None:
        draw(args.picture, settings, every)
    return 0


def run_all(settings: Settings, store: Store, *, retry: bool = False) -> bool:
    """Finish all runs, by turns; False if the very first one fails."""
    cells = list(settings.cells())
    missing = [(name, cell) for name, cell in cells if _is_missing(store, cell, retry=retry)]
    for name, cell in (bar := tqdm(missing, unit="run", disable=not missing)):
        bar.set_postfix_str(_title(name, cell))
        record = run(settings, cell, store.folder)
        store.keep(record)
        if record.status != DONE:
            bar.write(f"{_title(name, cell)}: {record.status}: {record.problem}", file=sys.stderr)
            if len(missing) == len(cells) and cell == cells[0][1]:
                bar.close()
                print("The first run ended so. Nothing else was run.", file=sys.stderr)
                return False
    return True


def _is_missing(store: Store, cell: Cell, *, retry: bool) -> bool:
    record = store.find(cell)
    return record is None or (retry and record.status != DONE)


def _title(name: str, cell: Cell) -> str:
    variant = "".join(f" {key}={value}" for key, value in cell.grid)
    return f"{name}{variant}, seed {cell.seed}"


def results(settings: Settings, store: Store) -> list[Found]:
    """Figures and verdicts of every variant of the grid that has runs."""
    every = []
    for variant in settings.variants():
        records: dict[str, dict[int, Record]] = {}
        for name in settings.rows:
            cells = (settings.cell(variant, name, seed) for seed in settings.seeds)
            found = {cell.seed: store.find(cell) for cell in cells}
            records[name] = {seed: each for seed, each in found.items() if each is not None}
        if any(records.values()):
            every.append(found_in(settings, records, variant))
    return every


def summary(found: Found) -> dict[str, Any]:
    """A variant's figures as JSON; runs have files of their own."""
    rows = [asdict(row) for row in found.rows]
    return {
        "variant": dict(found.variant),
        "metric": asdict(found.metric),
        "seconds": found.budget,
        "rows": rows,
        "verdict": found.sentence,
    }


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep a second comparison out of a folder.

    Raises:
        ValueError: one is under way.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go when the file is closed
        except BlockingIOError:
            raise ValueError(
                f"another comparison runs in {folder}. Wait for it, or give --out another folder"
            ) from None
        yield
