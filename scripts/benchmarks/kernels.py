"""`make bench-kernels`: what selection costs, against `r += g` and `torch.topk`, in one run.

One thread, no network. A step encodes one float32 tensor with error feedback. Each step takes one
of three gradients with random sign and size, after enough steps for the residual to settle as in
training. The floor is `residual.add_(gradient)` of the same size. All rows take turns.

    python scripts/bench.py kernels [--quick] [--gradients 25000000]

Writes docs/kernels.md and docs/results/kernels.json. The authors' bias: they want small ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.encoding import FLOOR, SLOW, Encoding, Gradients, Step, milliseconds
from horovod_topk.cli.machine import machine
from horovod_topk.core.plan.shards import shard
from horovod_topk.core.state.residual import Arenas
from horovod_topk.kernels import native
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.torch import TorchOps
from pages import RESULTS, ROOT, Values, write
from pages.markdown import table

SIZES = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
RATIOS = (0.1, 0.01, 0.001, 0.0001)
NO_CODING = "float32, plain"  # entries that are not coded
ISAS = ("avx512", "avx2", "portable")
CODINGS = ("float32", "float16", "bfloat16", "int8", "int4", "sign")


def plain(gradients: Gradients, ratio: float, selection: str, **settings: Any) -> Encoding:
    """Make an encoding of gradients by Top-K with plain error feedback."""
    values = {"values": "float32", "min_numel": 0, **settings}
    return Encoding(gradients, TopK(ratio, selection=selection, **values), TorchOps())


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


def encodings(gradients: Gradients, ratio: float) -> dict[str, Step]:
    """All ways of encoding one tensor, each with a residual of its own."""
    ways, settle = dict[str, Step](), settling_steps(len(gradients.current), ratio)
    for isa in available_isas():
        for selection in ("exact", "sampled"):
            with instruction_set(isa):
                ways[f"{isa}, {selection}"] = plain(gradients, ratio, selection).settle(settle).step
    return ways


def baselines(gradients: Gradients, ratio: float) -> dict[str, Step]:
    """The floor, and what frameworks offer."""
    k = max(1, int(ratio * len(gradients.current)))
    method = TopK(ratio, "float32", min_numel=0)
    return {
        FLOOR: gradients.floor(),
        SLOW[1]: Encoding(gradients, method, TorchOps(kernels=False)).settle(2).step,
        SLOW[0]: lambda: torch.topk(gradients.current.abs(), k, sorted=False),
    }


def medians(steps: dict[str, Step], before: Step | None, repeats: int) -> dict[str, float]:
    """Median milliseconds of steps that take turns."""
    taken = milliseconds(steps, before, repeats)
    return {name: statistics.median(each) for name, each in taken.items()}


def settling_steps(numel: int, ratio: float) -> int:
    """Steps before the first that is timed: residuals settle in about 1 / ratio."""
    return max(8, min(150, int(1.5 / ratio), 3_750_000_000 // numel))


def measure_encoding(numel: int, ratio: float, repeats: int) -> dict[str, float]:
    """Milliseconds of every way at one size and ratio."""
    gradients = Gradients.of(numel)
    ways = {**encodings(gradients, ratio), **baselines(gradients, ratio)}
    return medians(ways, gradients.next, repeats)


def measure_decoding(numel: int, ratio: float, repeats: int) -> dict[str, float]:
    """Milliseconds of decoding 1, 2, 4 and 8 payloads."""
    each = [plain(Gradients.of(numel, seed=rank), ratio, "exact").settle(2) for rank in range(8)]
    payloads = [rank.payload for rank in each]
    ways = {f"decode {ranks}": each[0].decoding(payloads[:ranks]) for ranks in (1, 2, 4, 8)}
    return medians(ways, None, repeats)


def measure_coding(numel: int, ratio: float, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of encoding, and of decoding two payloads, for every way of writing entries."""
    gradients = Gradients.of(numel)
    ways = {NO_CODING: ("plain", "float32")}
    ways |= {f"{values}, packed": ("packed", values) for values in CODINGS}
    encode, decode = dict[str, Step](), dict[str, Step]()
    for name, (indices, values) in ways.items():
        ours = plain(gradients, ratio, "sampled", indices=indices, values=values)
        encode[name] = ours.settle(settling_steps(numel, ratio)).step
        decode[name] = ours.decoding([ours.payload] * 2)
    encoding = medians(encode, gradients.next, repeats)
    decoding = medians(decode, None, repeats)
    return {name: {"encode": encoding[name], "decode": decoding[name]} for name in ways}


def measure_shards(numel: int, ratio: float, repeats: int) -> dict[str, float]:
    """Milliseconds of encoding for 2, 4 and 8 owners, beside encoding for an allgather."""
    gradients = Gradients.of(numel)
    whole = plain(gradients, ratio, "sampled").settle(settling_steps(numel, ratio))
    ways = {"allgather": whole.step}
    for owners in (2, 4, 8):
        ways[f"{owners} owners"] = _for_owners(whole, owners, settling_steps(numel, ratio))
    return medians(ways, gradients.next, repeats)


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


def measure_exchange(selection: str) -> dict[str, float]:
    """A ResNet-50's gradients between two ranks, by `benchmarks.exchange`."""
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    script = [sys.executable, "scripts/bench.py", "exchange", "--selection", selection]
    command, settings = [horovodrun, "-np", "2", "--gloo", *script], {"text": True, "timeout": 600}
    printed = subprocess.check_output(command, cwd=ROOT, **settings)
    found: dict[str, float] = json.loads(printed[printed.index("{") :])
    return found


def measure(numel: int, repeats: int, grid: list[tuple[int, float]]) -> dict[str, Any]:
    """All that the page shows; runs between two ranks come before and between the rest."""
    exchange: dict[str, list[dict[str, float]]] = {"exact": [], "sampled": []}

    def between_ranks() -> None:
        for selection, runs in exchange.items():
            runs.append(measure_exchange(selection))

    between_ranks()
    found: dict[str, Any] = {
        "machine": machine(),
        "numel": numel,
        "encoding": measure_encoding(numel, 0.01, repeats),
        "decoding": {"packed": measure_decoding(numel, 0.01, repeats)},
        "coding": measure_coding(numel, 0.01, repeats),
        "shards": measure_shards(numel, 0.01, repeats),
        "exchange": exchange,
        "sizes": [],
    }
    for each, (n, ratio) in enumerate(tqdm(grid, disable=None)):
        found["sizes"] += [{"numel": n, "ratio": ratio, "ms": measure_encoding(n, ratio, repeats)}]
        if each % (len(grid) // 2) == 0:
            between_ranks()
    return found


OPTIONS = {
    "quick": (False, "small sizes, and tables alone"),
    "gradients": (25_000_000, "elements of the tables"),
}


def main(args: argparse.Namespace) -> int:
    """Measure, and write results and page."""
    torch.set_num_threads(1)
    repeats = 5 if args.quick else 15
    sizes = [n for n in SIZES if n <= 1_000_000 or not args.quick]
    found = measure(
        args.gradients, repeats, [(numel, ratio) for numel in sizes for ratio in RATIOS]
    )
    if args.quick:
        print(encoding_table(found["encoding"]), sizes_table(found["sizes"]), sep="\n\n")
        return 0
    (RESULTS / "kernels.json").write_text(json.dumps(found, indent=1) + "\n")
    write("kernels")
    return 0


def values(found: dict[str, Any]) -> Values:
    """Return the figures that the page shows, by name."""
    return found["machine"] | {
        "numel": f"{found['numel']:,}",
        "encoding": encoding_table(found["encoding"]),
        "decoding": _listed(found["decoding"]["packed"], "decode"),
        "coding": coding(found["coding"]),
        "owners": _listed(found["shards"], ""),
        "sizes": sizes_table(found["sizes"]),
        "exchange": exchange_table(found["exchange"]),
    }


def encoding_table(found: dict[str, float]) -> str:
    """Every kernel at one size."""
    floor, topk = found["r += g"], found["torch.topk"]
    rows = (
        [name, f"{ms:.1f}", f"{ms / floor:.2f}", f"{topk / ms:.0f}x"] for name, ms in found.items()
    )
    return table(["", "ms", "of `r += g`", "faster than torch.topk"], rows)


def _listed(found: dict[str, float], kind: str) -> str:
    shown = [ms for name, ms in found.items() if name.startswith(kind) and name != "r += g"]
    return ", ".join(f"{ms:.1f}" for ms in shown)


def coding(found: dict[str, dict[str, float]]) -> str:
    """Return the least and the largest cost of a value format, as a share of encoding."""
    base = found[NO_CODING]
    more = (sum(ms[each] - base[each] for each in ("encode", "decode")) for ms in found.values())
    shares = sorted(each / base["encode"] for each in more)[1:]  # without the base itself
    return f"{shares[0]:.0%} to {shares[-1]:.0%}"


def sizes_table(cells: list[dict[str, Any]]) -> str:
    """Return a table with a row for each size and a column for each ratio."""
    rows = [
        [f"{numel:,}", *(_cell(cell["ms"]) for cell in cells if cell["numel"] == numel)]
        for numel in dict.fromkeys(cell["numel"] for cell in cells)
    ]
    return table(["elements", *(f"{ratio:g}" for ratio in RATIOS)], rows)


def _cell(ms: dict[str, float]) -> str:
    ours = next(iter(ms.values()))
    return f"{ours / ms['r += g']:.2f} ({ms['torch.topk'] / ours:.0f}x)"


def exchange_table(found: dict[str, list[dict[str, float]]]) -> str:
    """The time that an exchange adds: medians of runs."""
    columns = {
        "plain": "step without",
        "topk": "step with",
        "exchange": "exchange adds",
        "memory": "`r += g` and fill",
    }
    rows = (
        [selection, *(f"{statistics.median(run[each] for run in runs):.1f}" for each in columns)]
        for selection, runs in found.items()
    )
    return table(["selection", *columns.values()], rows)
