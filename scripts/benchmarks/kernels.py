"""`make bench-kernels`: what selection costs, against `r += g` and `torch.topk`, in one run.

One thread, no network. A step encodes one float32 tensor with error feedback. Each step takes one
of three gradients with random sign and size, after enough steps for the residual to settle as in
training. The floor is `residual.add_(gradient)` of the same size. For decoding it is filling the
output with zeros and reading the payloads once. All rows take turns.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.encoding import FLOOR, SLOW, Encoding, Gradients, Step, milliseconds
from benchmarks.kernels_page import NO_CODING, RATIOS, encoding_table, sizes_table
from horovod_topk.cli.machine import machine
from horovod_topk.core.plan.shards import shard
from horovod_topk.core.state.residual import Arenas
from horovod_topk.kernels import native
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.torch import TorchOps
from pages import RESULTS, ROOT, write

SIZES = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
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


def encodings(gradients: Gradients, ratio: float, settle: int) -> dict[str, Step]:
    """All ways of encoding one tensor, each with a residual of its own."""
    ways: dict[str, Step] = {}
    for isa in available_isas():
        for selection in ("exact", "sampled"):
            with instruction_set(isa):
                ours = plain(gradients, ratio, selection).settle(settle)
            ways[f"{isa}, {selection}"] = ours.step
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
    ours = encodings(gradients, ratio, settling_steps(numel, ratio))
    return medians({**ours, **baselines(gradients, ratio)}, gradients.next, repeats)


def measure_decoding(numel: int, ratio: float, repeats: int, indices: str) -> dict[str, float]:
    """Milliseconds of decoding 1, 2, 4 and 8 payloads, and of the floor of each."""
    payloads, ways = list[Tensor](), dict[str, Step]()
    for rank in range(8):
        last = plain(Gradients.of(numel, seed=rank), ratio, "exact", indices=indices).settle(2)
        payloads.append(last.payload)
    for ranks in (1, 2, 4, 8):
        ways[f"decode {ranks}"] = last.decoding(payloads[:ranks])
        ways[f"fill and read {ranks}"] = _fill_and_read(torch.cat(payloads[:ranks]), numel)
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
    ways: dict[str, Step] = {FLOOR: gradients.floor()}
    ways["allgather"] = whole.step
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


def _fill_and_read(gathered: Tensor, numel: int) -> Step:
    words, output = gathered.view(torch.int64), torch.empty(numel)

    def step() -> None:
        output.zero_()
        words.sum()

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
        "machine": machine(),
        "numel": numel,
        "encoding": encoding,
        "decoding": decoding,
        "coding": coding,
        "shards": shards,
        "exchange": exchange,
        "sizes": sizes,
    }


def main(arguments: Sequence[str]) -> int:
    """Measure, and write results and page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, and tables alone")
    parser.add_argument("--gradients", type=int, default=25_000_000, help="elements of the tables")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    repeats = 5 if args.quick else 15
    sizes = [n for n in SIZES if n <= 1_000_000 or not args.quick]
    grid = [(numel, ratio) for numel in sizes for ratio in RATIOS]
    found = measure(args.gradients, repeats, grid)
    if args.quick:
        print(encoding_table(found["encoding"]), sizes_table(found["sizes"]), sep="\n\n")
        return 0
    (RESULTS / "kernels.json").write_text(json.dumps(found, indent=1) + "\n")
    write("kernels")
    return 0
