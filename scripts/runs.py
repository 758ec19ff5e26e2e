"""Named runs of a benchmark, whose results are kept in one JSON file, run by run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tqdm import tqdm

Run = TypeVar("Run")
Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Runs(Generic[Run]):
    """A benchmark's runs.

    Args:
        named: all there are, in the order of the results.
        path: of the results.
        indent: of that file's lines; None: all in one.
    """

    named: Mapping[str, Run]
    path: Path
    indent: int | None = None

    def parser(self, description: str | None) -> argparse.ArgumentParser:
        """Of a command line that names runs, or measures nothing."""
        form = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=description, formatter_class=form)
        names = ", ".join(self.named)
        parser.add_argument("runs", nargs="*", help=f"of {names} (default: all)")
        less = parser.add_mutually_exclusive_group()
        less.add_argument("--missing", action="store_true", help="measure what has no results yet")
        less.add_argument("--page", action="store_true", help="measure nothing")
        return parser

    def parse(self, parser: argparse.ArgumentParser) -> argparse.Namespace:
        """What the command line says, once all the runs it names are known."""
        args = parser.parse_args()
        if unknown := set(args.runs) - set(self.named):
            known = ", ".join(self.named)
            parser.error(f"no such run: {', '.join(sorted(unknown))}; there are {known}")
        return args

    def measure(
        self, args: argparse.Namespace, measure: Callable[[Run], dict[str, Any]]
    ) -> Results:
        """The results, those asked for measured anew; each is written when it is there."""
        results = self._in_order(json.loads(self.path.read_text()) if self.path.exists() else {})
        wanted = [] if args.page else args.runs or list(self.named)
        if args.missing:
            wanted = [key for key in wanted if key not in results]
        for key in (bar := tqdm(wanted, unit="run")):
            bar.set_postfix_str(key)
            results = self.merged(results, key, measure(self.named[key]))
            self.path.write_text(json.dumps(results, indent=self.indent) + "\n")
        return results

    def merged(self, results: Results, key: str, new: dict[str, Any]) -> Results:
        """With a run in the place of the one it repeats, in the order of the runs."""
        return self._in_order(results | {key: new})

    def _in_order(self, results: Results) -> Results:
        return {key: results[key] for key in self.named if key in results}
