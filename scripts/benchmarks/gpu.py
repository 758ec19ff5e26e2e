"""Times the Triton kernels on a GPU: encode, and decode of eight payloads, in milliseconds.

Needs CUDA and Triton. Results are first compared with those of the framework's operations on the
CPU, bit for bit. Then everything is timed with CUDA events, launched from Python and replayed as a
CUDA graph, beside a copy that moves as many bytes. `benchmarks.gpu_steps` times whole steps.

    python scripts/bench.py gpu [--repeats 50] [--ratio 0.01] [--ranks 8] [--geometry programs=264]

The authors' bias: they want the kernels close to the copy. `--geometry` tries other sizes of
`horovod_topk.kernels.triton.topk.tables.Geometry`; they change speed only.
"""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from horovod_topk.cli.machine import cpu_model
from horovod_topk.cli.models import specs_of
from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.codec.momentum import OptimizerMoments
from horovod_topk.core.plan.buckets import BucketPlan, TensorSpec, make_plan
from horovod_topk.core.state.residual import Arenas
from horovod_topk.kernels.triton import unsupported
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.torch import DTYPES, TorchOps
from pages.markdown import table

DEVICE = "cuda"
BATCH = 10  # calls between two events
KINDS = ("float32", "float16", "bfloat16")
DEFAULT_RATIO = 0.02
COLUMNS = (
    "encode, graph",
    "encode, launched",
    "copy of its bytes",
    "decode, graph",
    "decode, launched",
    "copy of its bytes ",
)


@dataclass(frozen=True)
class Case:
    """Settings of one row of the table."""

    name: str
    bucket: BucketPlan
    weighs: bool = False  # whether entries are selected by Adam's mean squares


def cases(kind: str, ratio: float, selection: str) -> Iterator[Case]:
    """Yield the rows: one large tensor, a ResNet-50's gradients, and the default's settings."""
    many = [replace(spec, dtype=kind, device=DEVICE) for spec in specs_of("resnet50")]
    numel = sum(spec.numel for spec in many)
    one = [TensorSpec("all", (numel,), kind, DEVICE)]
    config = TopK(ratio=ratio, selection=selection, values="float32")
    for name, specs in ((f"1 tensor, {numel:,}", one), (f"{len(many)} tensors", many)):
        yield Case(f"{name}, {kind}", make_plan(specs, config, groups=[specs]).buckets[0])
    config = TopK(ratio=DEFAULT_RATIO, selection=selection, values="int4")
    (bucket,) = make_plan(many, config, groups=[many]).buckets
    name = f"{len(many)} tensors, {kind}, int4 at {DEFAULT_RATIO:g}"
    yield Case(name, bucket)
    if kind == "float32":
        yield Case(f"{name}, by squares", bucket, weighs=True)


def recipe_of(bucket: BucketPlan) -> tuple[int, ...]:
    """What a kernel has to know of a bucket of Top-K."""
    assert isinstance(bucket.config, TopK)
    return bucket.config.recipe(bucket)


class Bench:
    """A bucket with gradients, arenas and payloads on the GPU, and kernels for it."""

    def __init__(self, case: Case, ranks: int, geometry: dict[str, int]) -> None:
        from horovod_topk.kernels.triton.topk.bucket import TritonBucket, suited

        bucket, self.ranks = case.bucket, ranks
        self.bucket, self.geometry = bucket, replace(suited(torch.device(DEVICE, 0)), **geometry)
        self.new_kernel = lambda: TritonBucket(recipe_of(bucket), DEVICE, self.geometry)
        self.kernel = self.new_kernel()
        self.verbs = PayloadCodec(TorchOps(kernels=False))
        self.steps = [self._gradients(seed) for seed in range(ranks)]
        self.squares = [g.square() for g in self._gradients(ranks)] if case.weighs else []
        self.written = [torch.empty_like(g) for g in self.steps[0]]
        self.arenas = self._arenas(DEVICE)
        self.payload = self.verbs.new_payload(bucket)
        self.gathered = self.payload.repeat(ranks)

    def _gradients(self, seed: int) -> list[Tensor]:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        return [
            torch.randn(t.spec.shape, generator=generator, device=DEVICE).to(DTYPES[t.spec.dtype])
            for t in self.bucket.tensors
        ]

    def _arenas(self, device: str) -> Arenas[Tensor]:
        two = (torch.zeros(self.bucket.numel, device=device) for _ in range(2))
        return Arenas(self.bucket, *two)

    def check(self) -> None:
        """Each step's payload and residual against the verbs, then the sum of all payloads."""
        arenas, size = self._arenas("cpu"), self.bucket.layout.payload_bytes
        payload = self.verbs.new_payload(self.bucket).cpu()
        for step, gradients in enumerate(self.steps):
            squares = [v.cpu() for v in self.squares]
            moments = OptimizerMoments(squares=squares)
            self.verbs.encode(arenas, [g.cpu() for g in gradients], payload, moments)
            self.encode(step)
            refuse(f"the payload of step {step}", [payload], [self.payload])
            refuse(f"the residual of step {step}", [arenas.candidate], [self.arenas.candidate])
            self.gathered[step * size : (step + 1) * size] = self.payload
            arenas.swap()
            self.arenas.swap()
        expected = [torch.empty_like(g, device="cpu") for g in self.written]
        self.verbs.decode(self.bucket, self.gathered.cpu(), 1 / self.ranks, expected)
        self.decode()
        refuse("the decoded sum", expected, self.written)

    def encode(self, step: int = 0) -> None:
        """By the kernels."""
        pair, gradients = (self.arenas.residual, self.arenas.candidate), self.steps[step]
        self.kernel.encode(*pair, gradients, self.payload, (), self.squares)

    def training(self) -> Callable[[], None]:
        """Encode with commits and gradients that change."""
        calls = 0

        def run() -> None:
            nonlocal calls
            self.encode(calls % self.ranks)
            self.arenas.swap()
            calls += 1

        return run

    def decode(self) -> None:
        """By the kernels."""
        self.kernel.decode(self.gathered, 1 / self.ranks, [], self.written)

    def row(self, repeats: int) -> list[float]:
        """Milliseconds for `COLUMNS`."""
        dense = self.bucket.dense_bytes
        arrays = 3 if self.squares else 2
        encoded = arrays * 4 * self.bucket.numel + dense + self.bucket.layout.payload_bytes
        decoded = self.gathered.numel() + dense
        return [
            milliseconds(recorded(self.encode), repeats),
            milliseconds(self.training(), repeats),
            milliseconds(copying(encoded), repeats),
            milliseconds(recorded(self.decode), repeats),
            milliseconds(self.decode, repeats),
            milliseconds(copying(decoded), repeats),
        ]


def refuse(what: str, expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """End the program if a result of the kernels has other bits than the verbs' result."""
    differ, largest = 0, 0.0
    for one, other in zip(expected, (each.cpu() for each in found), strict=True):
        differ += int((one.view(torch.uint8) != other.view(torch.uint8)).sum())
        if one.numel():
            largest = max(largest, float((one.double() - other.double()).abs().max()))
    if differ:
        total = sum(each.numel() * each.element_size() for each in expected)
        sys.exit(
            f"{what} differs from the verbs' in {differ:,} of {total:,} bytes, by {largest:g} at "
            "most: do not use these kernels"
        )


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


def report(rows: Sequence[tuple[str, list[float]]], args: argparse.Namespace) -> str:
    """A table with what it was measured on."""
    lines = ([name, *(f"{each:.3f}" for each in row)] for name, row in rows)
    shown = table(["ms", *(column.strip() for column in COLUMNS)], lines)
    notes = (
        f"Ratio {args.ratio:g} if not said otherwise, {args.selection} selection, {args.ranks} "
        f"payloads, medians of {args.repeats} calls. "
        "Payloads and residuals equal those of the verbs on the CPU."
    )
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


def size(text: str) -> tuple[str, int]:
    """NAME=NUMBER."""
    name, _, number = text.partition("=")
    return name, int(number)


def main(arguments: Sequence[str]) -> int:
    """Checks, measures, prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--only", default="", help="rows whose names have this")
    parser.add_argument("--selection", default="exact")
    parser.add_argument("--dtypes", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--geometry", nargs="*", type=size, default=[], metavar="NAME=NUMBER")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("bench gpu needs a GPU that torch can use, and there is none here")
    rows = []
    for kind in args.dtypes:
        for case in cases(kind, args.ratio, args.selection):
            if args.only not in case.name:
                continue
            reason = unsupported(recipe_of(case.bucket), DEVICE)
            if reason:
                sys.exit(f"bench gpu cannot run: {reason}")
            bench = Bench(case, args.ranks, dict(args.geometry))
            bench.check()
            rows.append((case.name, bench.row(args.repeats)))
            print(f"{case.name}: done", file=sys.stderr)
    print(report(rows, args))
    return 0
