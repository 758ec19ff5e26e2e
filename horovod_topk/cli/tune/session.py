"""Runs a search of `horovod-topk tune`, from its first run to its report."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from horovod_topk.cli.compare.records import DONE, Cell, Record, Store
from horovod_topk.cli.compare.run import run
from horovod_topk.cli.compare.session import alone
from horovod_topk.cli.compare.settings import CompareSettings, metric_of
from horovod_topk.cli.frameworks import find
from horovod_topk.cli.models import specs_of
from horovod_topk.cli.plan import kernels
from horovod_topk.cli.tune.report import lines, progress
from horovod_topk.cli.tune.search import DENSE, Budget, GoOn, Runs, Search, Train
from horovod_topk.cli.tune.space import Costs, Fit, fit_to
from horovod_topk.cli.tune.space import settings as all_settings
from horovod_topk.core.plan.buckets import TensorSpec
from horovod_topk.cost import machine as machines
from horovod_topk.cost.step import Training
from horovod_topk.cost.traffic import nodes_of
from horovod_topk.methods import Method
from horovod_topk.updates.tracker import Rule


def main(settings: CompareSettings, args: argparse.Namespace) -> int:
    """Search, print what was found, and return the exit status."""
    began, status = time.monotonic(), 0
    store = Store(args.out or Path(f"compare-{args.script.stem}"))
    with alone(store.folder):
        search = prepared(settings, args, store)
        print(
            f"{len(search.fitting)} of {len(search.costs)} settings are within the budget",
            flush=True,
        )
        try:
            search.run()
        except KeyboardInterrupt:
            search.choose()
            print("interrupted: the same command goes on", file=sys.stderr)
            status = 130
        seconds = time.monotonic() - began
        print("\n".join(["", *lines(search, settings.script, seconds)]))
    return status


def prepared(settings: CompareSettings, args: argparse.Namespace, store: Store) -> Search:
    """Train the first seed without compression, and make the search."""
    specs, fit, train = _simulated(settings) if settings.simulated else _real(args, store)
    runs = Runs(settings, store, train)
    dense = runs(DENSE, settings.seeds[0])
    if dense.status != DONE:
        raise ValueError(f"the run without compression {dense.status}: {dense.problem}")
    steps = dense.points[-1].step
    costs = Costs(specs, nodes_of(settings.ranks, args.local_size), steps, fit, *_time(args))
    every = {each: costs.of(each.text) for each in all_settings(local=settings.simulated)}
    search = Search(
        every,
        costs.dense,
        Budget(args.bytes, args.step_time, args.quality),
        runs,
        metric_of(settings.metric, sorted({name for p in dense.points for name in p.metrics})),
        settings.seeds,
        args.runs * steps,
        args.search_seed,
        lambda *ended: print(progress(*ended), flush=True),
    )
    if not search.fitting:
        least = max(costs.dense.bytes / each.bytes for each in every.values())
        raise ValueError(
            f"none of {len(every)} settings is within the budget; the fewest bytes are "
            f"{least:.0f} times fewer than dense's. Give a larger budget"
        )
    return search


def _time(args: argparse.Namespace) -> tuple[Any, ...]:
    """Return the last arguments of `Costs`, which predict a step's time; none without a network."""
    if args.compute is None:
        return ()
    found = machines.read(machines.REFERENCE)
    machine = replace(found, network=replace(found.network, bandwidth=args.bandwidth))
    training = Training(args.compute, ranks_per_node=args.local_size)
    framework = find()
    timed = None if framework is None else partial(kernels.multiples, framework)
    return machine, training, timed


def _real(args: argparse.Namespace, store: Store) -> tuple[list[TensorSpec], Fit, Train]:
    """Return shapes and optimizer from options, and a function that runs under a launcher."""

    def train(settings: CompareSettings, cell: Cell, go_on: GoOn) -> Record:
        return run(settings, cell, store.folder, go_on)

    return specs_of(args.model), fit_to(args.optimizer), train


def _simulated(settings: CompareSettings) -> tuple[list[TensorSpec], Fit, Train]:
    """Return the workload's shapes and optimizer, and a function that trains in this process."""
    torch: Any = importlib.import_module("torch")
    simulated = "horovod_topk.cli.compare.simulated"
    training: Any = importlib.import_module(f"{simulated}.training")
    workload: Any = importlib.import_module(f"{simulated}.workload").load(settings.script)
    spec_of: Any = importlib.import_module("horovod_topk.torch_training.gradients").spec_of
    fitting: Any = importlib.import_module("horovod_topk.torch_training.optimizer_settings")
    logging.getLogger("horovod_topk").setLevel(logging.ERROR)  # each setting would warn anew
    torch.set_num_threads(1)  # so that the order of sums is the same in every run
    options, state = dict(settings.options), workload(**settings.options)
    model = state.model()
    optimizer = state.optimizer(model)
    specs = [spec_of(*each) for each in reversed(list(model.named_parameters()))]

    def fit(config: Method, deferred: Mapping[str, str]) -> tuple[Method, Rule | None]:
        config, rule, _ = fitting.fit_momentum(optimizer, config, deferred)
        return config, rule

    def train(settings: CompareSettings, cell: Cell, go_on: GoOn) -> Record:
        limit = settings.limit_seconds
        task = (cell, settings.script, settings.ranks, tuple(options.items()), limit)
        record: Record = training.train(training.Task(*task), go_on)
        return record

    return specs, fit, train
