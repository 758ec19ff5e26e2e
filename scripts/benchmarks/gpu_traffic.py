"""Counts the bytes that an encode and a decode load and store, under Triton's interpreter.

A GPU's memory has to move at least the bytes at distinct addresses. Bytes that a kernel loads again
may come from the GPU's caches. The benchmark needs no GPU, and measures no time. `gpu_compiled`
runs it.

    TRITON_INTERPRET=1 python scripts/bench.py gpu_traffic
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.torch import TorchOps

SIZES = 1 << 20, 1 << 18, 1 << 16  # elements of the tensors of a bucket
RANKS = 8
SELECTED = {"by magnitude": False, "by Adam's mean squares": True}
# Bytes of an element that an encode has to move: g, e and squares are read, e is written.
COPIED = {name: 4 * (4 if weighed else 3) for name, weighed in SELECTED.items()}


class Traffic:
    """Counts, for each kernel, all bytes that it moves, and the bytes at distinct addresses."""

    def __init__(self) -> None:
        self.kernel = ""
        self.moved = defaultdict[str, int](int)
        self._places = defaultdict[tuple[str, str], list[Any]](list)

    def note(self, kind: str, addresses: Any, mask: Any, itemsize: int) -> None:
        """Note an access of a kernel."""
        found = addresses[np.broadcast_to(mask, addresses.shape)]
        self.moved[self.kernel] += found.size * itemsize
        self._places[self.kernel, kind].append(np.unique(found.astype(np.int64) // 4))

    def distinct(self, kernel: str) -> int:
        """Return the bytes at distinct addresses, counted in words of 4, of loads and of stores."""
        each = [self._places[kernel, kind] for kind in ("load", "store")]
        return sum(4 * np.unique(np.concatenate(places)).size for places in each if places)


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count what the kernels of a bucket access."""
    from triton.runtime.interpreter import InterpreterBuilder

    bucket: Any = import_module("horovod_topk.kernels.triton.topk.bucket")
    traffic, builder, launch = Traffic(), InterpreterBuilder, bucket.launch
    load, store = builder.create_masked_load, builder.create_masked_store
    add = builder.create_atomic_rmw

    def noting_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        found = load(self, pointers, mask, *rest)
        traffic.note("load", pointers.data, mask.data, found.data.itemsize)
        return found

    def noting_store(self: Any, pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
        traffic.note("store", pointers.data, mask.data, values.data.itemsize)
        return store(self, pointers, values, mask, *rest)

    def noting_add(self: Any, op: Any, pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
        traffic.note("store", pointers.data, mask.data, values.data.itemsize)
        return add(self, op, pointers, values, mask, *rest)

    def launching(kernel: Any, *arguments: Any, **constants: Any) -> None:
        traffic.kernel = kernel.fn.__name__
        launch(kernel, *arguments, **constants)

    noting = {"masked_load": noting_load, "masked_store": noting_store, "atomic_rmw": noting_add}
    before = {"masked_load": load, "masked_store": store, "atomic_rmw": add}
    try:
        for name, function in noting.items():
            setattr(builder, f"create_{name}", function)
        bucket.launch = launching
        yield traffic
    finally:
        for name, function in before.items():
            setattr(builder, f"create_{name}", function)
        bucket.launch = launch


def traffic_of(*, weighed: bool) -> dict[str, list[float]]:
    """Return each kernel's bytes an element in a second step: [at distinct addresses, in all].

    Both steps have the same residual, so that their thresholds are close, as in training.
    """
    from horovod_topk.kernels.triton.topk.bucket import TritonBucket

    specs = [TensorSpec(str(i), (n,), "float32", "cpu") for i, n in enumerate(SIZES)]
    method = TopK(values="int4")
    (bucket,) = make_plan(specs, method).buckets
    kernel = TritonBucket(method.recipe(bucket), "cpu")
    payload = PayloadCodec(TorchOps(kernels=False)).new_payload(bucket)
    drawn = torch.Generator().manual_seed(0)

    def noise() -> list[Tensor]:
        return [torch.randn(n, generator=drawn) for n in SIZES]

    residual, candidate = torch.cat(noise()), torch.zeros(sum(SIZES))
    squares = [each.square() for each in noise()] if weighed else []
    for _ in range(2):
        gradients = [0.1 * each for each in noise()]
        with counted() as encode:
            kernel.encode(residual, candidate, gradients, payload, (), squares)
    with counted() as decode:
        kernel.decode(payload.repeat(RANKS), 1 / RANKS, [], gradients)
    return {
        name: [found.distinct(name) / sum(SIZES), found.moved[name] / sum(SIZES)]
        for found in (encode, decode)
        for name in found.moved
    }


def main(args: argparse.Namespace) -> int:
    """Print, as JSON, the bytes that kernels move with each way to select elements."""
    moved = {name: traffic_of(weighed=each) for name, each in SELECTED.items()}
    print(json.dumps({"sizes": SIZES, "ranks": RANKS, "moved": moved}))
    return 0
