"""Measure the processor time of compression methods in multiples of that of `r += g`.

There is one thread and no network. A step of a codec encodes one float32 matrix with error feedback
and updates the residual. A step of a method with several rounds runs its rounds on a single rank,
and also writes the gradient. All methods take turns with `r += g`.

    python scripts/bench.py methods [--rows 5000] [--columns 5000] [--repeats 15] [--only ByteGrad]
    python scripts/bench.py methods --json docs/results/encode.json    # results of docs/methods.md
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.encoding import FLOOR, Encoding, Gradients, Step, milliseconds
from horovod_topk.cli.machine import machine
from horovod_topk.config import fields_of
from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.exchange.loopback import Loopback
from horovod_topk.core.exchange.protocol import Storage
from horovod_topk.core.exchange.reduce import ReducedBucket, declared, state_plan
from horovod_topk.core.exchange.sharded import ShardedExchange
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.run.substitute import parse
from horovod_topk.core.state.residual import Arenas
from horovod_topk.methods import METHODS, Codec, Method
from horovod_topk.ops.torch import TorchOps

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


def rounds(gradient: Tensor, method: Method, ops: TorchOps) -> Step:
    """Return a function that runs all rounds of a method and commits."""
    plan = make_plan([TensorSpec("w", tuple(gradient.shape), "float32")], method)
    (bucket,) = plan.buckets
    committed, codec = 0, PayloadCodec[Tensor](ops)
    codec.draw_from(lambda: committed, lambda: 0)
    arenas, *states = (
        Arenas(each, torch.zeros(each.numel), torch.zeros(each.numel))
        for each in (bucket, *(state_plan(bucket, name) for name in declared(plan)))
    )
    alone = ShardedExchange(Loopback(1, ops).collective(0))
    storage = Storage([arenas], states=dict(zip(declared(plan), states, strict=True)))
    exchange = ReducedBucket(bucket, storage, codec, alone)
    output = torch.empty_like(gradient)

    def reduce() -> None:
        nonlocal committed
        exchange.send([gradient], "b")
        exchange.receive([output])
        exchange.swap()
        committed += 1

    return reduce


def measure(shape: tuple[int, int], names: Sequence[str], repeats: int) -> dict[str, list[float]]:
    """Measure encoding by the named methods.

    Returns:
        By name: the median milliseconds, and the median multiple of `r += g` in the same turn.
    """
    gradients, ops = Gradients.of(*shape), TorchOps()
    encode = {FLOOR: gradients.floor()}
    for name in names:
        method = method_of(name)
        if isinstance(method, Codec):
            encode[name] = Encoding(gradients, method, ops).settle(SETTLE).step
        else:
            encode[name] = rounds(gradients.current, method, ops)
            for _ in range(SETTLE):
                gradients.next()
                encode[name]()
    taken = milliseconds(encode, gradients.next, repeats, time.thread_time)
    return {
        name: [
            statistics.median(each),
            statistics.median(ms / floor for ms, floor in zip(each, taken[FLOOR], strict=True)),
        ]
        for name, each in taken.items()
    }


OPTIONS = {
    "rows": (5000, "of the matrix"),
    "columns": (5000, "of the matrix"),
    "repeats": (15, "timed steps"),
    "only": ("", "methods whose name contains this"),
    "json": ("", "write the results to this file"),
}


def main(args: argparse.Namespace) -> int:
    """Measure; print a table, and write JSON if asked to."""
    torch.set_num_threads(1)
    random.seed(0)
    names = [name for name in CALLS if args.only in name]
    encode = measure((args.rows, args.columns), names, args.repeats)
    print(f"| encode | ms | of `{FLOOR}` |")
    for name, (ms, multiple) in encode.items():
        print(f"| {name} | {ms:.1f} | {multiple:.2f} |")
    if args.json:
        shape = {"rows": args.rows, "columns": args.columns, "repeats": args.repeats}
        found = {"encode": encode, **shape, "machine": machine()}
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0
