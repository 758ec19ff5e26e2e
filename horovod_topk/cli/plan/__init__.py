"""`horovod-topk plan`: what a step will take with each way to exchange gradients, and which pays.

Formulas, sources and limits are in docs/plan.md. With `--measure`, under horovodrun, the constants
of the network and of this machine's kernels are measured first.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from horovod_topk.cli.files import check_picture, check_writable
from horovod_topk.cli.options import announce
from horovod_topk.cli.plan import arguments, measure, picture, table
from horovod_topk.cost import machine as machines
from horovod_topk.cost.machine import Machine
from horovod_topk.cost.verdict import judge, rows
from horovod_topk.cost.ways import all_ways
from horovod_topk.errors import TopKError

add_arguments = arguments.add_arguments


def main(args: argparse.Namespace) -> int:
    """Print the table and the verdict, on one rank; 2 if there is none."""
    try:
        return _main(args)
    except (ValueError, TopKError, measure.CannotMeasureError) as error:
        print(f"horovod-topk plan: {error}", file=sys.stderr)
        return 2


def _main(args: argparse.Namespace) -> int:
    asked = arguments.check(args)
    if args.picture:
        check_picture(Path(args.picture))
    if args.measure:
        if args.machine:
            check_writable("--machine", Path(args.machine))
        place = measure.measure(asked)
        if place is None:  # another rank prints
            return 0
        asked, machine = asked.on(place), place.machine
        if args.machine:
            _keep(machine, Path(args.machine))
    else:
        machine = asked.machine(machines.read(Path(args.machine or machines.REFERENCE)))
    _print(args, asked, machine)
    return 0


def _keep(machine: Machine, path: Path) -> None:
    try:
        machines.write(machine, path)
    except OSError as error:
        raise ValueError(
            f"--machine {path}: {error.strerror}. What it was to hold: "
            f"{json.dumps(asdict(machine))}"
        ) from error


def _print(args: argparse.Namespace, asked: arguments.Asked, machine: Machine) -> None:
    announce(sum(asked.nodes.sizes))
    ways = all_ways(asked.specs, asked.nodes, asked.config, rank=asked.rank, values=asked.values)
    found = rows(ways, machine, asked.training, overlap=asked.overlap)
    verdict = judge(found, overlap=asked.overlap)
    if args.json:
        print(json.dumps(table.as_json(asked, machine, found, verdict), indent=1))
    else:
        print("\n".join(table.lines(asked, machine, found, verdict)))
    if args.picture:
        picture.draw(Path(args.picture), asked, machine, ways)
