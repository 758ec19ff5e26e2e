"""`horovod-topk bytes`: the bytes that each format and exchange sends, from the plan alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from horovod_topk.cli.lines import WIDTH, wrapped
from horovod_topk.cli.models import elements, specs_of
from horovod_topk.cli.options import (
    KINDS,
    method_of,
    optimizer_of,
    parse_ratios,
    shared,
    update_rule_of,
    with_optimizer,
)
from horovod_topk.config import EXCHANGES, RESIDUALS
from horovod_topk.core.exchange.protocol import ring_allreduce_bytes
from horovod_topk.core.exchange.selection import fewest
from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.core.run.stats import planned_bytes
from horovod_topk.core.run.substitute import Substitute, parse
from horovod_topk.cost.quantities import count
from horovod_topk.cost.traffic import Busiest, Ranks, cheapest, nodes_of
from horovod_topk.methods.topk import VALUES, TopK

DESCRIPTION = (
    "Print the bytes a step that each format and exchange sends. They follow from the model's "
    "shapes and the settings; nothing is run. The last two columns say how many times fewer bytes "
    "leave a node than with a ring allreduce in float32 and in float16; on a single node they "
    "compare the bytes that a rank sends. 'default' marks what TopKEF() takes, and 'auto' what "
    "exchange='auto' would take. "
    "--compressor adds a row for any other method. The second table has the memory of a rank's "
    "state for each format of residuals."
)


OPTIONS = shared(
    "--model",
    "--device",
    "--ratio",
    "--gather-ratio",
    "--min-numel",
    "--optimizer",
    "--ratios",
    "--compressor",
    "--local-steps",
    "--ranks",
    "--local-size",
)


def main(args: argparse.Namespace) -> int:
    """Print the table."""
    specs = specs_of(args.model)
    plans = {values: _plan(args, specs, values) for values in VALUES}
    rows = list(table(args, plans))
    others = [_other(args, specs, parse(text)) for text in args.compressor]
    dense = ring_allreduce_bytes(4 * elements(specs), args.ranks)
    nodes = nodes_of(args.ranks, args.local_size)
    heading = (
        f"{elements(specs):,} float32 in {count(len(specs), 'tensor')}, "
        f"{count(args.ranks, 'rank')} on {count(len(nodes.ranks), 'node')}, ratio {args.ratio:g}"
        + "".join(f", {each}" for each in args.ratios)
        + f", gradients on a {KINDS[args.device]}: bytes a step "
        + with_optimizer(optimizer_of(args.optimizer))
    )
    print(wrapped(heading))
    print(
        f"{'exchange':<14}{'values':<10}{'a rank sends':>14}{'leave a node':>14}"
        f"{'of dense':>11}{'of fp16':>10}"
    )
    leaving = dense if len(nodes.ranks) > 1 else 0  # a ring leaves each node once
    for values, part in (("float32", 1), ("float16", 2)):
        print(_line("allreduce", values, dense // part, leaving // part, dense))
    for exchange, values, most, automatic in rows:
        line = _line(exchange, values, most.sent_bytes, most.node_bytes, dense)
        default = (exchange, values) == (TopK().exchange, TopK().values)
        marks = [name for name, is_so in (("default", default), ("auto", automatic)) if is_so]
        print(f"{line}  {', '.join(marks)}".rstrip())
    print("\n".join([*others, *memory(plans["float32"], nodes)]))
    if args.local_steps:
        print("\n".join(locally(args, specs, dense)))
    return 0


def memory(plan: Plan, nodes: Nodes) -> Iterator[str]:
    """Yield the lines of a table of the memory that a rank's state takes in PyTorch."""
    owned = {"allgather": 1.0, "sharded": 1.0 + 1.0 / sum(nodes.sizes)}  # residuals' elements
    if max(nodes.sizes) > 1:
        owned["hierarchical"] = 1.0 / nodes.owners
    elements = sum(tensor.numel for tensor in plan.tensors())
    yield "\nmemory of a rank's state beside the optimizer's, payloads aside: bytes a parameter"
    yield f"{'residuals':<14}{''.join(f'{kind:>14}' for kind in owned)}"
    for residuals in RESIDUALS:
        stored, others = planned_bytes(plan, residuals)
        found = ((share * stored + others) / elements for share in owned.values())
        yield f"{residuals:<14}{''.join(f'{each:>14.2f}' for each in found)}"


def locally(args: argparse.Namespace, specs: list[TensorSpec], dense: int) -> Iterator[str]:
    """Yield the lines of a table of the bytes of local steps, over the allgather."""
    ranks = Ranks("allgather", nodes_of(args.ranks, args.local_size))
    yield f"\nLocalSteps(every={args.local_steps}), allgather: bytes that a rank sends"
    yield f"{'values':<14}{'an exchange':>14}{'a step':>14}{'of dense':>13}"
    for values in VALUES:
        config = TopK(args.ratio, values=values, min_numel=args.min_numel, momentum=0)
        sent = ranks.busiest(make_plan(specs, config)).sent_bytes
        a_step = sent / args.local_steps
        yield f"{values:<14}{sent:>14,}{a_step:>14,.0f}{dense / a_step:>12,.0f}x"


def table(
    args: argparse.Namespace, plans: dict[str, Plan]
) -> Iterator[tuple[str, str, Busiest, bool]]:
    """Yield exchange, format, the most that a rank sends, and whether "auto" would select it."""
    nodes = nodes_of(args.ranks, args.local_size)
    kinds = [kind for kind in EXCHANGES if kind != "auto"]
    if max(nodes.sizes) == 1:
        kinds.remove("hierarchical")  # it equals the allgather
    ranks = {kind: Ranks(kind, nodes) for kind in kinds}
    found = {v: {k: ranks[k].busiest(plan) for k in kinds} for v, plan in plans.items()}
    adapts = optimizer_of(args.optimizer) is not None  # then "auto" leaves hierarchical out
    autos = [kind for kind in kinds if kind != "hierarchical" or not adapts]
    taken = {v: fewest({k: found[v][k].node_bytes for k in autos}) for v in plans}
    for kind in kinds:
        for values in VALUES:
            yield kind, values, found[values][kind], taken[values] == kind


def _other(args: argparse.Namespace, specs: list[TensorSpec], asked: Substitute) -> str:
    """Return the table row of any compressor, over the exchange in its settings."""
    config = method_of(asked)
    plan = make_plan(specs, config)
    kind, ranks = cheapest(plan, nodes_of(args.ranks, args.local_size))
    most, dense = ranks.busiest(plan), ring_allreduce_bytes(4 * elements(specs), args.ranks)
    line = _line(kind, asked.name, most.sent_bytes, most.node_bytes, dense)
    return f"{line}  {asked}" if len(f"{line}  {asked}") <= WIDTH else f"{asked}:\n{line}"


def _plan(args: argparse.Namespace, specs: list[TensorSpec], values: str) -> Plan:
    config = TopK(
        args.ratio,
        values=values,
        exchange="auto",  # valid with every setting, as all exchanges are listed
        gather_ratio=args.gather_ratio,
        min_numel=args.min_numel,
        ratios=parse_ratios(args.ratios),
    )
    return make_plan(specs, config, update_rule=update_rule_of(optimizer_of(args.optimizer)))


def _line(exchange: str, values: str, sent: int, leaving: int, dense: int) -> str:
    """A row; compares bytes that leave a node, or bytes that a rank sends on a single node."""
    times = dense / (leaving or sent)
    head = f"{exchange:<14}{values:<10}{sent:>14,} {leaving:>13,}"
    return f"{head}{times:>10.1f}x{times / 2:>9.1f}x"
