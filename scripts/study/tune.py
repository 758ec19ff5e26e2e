"""`horovod-topk tune` beside an exhaustive grid, on the digits: the table of docs/tune.md.

    python scripts/study/tune.py --seeds 2 --searches 8

The grid is every setting of `tune` within the larger budget, with each seed. Its runs are kept in
docs/results/tune.jsonl, and those that are missing are made. Searches then take their runs from it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from horovod_topk.cli import compare, tune
from horovod_topk.cli.compare import session as comparisons
from horovod_topk.cli.compare.records import Store
from horovod_topk.cli.options import Parser, add
from horovod_topk.cli.tune import session
from horovod_topk.cli.tune.search import DENSE, Budget, Runs, Search
from horovod_topk.cli.tune.space import Setting
from pages import RESULTS
from pages.markdown import table

BUDGETS = {  # the first one allows most
    "25x fewer bytes": Budget(fewer=25.0),
    "100x fewer bytes": Budget(fewer=100.0),
    "25x, at most 10% lost": Budget(fewer=25.0, lost=0.1),
}
NEAR, SHARE = 1.05, 0.25  # what is to be reached: factor to the grid's best, share of its steps
HEAD = ("budget", "settings", "within 5% of the best", "steps", "seconds", "the grid's best")


def main() -> None:
    """Make the grid's runs, search, and print the table."""
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--searches", type=int, default=8)
    own = parser.parse_args()
    options = Parser()
    add(options, tune.OPTIONS)
    words = [str(Path(__file__).with_suffix(".toml")), "--bytes", "25x", "--seeds", str(own.seeds)]
    args = options.parse_args(words, argparse.Namespace(arguments=()))
    given = {**vars(args), **tune.UNUSED, "compressors": ["TopKEF()"], "seeds": [own.seeds]}
    settings = compare.settings_of(argparse.Namespace(**given))[0]
    store = Store(RESULTS / "tune.jsonl")
    first = session.prepared(settings, args, store)
    texts = {each.text: each.text for each in first.fitting}
    grid = replace(settings, baselines={DENSE: DENSE}, compressors=texts)
    comparisons.run_all([grid], store)
    rows = []
    for name, budget in BUDGETS.items():
        made = Runs(settings, store, first.runs.train)
        whole = replace(first, budget=budget, runs=made, say=lambda *_: None)
        for setting in whole.fitting:
            for seed in settings.seeds:
                whole.baseline(seed)
                whole.tried.setdefault(setting, {})[seed] = made(setting.text, seed)
        rows.append(_row(name, whole, [_searched(whole, seed) for seed in range(own.searches)]))
    print(table(HEAD, rows))


def _searched(whole: Search, seed: int) -> Search:
    runs, most = whole.runs.anew(), int(SHARE * whole.runs.steps)
    found = replace(whole, runs=runs, most_steps=most, sampler_seed=seed)
    found.run()
    return found


def _row(name: str, whole: Search, searches: list[Search]) -> tuple[str, ...]:
    def measured(setting: Setting) -> float:
        """Return the value to minimise: bytes under a limit of quality, or else the metric."""
        if whole.budget.lost is not None:
            return whole.cost(setting) if whole.is_good(setting) else float("inf")
        runs = whole.tried[setting].values()
        return statistics.fmean(run.curve(whole.metric.name)[-1][2] for run in runs)

    best = min(whole.whole, key=measured)
    factors = [
        measured(each.best) / measured(best) if each.best is not None else float("inf")
        for each in searches
    ]
    steps = statistics.fmean(each.runs.steps for each in searches) / whole.runs.steps
    seconds = statistics.fmean(each.runs.seconds for each in searches) / whole.runs.seconds
    return (
        name,
        str(len(whole.fitting)),
        f"{sum(each <= NEAR for each in factors)} of {len(factors)}, at worst {max(factors):.2f}x",
        f"{steps:.0%}",
        f"{seconds:.0%}",
        f"{best.title}, {measured(best):.4g}",
    )


if __name__ == "__main__":
    main()
