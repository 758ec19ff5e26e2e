"""`horovod-topk bytes`: what each format and exchange sends, from the plan alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from horovod_topk.cli.models import MODELS, elements, specs_of
from horovod_topk.cli.options import announce
from horovod_topk.cli.ratios import add_ratios, parse_ratios
from horovod_topk.config import EXCHANGES, TopKConfig
from horovod_topk.core.choice import fewest
from horovod_topk.core.exchange import ring_allreduce_bytes
from horovod_topk.core.plan import Plan, TensorSpec, make_plan
from horovod_topk.cost.quantities import count
from horovod_topk.cost.traffic import Busiest, Ranks, nodes_of
from horovod_topk.errors import TopKError
from horovod_topk.methods.topk import VALUES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    add = parser.add_argument
    known = ", ".join(MODELS)
    add("--model", default="resnet50", help=f"{known}, or a JSON file with a shape for each name")
    add("--ratio", type=float, default=TopKConfig.ratio)
    add("--gather-ratio", type=float, default=None, help="sent back by owners; default: the ratio")
    add_ratios(parser)
    add("--ranks", type=int, default=8)
    add("--local-size", type=int, default=1, help="ranks on each node")
    add("--min-numel", type=int, default=TopKConfig.min_numel)


def main(args: argparse.Namespace) -> int:
    """Print the table; 2 if there is none."""
    try:
        specs = specs_of(args.model)
        _check(args)
        announce(args.ranks)
        rows = list(table(args, specs))
    except (ValueError, TopKError) as error:
        print(f"horovod-topk bytes: {error}", file=sys.stderr)
        return 2
    dense = ring_allreduce_bytes(4 * elements(specs), args.ranks)
    nodes = nodes_of(args.ranks, args.local_size)
    print(f"{elements(specs):,} float32 in {count(len(specs), 'tensor')}, ", end="")
    print(f"{count(args.ranks, 'rank')} on {count(len(nodes.ranks), 'node')}", end="")
    print(f", ratio {args.ratio:g}", end="")
    print(f"{''.join(f', {each}' for each in args.ratios)}: bytes a step")
    print(f"{'exchange':<14}{'values':<10}{'a rank sends':>14}{'leave a node':>14}", end="")
    print(f"{'of dense':>11}{'of fp16':>10}")
    leaving = dense if len(nodes.ranks) > 1 else 0  # a ring leaves each node once
    for values, part in (("float32", 1), ("float16", 2)):
        print(_line("allreduce", values, dense // part, leaving // part, dense))
    for exchange, values, most, automatic in rows:
        line = _line(exchange, values, most.sent_bytes, most.node_bytes, dense)
        print(f"{line}  auto" if automatic else line)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.ranks < 2:
        raise ValueError(f"--ranks {args.ranks}: nothing is exchanged by fewer than 2")
    if args.local_size < 1:
        raise ValueError(f"--local-size {args.local_size}: a node has at least 1 rank")


def table(
    args: argparse.Namespace, specs: list[TensorSpec]
) -> Iterator[tuple[str, str, Busiest, bool]]:
    """Exchange, values, what a rank sends at most, and whether `exchange="auto"` would take it."""
    nodes = nodes_of(args.ranks, args.local_size)
    kinds = [kind for kind in EXCHANGES if kind != "auto"]
    if max(nodes.sizes) == 1:
        kinds.remove("hierarchical")  # it would be the allgather
    plans = {values: _plan(args, specs, values) for values in VALUES}
    ranks = {kind: Ranks(kind, nodes) for kind in kinds}
    found = {v: {k: ranks[k].busiest(plan) for k in kinds} for v, plan in plans.items()}
    taken = {v: fewest({k: most.node_bytes for k, most in of.items()}) for v, of in found.items()}
    for kind in kinds:
        for values in VALUES:
            yield kind, values, found[values][kind], taken[values] == kind


def _plan(args: argparse.Namespace, specs: list[TensorSpec], values: str) -> Plan:
    config = TopKConfig(
        args.ratio,
        values=values,
        exchange="auto",  # of no one exchange, as all are listed
        gather_ratio=args.gather_ratio,
        min_numel=args.min_numel,
        ratios=parse_ratios(args.ratios),
    )
    return make_plan(specs, config)


def _line(exchange: str, values: str, sent: int, leaving: int, dense: int) -> str:
    """Compared with dense by what leaves a node; by what a rank sends where there is one node."""
    times = dense / (leaving or sent)
    head = f"{exchange:<14}{values:<10}{sent:>14,}{leaving:>14,}"
    return f"{head}{times:>10.1f}x{times / 2:>9.1f}x"
