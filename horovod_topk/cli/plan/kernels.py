"""What kernels cost here: a bucket of a usual size, encoded and decoded by one rank alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from horovod_topk.cli.frameworks import Framework
from horovod_topk.core.codec import PayloadCodec
from horovod_topk.core.plan import BUCKET_ELEMENTS, TensorSpec, make_plan
from horovod_topk.core.residual import Arenas
from horovod_topk.cost.machine import Kernels
from horovod_topk.methods.topk import TopK

SETTLE, REPEATS = 40, 60  # steps before the first is timed: a residual has to fill
FEW, MANY = 1, 8  # payloads decoded
MATRIX = (2304, 512, 4)  # rows, columns and rank of PowerSGD


def measure(framework: Framework, config: TopK) -> Kernels:
    """Seconds an element, an entry and a multiply-add, on a core that nobody else uses."""
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

    def decode(payloads: int) -> float:
        gathered = _repeated(framework, payload, bucket.layout.payload_bytes, payloads)
        target = framework.gradient(numel)
        return seconds(lambda: codec.decode(bucket, gathered, 1 / payloads, [target]))

    few, many = decode(FEW), decode(MANY)
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


def _repeated(framework: Framework, payload: Any, size: int, count: int) -> Any:
    gathered = framework.ops.zeros(count * size, "uint8", "cpu")
    for position in range(count):
        at = position * size
        framework.ops.assign(framework.ops.view(gathered, at, at + size), payload)
    return gathered


def seconds(action: Callable[[], object]) -> float:
    """The fastest of some repeats: what others on the same core take is `Machine.slowdown`'s."""
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began)
    return min(taken)
