"""Times whole steps on a GPU: encode, decode and commit, and the optimizer's step, in milliseconds.

Needs CUDA and Triton. The gradients have the shapes of a ResNet-50. Two simulated ranks share the
GPU, and the times are those of the first. Gradients and residuals are first compared, bit for bit,
with those of torch's operations on the CPU. Beside TopKEF are timed `r += g`, and optimizers
of dense gradients.

    python scripts/bench.py gpu_steps [--repeats 40] [--only SGD] [--model resnet18]

The authors' bias: they want small figures. `--device cpu` rehearses the script: its times, of the
CPU kernels, mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from benchmarks.gpu import origin
from benchmarks.simulated import PARTS, PLAIN, RANKS, NamedState, Training
from horovod_topk.cli.compare.simulated import exchanges
from horovod_topk.cli.models import specs_of
from horovod_topk.cli.timing import in_turns, repeated
from horovod_topk.core.plan.buckets import Plan, TensorSpec
from horovod_topk.kernels.triton import unsupported
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.torch import TorchOps
from pages.markdown import table

SETTLE = 12  # steps before the first timed one; the first compile the kernels
CHECKED = 2  # steps whose bits are compared
BATCH = 10  # calls of a floor between two waits
ALL = "all"


@dataclass(frozen=True)
class Row:
    """Settings of one row of the table."""

    name: str
    optimizer: str  # sgd, adamw or none: no step
    call: str | None  # the compressor, as after its warm-up; None: dense
    checks: bool = False  # compare its bits with those of the CPU
    profiles: bool = False  # time the GPU's own work


ROWS = (
    Row("dense, SGD", "sgd", None),
    Row("dense, AdamW", "adamw", None),
    Row("TopKEF(), SGD", "sgd", "TopKEF(warmup=None)", checks=True, profiles=True),
    Row("TopKEF(), AdamW", "adamw", "TopKEF(warmup=None)", checks=True, profiles=True),
    Row("plain int4", "none", f"TopKEF({PLAIN})", checks=True),
    Row("plain float32", "none", f"TopKEF({PLAIN}, values='float32')"),
    Row("float32, SGD", "sgd", "TopKEF(warmup=None, values='float32')"),
)


def training(specs: Sequence[TensorSpec], device: str, row: Row) -> Training:
    """A row's steps on a device."""
    made = Training(specs, row.optimizer, row.call, device)
    if made.exchange is not None:
        refuse_without_kernels(made.exchange.compressors[0].plan, device)
    return made


def refuse_without_kernels(plan: Plan, device: str) -> None:
    """End the program if a bucket on a GPU has no Triton kernel, so that others would be timed."""
    for bucket in plan.buckets if device == "cuda" else ():
        assert isinstance(bucket.config, TopK)
        reason = unsupported(bucket.config.recipe(bucket), bucket.device)
        if reason:
            sys.exit(f"gpu_steps cannot run: {reason}")


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


def check(specs: Sequence[TensorSpec], device: str, row: Row) -> None:
    """End the program if the device's gradients or residuals have other bits than the CPU's.

    Both get the same gradients and, before each step, the same moments: Adam's own steps differ
    between CPU and GPU in their last bits.
    """
    with mock.patch.object(exchanges, "TorchOps", partial(TorchOps, kernels=False)):
        cpu = Training(specs, row.optimizer, row.call)
    other = training(specs, device, row)
    other.model.load_state_dict(cpu.model.state_dict())
    for step in range(CHECKED):
        other.optimizer.load_state_dict(cpu.optimizer.state_dict())
        for here, there in zip(cpu.gradients, other.gradients, strict=True):
            for gradient, its_copy in zip(here, there, strict=True):
                its_copy.copy_(gradient.normal_(std=0.01))
        for each in (cpu, other):
            each.encode(0)
            each.encode(1)
            each.decode(0)
        refuse(f"{row.name}: a gradient of step {step}", cpu.gradients[0], other.gradients[0])
        for each in (cpu, other):
            each.decode(1)
        refuse(f"{row.name}: a residual of step {step}", cpu.residuals(), other.residuals())
        cpu.apply()


def wait(device: str) -> None:
    """Wait until the device has done all that is queued."""
    if device == "cuda":
        torch.cuda.synchronize()


class Clock:
    """Times parts of steps, each from an idle device to an idle device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._taken: dict[str, list[float]] = defaultdict(list)

    def __call__(self, name: str, part: NamedState, calls: int = 1) -> None:
        """Run a part, a number of times, and note the time of one."""
        wait(self._device)
        began = time.perf_counter()
        for _ in range(calls):
            part()
        wait(self._device)
        self._taken[name].append(1e3 * (time.perf_counter() - began) / calls)

    def medians(self) -> dict[str, float]:
        """Return each part's milliseconds until the GPU is done."""
        found = {name: statistics.median(each) for name, each in self._taken.items()}
        return {**found, ALL: sum(found.values())}


def work(training: Training) -> str:
    """Return the milliseconds that the GPU itself works in encode and decode of a step, as text."""
    found: dict[str, float] = {}

    def profiled(name: str, part: NamedState) -> None:
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        wait("cuda")
        with torch.profiler.profile(activities=activities) as profiler:
            part()
            wait("cuda")
        events = profiler.key_averages()
        own = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
        found[name] = sum(event.self_device_time_total for event in own) / 1e3

    training(profiled)
    return ", ".join(f"{name}: {found[name]:.2f} ms of kernels" for name in PARTS[:2])


def measure(trainings: dict[str, Training], device: str, repeats: int) -> dict[str, Clock]:
    """Time steps of all rows in turns, so that a host that is slow for a while is so for each.

    The first steps compile the kernels, and residuals settle.
    """
    clocks = {name: Clock(device) for name in trainings}
    for training in trainings.values():
        repeated(training, SETTLE)
    in_turns({name: partial(each, clocks[name]) for name, each in trainings.items()}, repeats)
    return clocks


def measure_floor(specs: Sequence[TensorSpec], device: str, repeats: int) -> Clock:
    """Time `r += g` on as many elements as a step has."""
    r, g = (torch.randn(sum(spec.numel for spec in specs), device=device) for _ in range(2))
    r.add_(g)  # warms up
    clock = Clock(device)
    repeated(partial(clock, ALL, partial(r.add_, g), BATCH), repeats)
    return clock


def report(clocks: dict[str, Clock], insights: dict[str, str], args: argparse.Namespace) -> str:
    """Return the table, and notes on what it was measured on."""
    columns = (*PARTS, ALL)
    rows = []
    for name, clock in clocks.items():
        found = clock.medians()
        cells = (f"{found[c]:.3f}" if c in found else "" for c in columns)
        rows.append([name, *cells])
    checked = [row.name for row in chosen(args.only) if row.checks]
    notes = (
        f"{args.model}, {RANKS} simulated ranks on one device, times of the first; medians of "
        f"{args.repeats} steps, in turns, after {SETTLE} others.\n"
        "Plain: momentum=0, follow_lr=False.\n"
        f"Gradients and residuals of {CHECKED} steps equal those of torch's operations on the CPU, "
        f"bit for bit: {'; '.join(checked) or 'not compared'}."
    )
    within = [f"- {name}: {text}." for name, text in insights.items()]
    shown = table(["ms", *columns], rows)
    return "\n".join([shown, "", *within, *[""] * bool(within), notes, origin(args.device)])


def chosen(only: str) -> list[Row]:
    """Return the rows whose names contain a text."""
    return [row for row in ROWS if only in row.name]


OPTIONS = {
    "repeats": (40, "timed steps"),
    "only": ("", "rows whose names have this"),
    "model": ("resnet50", "or a JSON file of shapes by name"),
    "device": ("cuda", "or cpu"),
}


def main(args: argparse.Namespace) -> int:
    """Checks, measures, prints."""
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_steps needs a GPU that torch can use, and there is none here")
    torch.manual_seed(0)
    specs = specs_of(args.model)
    for row in chosen(args.only):
        if row.checks:
            check(specs, args.device, row)
            print(f"{row.name}: the bits of the CPU", file=sys.stderr)
    clocks = {"`r += g`": measure_floor(specs, args.device, args.repeats)}
    trainings = {row.name: training(specs, args.device, row) for row in chosen(args.only)}
    clocks.update(measure(trainings, args.device, args.repeats))
    profiled = {row.name for row in ROWS if row.profiles and args.device == "cuda"}
    # Last, as a process that has been profiled may be slower.
    insights = {name: work(each) for name, each in trainings.items() if name in profiled}
    print(report(clocks, insights, args))
    return 0
