"""Measures the kernels' time here: one rank encodes and decodes a bucket of usual size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from horovod_topk.cli.frameworks import Framework
from horovod_topk.cli.timing import clocked, repeated
from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.exchange.loopback import Loopback
from horovod_topk.core.exchange.selection import make_exchange
from horovod_topk.core.plan.buckets import BUCKET_ELEMENTS, BucketPlan, TensorSpec, make_plan
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.core.state.residual import Arenas
from horovod_topk.cost.machine import Kernels
from horovod_topk.cost.strategies import Multiples
from horovod_topk.methods import Method
from horovod_topk.methods.topk import TopK

SETTLE, REPEATS = 40, 60  # steps before the first timed one, to fill the residual; timed ones
FEW, MANY = 1, 8  # numbers of payloads to decode
MATRIX = (2304, 512, 4)  # rows, columns and rank of PowerSGD
SOME, FEW_REPEATS = (2304, 512), 4  # shape for any method; few repeats, as many are slow


def measure(framework: Framework, config: TopK) -> Kernels:
    """Measure seconds per element, entry and multiply-add, on an idle core."""
    ops, codec = framework.ops, PayloadCodec(framework.ops)
    bucket = make_plan([TensorSpec("all", (BUCKET_ELEMENTS,), "float32")], config).buckets[0]
    numel, entries = bucket.numel, bucket.entries
    arenas = Arenas(bucket, *(ops.zeros(numel, "float32", "cpu") for _ in range(2)))
    payload = codec.new_payload(bucket)
    gradients = itertools.cycle([framework.gradient(numel) for _ in range(3)])

    def encode() -> None:
        codec.encode(arenas, [next(gradients)], payload)
        arenas.swap()

    for _ in range(SETTLE):
        encode()
    encoded = seconds(encode)

    few, many = _decoding(framework, codec, bucket, payload, REPEATS)
    entry = max(0.0, (many - few) / (MANY - FEW) / entries)
    rows, columns, rank = MATRIX
    multiplied = seconds(framework.multiply(*MATRIX)) / (rows * columns * rank)
    return Kernels(
        encode=encoded / numel,
        clear=max(0.0, few - FEW * entries * entry) / numel,
        decode=entry,
        multiply=multiplied,
        triad=seconds(framework.triad(numel)) / numel,
    )


def multiples(framework: Framework, config: Method) -> Multiples:
    """Measure any method's computation in multiples of `r += g`, on one core."""
    ops, codec = framework.ops, PayloadCodec(framework.ops)
    spec = TensorSpec("all", SOME, "float32")
    config = replace(config, warmup=None, ratios=None)
    plan = make_plan([spec], config)
    (bucket,) = plan.buckets
    triad = seconds(framework.triad(BUCKET_ELEMENTS)) * bucket.numel / BUCKET_ELEMENTS  # uncached
    if config.in_rounds:
        exchange = make_exchange("reduce", Loopback(1, ops).collective(0), in_rounds=True)
        compressor = StepRunner(plan, ops, codec, exchange, "topkef.plan")

        def step() -> None:
            gradient = [framework.gradient(bucket.numel)]
            compressor.launch(0, gradient)
            compressor.step.finish({0: gradient})
            compressor.commit()

        drawn = seconds(lambda: framework.gradient(bucket.numel), FEW_REPEATS)
        return Multiples(max(0.0, seconds(step, FEW_REPEATS) - drawn) / triad)
    arenas = Arenas(bucket, *(ops.zeros(bucket.numel, "float32", "cpu") for _ in range(2)))
    payload, gradients = codec.new_payload(bucket), [framework.gradient(bucket.numel)]
    codec.measures.set(bucket, [0.0] * len(config.needed_measures))
    encoded = seconds(lambda: codec.encode(arenas, gradients, payload), FEW_REPEATS)
    few, many = _decoding(framework, codec, bucket, payload, FEW_REPEATS)
    return Multiples(encoded / triad, max(0.0, many - few) / (MANY - FEW) / triad)


def _decoding(
    framework: Framework, codec: PayloadCodec[Any], bucket: BucketPlan, payload: Any, repeats: int
) -> Iterator[float]:
    """Yield the seconds of decoding `FEW` and `MANY` payloads."""
    ops, size, target = framework.ops, bucket.layout.payload_bytes, framework.gradient(bucket.numel)
    for count in (FEW, MANY):
        gathered = ops.zeros(count * size, "uint8", "cpu")
        for at in range(0, count * size, size):
            ops.assign(ops.view(gathered, at, at + size), payload)
        yield seconds(partial(codec.decode, bucket, gathered, 1 / count, [target]), repeats)


def seconds(action: Callable[[], object], repeats: int = REPEATS) -> float:
    """The fastest of some repeats; load by other processes is in `Machine.slowdown` instead."""
    return min(repeated(clocked(action), repeats))
