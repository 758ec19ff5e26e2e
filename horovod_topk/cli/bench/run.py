"""One rank of `horovod-topk bench`. Rank 0 prints and writes."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from horovod_topk.cli.bench import nic
from horovod_topk.cli.bench.figures import Result
from horovod_topk.cli.bench.gradients import GivenGradients, Weights
from horovod_topk.cli.bench.measure import Taken, race
from horovod_topk.cli.bench.methods import (
    DDP_KINDS,
    FSDP_KINDS,
    FSDP_NONE,
    NONE,
    OTHER,
    TOPK,
    Method,
    first_of_fsdp,
)
from horovod_topk.cli.bench.picture import check_comparable, draw
from horovod_topk.cli.bench.ranks import HorovodRanks, Ranks, TorchRanks
from horovod_topk.cli.bench.runners import build
from horovod_topk.cli.bench.table import SCRIPT, table
from horovod_topk.cli.launcher import by_torchrun
from horovod_topk.cli.lines import wrapped
from horovod_topk.cli.machine import machine
from horovod_topk.cli.models import Shape
from horovod_topk.cli.options import optimizer_of
from horovod_topk.core.plan.buckets import TensorSpec
from horovod_topk.reporting import launched_rank

CURE = (
    "run it as `horovodrun -np 2 horovod-topk bench`, or, without Horovod, "
    "`torchrun --nproc-per-node 2 -m horovod_topk.cli bench`, or more"
)
SCRIPTS = "horovod_topk.cli.bench.script"  # it needs Horovod


def main(
    args: argparse.Namespace,
    specs: list[TensorSpec],
    methods: Sequence[Method],
    beside: Sequence[Result] = (),
) -> int:
    """Measure, on every rank; return the exit status."""
    if by_torchrun():
        methods = [over_ddp(method) for method in methods]
        if args.script is not None:
            raise ValueError(
                "--script times an optimizer of Horovod's, and torchrun started these ranks. Ask "
                "`horovod-topk compare --torchrun`"
            )
    if args.script is not None:
        importlib.import_module(SCRIPTS).check(methods)
    if launched_rank() is None:  # MPI would abort this process with a page of internal errors
        raise ValueError(f"no launcher started this process, so there are no ranks: {CURE}")
    torch.set_num_threads(1)
    ranks = _ranks(methods)
    if ranks.size < 2:
        raise ValueError(f"1 rank exchanges nothing: {CURE}")
    check_comparable([*beside, _asked(args, ranks)])
    check_nodes(methods, ranks)
    bases = [NONE, FSDP_NONE] if first_of_fsdp(methods) else [NONE]
    others = (method for method in methods if method.name not in bases)
    everyone = [*(Method(name, name) for name in bases), *others]
    alone = ranks.size == ranks.local_size  # on one host, so that no packets leave a card
    interface = nic.interface_named(args.interface, alone=alone)
    counted = None if alone else interface
    if args.script is None:
        shapes = [spec.shape for spec in specs]
        taken = _of_shapes(ranks, args, specs, everyone, interface, counted)
    else:
        taken, shapes = _of_script(ranks, args, everyone, counted)
    if ranks.rank == 0:
        found = _result(args, ranks, shapes, everyone, taken)
        found["rate"] = args.rate or (nic.bandwidth_of(interface) if interface else None)
        found["optimizer"] = SCRIPT if args.script else optimizer_of(args.optimizer)
        found["counter"] = counted and nic.counter(counted)
        _report(args, found, beside)
    return 0


def _ranks(methods: Sequence[Method]) -> Ranks:
    if by_torchrun():
        return TorchRanks()
    importlib.import_module("horovod.torch").init(process_sets=process_sets(methods))
    return HorovodRanks()


def over_ddp(method: Method) -> Method:
    """The same method with torch DDP or FSDP2, for ranks that torchrun has started."""
    if method.needs_group:
        return method
    if method.kind in (TOPK, OTHER):
        return replace(method, adapter="ddp")
    raise ValueError(
        f"--methods: {method.name} is Horovod's, and torchrun started these ranks. Give "
        f"--methods of {', '.join(DDP_KINDS + FSDP_KINDS)} and compressors, or start them with "
        "horovodrun"
    )


def nodes_of(ranks: Ranks) -> int:
    """The nodes within which FSDP2 shards: hosts, or the two halves of one host's ranks."""
    return max(2, ranks.hosts)


def check_nodes(methods: Sequence[Method], ranks: Ranks) -> None:
    """Refuse FSDP2 where nodes differ in their number of ranks."""
    fsdp = first_of_fsdp(methods)
    if fsdp and ranks.size % (nodes := nodes_of(ranks)):
        raise ValueError(
            f"--methods: {fsdp} shards within {nodes} nodes of equally many ranks, and there are "
            f"{ranks.size} ranks. Start a multiple of {nodes}"
        )


def process_sets(methods: Sequence[Method]) -> str | None:
    """Horovod's option `process_sets` for these methods: "dynamic" if one of them needs it."""
    kinds = {method.settings.get("exchange") for method in methods}
    return "dynamic" if kinds & {"hierarchical", "auto"} else None


def _of_shapes(
    ranks: Ranks,
    args: argparse.Namespace,
    specs: list[TensorSpec],
    methods: Sequence[Method],
    interface: str | None,
    counted: str | None,
) -> dict[str, Taken]:
    shared = Weights.of(specs, ranks.rank)
    with contextlib.ExitStack() as stack:
        if by_torchrun() or any(method.needs_group for method in methods):
            stack.enter_context(ranks.process_group(interface))
        runners = {}
        for ordinal, method in enumerate(methods):
            model = GivenGradients(shared, ranks.rank, args.compute, args.idle_parameters)
            optimizer = optimizer_of(args.optimizer)
            runners[method.name] = build(method, model, ordinal, optimizer, nodes_of(ranks))
        taken = race(ranks, runners, args.rounds, counted)
        runners.clear()
        gc.collect()  # delete DDP's objects before their process group
    return taken


def _of_script(
    ranks: Ranks, args: argparse.Namespace, methods: Sequence[Method], counted: str | None
) -> tuple[dict[str, Taken], list[Shape]]:
    time_script = importlib.import_module(SCRIPTS).time_script
    taken: dict[str, Taken] = {}
    shapes: list[Shape] = []
    for method in methods:
        found, shapes = time_script(
            ranks, args.script, args.arguments, method, args.rounds, counted
        )
        taken[method.name] = found
    return taken, shapes


def _asked(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """The facts about a run that are known before it."""
    return {
        "model": args.model if args.script is None else args.script.name,
        "ranks": ranks.size,
        "compute": args.compute and args.compute.text,
    }


def _result(
    args: argparse.Namespace,
    ranks: Ranks,
    shapes: Sequence[Shape],
    methods: Sequence[Method],
    taken: dict[str, Taken],
) -> Result:
    return {
        **_asked(args, ranks),
        "elements": sum(math.prod(shape) for shape in shapes),
        "tensors": len(shapes),
        "hosts": ranks.hosts,
        "idle parameters": args.idle_parameters,
        "methods": [
            {
                "name": method.name,
                "what": method.what,
                "settings": dict(method.settings),
                "seconds": taken[method.name].seconds,
                "cpu": taken[method.name].cpu,
                "bytes": taken[method.name].bytes,
            }
            for method in methods
        ],
        "machine": machine(),
    }


def _report(args: argparse.Namespace, result: Result, beside: Sequence[Result]) -> None:
    print(wrapped(table(result)))
    if args.json is not None:
        text = json.dumps(result, indent=1) + "\n"
        _write("--json", args.json, lambda: args.json.write_text(text))
    if args.picture is not None:
        _write("--picture", args.picture, lambda: draw(args.picture, [*beside, result]))


def _write(option: str, path: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}. The results are above") from error
