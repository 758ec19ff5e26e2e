"""Compile the CPU kernels: `python -m horovod_topk.kernels.compile` writes them beside this file.

Installing the package compiles them too (`hatch_build.py`), and goes on without kernels if there is
no C++17 compiler. This module imports only the standard library, and nothing of this package.

`HOROVOD_TOPK_COMPILE=native` compiles what this machine would select alone, in half of the time.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "cpu"
LIBRARY = HERE / "libtopkef.so"
TENSORFLOW_LIBRARY = HERE / "libtopkef_tensorflow.so"

# Results are fixed to the bit: no fused multiply-add, no reassociation. Without traps, which nobody
# enables, loops with conditions become vector code on processors without AVX-512, too.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
)
BITS = ("-mbmi", "-mpopcnt", "-mf16c", "-mavx2")
# Files for one instruction set, selected at run time. GCC warns of its own headers.
INSTRUCTIONS = {
    "passes_avx2.cpp": BITS,
    "passes_avx512.cpp": (
        *BITS,
        *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl")),
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
    ),
}
# A processor has the instructions of a file if /proc/cpuinfo has this flag. The fastest first.
SELECTED_BY = {"passes_avx512.cpp": "avx512bw", "passes_avx2.cpp": "avx2"}
KERNELS = (  # those that take longest first, as files are compiled side by side
    "passes_avx512.cpp",
    "passes_avx2.cpp",
    "passes_portable.cpp",
    "bucket.cpp",
    "topk/topk.cpp",
    "tensor.cpp",
    "arrays.cpp",
    "updates/updates.cpp",
    "baselines/baselines.cpp",
    "workers.cpp",
)
OPERATIONS = "tensorflow_ops.cpp"  # of a library of their own


class CompileError(Exception):
    """There is no compiler, or it failed; the message is shown to the user."""


def find_compiler() -> list[str]:
    """The command of the C++ compiler: $CXX, or the first of c++, g++ and clang++ that exists.

    Raises:
        CompileError: no compiler was found.
    """
    asked = shlex.split(os.environ.get("CXX", ""))
    for command in [asked] if asked else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise CompileError("no C++ compiler was found (c++, g++, clang++, or $CXX)")


def target_machine() -> str:
    """The processor that the compiler compiles for, as wheels name it: "x86_64" or "aarch64".

    A cross compiler in $CXX compiles for another processor than this machine's.

    Raises:
        CompileError: no compiler was found, or it failed.
    """
    macros = run([*find_compiler(), "-dM", "-E", "-x", "c++", os.devnull]).split()
    known = [name for name in ("x86_64", "aarch64") if f"__{name}__" in macros]
    return known[0] if known else platform.machine().lower()


def digest() -> str:
    """A digest of the kernels' sources, which identifies their version."""
    files = sorted(file for file in SOURCES.rglob("*") if file.is_file())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def instructions() -> dict[str, tuple[str, ...]]:
    """The flags of each file that is compiled for one set of instructions.

    A file without its flags compiles to nothing, and is never selected.
    """
    if target_machine() != "x86_64":
        return {}
    if os.environ.get("HOROVOD_TOPK_COMPILE") != "native":
        return INSTRUCTIONS
    has = Path("/proc/cpuinfo").read_text().split()
    selected = next((file for file, flag in SELECTED_BY.items() if flag in has), None)
    if selected is None:
        return {}
    # What the others would do is left to the portable file, which has little to do here.
    return {selected: INSTRUCTIONS[selected], "passes_portable.cpp": ("-O1",)}


def compile_objects(
    folder: Path, extra: Sequence[str] = (), names: Sequence[str] = KERNELS
) -> list[Path]:
    """Compile source files to object files in `folder`, with `extra` flags as well.

    Files are compiled side by side, one on each core.

    Raises:
        CompileError: as `compile_libraries`.
    """
    compiler = find_compiler()
    version = f'-DTOPKEF_DIGEST="{digest()}"'
    own = instructions()

    def compile_one(name: str) -> Path:
        target = folder / f"{Path(name).name}.o"
        flags = *FLAGS, *own.get(name, ()), *extra, version
        files = f"-I{SOURCES}", "-c", str(SOURCES / name), "-o", str(target)
        run([*compiler, *flags, *files])
        return target

    cores = len(os.sched_getaffinity(0))
    print(f"compiling {len(names)} files of CPU kernels on {cores} cores", file=sys.stderr)
    with ThreadPoolExecutor(cores) as threads:
        return list(threads.map(compile_one, names))


def compile_libraries(target: Path = HERE) -> list[Path]:
    """Compile both libraries to the folder `target`; old files are replaced at the end.

    Raises:
        CompileError: there is no compiler, or it failed.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        names = [*KERNELS, OPERATIONS]
        *objects, operations = map(str, compile_objects(folder, names=names))
        kernels, tensorflow = folder / LIBRARY.name, folder / TENSORFLOW_LIBRARY.name
        link = [*compiler, "-shared", "-pthread"]
        run([*link, *objects, "-o", str(kernels), f"-Wl,-soname,{kernels.name}"])
        needed = [operations, str(kernels), "-ldl", "-Wl,-rpath,$ORIGIN"]
        run([*link, *needed, "-o", str(tensorflow)])
        return [_put(library, target) for library in (kernels, tensorflow)]


def _put(library: Path, folder: Path) -> Path:
    """Copy a file into a folder, and give it its name when it is complete."""
    beside = folder / f".{library.name}.{os.getpid()}"
    shutil.copy2(library, beside)
    return beside.replace(folder / library.name)


def run(command: Sequence[str]) -> str:
    """Run a command and return its output.

    Raises:
        CompileError: the command failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
    return done.stdout


def main() -> int:
    """Compile the libraries; return 0, or 1 after printing the compiler's message."""
    try:
        for library in compile_libraries():
            print(library)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
