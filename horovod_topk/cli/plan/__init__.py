"""`horovod-topk plan`: the predicted time of a step with each exchange, and whether to compress.

Formulas, sources and limits are in docs/plan.md. With `--measure`, under horovodrun, the constants
of the network and of this machine's kernels are measured first.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from horovod_topk.cli.files import check_picture, check_writable
from horovod_topk.cli.frameworks import NO_FRAMEWORK, find
from horovod_topk.cli.lines import wrapped
from horovod_topk.cli.plan import arguments, kernels, measure, picture, table
from horovod_topk.cost import machine as machines
from horovod_topk.cost.machine import Machine
from horovod_topk.cost.strategies import Strategy, all_strategies, of_method
from horovod_topk.cost.verdict import judge, locally, rows
from horovod_topk.methods import METHODS

DESCRIPTION = (
    "Predict the time of a training step with Horovod's allreduce, with PowerSGD and with each "
    "exchange of TopKEF, and say whether to compress. Formulas and their errors: docs/plan.md. "
    "--compressor adds a row for any other method."
)
OPTIONS = arguments.OPTIONS


def main(args: argparse.Namespace) -> int:
    """Print the table and the verdict, on one rank."""
    asked = arguments.check(args)
    if args.picture:
        check_picture(args.picture)
    if args.measure:
        if args.machine:
            check_writable("--machine", args.machine)
        found = measure.measure(asked)
        if found is None:  # another rank prints
            return 0
        machine, nodes = found
        asked = asked.on(nodes)
        if args.machine:
            _keep(machine, args.machine)
    else:
        machine = asked.machine(_read(args.machine))
    _print(asked, machine)
    return 0


def _read(path: Path | None) -> Machine:
    if path is None:
        return machines.read(machines.REFERENCE)
    if not path.exists():
        raise ValueError(
            f"--machine {path}: there is no such file. `horovodrun -np 2 horovod-topk plan "
            f"--compute TIME --measure --machine {path}` writes it"
        )
    try:
        return machines.read(path)
    except ValueError as error:
        raise ValueError(f"--machine {error}") from error


def _keep(machine: Machine, path: Path) -> None:
    try:
        machines.write(machine, path)
    except OSError as error:
        raise ValueError(
            f"--machine {path}: {error.strerror}. Its content would have been: "
            f"{json.dumps(asdict(machine))}"
        ) from error


def _others(asked: arguments.Asked) -> list[Strategy]:
    """Strategies of further compressors, whose kernels are timed here."""
    framework = find() if asked.others else None
    if asked.others and framework is None:
        raise ValueError(NO_FRAMEWORK.format("--compressor"))
    found = []
    for config in asked.others.values():
        assert framework is not None
        name = next(name for name, method in METHODS.items() if method is type(config))
        computed = kernels.multiples(framework, config)
        found.append(of_method(asked.specs, asked.nodes, config, name, computed))
    return found


def _print(asked: arguments.Asked, machine: Machine) -> None:
    args = asked.args
    strategies = all_strategies(
        asked.specs,
        asked.nodes,
        asked.config,
        rank=args.powersgd,
        values=args.values,
        update_rule=asked.update_rule,
    )
    strategies += _others(asked)
    found = rows(strategies, machine, asked.training, overlap=asked.overlap)
    verdict = judge(
        found,
        overlap=asked.overlap,
        setting=f" {asked.setting}",
        caveat=table.caveat(asked, machine),
        default=asked.default,
    )
    if args.local_steps:
        plain = replace(asked.config, momentum=0.0)
        movements = all_strategies(asked.specs, asked.nodes, plain, rank=1, values=args.values)
        said = machine, asked.training, args.local_steps, found
        also = locally(movements, *said, overlap=asked.overlap)
        verdict = replace(verdict, text=f"{verdict.text}\n\n{also}.")
    if args.json:
        print(json.dumps(table.as_json(asked, machine, found, verdict), indent=1))
    else:
        print(wrapped("\n".join(table.lines(asked, machine, found, verdict))))
    if args.picture:
        picture.draw(args.picture, asked, machine, strategies)
