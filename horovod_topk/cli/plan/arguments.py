"""Options of `horovod-topk plan`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from horovod_topk.cli.models import specs_of
from horovod_topk.cli.options import (
    FILE,
    FLAG,
    MOST_RANKS,
    PLAIN,
    RATE,
    SHARED,
    TIME,
    Options,
    method_of,
    number,
    optimizer_of,
    parse_ratios,
    quantity,
    shared,
    update_rule_of,
    whole,
    with_optimizer,
)
from horovod_topk.core.plan.buckets import TensorSpec
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.core.run.substitute import parse
from horovod_topk.cost.machine import Machine
from horovod_topk.cost.quantities import seconds
from horovod_topk.cost.step import FORWARD, Training
from horovod_topk.cost.traffic import nodes_of
from horovod_topk.cost.verdict import TOO_COARSE
from horovod_topk.methods import Method
from horovod_topk.methods.topk import SELECTIONS, VALUES, TopK
from horovod_topk.updates.tracker import Rule

MOMENTUM = 0.9  # the time does not depend on its value
MOST_POWERSGD = 65_536  # rank of PowerSGD's matrices
CONSTANTS = ("bandwidth", "latency", "overhead", "local_bandwidth")  # options: of a `Network`
OF_THE_JOB = "(default: %(default)s; with --measure: those of the job)"
OF_THE_FILE = "(default: that of the machine file, {} without one; with --measure: measured)"


def above_0(text: str) -> float:
    """Parse a time that is not 0."""
    found = seconds(text)
    if not found:
        raise ValueError(f"{text}: give a time above 0, such as 62.5ms")
    return found


OPTIONS: Options = {
    **shared("--model"),
    "--compute": {
        "type": quantity(above_0),
        "required": True,
        "metavar": "TIME",
        "help": "time of a rank's forward, backward and optimizer in a step, without any exchange, "
        "as in 62.5ms or 1.2s; required",
    },
    **shared("--device"),
    "--ranks": {**SHARED["--ranks"], "help": f"ranks, 2 or more {OF_THE_JOB}"},
    "--local-size": {**SHARED["--local-size"], "help": f"ranks on each node {OF_THE_JOB}"},
    "--bandwidth": {
        **RATE,
        "help": "bandwidth of a node's network card, as in 100mbit or 10gbit "
        + OF_THE_FILE.format("10gbit"),
    },
    "--latency": {
        **TIME,
        "help": f"time of a message without its bytes, as in 50us {OF_THE_FILE.format('50us')}",
    },
    "--overhead": {
        **TIME,
        "help": "time of a collective before its first message, as in 500us; half of Horovod's "
        f"cycle at least {OF_THE_FILE.format('500us')}",
    },
    "--local-bandwidth": {
        **RATE,
        "help": "bandwidth of each rank within its node, as in 50gbit (default: no limit)",
    },
    "--cores": {
        "type": number(0.01, 1e6, "a number from 0.01 to 1,000,000"),  # a container has a share
        "help": "cores that the ranks of a node share (default: enough for all)",
    },
    "--crowd": {
        "type": whole(1, MOST_RANKS),
        "metavar": "RANKS",
        "help": "ranks that share --cores (default: the ranks of a node)",
    },
    "--forward": {
        "type": number(0, 1, "a share from 0 to 1"),
        "default": FORWARD,
        "metavar": "SHARE",
        "help": "share of --compute that passes before the first gradient is ready, from 0 to 1 "
        "(default: a third)",
    },
    "--no-overlap": {
        **FLAG,
        "help": "base the verdict on steps that exchange only after backward (default: on steps "
        "that exchange gradients while backward computes others)",
    },
    **shared("--ratio", "--gather-ratio", "--min-numel", "--ratios"),
    "--momentum": {
        **FLAG,
        "help": "plan momentum correction (momentum=0.9) instead of adapted steps (default: off)",
    },
    **shared("--optimizer"),
    "--selection": {
        "choices": SELECTIONS,
        "default": "exact",
        "help": "selection that --measure times (default: %(default)s)",
    },
    "--values": {
        "nargs": "+",
        "choices": VALUES,
        "default": VALUES,
        "metavar": "FORMAT",
        "help": f"formats of values to list: {', '.join(VALUES)} (default: all)",
    },
    "--powersgd": {
        "type": whole(1, MOST_POWERSGD),
        "default": 4,
        "metavar": "RANK",
        "help": "rank of PowerSGD's matrices, 1 or more (default: %(default)s)",
    },
    **shared("--compressor", "--local-steps"),
    "--machine": {
        **FILE,
        "help": "JSON file with the constants of the network and the kernels: read, or written "
        "with --measure (default: constants of a CPU, which come with this package)",
    },
    "--measure": {
        **FLAG,
        "help": "measure the constants first: the network of this job and the kernels on its CPU, "
        "whatever --device is; run it under horovodrun, on every rank (default: off)",
    },
    "--json": {**FLAG, "help": "print JSON in SI units (default: a table)"},
    "--picture": {
        **FILE,
        "help": "draw step time against bandwidth into this file, such as plan.png; needs "
        "matplotlib (default: no picture)",
    },
}


@dataclass(frozen=True)
class Asked:
    """The options of `plan` after they were checked, with values derived from them."""

    args: argparse.Namespace
    specs: tuple[TensorSpec, ...]
    nodes: Nodes
    config: TopK
    update_rule: Rule | None  # what is kept and sent for the optimizer's steps
    training: Training
    others: Mapping[str, Method]  # further compressors, by their text

    @property
    def overlap(self) -> bool:
        """Whether the verdict is about steps that exchange while backward computes."""
        return not self.args.no_overlap

    @property
    def setting(self) -> str:
        """The optimizer or the momentum that is planned for, as a part of a sentence."""
        if self.config.momentum:
            return f"with momentum={self.config.momentum:g}"
        return with_optimizer(None if self.update_rule is None else self.update_rule.name)

    @property
    def default(self) -> str | None:
        """The row that `TopKEF()` without arguments is; None: the options change its selection."""
        usual = TopK()
        selects = ("ratio", "gather_ratio", "min_numel", "ratios", "momentum")
        if any(getattr(self.config, name) != getattr(usual, name) for name in selects):
            return None
        return f"{usual.exchange} {usual.values}"

    def machine(self, found: Machine) -> Machine:
        """Return a machine with the constants of the command line instead of its own."""

        def given(*names: str) -> dict[str, Any]:
            each = {name: getattr(self.args, name) for name in names}
            return {name: value for name, value in each.items() if value is not None}

        network = replace(found.network, **given(*CONSTANTS))
        return replace(found, network=network, **given("cores", "crowd"))

    def on(self, nodes: Nodes) -> Asked:
        """Return the same options for the nodes that ran the measurement."""
        training = replace(self.training, ranks_per_node=max(nodes.sizes))
        return replace(self, nodes=nodes, training=training)


def check(args: argparse.Namespace) -> Asked:
    """Check the options, and return them."""
    if args.crowd is not None and args.cores is None:
        raise ValueError(f"--crowd {args.crowd}: give --cores too, the cores that they share")
    if args.momentum and optimizer_of(args.optimizer or PLAIN):
        raise ValueError("--momentum --optimizer: TopKEF does one of the two; give one")
    if set(args.values) <= set(TOO_COARSE):
        given = " ".join(args.values)
        raise ValueError(
            f"--values {given}: the verdict never recommends it, because training with it diverged "
            f"or lost quality (docs/methods.md). Add another format, as in --values int4 {given}"
        )
    return Asked(
        args,
        specs=tuple(specs_of(args.model)),
        nodes=nodes_of(args.ranks, args.local_size),
        config=TopK(
            args.ratio,
            exchange="auto",  # valid with every setting, as all exchanges are listed
            gather_ratio=args.gather_ratio,
            selection=args.selection,
            min_numel=args.min_numel,
            momentum=MOMENTUM if args.momentum else TopK.momentum,
            ratios=parse_ratios(args.ratios),
        ),
        update_rule=None if args.momentum else update_rule_of(optimizer_of(args.optimizer)),
        training=Training(args.compute, args.forward, args.local_size),
        others={str(asked): method_of(asked) for asked in map(parse, args.compressor)},
    )
