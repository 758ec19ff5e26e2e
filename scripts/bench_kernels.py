"""`make bench-kernels`: what selection costs, against `r += g` and `torch.topk`, in one run.

One thread, no network. A step encodes one float32 tensor with error feedback: gradients are drawn
anew each step (one of three, with a random sign and size), after enough steps for the residual to
be what training makes of it. The floor is `residual.add_(gradient)` of the same size, and for
decoding, filling the output with zeros and reading the payloads once. Ways take turns.

    python scripts/bench_kernels.py [--quick] [--gradients 25000000]

Writes docs/kernels.md, docs/results/kernels.png and docs/results/kernels.json. The authors' bias:
they want small ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from tqdm import tqdm

from horovod_topk.config import TopKConfig
from horovod_topk.core.codec import TopK
from horovod_topk.core.plan import TensorSpec, make_plan
from horovod_topk.core.residual import Arenas
from horovod_topk.core.shards import shard
from horovod_topk.kernels import native
from horovod_topk.ops.torch import TorchOps
from launch import ROOT
from processor import cpu_model

PAGE = ROOT / "docs" / "kernels.md"
RESULTS = ROOT / "docs" / "results"
SIZES = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
RATIOS = (0.1, 0.01, 0.001, 0.0001)
ISAS = ("avx512", "avx2", "portable")
# Multiples of the floor, at 25 million elements and 1%.
TARGETS = {"avx512, sampled": 1.3, "avx512, exact": 2.3, "avx2, sampled": 1.6}
SLOW = ("torch.topk", "framework operations")
CODINGS = ("float32", "float16", "bfloat16", "int8", "int4", "sign")
NO_CODING = "float32, plain"  # values and indices as they are
Step = Callable[[], None]


@dataclass(frozen=True)
class Gradients:
    """A supply of gradients; each call of `next` sets one up, untimed."""

    pool: list[Tensor]
    current: Tensor

    @classmethod
    def of(cls, numel: int, seed: int = 0) -> Gradients:
        """For a tensor of `numel` elements."""
        generator = torch.Generator().manual_seed(seed)
        pool = [torch.randn(numel, generator=generator) for _ in range(3)]
        return cls(pool, torch.empty(numel))

    def next(self) -> None:
        """Another one: of random sign, and of a norm that varies by a third."""
        factor = random.choice((-1, 1)) * random.uniform(0.7, 1.3)
        torch.mul(random.choice(self.pool), factor, out=self.current)


class Encoding:
    """One tensor with its error feedback, encoded step after step."""

    def __init__(
        self,
        gradients: Gradients,
        ratio: float,
        selection: str,
        ops: TorchOps,
        indices: str = "packed",
        values: str = "float32",
    ) -> None:
        spec = TensorSpec("w", tuple(gradients.current.shape), "float32")
        settings = TopKConfig(ratio, values, indices, selection=selection, min_numel=0)
        (self.bucket,) = make_plan([spec], settings).buckets
        self.codec: TopK[Tensor] = TopK(ops)
        numel = spec.numel
        self.arenas = Arenas(self.bucket, torch.zeros(numel), torch.zeros(numel))
        self.payload = self.codec.new_payload(self.bucket)
        self.gradients = gradients

    def step(self) -> None:
        """Encode and commit."""
        self.codec.encode(self.arenas, [self.gradients.current], self.payload)
        self.arenas.swap()

    def settle(self, steps: int) -> Encoding:
        """Let the residual grow to what it is in training, as far as `steps` go."""
        for _ in range(steps):
            self.gradients.next()
            self.step()
        return self


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Kernels made within use this one."""
    os.environ["HOROVOD_TOPK_ISA"] = name
    try:
        yield
    finally:
        del os.environ["HOROVOD_TOPK_ISA"]


def available_isas() -> list[str]:
    """Instruction sets of this processor, fastest first; none without kernels."""
    found = native.find()
    return list(ISAS[ISAS.index(found.description) :]) if found.library else []


def encodings(gradients: Gradients, ratio: float, settle: int) -> dict[str, Step]:
    """All ways of encoding one tensor, each with a residual of its own."""
    ways: dict[str, Step] = {}
    for isa in available_isas():
        for selection in ("exact", "sampled"):
            with instruction_set(isa):
                ours = Encoding(gradients, ratio, selection, TorchOps()).settle(settle)
            ways[f"{isa}, {selection}"] = ours.step
    return ways


def baselines(gradients: Gradients, ratio: float) -> dict[str, Step]:
    """The floor, and what frameworks offer."""
    residual, k = torch.zeros_like(gradients.current), max(1, int(ratio * len(gradients.current)))
    verbs = Encoding(gradients, ratio, "exact", TorchOps(kernels=False)).settle(2)
    return {
        "r += g": lambda: _discard(residual.add_(gradients.current)),
        "framework operations": verbs.step,
        "torch.topk": lambda: _discard(torch.topk(gradients.current.abs(), k, sorted=False)),
    }


def _discard(_: Any) -> None:
    """What was computed is not needed."""


def milliseconds(ways: dict[str, Step], before: Step, repeats: int) -> dict[str, float]:
    """Medians, the ways taking turns so that a noisy neighbour meets them all.

    Those in SLOW take every third turn.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, step in ways.items():
            if turn % 3 and name in SLOW:
                continue
            before()
            started = time.perf_counter()
            step()
            taken[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(each[1:]) for name, each in taken.items()}


def settling_steps(numel: int, ratio: float) -> int:
    """Steps before the first that is timed: residuals settle in about 1 / ratio."""
    return max(8, min(150, int(1.5 / ratio), 3_750_000_000 // numel))


def measure_encoding(numel: int, ratio: float, repeats: int) -> dict[str, float]:
    """Milliseconds of every way at one size and ratio."""
    gradients = Gradients.of(numel)
    ours = encodings(gradients, ratio, settling_steps(numel, ratio))
    return milliseconds({**ours, **baselines(gradients, ratio)}, gradients.next, repeats)


def measure_decoding(numel: int, ratio: float, repeats: int, indices: str) -> dict[str, float]:
    """Milliseconds of decoding 1, 2, 4 and 8 payloads, and of the floor of each."""
    payloads = []
    for rank in range(8):
        gradients = Gradients.of(numel, rank)
        encoding = Encoding(gradients, ratio, "exact", TorchOps(), indices).settle(2)
        payloads.append(encoding.payload)
    output, ways = torch.empty(numel), dict[str, Step]()
    for ranks in (1, 2, 4, 8):
        gathered = torch.cat(payloads[:ranks])
        ways[f"decode {ranks}"] = _decode(encoding, gathered, output, ranks)
        ways[f"fill and read {ranks}"] = _fill_and_read(gathered, output)
    return milliseconds(ways, lambda: None, repeats)


def measure_coding(numel: int, ratio: float, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of encoding, and of decoding two payloads, for every way of writing entries."""
    gradients, output = Gradients.of(numel), torch.empty(numel)
    ways = {NO_CODING: ("plain", "float32")}
    ways |= {f"{values}, packed": ("packed", values) for values in CODINGS}
    encode, decode = dict[str, Step](), dict[str, Step]()
    for name, (indices, values) in ways.items():
        ours = Encoding(gradients, ratio, "sampled", TorchOps(), indices, values)
        encode[name] = ours.settle(settling_steps(numel, ratio)).step
        decode[name] = _decode(ours, torch.cat([ours.payload, ours.payload]), output, 2)
    encoding = milliseconds(encode, gradients.next, repeats)
    decoding = milliseconds(decode, lambda: None, repeats)
    return {name: {"encode": encoding[name], "decode": decoding[name]} for name in ways}


def measure_shards(numel: int, ratio: float, repeats: int) -> dict[str, float]:
    """Milliseconds of encoding for 2, 4 and 8 owners, beside encoding for an allgather."""
    gradients = Gradients.of(numel)
    whole = Encoding(gradients, ratio, "sampled", TorchOps()).settle(settling_steps(numel, ratio))
    ways: dict[str, Step] = {"r += g": baselines(gradients, ratio)["r += g"]}
    ways["allgather"] = whole.step
    for owners in (2, 4, 8):
        ways[f"{owners} owners"] = _for_owners(whole, owners, settling_steps(numel, ratio))
    return milliseconds(ways, gradients.next, repeats)


def _for_owners(whole: Encoding, owners: int, settle: int) -> Step:
    plans, codec = shard(whole.bucket, owners).scatter, whole.codec
    arenas = [Arenas(p, torch.zeros(p.numel), torch.zeros(p.numel)) for p in plans]
    payloads = [codec.new_payload(plan) for plan in plans]

    def step() -> None:
        codec.encode_shards(arenas, [whole.gradients.current], payloads)
        for each in arenas:
            each.swap()

    for _ in range(settle):
        whole.gradients.next()
        step()
    return step


def _decode(encoding: Encoding, gathered: Tensor, output: Tensor, ranks: int) -> Step:
    codec, bucket = encoding.codec, encoding.bucket
    return lambda: _discard(codec.decode(bucket, gathered, 1 / ranks, [output]))


def _fill_and_read(gathered: Tensor, output: Tensor) -> Step:
    words = gathered.view(torch.int64)

    def step() -> None:
        output.zero_()
        words.sum()

    return step


def measure_exchange(selection: str) -> dict[str, float]:
    """A ResNet-50's gradients between two ranks; see scripts/bench_exchange.py."""
    script = [sys.executable, "scripts/bench_exchange.py", "--selection", selection]
    horovodrun = Path(sys.executable).with_name("horovodrun")
    command = [str(horovodrun), "-np", "2", "--gloo", *script]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True
    )
    found: dict[str, float] = json.loads(done.stdout[done.stdout.index("{") :])
    return found


def measure(numel: int, repeats: int, grid: list[tuple[int, float]]) -> dict[str, Any]:
    """All that the page shows; runs between two ranks come before and between the rest."""
    exchange: dict[str, list[dict[str, float]]] = {"exact": [], "sampled": []}

    def between_ranks() -> None:
        for selection, runs in exchange.items():
            runs.append(measure_exchange(selection))

    between_ranks()
    encoding = measure_encoding(numel, 0.01, repeats)
    between_ranks()
    indices = ("plain", "packed")
    decoding = {each: measure_decoding(numel, 0.01, repeats, each) for each in indices}
    coding = measure_coding(numel, 0.01, repeats)
    shards = measure_shards(numel, 0.01, repeats)
    between_ranks()
    sizes = []
    for each, (n, ratio) in enumerate(tqdm(grid, disable=None)):
        sizes.append({"numel": n, "ratio": ratio, "ms": measure_encoding(n, ratio, repeats)})
        if each == len(grid) // 2:
            between_ranks()
    between_ranks()
    return {
        "numel": numel,
        "encoding": encoding,
        "decoding": decoding,
        "coding": coding,
        "shards": shards,
        "exchange": exchange,
        "sizes": sizes,
    }


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
        shards=shards_table(found["shards"]),
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


def shards_table(found: dict[str, float]) -> str:
    """What more owners cost."""
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


def main() -> int:
    """Measures, prints the page and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="no sizes above a million, no page")
    parser.add_argument("--gradients", type=int, default=25_000_000, help="elements of the tables")
    args = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    repeats = 5 if args.quick else 15
    sizes = [n for n in SIZES if n <= 1_000_000 or not args.quick]
    grid = [(numel, ratio) for numel in sizes for ratio in RATIOS]
    found = measure(args.gradients, repeats, grid)
    page = report(found)
    print(page)
    if not args.quick:
        PAGE.write_text(page)
        (RESULTS / "kernels.json").write_text(json.dumps(found, indent=1) + "\n")
        picture(found["sizes"], RESULTS / "kernels.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
