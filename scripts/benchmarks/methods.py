"""Measure the processor time of compression methods in multiples of that of `r += g`.

There is one thread and no network. A step of a codec encodes one float32 matrix with error feedback
and updates the residual. A step of a method with several rounds runs its rounds on a single rank,
and also writes the gradient. All methods take turns with `r += g`. Decoding means decoding two
payloads into a gradient. `--verbs` times the framework's operations instead of kernels.

    python scripts/bench.py methods [--rows 5000] [--columns 5000] [--repeats 15] [--only ByteGrad]
    python scripts/bench.py methods --json docs/results/encode.json    # results of docs/methods.md
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from horovod_topk.cli.machine import machine
from horovod_topk.config import fields_of
from horovod_topk.core.codec.payload_codec import PayloadCodec
from horovod_topk.core.exchange import Storage
from horovod_topk.core.exchange.reduce import ReducedBucket, declared, state_plan
from horovod_topk.core.exchange.sharded import ShardedExchange
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.plan.nodes import Location
from horovod_topk.core.run.substitute import parse
from horovod_topk.core.state.residual import Arenas
from horovod_topk.methods import METHODS, Codec, Method
from horovod_topk.ops.torch import TorchOps

Step = Callable[[], Any]
FLOOR = "r += g"
SETTLE = 4  # steps before the first timed step
CALLS = (
    "TopKEF()",
    "TopKEF(ratio=0.11)",
    "TopKEF(ratio=0.01,values='float32',selection='sampled')",
    "Threshold()",
    "RandomK(ratio=0.01)",
    "RandomK(ratio=0.056)",
    "SignSGD()",
    "OneBit()",
    "TernGrad()",
    "QSGD(bits=2)",
    "QSGD(bits=3)",
    "QSGD(bits=4)",
    "QSGD(bits=4,norm='l2')",
    "QSGD(bits=8)",
    "ByteGrad()",
    "PowerSGD(rank=4)",
)


def method_of(call: str) -> Method:
    """The method of a compressor's call, without momentum correction."""
    asked = parse(call)
    method = METHODS[asked.name]
    return method(**fields_of(method, asked.settings, asked.name)[0])


@dataclass(frozen=True)
class Done:
    """A finished collective of a single rank."""

    result: Tensor

    def wait(self) -> Tensor:
        """Return the array that was sent."""
        return self.result


class Alone:
    """`Collective` of a single rank."""

    rank, size, location = 0, 1, Location("host", 0, 0)

    def allgather(self, payload: Tensor, name: str, counts: Sequence[int] | None = None) -> Done:
        """Return the payload."""
        return Done(payload)

    def alltoall(self, payloads: Tensor, name: str) -> Done:
        """Return the payloads."""
        return Done(payloads)


def step_of(method: Method, gradient: Tensor, ops: TorchOps) -> tuple[Step, Step | None]:
    """Return a function that encodes and commits, and one that decodes two payloads, if any."""
    spec = TensorSpec("w", tuple(gradient.shape), "float32")
    plan = make_plan([spec], method)
    (bucket,) = plan.buckets
    codec: PayloadCodec[Tensor] = PayloadCodec(ops)
    committed = [0]
    codec.draw_from(lambda: committed[0], lambda: 0)
    arenas = Arenas(bucket, torch.zeros(spec.numel), torch.zeros(spec.numel))
    output = torch.empty_like(gradient)
    gathered: list[Tensor] = []

    def decode() -> None:
        if not gathered:
            gathered.append(torch.cat([payload] * 2))
        codec.decode(bucket, gathered[0], 0.5, [output])

    if isinstance(method, Codec):
        payload = codec.new_payload(bucket)

        def encode() -> None:
            codec.measures.set(bucket, [0.0] * len(method.needed_measures))
            codec.encode(arenas, [gradient], payload)
            arenas.swap()
            committed[0] += 1

        return encode, decode
    states = {
        name: Arenas(each, torch.zeros(each.numel), torch.zeros(each.numel))
        for name in declared(plan)
        for each in [state_plan(bucket, name)]
    }
    collective: Any = Alone()
    by = ShardedExchange(collective)
    exchange = ReducedBucket(bucket, Storage([arenas], states=states), codec, by)

    def reduce() -> None:
        exchange.send([gradient], "b")
        exchange.receive([output])
        exchange.swap()
        committed[0] += 1

    return reduce, None


def medians(ways: dict[str, Step], before: Step, repeats: int) -> dict[str, list[float]]:
    """Median milliseconds of each step, and median multiple of `r += g` in the same turn."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, step in ways.items():
            before()
            started = time.thread_time()
            step()
            taken[name].append(1e3 * (time.thread_time() - started))
    floor = taken[FLOOR]
    return {
        name: [
            statistics.median(each[1:]),
            statistics.median(one / other for one, other in zip(each[1:], floor[1:], strict=True)),
        ]
        for name, each in taken.items()
    }


def measure(
    shape: tuple[int, int], names: Sequence[str], repeats: int, ops: TorchOps
) -> dict[str, dict[str, list[float]]]:
    """Measure encoding and decoding of the named methods."""
    gradient, residual = torch.randn(shape), torch.zeros(shape)
    floor: dict[str, Step] = {FLOOR: lambda: residual.add_(gradient)}
    pool = [torch.randn(shape) for _ in range(3)]

    def next_gradient() -> None:
        factor = random.choice((-1, 1)) * random.uniform(0.7, 1.3)
        torch.mul(random.choice(pool), factor, out=gradient)

    encode, decode = dict(floor), dict(floor)
    for name in names:
        encode[name], read = step_of(method_of(name), gradient, ops)
        if read is not None:
            decode[name] = read
        for _ in range(SETTLE):
            next_gradient()
            encode[name]()
    return {
        "encode": medians(encode, next_gradient, repeats),
        "decode": medians(decode, lambda: None, repeats),
    }


def main(arguments: Sequence[str]) -> int:
    """Measure; print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=5000, help="of the matrix")
    parser.add_argument("--columns", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="methods whose name contains this")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--verbs", action="store_true", help="the framework's operations")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    random.seed(0)
    names = [name for name in CALLS if args.only in name]
    ops = TorchOps(kernels=not args.verbs)
    found = measure((args.rows, args.columns), names, args.repeats, ops)
    for what, rows in found.items():
        print(f"| {what} | ms | of `{FLOOR}` |")
        for name, (ms, multiple) in rows.items():
            print(f"| {name} | {ms:.1f} | {multiple:.2f} |")
    if args.json is not None:
        shape = {"rows": args.rows, "columns": args.columns, "repeats": args.repeats}
        args.json.write_text(json.dumps({**found, **shape, "machine": machine()}, indent=1) + "\n")
    return 0
