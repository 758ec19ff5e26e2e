"""Write docs/kernels.md and its picture from the measurements of `bench_kernels.py`."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

from horovod_topk.cli.processor import cpu_model

# Multiples of the floor, at 25 million elements and 1%.
TARGETS = {"avx512, sampled": 1.3, "avx512, exact": 2.3, "avx2, sampled": 1.6}
RATIOS = (0.1, 0.01, 0.001, 0.0001)
NO_CODING = "float32, plain"  # entries that are not coded

PAGE_TEMPLATE = """\
# What selection costs

<!-- Written by `make bench-kernels`. Change scripts/bench_kernels.py instead of this page. -->

This page times the CPU kernels that select and encode the largest entries of a gradient. The
yardstick is `r += g`, the addition of a gradient to a residual of the same size: no error feedback
can cost less. One thread, medians, random gradients, no GPU.

**Encoding is only a part of a step.** With AVX kernels, encoding a gradient costs 1.3 to 1.5 times
`r += g` (first table). What all of a step costs with the default's settings and an optimizer is in
[benchmarks.md](benchmarks.md).

**GPUs** have Triton kernels for every format of values, with plain indices and the allgather
exchange. [gpu.md](gpu.md) has their times. Everything else uses the framework's operations there.

## Encode {numel:,} float32 at ratio 0.01

{encoding}

- *Encode*: add the gradient to the residual, select the largest entries, write the payload and the
  new residual. Like `r += g` it reads two arrays and writes one.
- `exact` selects exactly k entries and starts from the threshold of the step before. `sampled`
  estimates the threshold from a sample of this step's gradient.
- `avx512`, `avx2` and `portable` are the native kernels for different processors. `framework
  operations` is the same in PyTorch calls. `torch.topk` is the selection alone:
  `topk(gradient.abs(), k, sorted=False)`.
- Each step takes one of three gradients with random signs and a norm that varies by a third.
  Before, 150 steps let the residual settle ("framework operations": 2). All rows take turns; the
  last two run every third time.

## Decode into a gradient of the same size

{decoding}

The floor fills the output with zeros and reads the payloads once. Packed payloads are a third
shorter, so their floor is lower, but they must be unpacked.

## Cost of value and index formats

{coding}

Sampled selection; two payloads are decoded. *Coding* is the time of a row beyond plain float32
entries, as a share of the time of encoding those.

## Encode for several owners

{shards}

The sharded exchange sends each owner the largest entries of the owner's elements. It selects as
many times as there are owners, in one pass over the gradient. Sampled selection, float32 values,
packed indices.

## Momentum

{momentum}

One tensor of the same size, int4 values at ratio 0.02. *Momentum* (`momentum=0.9`) keeps a velocity
and sends it in place of the gradient. *Masking* sets the velocity of a sent entry to zero.
*Rescale* multiplies the residual by the change of the learning rate. All of it is one pass over the
tensor.

## Other methods

[methods.md](methods.md#time) has the time of every method, by `scripts/bench_methods.py`. The
numbers below are multiples of `r += g` for 25 million float32, medians of 9 beside other jobs.

- `r += g` reads two arrays of 100 MB and writes one. `SignSGD`, `OneBit`, `ByteGrad` and `QSGD`
  move no more, because a block stays in the cache between measuring and writing. Their cost beyond
  1 is arithmetic. `OneBit` adds float64 numbers in a fixed order, so that every framework gets the
  same bits.
- `RandomK` costs 1.1 for e + g, 0.1 for indices, 0.25 to read its entries and 0.25 to subtract
  them, as most entries miss the cache. Its timed step also writes the gradient, for 0.45.
- `TernGrad` moves seven arrays, 2.3 times those of `r += g`: three for e + g, one for the moments,
  one to encode, and two to clear. These cost 1.1, 0.65, 1.3 and 0.45. About half of encoding is
  drawing random numbers.
- If other processes use the memory, `r += g` takes longer and arithmetic does not, so that
  multiples fall: `SignSGD` cost 1.8 where `r += g` took 6.2 ms, and 1.4 where it took 9.0 ms.

## Sizes and ratios

The fastest exact kernel as a multiple of `r += g`. In brackets: how many times faster than
`torch.topk`.

{sizes}

Residuals had 150 steps to settle (37 at 100 million elements) and need about 1 / ratio steps. So at
ratios below 0.01 they still grew, as in the first steps of a run. Small tensors fit in the
processor's caches, where `r += g` is faster than in memory.

![time against size](results/kernels.png)

## Between two ranks

{exchange}

Milliseconds a step on the slower of two ranks that share this machine's cores, for a ResNet-50's
161 gradients.

- *Allowed*: 1.5 times (`r += g` and a zero-fill, on both ranks at once), plus an allgather of the
  same bytes in the same number of buckets.
- *Share of it*: what the exchange added, divided by what was allowed, compared turn by turn in one
  run (scripts/bench_exchange.py); the median. The other columns are medians over runs.
- The runs lie minutes apart, because the memory bandwidth of a shared machine changes.

Machine: {cpu}, {cores} shared cores, Python {python}, PyTorch {torch}. Date: {date}. Command: `make
bench-kernels`. The authors' bias: they want small ratios.
"""


def machine() -> dict[str, str | int | None]:
    """Where and when the page's figures are measured."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def report(found: dict[str, Any]) -> str:
    """The page."""
    return PAGE_TEMPLATE.format(
        **found["machine"],
        numel=found["numel"],
        encoding=encoding_table(found["encoding"]),
        decoding=decoding_table(found["decoding"]),
        coding=coding_table(found["coding"]),
        shards=floor_table(found["shards"]),
        momentum=floor_table(found["momentum"]),
        sizes=sizes_table(found["sizes"]),
        exchange=exchange_table(found["exchange"]),
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def encoding_table(found: dict[str, float]) -> str:
    """Every kernel at the size of the targets."""
    floor, topk = found["r += g"], found["torch.topk"]
    rows = []
    for name, ms in found.items():
        wanted = TARGETS.get(name)
        limit = f"{wanted} at most" if wanted else ""
        rows.append([name, f"{ms:.1f}", f"{ms / floor:.2f}", limit, f"{topk / ms:.0f}x"])
    return table(["", "ms", "of `r += g`", "wanted", "faster than torch.topk"], rows)


def decoding_table(found: dict[str, dict[str, float]]) -> str:
    """Decoding against filling and reading."""
    rows = []
    for indices, ms in found.items():
        for ranks in (1, 2, 4, 8):
            ours, floor = ms[f"decode {ranks}"], ms[f"fill and read {ranks}"]
            figures = [f"{ours:.1f}", f"{floor:.1f}", f"{ours / floor:.2f}"]
            rows.append([indices, str(ranks), *figures])
    return table(["indices", "payloads", "ms", "floor, ms", "ratio (1.5 at most)"], rows)


def coding_table(found: dict[str, dict[str, float]]) -> str:
    """The cost of formats beyond selection."""
    base, rows = found[NO_CODING], []
    for name, ms in found.items():
        more = sum(ms[each] - base[each] for each in ("encode", "decode"))
        figures = [f"{ms['encode']:.1f}", f"{ms['decode']:.1f}", f"{more / base['encode']:.2f}"]
        rows.append([name, *figures])
    return table(["values, indices", "encode, ms", "decode, ms", "coding (0.25 at most)"], rows)


def floor_table(found: dict[str, float]) -> str:
    """Times, also as multiples of `r += g`."""
    floor = found["r += g"]
    rows = [[name, f"{ms:.1f}", f"{ms / floor:.2f}"] for name, ms in found.items()]
    return table(["", "ms", "of `r += g`"], rows)


def sizes_table(cells: list[dict[str, Any]]) -> str:
    """A row a size, a column a ratio."""
    rows = [
        [f"{numel:,}", *(_cell(cell["ms"]) for cell in cells if cell["numel"] == numel)]
        for numel in dict.fromkeys(cell["numel"] for cell in cells)
    ]
    return table(["elements", *(f"{ratio:g}" for ratio in RATIOS)], rows)


def _cell(ms: dict[str, float]) -> str:
    ours = next(iter(ms.values()))
    return f"{ours / ms['r += g']:.2f} ({ms['torch.topk'] / ours:.0f}x)"


def exchange_table(found: dict[str, list[dict[str, float]]]) -> str:
    """The time that an exchange adds and may add: medians of runs, and each run's share."""
    columns = {
        "plain": "step without",
        "topk": "step with",
        "exchange": "exchange adds",
        "allowed": "allowed",
        "memory": "`r += g` and fill",
        "allgather": "allgather alone",
    }
    rows = []
    for selection, runs in found.items():
        medians = (statistics.median(run[column] for run in runs) for column in columns)
        shares = [run["share"] for run in runs]
        each = ", ".join(f"{share:.2f}" for share in shares)
        rows.append(
            [
                selection,
                *(f"{median:.1f}" for median in medians),
                f"{statistics.median(shares):.2f}",
                each,
            ]
        )
    return table(["selection", *columns.values(), "share of it", "in each run"], rows)


def picture(cells: list[dict[str, Any]], target: Path) -> None:
    """Time against size at ratio 0.01."""
    at = [cell for cell in cells if cell["ratio"] == 0.01]
    sizes = [cell["numel"] for cell in at]
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name in at[0]["ms"]:
        axes.plot(sizes, [cell["ms"][name] for cell in at], marker="o", markersize=3, label=name)
    axes.set(xscale="log", yscale="log", xlabel="elements (float32)", ylabel="ms, one thread")
    axes.set_title("Selecting 1%")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target, dpi=120)
