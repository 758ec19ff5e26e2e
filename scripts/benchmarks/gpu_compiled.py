"""Compiles the Triton kernels ahead of time: registers, spilled bytes, and accesses of each.

It needs Triton, which brings NVIDIA's assembler, and no GPU. Constants are those of a large bucket
with the default geometry. `gpu_traffic` counts what kernels move, in a process of its own. This
writes docs/results/gpu.json and docs/gpu.md.

    python scripts/bench.py gpu_compiled
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.gpu_traffic import COPIED
from horovod_topk.kernels.triton.topk import tables
from horovod_topk.kernels.triton.topk.tables import Geometry, Tables
from horovod_topk.ops import coding
from pages import RESULTS, Values, write
from pages.markdown import table

SCRIPTS = Path(__file__).parents[1]
ENCODES = "stream", "narrow", "scatter", "pack"
# GPUs by compute capability, and AMD's by the name of their architecture.
GENERATIONS = {"80": "A100", "90": "H100, H200", "100": "B200", "gfx942": "MI300X"}
ACCESSES = {"loads": "ld", "stores": "st", "atomic": "red"}  # instructions of PTX by name
BFLOAT16, FLOAT32, MIXED = 1, 2, 3  # dtypes of a bucket's gradients, as kernels number them
FORMATS = "int4", "float32", "float16", "bfloat16", "int8", "int3", "int2", "sign"
VALUES: dict[str, int] = {name: getattr(tables, name.upper()) for name in FORMATS}
# Methods that send all elements: kind of values, bits of a code, and elements of a block.
CODED = {
    "QSGD": (tables.DITHERED, 4, 128),
    "QSGD, l2": (tables.DITHERED_L2, 4, 1024),
    "ByteGrad": (tables.MINMAX, 8, 2048),
    "OneBit": (tables.MEANS, 1, 4608),
    "TernGrad": (tables.TERNARY, 2, 1 << 20),
}
# Types of arguments by name; others are int32 arrays in a bucket's kernels, float32 in the lists'.
OF_BUCKETS = {
    **dict.fromkeys(("table", "addresses", "squares", "streams", "stream"), "*i64"),
    **dict.fromkeys(("payload", "flags"), "*u8"),
    **dict.fromkeys(("residual", "candidate", "products", "rows"), "*fp32"),
    **dict.fromkeys(("tiles", "entries", "ranks", "writers"), "i32"),
    **dict.fromkeys(("runs", "tensors", "apart", "crowd"), "i32"),
    "histograms": "*i16",
    "scale": "fp32",
}
OF_LISTS = {
    **dict.fromkeys(("table", "gradients", "arrays", "rows", "sets"), "*i64"),
    **dict.fromkeys(("before", "after", "scales", "fading", "sent", "gains", "out"), "*fp32"),
    **dict.fromkeys(("residual", "candidate", "damping"), "*fp32"),
    "owners": "*i32",
    "arrivals": "*u8",
    "later": "*u8",
    **dict.fromkeys(("width", "ranks", "parts"), "i32"),
}

OF_ONE = {
    "stream": "*i64",
    "sums": "*fp64",
    "payload": "*u8",
    **dict.fromkeys(("count", "tiles"), "i32"),
}


@dataclass(frozen=True)
class Build:
    """A kernel with its constants and the types of its arguments."""

    name: str
    kernel: Any
    warps: int
    types: Mapping[str, str] = field(default_factory=lambda: OF_BUCKETS)
    other: str = "*i32"  # the type of arguments that `types` does not name
    constants: Mapping[str, Any] = field(default_factory=dict)

    def compiled(self, generation: str) -> Any:
        """Return the kernel's text and binary code by kind, for one of `GENERATIONS`.

        Arrays begin at multiples of 16 bytes, as those of PyTorch do.
        """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature = {
            name: "constexpr" if name in self.constants else self.types.get(name, self.other)
            for name in self.kernel.arg_names
        }
        aligned = {
            (position,): [["tt.divisibility", 16]]
            for position, kind in enumerate(signature.values())
            if kind.startswith("*")
        }
        source = ASTSource(self.kernel, signature, dict(self.constants), aligned)
        options = {"num_warps": self.warps, "enable_fp_fusion": False}
        target = GPUTarget("hip", generation, 64)
        if generation.isdigit():
            target = GPUTarget("cuda", int(generation), 32)
        return triton.compile(source, target=target, options=options).asm


def of_buckets(
    values: Sequence[str], kind: int, coded: Sequence[str] = tuple(CODED)
) -> Iterator[Build]:
    """Yield the kernels of a bucket for some formats of values and one kind of gradients.

    Values are decoded from the first format alone. coded: methods that send all elements.
    """
    from horovod_topk.kernels.triton.baselines.coders import pack_coded
    from horovod_topk.kernels.triton.topk.gather import gather
    from horovod_topk.kernels.triton.topk.index_coding import unpack
    from horovod_topk.kernels.triton.topk.narrow import narrow
    from horovod_topk.kernels.triton.topk.pack import pack
    from horovod_topk.kernels.triton.topk.scatter import scatter
    from horovod_topk.kernels.triton.topk.stream import stream

    size = Geometry()
    chunk = {"CHUNK": size.chunk, "SLOT": size.slot}
    run = {"ROOM": 8192, "LANES": size.lanes}
    runs = {"RUN_CHUNKS": 12, "CHUNKS_ROOM": 16, "SAMPLE": 2 * size.sample}
    out = {"OUTPUT": size.output, "BLOCK": size.block, "LANES": 128, "ROOM": 8, "STEPS": 18}
    for name, weighs in (("stream", -1), ("stream, by squares", FLOAT32)):
        own = {"KIND": kind, "WEIGHS": weighs, "TILE": size.tile, **chunk}
        yield Build(name, stream, 4, constants=own)
    yield Build("narrow", narrow, 16, constants={**chunk, **run, **runs})
    yield Build("scatter", scatter, 16, constants={"RUN": 12 * size.chunk, **run})
    for name in values:
        block = tables.BLOCKS.get(VALUES[name], 128)
        own = {"VALUES": VALUES[name], "BLOCK": block, "ROWS": size.parcel // block}
        yield Build(f"pack, {name}", pack, 4, constants=own)
    yield Build("unpack", unpack, 4, constants={"LANES": size.tile})
    own = {"KIND": kind, "VALUES": VALUES[values[0]], "BITS": 0, **out}
    yield Build(f"gather, {values[0]}", gather, 4, constants=own)
    for name in coded:
        code, bits, block = CODED[name]
        made = Tables((1, 4, code, *[0] * 5, bits, *[block] * 3, *[0] * 6, block), size)
        own = {"KIND": code, "BITS": bits, "KEEPS": True, "LANES": size.parcel // 4}
        own |= {
            "ROWS": made.parcel_rows,
            "SOME": made.measured_rows,
            "WIDTH": made.block,
            "TILES": made.block_tiles,
        }
        if code != tables.TERNARY:
            yield Build(f"pack, {name}", pack_coded, 4, constants=own)
        own = {"KIND": kind, "VALUES": code, "BITS": bits, **out, "STEPS": 0, "BLOCK": made.written}
        yield Build(f"gather, {name}", gather, 4, constants=own)


def of_lists() -> Iterator[Build]:
    """Yield the kernels for lists of tensors, and for single tensors."""
    from horovod_topk.kernels.triton.baselines import draws, ternary
    from horovod_topk.kernels.triton.updates import elements, samples

    by_element = elements.limit, elements.sgd, elements.adam, elements.shards
    of_samples = samples.rms, samples.spikes, samples.energy_withheld, samples.energies
    for kind, named in ((FLOAT32, ""), (BFLOAT16, ", bfloat16")):
        for kernel in (*by_element, *of_samples, samples.energy_of_owner):
            warps = 8 if kernel in by_element else 16
            name = f"{kernel.fn.__name__}{named}"
            yield Build(name, kernel, warps, OF_LISTS, "fp32", {"KIND": kind})
    yield Build("draw", draws.draw, 4, OF_ONE, "*i64", {"BITS": 32, "LANES": draws.LANES})
    yield Build("measure, TernGrad", ternary.measure, 4, OF_ONE, "*fp32", {"TILE": coding.TILE})
    for kernel in (ternary.merge, ternary.pack):
        name = f"{kernel.fn.__name__}, TernGrad"
        yield Build(name, kernel, 4, OF_ONE, "*fp32", {"LANES": ternary.LANES})


def resources(code: Any) -> tuple[int, int]:
    """Return a thread's registers, and the bytes that it spills to memory of its own."""
    from triton import knobs

    if "amdgcn" in code:
        found = dict(re.findall(r"\.vgpr(\w*)_count: +(\d+)", code["amdgcn"]))
        return int(found[""]), 4 * int(found["_spill"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(code["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", found)[-1]
    return int(registers), int(stack)


def counted(build: Build, generation: str) -> dict[str, int]:
    """Compile a kernel, and count what it needs."""
    code = build.compiled(generation)
    registers, spilled = resources(code)
    text = code.get("ptx", "")
    accesses = {name: text.count(f"{kind}.global.") for name, kind in ACCESSES.items() if text}
    return {"registers": registers, "spilled": spilled, **accesses}


def values(found: dict[str, Any]) -> Values:
    """Return the figures that the page shows, by name."""
    shown = ["kernel", "warps"]
    for name in GENERATIONS.values():
        shown += [f"{name}: registers", "spilled, bytes"]
    rows = []
    for each in found["kernels"]:
        row = [f"`{each['name']}`", str(each["warps"])]
        for generation in GENERATIONS:
            row += [str(each[generation][kind]) for kind in ("registers", "spilled")]
        rows.append([*row, *(str(each["100"][name]) for name in ACCESSES)])
    sizes = found["traffic"]["sizes"]
    return {
        "compiled": table([*shown, *ACCESSES], rows),
        "traffic": table(*moved(found["traffic"]["moved"])),
        "of_a_copy": " and ".join(
            f"{least / COPIED[name]:.1f} ({name})"
            for name, least in least_of_encode(found["traffic"]["moved"]).items()
        ),
        "sizes": ", ".join(f"{size:,}" for size in sizes[:-1]) + f" and {sizes[-1]:,}",
        "ranks": str(found["traffic"]["ranks"]),
        "triton": found["triton"],
        "date": found["date"],
    }


def least_of_encode(counts: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes at distinct addresses that an encode moves for each element."""
    return {
        name: sum(least for kernel, (least, _) in own.items() if kernel in ENCODES)
        for name, own in counts.items()
    }


def moved(counts: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the table of the bytes that kernels move."""
    ways = list(counts)
    heads = ["kernel"]
    for way in ways:
        heads += [f"{way}: at least", "in all"]
    rows = [
        [f"`{kernel}`", *(f"{n:.2f}" for way in ways for n in counts[way][kernel])]
        for kernel in counts[ways[0]]
    ]
    return heads, rows


def traffic() -> Any:
    """Run `gpu_traffic` in a process of its own, as Triton chooses its interpreter at import."""
    command = [sys.executable, str(SCRIPTS / "bench.py"), "gpu_traffic"]
    settings = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=settings, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main(args: argparse.Namespace) -> int:
    """Compile, and write results and page."""
    found = []
    for build in tqdm([*of_buckets([*VALUES], FLOAT32), *of_lists()], disable=None):
        each = {generation: counted(build, generation) for generation in GENERATIONS}
        found.append({"name": build.name, "warps": build.warps, **each})
    date = time.strftime("%Y-%m-%d")
    results: dict[str, Any] = {"triton": metadata.version("triton"), "date": date}
    results |= {"kernels": found, "traffic": traffic()}
    (RESULTS / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    write("gpu")
    return 0
