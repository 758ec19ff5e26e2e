"""docs/kernels.md: tables and a picture of what `bench_kernels.py` measured."""

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
NO_CODING = "float32, plain"  # values and indices as they are

PAGE_TEMPLATE = """\
# What selection costs

<!-- Written by `make bench-kernels`. Change scripts/bench_kernels.py instead of this page. -->

One thread, medians. Machine: {cpu}, {cores} shared cores, Python {python}, PyTorch {torch}.
Date: {date}. Command: `make bench-kernels`.

## Encoding {numel:,} float32 at 1%

{encoding}

A step adds the gradient to the residual, selects, writes the payload and what is left. `r += g`
reads two arrays and writes one of them; so does encoding, into the other arena. `exact` starts from
the last step's threshold, `sampled` from a sample of this step's. Each step has one of three
gradients, of random sign and with a norm that varies by a third, after 150 steps for the residual
to settle ("framework operations": after 2). `torch.topk` is the selection alone,
`topk(gradient.abs(), k, sorted=False)`. Ways take turns, the last two every third time.

## Decoding into as many

{decoding}

The floor fills the output with zeros and reads the payloads once. Packed payloads are a third
shorter, so that their floor is lower, and have to be unpacked.

## Writing and reading entries

{coding}

Sampled selection, and two payloads decoded. "Coding" is what a row costs beyond entries that are
written as they are, in parts of the time that encoding those takes.

## Encoding for owners

{shards}

The sharded exchange sends each owner the largest of its own elements: as many selections as owners,
in one pass over the gradient. Sampled selection, float32, packed.

## Momentum correction

{momentum}

One tensor of as many elements, values of 4 bits at ratio 0.024, as `TopKEF.compact()` has it,
without and with momentum correction: a velocity is kept up, sent in place of the gradient, and
masked where it was sent.

## Sizes and ratios

Multiples of `r += g` for the fastest kernels, exact; in brackets, how many times faster than
`torch.topk`. Residuals had 150 steps (37 at 100 million elements) and settle in about 1 / ratio:
those below 0.01 still grow, as in a run's first steps. Small tensors lie in the processor's caches,
where `r += g` is faster than memory.

{sizes}

![time against size](results/kernels.png)

## Between two ranks

{exchange}

Milliseconds a step of a ResNet-50's 161 gradients, two ranks on this machine's cores, the slower
rank. Allowed: 1.5 times (`r += g` and a fill, both ranks at once) plus an allgather of the same
bytes in the same number of buckets. All is measured in one run (scripts/bench_exchange.py), and
compared turn by turn: "share of it" is the median of what a turn added to what it was allowed. The
runs lie minutes apart, between this page's other measurements, as the bandwidth of a shared
machine's memory does not stay the same; the other columns are medians over runs.
"""


def report(found: dict[str, Any]) -> str:
    """The page."""
    return PAGE_TEMPLATE.format(
        cpu=cpu_model(),
        cores=os.cpu_count(),
        python=platform.python_version(),
        torch=torch.__version__,
        date=time.strftime("%Y-%m-%d"),
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
    """Every way at the size that the targets name."""
    floor, topk = found["r += g"], found["torch.topk"]
    rows = []
    for name, ms in found.items():
        wanted = TARGETS.get(name)
        limit = f"{wanted} at most" if wanted else ""
        rows.append([name, f"{ms:.1f}", f"{ms / floor:.2f}", limit, f"{topk / ms:.0f}x"])
    return table(["", "ms", "of `r += g`", "wanted", "faster than torch.topk"], rows)


def decoding_table(found: dict[str, dict[str, float]]) -> str:
    """Payloads against filling and reading."""
    rows = []
    for indices, ms in found.items():
        for ranks in (1, 2, 4, 8):
            ours, floor = ms[f"decode {ranks}"], ms[f"fill and read {ranks}"]
            figures = [f"{ours:.1f}", f"{floor:.1f}", f"{ours / floor:.2f}"]
            rows.append([indices, str(ranks), *figures])
    return table(["indices", "payloads", "ms", "floor, ms", "ratio (1.5 at most)"], rows)


def coding_table(found: dict[str, dict[str, float]]) -> str:
    """What formats cost beyond selection."""
    base, rows = found[NO_CODING], []
    for name, ms in found.items():
        more = sum(ms[each] - base[each] for each in ("encode", "decode"))
        figures = [f"{ms['encode']:.1f}", f"{ms['decode']:.1f}", f"{more / base['encode']:.2f}"]
        rows.append([name, *figures])
    return table(["values, indices", "encode, ms", "decode, ms", "coding (0.25 at most)"], rows)


def floor_table(found: dict[str, float]) -> str:
    """Ways, and what they cost beside the floor."""
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
    """What an exchange adds to a step, and what it may: medians of runs, and each run's share."""
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
