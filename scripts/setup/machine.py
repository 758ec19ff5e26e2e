"""What has to be on the machine before anything is installed, checked by trying it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from setup.run import SetupError

GB = 10**9
BYTES_PER_JOB = 2 * GB  # what one compiler process takes on Horovod's largest source files

# Structured bindings and `if constexpr` are C++17; <optional> shows that the library is as well.
CXX17_PROGRAM = """
#include <optional>
#include <utility>
int main() { auto [a, b] = std::pair(0, std::optional(1)); if constexpr (true) return a; }
"""


def check_python_parts() -> None:
    """Debian and its descendants ship Python in parts; two of them are needed here."""
    version = sysconfig.get_python_version()
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        raise SetupError(f"Python's venv module is missing: install python{version}-venv")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise SetupError(f"Python.h is missing: install python{version}-dev (or -devel)")


# What the set-up runs: patch changes Horovod's sources, and make builds them.
PROGRAMS = ("make", "patch")


def check_programs() -> None:
    """Every program of `PROGRAMS` is on PATH; SetupError names the first that is not."""
    for program in PROGRAMS:
        if not shutil.which(program):
            raise SetupError(f"{program} is missing: install it (package {program})")


def find_compiler(env: Mapping[str, str]) -> str:
    """The C++ compiler, `CXX` or one of the usual names, after it has built a C++17 program."""
    names = [env["CXX"]] if env.get("CXX") else ["c++", "g++", "clang++"]
    found = next(filter(None, (shutil.which(name, path=env.get("PATH")) for name in names)), None)
    if not found:
        raise SetupError(
            f"no C++ compiler (looked for {', '.join(names)}): install g++, or set CXX to one"
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "cxx17.cc")
        source.write_text(CXX17_PROGRAM)
        command = [found, "-std=c++17", str(source), "-o", str(Path(folder, "cxx17"))]
        if subprocess.run(command, env=dict(env), capture_output=True).returncode:
            raise SetupError(f"{found} cannot compile and link C++17: g++ 9 or clang 10 can")
    return found


def compiler_version(compiler: str) -> str:
    """The compiler's own words about itself."""
    text = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    return text.partition("\n")[0]


def check_disk(needed: Iterable[tuple[Path, int]]) -> None:
    """Raise unless each place has its bytes free; places on one disk share what it has."""
    by_disk: dict[int, tuple[Path, int]] = {}
    for place, size in needed:
        place = _existing(place)
        disk = place.stat().st_dev
        first, sum_so_far = by_disk.get(disk, (place, 0))
        by_disk[disk] = first, sum_so_far + size
    for place, size in by_disk.values():
        free = shutil.disk_usage(place).free
        if free < size:
            raise SetupError(
                f"too little disk space: {place} has {free / GB:.1f} GB free, "
                f"{size / GB:.1f} GB are needed"
            )


def _existing(place: Path) -> Path:
    return place if place.exists() else _existing(place.parent)


def arch_flags() -> str:
    """Those of Horovod's processor flags that this processor has.

    Horovod would find them by itself. Given explicitly they become part of the wheel's key, and a
    home directory shared by unlike machines gets a wheel for each.
    """
    cpu = Path("/proc/cpuinfo")
    features = cpu.read_text().split() if cpu.exists() else []
    return " ".join(f"-m{name}" for name in ("f16c", "avx", "fma") if name in features)


def jobs(env: Mapping[str, str]) -> int:
    """How many compilers to run at once: a core and 2 GB each, unless HOROVOD_TOPK_JOBS says."""
    if env.get("HOROVOD_TOPK_JOBS", "").isdigit():
        return max(1, int(env["HOROVOD_TOPK_JOBS"]))
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, available_memory() // BYTES_PER_JOB))


def available_memory() -> int:
    """Bytes: the machine's available memory, or the container's limit if that is smaller."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    container = Path("/sys/fs/cgroup/memory.max")
    if container.exists() and container.read_text().strip().isdigit():
        limits.append(int(container.read_text()))
    return min(limits)
