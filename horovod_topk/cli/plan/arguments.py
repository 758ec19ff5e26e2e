"""Options of `horovod-topk plan`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace

from horovod_topk.cli.models import MODELS, specs_of
from horovod_topk.cli.options import (
    MOST_RANKS,
    PLAIN,
    add_compressors,
    add_device,
    add_model,
    add_optimizer,
    add_selection,
    check_positive,
    check_ranks,
    check_whole,
    follows_of,
    given,
    method_of,
    number,
    optimizer_of,
    whole,
    with_optimizer,
)
from horovod_topk.cli.ratios import add_ratios, parse_ratios
from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.core.run.substitute import parse
from horovod_topk.cost.machine import Machine, Network
from horovod_topk.cost.quantities import bits_per_second, seconds
from horovod_topk.cost.step import FORWARD, Training
from horovod_topk.cost.traffic import nodes_of
from horovod_topk.cost.verdict import TOO_COARSE
from horovod_topk.methods import Method
from horovod_topk.methods.topk import SELECTIONS, VALUES, TopK
from horovod_topk.updates.tracker import Rule

MOMENTUM = 0.9  # the time does not depend on its value
MOST_POWERSGD = 65_536  # rank of PowerSGD's matrices
FEWEST_CORES, MOST_CORES = 0.01, 1e6  # a container may have a share of a core


@dataclass(frozen=True)
class Place:
    """The nodes that ran a measurement, and the constants that it found."""

    machine: Machine
    nodes: Nodes


@dataclass(frozen=True)
class Asked:
    """The checked options."""

    model: str
    device: str  # device of the gradients: "cpu" or "cuda"
    specs: tuple[TensorSpec, ...]
    nodes: Nodes
    config: TopK
    follows: Rule | None  # what is kept and sent for the optimizer's steps
    training: Training
    rank: int  # PowerSGD's rank
    values: tuple[str, ...]
    others: Mapping[str, Method]  # further compressors, by their text
    overlap: bool
    bandwidth: float | None
    latency: float | None
    overhead: float | None
    local_bandwidth: float | None
    cores: float | None
    crowd: int | None

    @property
    def setting(self) -> str:
        """The optimizer or the momentum that is planned for, as a part of a sentence."""
        if self.config.momentum:
            return f"with momentum={self.config.momentum:g}"
        return with_optimizer(None if self.follows is None else self.follows.name)

    @property
    def plan(self) -> Plan:
        """The plan of the gradients with these settings."""
        return make_plan(self.specs, self.config, follows=self.follows)

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
        given = {
            "bandwidth": self.bandwidth,
            "latency": self.latency,
            "overhead": self.overhead,
            "local_bandwidth": self.local_bandwidth,
        }
        network: Network = replace(
            found.network, **{name: value for name, value in given.items() if value is not None}
        )
        cores = found.cores if self.cores is None else self.cores
        crowd = found.crowd if self.crowd is None else self.crowd
        return replace(found, network=network, cores=cores, crowd=crowd)

    def on(self, place: Place) -> Asked:
        """Return the same options for the nodes that ran the measurement."""
        training = replace(self.training, ranks_per_node=max(place.nodes.sizes))
        return replace(self, nodes=place.nodes, training=training)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add_model(parser, MODELS)
    add(
        "--compute",
        required=True,
        metavar="TIME",
        help="time of a rank's forward, backward and optimizer in a step, without any exchange, "
        "as in 62.5ms or 1.2s; required",
    )
    add_device(parser)
    add(
        "--ranks",
        type=whole,
        default=8,
        help="ranks, 2 or more (default: %(default)s; with --measure: those of the job)",
    )
    add(
        "--local-size",
        type=whole,
        default=1,
        metavar="RANKS",
        help="ranks on each node (default: %(default)s; with --measure: those of the job)",
    )
    _add_network(parser)
    _add_training(parser)
    add_selection(parser)
    add_ratios(parser)
    add(
        "--momentum",
        action="store_true",
        help="plan momentum correction (momentum=0.9) instead of adapted steps (default: off)",
    )
    add_optimizer(parser)
    add(
        "--selection",
        choices=SELECTIONS,
        default="exact",
        help="selection that --measure times (default: %(default)s)",
    )
    add(
        "--values",
        nargs="+",
        choices=VALUES,
        default=VALUES,
        help="formats of values to list (default: all)",
    )
    add(
        "--powersgd",
        type=whole,
        default=4,
        metavar="RANK",
        help="rank of PowerSGD's matrices, 1 or more (default: %(default)s)",
    )
    add_compressors(parser)
    _add_files(parser)


def _add_network(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--bandwidth",
        metavar="RATE",
        help="bandwidth of a node's network card, as in 100mbit or 10gbit (default: that of the "
        "machine file, 10gbit without one; with --measure: measured)",
    )
    add(
        "--latency",
        metavar="TIME",
        help="time of a message without its bytes, as in 50us (default: that of the machine file, "
        "50us without one; with --measure: measured)",
    )
    add(
        "--overhead",
        metavar="TIME",
        help="time of a collective before its first message, as in 500us; half of Horovod's cycle "
        "at least (default: that of the machine file, 500us without one; with --measure: measured)",
    )
    add(
        "--local-bandwidth",
        metavar="RATE",
        help="bandwidth of each rank within its node, as in 50gbit (default: no limit)",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--cores",
        type=number,
        help="cores that the ranks of a node share (default: enough for all)",
    )
    add(
        "--crowd",
        type=whole,
        metavar="RANKS",
        help="ranks that share --cores (default: the ranks of a node)",
    )
    add(
        "--forward",
        type=number,
        default=FORWARD,
        metavar="SHARE",
        help="share of --compute that passes before the first gradient is ready, from 0 to 1 "
        "(default: a third)",
    )
    add(
        "--no-overlap",
        action="store_true",
        help="base the verdict on steps that exchange only after backward (default: on steps that "
        "exchange gradients while backward computes others)",
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--machine",
        metavar="FILE",
        help="JSON file with the constants of the network and the kernels: read, or written with "
        "--measure (default: constants of a CPU, which come with this package)",
    )
    add(
        "--measure",
        action="store_true",
        help="measure the constants first: the network of this job and the kernels on its CPU, "
        "whatever --device is; run it under horovodrun, on every rank (default: off)",
    )
    add("--json", action="store_true", help="print JSON in SI units (default: a table)")
    add(
        "--picture",
        metavar="FILE",
        help="draw step time against bandwidth into this file, such as plan.png; needs matplotlib "
        "(default: no picture)",
    )


def check(args: argparse.Namespace) -> Asked:
    """Check the options, and return them.

    Raises:
        ValueError, TopKError: an option's value is not valid; names the limit.
    """
    check_ranks(args.ranks, args.local_size)
    check_whole("--powersgd", args.powersgd, 1, MOST_POWERSGD)
    if not 0 <= args.forward <= 1:
        raise ValueError(f"--forward {args.forward:g}: give a share from 0 to 1")
    check_positive("--cores", args.cores, MOST_CORES)
    if args.cores is not None and args.cores < FEWEST_CORES:
        raise ValueError(f"--cores {args.cores:g}: give {FEWEST_CORES:g} or more")
    if args.crowd is not None and args.cores is None:
        raise ValueError(f"--crowd {args.crowd}: give --cores too, the cores that they share")
    if args.crowd is not None:
        check_whole("--crowd", args.crowd, 1, MOST_RANKS)
    if args.momentum and optimizer_of(args.optimizer or PLAIN):
        raise ValueError("--momentum --optimizer: TopKEF does one of the two; give one")
    if set(args.values) == {TOO_COARSE}:
        raise ValueError(
            f"--values {TOO_COARSE}: the verdict never recommends it, because training with it "
            "diverged or lost much quality (docs/frontier.md). Add another format, as in "
            f"--values int4 {TOO_COARSE}"
        )
    compute = given(seconds, "--compute", args.compute)
    if not compute:
        raise ValueError(f"--compute {args.compute}: give a time above 0, such as 62.5ms")
    return Asked(
        model=args.model,
        device=args.device,
        specs=tuple(specs_of(args.model, args.device)),
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
        follows=None if args.momentum else follows_of(optimizer_of(args.optimizer)),
        training=Training(compute, args.forward, args.local_size),
        rank=args.powersgd,
        values=tuple(args.values),
        others={str(asked): method_of(asked) for asked in map(parse, args.compressor)},
        overlap=not args.no_overlap,
        bandwidth=given(bits_per_second, "--bandwidth", args.bandwidth),
        latency=given(seconds, "--latency", args.latency),
        overhead=given(seconds, "--overhead", args.overhead),
        local_bandwidth=given(bits_per_second, "--local-bandwidth", args.local_bandwidth),
        cores=args.cores,
        crowd=args.crowd,
    )
