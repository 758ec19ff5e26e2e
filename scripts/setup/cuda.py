"""What Horovod's GPU operations are built with: a CUDA toolkit and NCCL.

pip's usual index serves Linux a CUDA build of torch, so most machines get one, with or without a
GPU. That build brings CUDA's libraries and NCCL in NVIDIA's wheels, but not all that it takes to
compile for a GPU: the compiler, nvcc, is in a toolkit of its own. A toolkit counts where CUDA_HOME
names it. An nvcc on PATH does not: it can be a script in front of a toolkit that lies elsewhere.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from setup.run import SetupError

# Of a toolkit. CMake looks for the rest, and says what it misses.
TOOLKIT_FILES = ("bin/nvcc", "include/cuda_runtime.h")
NCCL_FILES = ("include/nccl.h", "lib/libnccl.so.2")
# They have a whole toolkit from CUDA 13 on, but for the names that a linker looks for.
TOOLKIT_WHEELS = (
    *("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"),
    *("nvidia-cuda-runtime", "nvidia-cuda-cccl"),
)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The toolkit and the NCCL that GPU operations are compiled and linked with."""

    toolkit: Path
    nvcc: str  # the compiler's version: 13.0.88
    nccl: Path  # the folder of NVIDIA's wheel, with include/ and lib/
    nccl_version: str

    def __str__(self) -> str:
        return f"NCCL {self.nccl_version} and CUDA {self.nvcc} in {self.toolkit}"

    def environment(self, path: str, nccl: Path) -> dict[str, str]:
        """Variables that lead Horovod's build to this toolkit and to NCCL in `nccl`.

        `path` is PATH so far: Horovod runs the first nvcc there to ask for its processors.
        """
        return {
            "CUDA_HOME": str(self.toolkit),
            "CUDAToolkit_ROOT": str(self.toolkit),
            "CUDACXX": str(self.toolkit / "bin" / "nvcc"),
            "HOROVOD_CUDA_HOME": str(self.toolkit),
            "HOROVOD_NCCL_HOME": str(nccl),
            "PATH": f"{self.toolkit / 'bin'}{os.pathsep}{path}",
        }

    def link_nccl(self, folder: Path) -> Path:
        """Lay NCCL out in `folder` as a linker wants it: the wheel has no libnccl.so."""
        (folder / "lib").mkdir(parents=True)
        (folder / "include").symlink_to(self.nccl / "include")
        (folder / "lib" / "libnccl.so").symlink_to(self.nccl / "lib" / "libnccl.so.2")
        return folder


def find_gpu(versions: Mapping[str, str], env: Mapping[str, str], packages: Path) -> Gpu:
    """What GPU operations can be built with; SetupError says what is missing."""
    if not env.get("CUDA_HOME"):
        raise SetupError("CUDA_HOME names no CUDA toolkit")
    toolkit = Path(env["CUDA_HOME"]).absolute()
    _check_files("the CUDA toolkit that CUDA_HOME names", toolkit, TOOLKIT_FILES)
    nvcc = nvcc_version(toolkit)
    if nvcc.partition(".")[0] != versions["cuda"].partition(".")[0]:
        raise SetupError(f"CUDA_HOME's toolkit is {nvcc}, torch was built with {versions['cuda']}")
    nccl = packages / "nvidia" / "nccl"
    _check_files("NCCL's wheel", nccl, NCCL_FILES)
    return Gpu(toolkit, nvcc, nccl, versions["nccl"])


def complete_toolkit(toolkit: Path) -> Path:
    """Add the names that CMake looks for to a toolkit that was installed from NVIDIA's wheels."""
    found = sorted((toolkit / "lib").glob("libcudart.so.*"))
    if not found:
        raise SetupError(f"the wheels of CUDA's toolkit are incomplete: no libcudart in {toolkit}")
    (toolkit / "lib" / "libcudart.so").symlink_to(found[0].name)
    (toolkit / "lib64").symlink_to("lib")
    return toolkit


def _check_files(what: str, folder: Path, files: tuple[str, ...]) -> None:
    for file in files:
        if not (folder / file).exists():
            raise SetupError(f"{what} is incomplete: {folder / file} is missing")


def nvcc_version(toolkit: Path) -> str:
    """The version of the toolkit's compiler, in its own words."""
    command = [str(toolkit / "bin" / "nvcc"), "--version"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"the compiler that CUDA_HOME names does not run: {command[0]}") from error
    found = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    if not found:
        raise SetupError(f"{command[0]} --version names no version")
    return found[1]
