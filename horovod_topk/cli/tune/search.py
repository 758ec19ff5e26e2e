"""The search of `horovod-topk tune`: Optuna proposes settings, and `compare`'s runs judge them.

Settings outside of the budget are never run. A run that does badly is stopped after a third of its
steps. The best ones are trained with all seeds, and so is the default.
"""

from __future__ import annotations

import importlib
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from horovod_topk.cli.compare.curves import Metric, at_step
from horovod_topk.cli.compare.records import DONE, STOPPED, Cell, Point, Record, Store
from horovod_topk.cli.compare.settings import CompareSettings
from horovod_topk.cli.tune.space import AXES, DEFAULT, USUAL, Cost, Setting

DENSE = "none"
FINALISTS = 3  # settings that are trained with all seeds, beside the default
SHORT, FACTOR = 3, 3  # a run goes on after 1/SHORT of its steps if it is among the best 1/FACTOR
SLACK = 5.0  # with --quality: a run is stopped if it trails so many times as far as a good one
REPEATS = 20  # proposals without a new setting, after which one is drawn
RANDOM = 8  # settings that are drawn before Optuna models them

GoOn = Callable[[Point], bool]  # whether a run goes on after a report
Train = Callable[[CompareSettings, Cell, GoOn], Record]


@dataclass(frozen=True)
class Budget:
    """Limits of what a setting costs; None: no limit."""

    fewer: float | None = None  # at least so many times fewer bytes than dense
    seconds: float | None = None  # a step, predicted
    lost: float | None = None  # share of dense's quality

    def allows(self, cost: Cost, dense: Cost) -> bool:
        """Return whether the bytes and seconds of a setting are within the limits."""
        bytes_fit = self.fewer is None or cost.bytes * self.fewer <= dense.bytes
        return bytes_fit and (
            self.seconds is None or (cost.seconds is not None and cost.seconds <= self.seconds)
        )


class Runs:
    """Makes runs of a script, keeps them, and counts their steps and seconds."""

    def __init__(self, settings: CompareSettings, store: Store, train: Train) -> None:
        self._settings, self._store, self.train = settings, store, train
        self._known: dict[tuple[str, int], Record] = {}
        self.made = 0  # runs of this start; others were kept

    def __call__(self, text: str, seed: int, go_on: GoOn = lambda _: True) -> Record:
        """Train with a compressor and a seed, or take the run that is kept.

        go_on: called after each report; if it returns False, the run is stopped.
        """
        if (text, seed) not in self._known:
            decided: dict[int, bool] = {}  # a kept run may have to be made again, with more steps

            def asked(point: Point) -> bool:
                if point.step not in decided:
                    decided[point.step] = go_on(point)
                return decided[point.step]

            cell = replace(self._settings, compressors={text: text}).cell((), text, seed)
            record = _replayed(self._store.find(cell), asked)
            if record is None:
                record = self.train(self._settings, cell, asked)
                self._store.keep(record)
                self.made += 1
            self._known[text, seed] = record
        return self._known[text, seed]

    def anew(self) -> Runs:
        """Return runs of the same script and store, with nothing counted yet."""
        return Runs(self._settings, self._store, self.train)

    @property
    def records(self) -> list[Record]:
        """The runs that the search has used; a kept run ends where the search would stop it."""
        return list(self._known.values())

    @property
    def steps(self) -> int:
        """The sum of the steps of all runs."""
        return sum(each.points[-1].step for each in self.records if each.points)

    @property
    def seconds(self) -> float:
        """The sum of the seconds that all runs trained."""
        return math.fsum(each.points[-1].seconds for each in self.records if each.points)


def _replayed(record: Record | None, go_on: GoOn) -> Record | None:
    """Return a kept run up to the report that would stop it; None: it has to be made again."""
    if record is None:
        return None
    for count, point in enumerate(record.points, 1):
        is_last = record.status == DONE and count == len(record.points)
        if not is_last and not go_on(point):
            return replace(record, status=STOPPED, points=record.points[:count])
    return None if record.status == STOPPED else record


@dataclass
class Search:
    """A search, and what it has found so far.

    Args:
        costs, dense: of all settings, and of dense.
        seeds: the first one is searched with.
        most_steps: of all runs.
        say: called with the setting, the run and the quality lost, after each run.
    """

    costs: Mapping[Setting, Cost]
    dense: Cost
    budget: Budget
    runs: Runs
    metric: Metric
    seeds: Sequence[int]
    most_steps: int
    sampler_seed: int = 0
    say: Callable[[str, Record, float | None], None] = lambda *_: None
    tried: dict[Setting, dict[int, Record]] = field(default_factory=dict, init=False)  # by seed
    best: Setting | None = field(default=None, init=False)
    _trailed: dict[int, float] = field(default_factory=dict, init=False)  # by step, by good runs

    def __post_init__(self) -> None:
        self.fitting = [s for s, cost in self.costs.items() if self.budget.allows(cost, self.dense)]
        self.steps = self.baseline(self.seeds[0]).points[-1].step

    # Quality

    def baseline(self, seed: int) -> Record:
        """Return the dense run of a seed."""
        return self.runs(DENSE, seed)

    def lost(self, record: Record, at: int | None = None) -> float | None:
        """Return the share of dense's quality that a run loses after a step (default: the last)."""
        dense = self.baseline(record.cell.seed).curve(self.metric.name)
        curve = record.curve(self.metric.name)
        if not curve or not dense:
            return None
        found = at_step(curve, curve[-1][0] if at is None else at)
        beside = at_step(dense, min(curve[-1][0], dense[-1][0]) if at is None else at)
        if found is None or beside is None:
            return None
        return self.metric.gain(beside, found) / max(abs(beside), 1e-12)

    def losses(self, setting: Setting) -> list[float]:
        """Return the shares of quality that a setting's whole runs lose, in the order of seeds."""
        runs = self.tried.get(setting, {})
        found = [
            self.lost(runs[seed])
            for seed in self.seeds
            if seed in runs and runs[seed].outcome(self.metric.name) == DONE
        ]
        return [each for each in found if each is not None]

    @property
    def whole(self) -> list[Setting]:
        """Settings that have been trained to the end with at least one seed."""
        return [setting for setting in self.tried if self.losses(setting)]

    def cost(self, setting: Setting) -> float:
        """Return the cost to minimise under a limit of quality: seconds if known, else bytes."""
        found = self.costs[setting]
        return found.bytes if found.seconds is None else found.seconds

    def value(self, setting: Setting) -> float:
        """Return the objective of a setting: Optuna and the final choice minimise it."""
        lost = statistics.fmean(self.losses(setting))
        if self.budget.lost is None:
            return lost
        if lost <= self.budget.lost:
            return math.log(self.cost(setting))
        costliest = max(map(self.cost, self.fitting))
        return math.log(costliest) + lost - self.budget.lost

    def is_good(self, setting: Setting) -> bool:
        """Return whether the quality that a setting loses is within the limit."""
        losses = self.losses(setting)
        return bool(losses) and (
            self.budget.lost is None or statistics.fmean(losses) <= self.budget.lost
        )

    # Search

    def run(self) -> None:
        """Search, and train the best with all seeds."""
        optuna: Any = importlib.import_module("optuna")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        pruned, failed = optuna.trial.TrialState.PRUNED, optuna.trial.TrialState.FAIL
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(
                seed=self.sampler_seed, n_startup_trials=RANDOM, multivariate=False
            ),
            pruner=optuna.pruners.SuccessiveHalvingPruner(
                min_resource=max(1, self.steps // SHORT), reduction_factor=FACTOR
            ),
        )
        drawn, repeats, starts = random.Random(self.sampler_seed), 0, self.starts()
        for setting in starts:
            study.enqueue_trial(_params(setting))
        while self._has_room() and (left := self._left()):
            if repeats == REPEATS:
                study.enqueue_trial(_params(drawn.choice(left)))
            trial = study.ask()
            setting = _suggested(trial, self.costs)
            repeats = 0 if setting in left else repeats % REPEATS + 1
            if setting not in left:
                study.tell(trial, state=failed if setting in self.tried else pruned)
                continue
            self._try(trial, setting, is_whole=setting in starts)
            if setting in self.whole:
                study.tell(trial, self.value(setting))
                if self.budget.lost is not None and self.is_good(setting):
                    for each in self._cheaper(setting)[-1:]:
                        study.enqueue_trial(_params(each))
            else:
                study.tell(trial, state=pruned)
        self._finish()

    def starts(self) -> list[Setting]:
        """Return the settings to try first, in whole runs; docs/choosing.md leads to them.

        These are the default, and of int4, which is best at equal bytes, the largest ratio that the
        budget allows, for each exchange and number of local steps; with a limit of quality, the
        default's ratio at most.
        """
        edges: dict[object, Setting] = {}
        for setting in self.fitting:
            found = dict(setting.values)
            small = self.budget.lost is None or found.get("ratio", 1.0) <= USUAL["ratio"]
            if found.get("values") == USUAL["values"] and small:
                edges[found["exchange"], setting.every] = setting  # ratios ascend
        first = [DEFAULT] if DEFAULT in self.fitting else []
        return [*first, *(each for each in edges.values() if each != DEFAULT)]

    def _left(self) -> list[Setting]:
        """Return untried settings; under a limit of quality those cheaper than a good one alone."""
        left = [setting for setting in self.fitting if setting not in self.tried]
        if self.budget.lost is None:
            return left
        least = min((self.cost(each) for each in self.whole if self.is_good(each)), default=None)
        return [setting for setting in left if least is None or self.cost(setting) < least]

    def _cheaper(self, setting: Setting) -> list[Setting]:
        """Return untried settings that differ in their ratio alone, from small to large ratios."""
        others = {key: each for key, each in setting.values if key != "ratio"}
        return [each for each in self._left() if others.items() <= dict(each.values).items()]

    def _has_room(self) -> bool:
        """Return whether steps are left for another run beside the final ones with all seeds."""
        others = (2 + FINALISTS) * (len(self.seeds) - 1)
        return self.runs.steps + (others + 1) * self.steps <= self.most_steps

    def _try(self, trial: Any, setting: Setting, *, is_whole: bool) -> None:
        seed = self.seeds[0]

        def go_on(point: Point) -> bool:
            if point.step >= self.steps:
                return True
            record = Record(Cell("", seed, (), (), ()), DONE, points=(point,))
            lost = self.lost(record, point.step)
            if lost is None:
                return True
            trial.report(lost, point.step)
            if self.budget.lost is None:
                return not trial.should_prune() or is_whole
            allowed = self._trailed.get(point.step, math.inf)
            return point.step < self.steps / SHORT or lost <= allowed

        record = self.runs(setting.text, seed, go_on)
        self._keep(setting, record)
        if self.budget.lost is not None and self.is_good(setting):
            for point in record.points:
                lost = self.lost(record, point.step) or 0.0
                far = SLACK * max(lost, self.budget.lost)
                self._trailed[point.step] = max(far, self._trailed.get(point.step, 0.0))

    def _keep(self, setting: Setting, record: Record) -> None:
        self.tried.setdefault(setting, {})[record.cell.seed] = record
        lost = self.lost(record) if record.status in (DONE, STOPPED) else None
        self.say(setting.title, record, lost)

    def _finish(self) -> None:
        """Train the default and the best settings with all seeds, and choose."""
        if DEFAULT in self.whole:
            self._train_all(DEFAULT)
        ranked = sorted(self.whole, key=self.value)
        finalists = [setting for setting in ranked if setting != DEFAULT][:FINALISTS]
        for setting in finalists:
            self._train_all(setting)
            if self.budget.lost is not None and self.is_good(setting):
                break  # the others cost more
        self.choose()

    def _train_all(self, setting: Setting) -> None:
        for seed in self.seeds:
            if seed not in self.tried[setting]:
                self.baseline(seed)
                self._keep(setting, self.runs(setting.text, seed))

    def choose(self) -> None:
        """Choose the best of the settings with most seeds; None: none is within the limit."""
        most = max((len(self.losses(each)) for each in self.whole), default=0)
        sure = [each for each in self.whole if len(self.losses(each)) == most]
        self.best = min(filter(self.is_good, sure), key=self.value, default=None)


def _params(setting: Setting) -> dict[str, Any]:
    """Return a setting as Optuna's parameters; a number is its position on the axis."""
    found: dict[str, Any] = {"method": setting.method}
    for axis, value in setting.values:
        options = AXES[setting.method][axis]
        named = isinstance(value, str)
        found[f"{setting.method}.{axis}"] = value if named else options.index(value)
    return found


def _suggested(trial: Any, known: Mapping[Setting, Cost]) -> Setting:
    method = trial.suggest_categorical("method", list(dict.fromkeys(s.method for s in known)))
    values = []
    for axis, options in AXES[method].items():
        name = f"{method}.{axis}"
        if isinstance(options[0], str):
            values.append((axis, trial.suggest_categorical(name, options)))
        else:
            values.append((axis, options[trial.suggest_int(name, 0, len(options) - 1)]))
    return Setting(method, tuple(values))
