"""`make fuzz`: encode and decode arbitrary buckets under AddressSanitizer and UBSan.

    python scripts/fuzz.py [--seconds 20] [--seed 1] [--folder build/fuzz]

Builds tests/fuzz/fuzz_bucket.cpp with the kernels and runs it for each instruction set. Ends with
an error at the first thing that a sanitizer, or a check of the target itself, reports.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from horovod_topk.kernels import compile as kernels

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "tests" / "fuzz" / "fuzz_bucket.cpp"
SANITIZERS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g1",
    "-O1",
    "-DTOPKEF_SPLIT=1000",  # small tensors are cut for several threads, too
    "-DTOPKEF_TOGETHER=1",  # and small shards go together
)
ISAS = ("portable", "avx2", "avx512")  # what a processor does not have falls back to the next lower


def build(folder: Path) -> Path:
    """The fuzz target, with everything it runs under the sanitizers."""
    folder.mkdir(parents=True, exist_ok=True)
    objects = [str(each) for each in kernels.compile_objects(folder, SANITIZERS)]
    target = folder / "fuzz_bucket"
    source = [f"-I{kernels.SOURCES}", str(TARGET), *objects, "-pthread", "-o", str(target)]
    kernels.run([*kernels.find_compiler(), "-std=c++17", *SANITIZERS, *source])
    return target


def fuzz(target: Path, isa: str, seconds: float, seed: int) -> None:
    """Run it; raises subprocess.CalledProcessError when something was found."""
    environment = os.environ | {"HOROVOD_TOPK_ISA": isa}
    subprocess.run([target, str(seconds), str(seed)], env=environment, check=True)


def main() -> int:
    """Builds and runs; 0 if nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20, help="for each instruction set")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz")
    args = parser.parse_args()
    target = build(args.folder)
    for isa in ISAS:
        fuzz(target, isa, args.seconds, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
