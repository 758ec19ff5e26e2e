"""A comparison from its first run to its report."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from horovod_topk.cli.compare.picture import draw
from horovod_topk.cli.compare.records import DONE, STOPPED, Cell, Record, Store
from horovod_topk.cli.compare.result import Found, found_in
from horovod_topk.cli.compare.run import check_network, run
from horovod_topk.cli.compare.settings import CompareSettings
from horovod_topk.cli.compare.table import overview, table
from horovod_topk.cli.lines import wrapped


def main(every: Sequence[CompareSettings], args: argparse.Namespace) -> int:
    """Do all missing runs, print and write; return the exit status: 1 if the first run failed."""
    store = Store(args.out or Path(f"compare-{args.script.stem}"))
    if not args.no_runs:
        if any(settings.network for settings in every):
            check_network()
        with alone(store.folder):
            if not run_all(every, store, retry=args.retry):
                return 1
    found = [each for settings in every for each in results(settings, store)]
    if not found:
        raise ValueError(f"{store.path} has no runs of these settings. Leave out --no-runs")
    tables = [*map(table, found), *([overview(found)] if len(found) > 1 else [])]
    print(wrapped("\n\n\n".join(tables)))
    if args.json is not None:
        args.json.write_text(json.dumps([summary(each) for each in found], indent=1) + "\n")
    if args.picture is not None:
        draw(args.picture, found)
    return 0


Wanted = tuple[str, Cell, CompareSettings]


def run_all(every: Sequence[CompareSettings], store: Store, *, retry: bool = False) -> bool:
    """Do all missing runs, in turns; return False if the very first one fails."""
    wanted: dict[str, Wanted] = {}  # by digest: cases may share runs
    for name, cell, settings in by_turns(every):
        wanted.setdefault(cell.digest, (name, cell, settings))
    missing = [each for each in wanted.values() if _is_missing(store, each[1], retry=retry)]
    first = next(iter(wanted), None)
    with tqdm(total=len(missing), unit="run", disable=not missing) as bar:
        for record in _records(missing, store, bar):
            store.keep(record)
            bar.update()
            name, cell, settings = wanted[record.cell.digest]
            if settings.simulated:  # several run at a time: show the last one that ended
                bar.set_postfix_str(_title(name, cell))
            if record.status == DONE:
                continue
            bar.write(f"{_title(name, cell)}: {record.status}: {record.problem}", file=sys.stderr)
            if len(missing) == len(wanted) and record.cell.digest == first:
                print("The first run ended so. Nothing else was run.", file=sys.stderr)
                return False
    return True


def by_turns(every: Sequence[CompareSettings]) -> Iterator[Wanted]:
    """All runs: for each comparison in turn, one seed of a variant with every compressor."""
    turns: list[list[Wanted]] = []
    for settings in every:
        for place, (name, cell) in enumerate(settings.cells()):
            turn = place // len(settings.rows)
            turns.extend([] for _ in range(turn + 1 - len(turns)))
            turns[turn].append((name, cell, settings))
    return itertools.chain.from_iterable(turns)


def _records(missing: Sequence[Wanted], store: Store, bar: tqdm[Any]) -> Iterator[Record]:
    """Do the runs one after another; simulated ranks last, in a pool of processes."""
    tasks = []
    for name, cell, settings in missing:
        if settings.simulated:
            options = {**settings.options, **dict(cell.grid)}
            limit = settings.limit_seconds
            task = (cell, settings.script, settings.ranks, tuple(options.items()), limit)
            tasks.append(task)
            continue
        bar.set_postfix_str(_title(name, cell))
        yield run(settings, cell, store.folder)
    if tasks:
        jobs = max(settings.jobs for _, _, settings in missing)
        pool = importlib.import_module("horovod_topk.cli.compare.simulated.pool")  # PyTorch
        yield from pool.results(tasks, jobs)


def _is_missing(store: Store, cell: Cell, *, retry: bool) -> bool:
    record = store.find(cell)
    return record is None or record.status == STOPPED or (retry and record.status != DONE)


def _title(name: str, cell: Cell) -> str:
    variant = "".join(f" {key}={value}" for key, value in cell.grid)
    return f"{name}{variant}, seed {cell.seed}"


def results(settings: CompareSettings, store: Store) -> list[Found]:
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
    """A variant's figures as JSON; runs have their own files."""
    rows = [asdict(row) for row in found.rows]
    return {
        "title": found.settings.title,
        "options": dict(found.settings.options),
        "variant": dict(found.variant),
        "metric": asdict(found.metric),
        "seconds": found.budget,
        "rows": rows,
        "verdict": found.sentence,
    }


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock a folder, so that a second comparison cannot use it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the file is closed
        except BlockingIOError:
            raise ValueError(
                f"another comparison runs in {folder}. Wait for it, or give --out another folder"
            ) from None
        yield
