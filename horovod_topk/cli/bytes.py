"""`horovod-topk bytes`: what each format and exchange sends, from the plan alone."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator

from horovod_topk.cli.models import MODELS, elements, specs_of
from horovod_topk.config import EXCHANGES, VALUES, TopKConfig
from horovod_topk.core.exchange import Collective, Pending, Traffic, exchange_of
from horovod_topk.core.plan import TensorSpec, make_plan
from horovod_topk.errors import TopKError


@dataclasses.dataclass(frozen=True)
class _Nobody:
    """A collective of so many ranks that carries nothing."""

    size: int
    rank: int = 0

    def allgather(self, payload: bytes, name: str) -> Pending[bytes]:
        raise TypeError("nothing is sent for a plan")

    alltoall = allgather


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    add = parser.add_argument
    known = ", ".join(MODELS)
    add("--model", default="resnet50", help=f"{known}, or a JSON file with a shape for each name")
    add("--ratio", type=float, default=TopKConfig.ratio)
    add("--gather-ratio", type=float, default=None, help="sent back by owners; default: the ratio")
    add("--ranks", type=int, default=8)
    add("--min-numel", type=int, default=TopKConfig.min_numel)


def main(args: argparse.Namespace) -> int:
    """Print the table; 2 if there is none."""
    try:
        specs = specs_of(args.model)
        rows = list(table(args, specs))
    except (ValueError, TopKError) as error:
        print(f"horovod-topk bytes: {error}")
        return 2
    dense = 2 * (args.ranks - 1) * 4 * elements(specs) // args.ranks
    print(f"{elements(specs):,} float32 in {len(specs)} tensors, {args.ranks} ranks, ", end="")
    print(f"ratio {args.ratio:g}: bytes a step and rank")
    print(f"{'exchange':<11}{'values':<10}{'bytes':>13}{'of dense':>11}{'of fp16':>10}")
    print(_line("allreduce", "float32", dense, dense))
    print(_line("allreduce", "float16", dense // 2, dense))
    for exchange, values, traffic in rows:
        print(_line(exchange, values, traffic.sent_bytes, traffic.dense_bytes))
    return 0


def table(args: argparse.Namespace, specs: list[TensorSpec]) -> Iterator[tuple[str, str, Traffic]]:
    """Exchange, kind of values, and what a rank sends."""
    if args.ranks < 2:
        raise ValueError(f"--ranks {args.ranks}: nothing is exchanged by fewer than 2")
    for exchange in EXCHANGES:
        for values in VALUES:
            config = TopKConfig(
                args.ratio,
                values=values,
                exchange=exchange,
                gather_ratio=args.gather_ratio,
                min_numel=args.min_numel,
            )
            collective: Collective[bytes] = _Nobody(args.ranks)
            yield (
                exchange,
                values,
                exchange_of(exchange, collective).traffic(make_plan(specs, config)),
            )


def _line(exchange: str, values: str, sent: int, dense: int) -> str:
    return f"{exchange:<11}{values:<10}{sent:>13,}{dense / sent:>10.1f}x{dense / sent / 2:>9.1f}x"
