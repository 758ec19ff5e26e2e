"""Times the Triton kernels on a GPU: encode, and decode of eight payloads, in milliseconds.

Needs CUDA and Triton. Everything is timed with CUDA events, launched from Python and replayed as a
CUDA graph, beside a copy that moves as many bytes. `benchmarks.gpu_steps` times whole steps, whose
bits it compares with those of the framework's operations on the CPU.

    python scripts/bench.py gpu [--repeats 50]

The authors' bias: they want the kernels close to the copy.
"""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from horovod_topk.cli.machine import cpu_model
from horovod_topk.cli.models import specs_of
from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.plan.buckets import BucketPlan, make_plan
from horovod_topk.core.state.residual import Arenas
from horovod_topk.kernels.triton import unsupported
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.torch import TorchOps
from pages.markdown import table

DEVICE = "cuda"
BATCH = 10  # calls between two events
RANKS = 8
COLUMNS = ("encode, launched", "encode, graph", "copy of its bytes", "decode, graph")


def cases() -> Iterator[tuple[str, BucketPlan, bool]]:
    """Yield the rows: name, a ResNet-50's gradients, whether Adam's mean squares select."""
    specs = [replace(spec, device=DEVICE) for spec in specs_of("resnet50")]
    for values, ratio, weighs in (("int4", 0.02, 0), ("int4", 0.02, 1), ("float32", 0.01, 0)):
        config = TopK(ratio=ratio, values=values)
        (bucket,) = make_plan(specs, config, groups=[specs]).buckets
        yield f"{values} at {ratio:g}" + ", by squares" * weighs, bucket, bool(weighs)


class Bench:
    """A bucket with gradients, arenas and payloads on the GPU, and kernels for it."""

    def __init__(self, bucket: BucketPlan, weighs: bool) -> None:
        from horovod_topk.kernels.triton.topk.bucket import TritonBucket, suited

        assert isinstance(bucket.config, TopK)
        recipe = bucket.config.recipe(bucket)
        if reason := unsupported(recipe, DEVICE):
            sys.exit(f"bench gpu cannot run: {reason}")
        self.bucket = bucket
        self.kernel = TritonBucket(recipe, DEVICE, suited(torch.device(DEVICE, 0)))
        self.steps = [self._gradients(seed) for seed in range(RANKS)]
        self.squares = [g.square() for g in self._gradients(RANKS)] if weighs else []
        self.written = [torch.empty_like(g) for g in self.steps[0]]
        two = (torch.zeros(bucket.numel, device=DEVICE) for _ in range(2))
        self.arenas = Arenas(bucket, *two)
        self.payload = PayloadCodec(TorchOps(kernels=False)).new_payload(bucket)
        self.gathered = self.payload.repeat(RANKS)
        for step in range(RANKS):
            self.encode(step)
            self.arenas.swap()
            self.gathered.view(RANKS, -1)[step] = self.payload

    def _gradients(self, seed: int) -> list[Tensor]:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        shapes = (each.spec.shape for each in self.bucket.tensors)
        return [torch.randn(each, generator=generator, device=DEVICE) for each in shapes]

    def encode(self, step: int = 0) -> None:
        """Write a payload and the next residual."""
        pair, gradients = (self.arenas.residual, self.arenas.candidate), self.steps[step]
        self.kernel.encode(*pair, gradients, self.payload, (), self.squares)

    def training(self) -> Callable[[], None]:
        """Encode with commits and gradients that change."""
        calls = 0

        def run() -> None:
            nonlocal calls
            self.encode(calls % RANKS)
            self.arenas.swap()
            calls += 1

        return run

    def decode(self) -> None:
        """Write the mean of all payloads."""
        self.kernel.decode(self.gathered, 1 / RANKS, [], self.written)

    def row(self, repeats: int) -> list[float]:
        """Milliseconds for `COLUMNS`."""
        dense, arrays = self.bucket.dense_bytes, 3 if self.squares else 2
        encoded = arrays * 4 * self.bucket.numel + dense + self.bucket.layout.payload_bytes
        return [
            milliseconds(self.training(), repeats),
            milliseconds(recorded(self.encode), repeats),
            milliseconds(copying(encoded), repeats),
            milliseconds(recorded(self.decode), repeats),
        ]


def copying(moved: int) -> Callable[[], object]:
    """A copy that moves so many bytes, reads and writes counted."""
    source = torch.randint(256, (moved // 2,), dtype=torch.uint8, device=DEVICE)
    return functools.partial(torch.empty_like(source).copy_, source)


def recorded(call: Callable[[], None]) -> Callable[[], None]:
    """The same as a CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call, over batches of calls."""
    taken: list[float] = []
    for turn in range(max(1, repeats // BATCH) + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(BATCH):
            call()
        end.record()
        end.synchronize()
        if turn:  # the first compiles and warms up
            taken.append(begin.elapsed_time(end) / BATCH)
    return statistics.median(taken)


def report(rows: Sequence[tuple[str, list[float]]], repeats: int) -> str:
    """A table with what it was measured on."""
    shown = table(["ms", *COLUMNS], ([name, *(f"{ms:.3f}" for ms in row)] for name, row in rows))
    notes = f"A ResNet-50's gradients, {RANKS} payloads, medians of {repeats} calls."
    return "\n".join([shown, "", notes, origin(DEVICE)])


def origin(device: str) -> str:
    """Return the machine, versions, date and command of the figures, as text."""
    import triton

    name = torch.cuda.get_device_name() if device == "cuda" else cpu_model()
    return (
        f"Machine: {name}, Python {platform.python_version()}, PyTorch {torch.__version__}, Triton "
        f"{triton.__version__}. Date: {time.strftime('%Y-%m-%d')}.\n"
        f"Command: python {' '.join(sys.argv)}"
    )


OPTIONS = {"repeats": (50, "timed calls")}


def main(args: argparse.Namespace) -> int:
    """Measure and print."""
    if not torch.cuda.is_available():
        sys.exit("bench gpu needs a GPU that torch can use, and there is none here")
    rows = [(name, Bench(bucket, weighs).row(args.repeats)) for name, bucket, weighs in cases()]
    print(report(rows, args.repeats))
    return 0
