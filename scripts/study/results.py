"""A study's results: the cases of its settings, with the runs that docs/results has of them."""

from __future__ import annotations

import fnmatch
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from horovod_topk.cli.compare.records import Record, Store
from horovod_topk.cli.compare.result import Found
from horovod_topk.cli.compare.session import results
from horovod_topk.cli.compare.settings import CompareSettings, of_file
from horovod_topk.core.run.substitute import Substitute
from horovod_topk.local.call import LocalCall, parse
from pages import RESULTS
from pages.markdown import spread

DENSE = "dense"


@dataclass(frozen=True)
class Row:
    """A compressor of a case, beside the case's dense runs."""

    name: str
    asked: Substitute | LocalCall
    metric: str
    runs: dict[int, Record]  # by seed
    dense: dict[int, Record]

    def scores(self) -> list[float | None]:
        """Final scores by seed; None: diverged."""
        return [end(self.metric, run) for run in self.runs.values()]

    @cached_property
    def costs(self) -> list[float]:
        """How much worse than dense by seed: points, or % of dense's score; inf: diverged.

        Seeds with which dense diverged are left out.
        """
        found = []
        for seed in self.runs.keys() & self.dense.keys():
            ours, theirs = (end(self.metric, each[seed]) for each in (self.runs, self.dense))
            if theirs is None:
                continue
            if ours is None:
                found.append(math.inf)
            elif self.metric == "accuracy":
                found.append(100 * (theirs - ours))
            else:
                found.append(100 * (ours / theirs - 1))
        return found

    @property
    def cost(self) -> float:
        """The mean over seeds."""
        return statistics.mean(self.costs) if self.costs else math.nan

    @property
    def sent_bytes(self) -> float:
        """A step and rank."""
        return next(iter(self.runs.values())).sent_bytes or math.nan

    @property
    def reduction(self) -> float:
        """How many times fewer bytes than a ring allreduce of float32."""
        return (next(iter(self.runs.values())).dense_bytes or math.nan) / self.sent_bytes

    @property
    def difference(self) -> str:
        """The difference to dense: points of accuracy (more is better) or % (fewer is better)."""
        if not self.costs:
            return "not run"
        seeds = " (1 seed)" if len(self.costs) == 1 else ""
        if diverged := sum(map(math.isinf, self.costs)):
            return (
                f"diverged{seeds}"
                if diverged == len(self.costs)
                else (f"{diverged} of {len(self.costs)} diverged")
            )
        if self.metric == "accuracy":
            return spread([-cost for cost in self.costs], "+") + seeds
        return spread(self.costs, "+", "%") + seeds


def end(metric: str, run: Record) -> float | None:
    """The final score of a run; None: it diverged."""
    return run.points[-1].metrics[metric]


def shown(metric: str, scores: Sequence[float | None]) -> str:
    """Final scores of all seeds."""
    known = [each for each in scores if each is not None]
    if len(known) < len(scores):
        return "diverged"
    if metric == "accuracy":
        return spread([100 * each for each in known], unit="%")
    return ", ".join(f"{each:.4f}" for each in known)


class Study:
    """The cases of a settings file by title, as far as they have been run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings: list[CompareSettings] = of_file(Path(__file__).with_name(f"{name}.toml"))
        store = Store(RESULTS / f"{name}.jsonl")
        every = [(each, results(each, store)) for each in self.settings]
        self.cases: dict[str, list[Found]] = {each.title: found for each, found in every}

    def titles(self, pattern: str) -> list[str]:
        """Titles of the cases that match a pattern as of file names, in the order of the file.

        Semicolons stand between several patterns.
        """
        found = list[str]()
        for each in pattern.split("; "):
            matching = [title for title in self.cases if fnmatch.fnmatchcase(title, each)]
            if not matching:
                raise ValueError(f"{self.name}: no case matches {each!r}")
            found += matching
        return found

    def found(self, title: str) -> Found:
        """A case without a grid."""
        (found,) = self.cases[self.titles(title)[0]]
        return found

    def rows(self, title: str) -> dict[str, Row]:
        """A case's compressors by name, those that have been run."""
        return self.rows_of(self.found(title))

    def rows_of(self, found: Found) -> dict[str, Row]:
        """The same of a variant of a case's grid; none without dense runs."""
        dense = self._dense(found)
        return {
            name: Row(name, parse(call), found.metric.name, dict(found.runs[name]), dense)
            for name, call in found.settings.compressors.items()
            if found.runs[name]
        }

    def dense(self, title: str) -> dict[int, Record]:
        """A case's dense runs by seed."""
        return self._dense(self.found(title))

    def _dense(self, found: Found) -> dict[int, Record]:
        """Its own, or of the case whose options are the same but for one more."""
        if own := found.runs.get(DENSE):
            return dict(own)
        options = found.settings.options.items()
        for others in self.cases.values():
            for other in others:
                rest = other.settings.options.items()
                if rest < options and len(options) == len(rest) + 1 and DENSE in other.runs:
                    return dict(other.runs[DENSE])
        raise ValueError(f"{found.settings.title}: no dense runs to compare with")

    def runs(self) -> Iterator[Record]:
        """Yield every run. A run that several cases share comes once."""
        each = (
            runs for case in self.cases.values() for found in case for runs in found.runs.values()
        )
        yield from {run.cell.digest: run for runs in each for run in runs.values()}.values()
