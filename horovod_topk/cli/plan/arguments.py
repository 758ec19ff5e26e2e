"""What `horovod-topk plan` is asked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from horovod_topk.cli.models import MODELS, specs_of
from horovod_topk.cli.options import given
from horovod_topk.cli.ratios import add_ratios, parse_ratios
from horovod_topk.config import TopKConfig
from horovod_topk.core.nodes import Nodes
from horovod_topk.core.plan import TensorSpec
from horovod_topk.cost.machine import Machine, Network
from horovod_topk.cost.quantities import bits_per_second, seconds
from horovod_topk.cost.step import FORWARD, Training
from horovod_topk.cost.traffic import nodes_of
from horovod_topk.cost.verdict import TOO_COARSE
from horovod_topk.methods.topk import SELECTIONS, VALUES

MOMENTUM = 0.9  # any takes as long


@dataclass(frozen=True)
class Place:
    """Where a measurement ran, and what it found."""

    machine: Machine
    nodes: Nodes


@dataclass(frozen=True)
class Asked:
    """The question, checked."""

    model: str
    specs: tuple[TensorSpec, ...]
    nodes: Nodes
    config: TopKConfig
    training: Training
    rank: int  # of PowerSGD
    values: tuple[str, ...]
    overlap: bool
    bandwidth: float | None
    latency: float | None
    overhead: float | None
    local_bandwidth: float | None
    cores: float | None
    crowd: int | None

    def machine(self, found: Machine) -> Machine:
        """A machine with what was given on the command line in the place of its own."""
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
        """The same question of the ranks that measured."""
        training = replace(self.training, ranks_per_node=max(place.nodes.sizes))
        return replace(self, nodes=place.nodes, training=training)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    add = parser.add_argument
    known = ", ".join(MODELS)
    add("--model", default="resnet50", help=f"{known}, or a JSON file with a shape for each name")
    add("--compute", required=True, help="a rank's seconds a step without exchange, as in 62.5ms")
    add("--ranks", type=int, default=8, help="default: %(default)s; --measure takes the job's")
    add("--local-size", type=int, default=1, help="ranks on each node (default: %(default)s)")
    add("--bandwidth", help="of a node's card, as in 10gbit; with --measure: known beforehand")
    add("--latency", help="of a message, as in 50us")
    add("--overhead", help="of a collective, as in 500us: half of Horovod's cycle, and more")
    add("--local-bandwidth", help="of each rank within its node (default: no limit)")
    add("--cores", type=float, help="that ranks share (default: enough)")
    add("--crowd", type=int, help="ranks that share those cores (default: those of a node)")
    add("--forward", type=float, default=FORWARD, help="share of compute (default: a third)")
    add("--no-overlap", action="store_true", help="judge steps in which nothing overlaps")
    add("--ratio", type=float, default=TopKConfig.ratio)
    add_ratios(parser)
    add("--gather-ratio", type=float, default=None, help="sent back by owners; default: the ratio")
    add("--min-numel", type=int, default=TopKConfig.min_numel)
    add("--momentum", action="store_true", help="momentum is corrected, as by TopKEF.compact()")
    add("--selection", choices=SELECTIONS, default="exact", help="that --measure times")
    add("--values", nargs="+", choices=VALUES, default=VALUES, help="default: all")
    add("--powersgd", type=int, default=4, metavar="RANK", help="default: rank %(default)s")
    add("--machine", help="JSON with constants: read, or with --measure written")
    add("--measure", action="store_true", help="time this job first; under horovodrun, every rank")
    add("--json", action="store_true", help="all figures, in SI units")
    add("--picture", metavar="FILE", help="of step time against bandwidth; needs matplotlib")


def check(args: argparse.Namespace) -> Asked:
    """The question.

    Raises:
        ValueError, TopKError: something of it makes no sense; says the limit.
    """
    if args.ranks < 2:
        raise ValueError(f"--ranks {args.ranks}: nothing is exchanged by fewer than 2")
    for name in ("local_size", "powersgd"):
        if getattr(args, name) < 1:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} {getattr(args, name)}: give 1 or more")
    if args.crowd is not None and args.cores is None:
        raise ValueError(f"--crowd {args.crowd}: say with --cores how many they share")
    if set(args.values) == {TOO_COARSE}:
        raise ValueError(
            f"--values {TOO_COARSE}: it is never recommended, as training lost much with it or "
            f"diverged (docs/frontier.md). Add what may be, such as --values int4 {TOO_COARSE}"
        )
    compute = given(seconds, "--compute", args.compute) or 0.0
    return Asked(
        model=args.model,
        specs=tuple(specs_of(args.model)),
        nodes=nodes_of(args.ranks, args.local_size),
        config=TopKConfig(
            args.ratio,
            exchange="auto",  # of no one exchange, as all are listed
            gather_ratio=args.gather_ratio,
            selection=args.selection,
            min_numel=args.min_numel,
            momentum=MOMENTUM if args.momentum else TopKConfig.momentum,
            ratios=parse_ratios(args.ratios),
        ),
        training=Training(compute, args.forward, args.local_size),
        rank=args.powersgd,
        values=tuple(args.values),
        overlap=not args.no_overlap,
        bandwidth=given(bits_per_second, "--bandwidth", args.bandwidth),
        latency=given(seconds, "--latency", args.latency),
        overhead=given(seconds, "--overhead", args.overhead),
        local_bandwidth=given(bits_per_second, "--local-bandwidth", args.local_bandwidth),
        cores=args.cores,
        crowd=args.crowd,
    )
