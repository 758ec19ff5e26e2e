"""One rank of `horovod-topk bench`. Rank 0 prints and writes."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch

from horovod_topk.cli.bench import card, group
from horovod_topk.cli.bench.compute import Compute
from horovod_topk.cli.bench.contestants import build
from horovod_topk.cli.bench.figures import Result
from horovod_topk.cli.bench.gradients import GivenGradients, Weights
from horovod_topk.cli.bench.machine import machine
from horovod_topk.cli.bench.measure import race
from horovod_topk.cli.bench.methods import KINDS, NONE, Method
from horovod_topk.cli.bench.rates import rate_of_card
from horovod_topk.cli.bench.table import table
from horovod_topk.cli.models import elements
from horovod_topk.core.plan import TensorSpec


def main(
    args: argparse.Namespace,
    specs: list[TensorSpec],
    methods: Sequence[Method],
    compute: Compute | None,
    rate: int | None,
) -> int:
    """Measure, on every rank; the exit status.

    Raises:
        ValueError: there are too few ranks, or their network card is not known.
    """
    torch.set_num_threads(1)
    hvd.init()
    if hvd.size() < 2:
        raise ValueError(
            "1 rank exchanges nothing: run it as `horovodrun -np 2 horovod-topk bench`, or more"
        )
    everyone = [Method(NONE, NONE), *methods]
    interface = group.interface_named(args.interface)
    found = _measure(args, specs, everyone, compute, interface)
    if hvd.rank() == 0:
        result = {
            "model": args.model,
            "elements": elements(specs),
            "tensors": len(specs),
            "ranks": hvd.size(),
            "hosts": hvd.size() // hvd.local_size(),
            "rate": rate or (rate_of_card(interface) if interface else None),
            "compute": args.compute,
            "idle parameters": args.idle_parameters,
            **found,
            "machine": machine(),
        }
        _report(args, result)
    return 0


def _measure(
    args: argparse.Namespace,
    specs: list[TensorSpec],
    methods: Sequence[Method],
    compute: Compute | None,
    interface: str | None,
) -> dict[str, Any]:
    """What all took, and who counted bytes."""
    shared = Weights.of(specs, hvd.rank())
    alone = hvd.size() == hvd.local_size()  # on one host, where packets leave no card
    counted = None if alone or interface is None else interface
    with contextlib.ExitStack() as stack:
        if any(method.kind in ("ddp", "powersgd") for method in methods):
            stack.enter_context(group.process_group(group.require(interface)))
        contestants = {}
        for ordinal, method in enumerate(methods):
            model = GivenGradients(shared, hvd.rank(), compute, args.idle_parameters)
            contestants[method.name] = build(method, model, ordinal)
        taken = race(contestants, args.rounds, counted)
        contestants.clear()
        gc.collect()  # DDP's objects before their process group
    rows = [
        {
            "name": method.name,
            "what": KINDS[method.kind],
            "settings": dict(method.settings),
            "seconds": taken[method.name].seconds,
            "bytes": taken[method.name].bytes,
        }
        for method in methods
    ]
    return {"counter": counted and card.counter(counted), "methods": rows}


def _report(args: argparse.Namespace, result: Result) -> None:
    print(table(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.picture is not None:
        from horovod_topk.cli.bench.picture import draw

        draw(args.picture, [*(json.loads(path.read_text()) for path in args.beside), result])
