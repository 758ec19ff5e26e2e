"""The lines of Horovod's CMake files that are changed before it is built.

Horovod 0.28.1 compiles as it is against PyTorch 2.0 and TensorFlow 2.13. Later versions need the
edits below; no C++ or Python of Horovod is touched.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from setup.run import SetupError


@dataclasses.dataclass(frozen=True)
class Edit:
    """One replacement in one file of Horovod's sources."""

    path: str
    old: str  # occurs exactly once, or the sources are not the ones this was written for
    new: str
    why: str

    def apply(self, sources: Path) -> None:
        """Rewrite the file below `sources`."""
        file = sources / self.path
        text = file.read_text()
        if text.count(self.old) != 1:
            raise SetupError(f"Horovod's {self.path} does not have {self.old!r} exactly once")
        file.write_text(text.replace(self.old, self.new))


EDITS = (
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 17)",
        "the headers of PyTorch 2.1 and later are C++17",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 17)",
        "the headers of PyTorch 2.1 and later are C++17",
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")',
        "",
        "the XLA header it includes moved in TensorFlow 2.14; only HOROVOD_ENABLE_XLA_OPS needs it",
    ),
    Edit(
        "CMakeLists.txt",
        "project(horovod CXX)",
        "project(horovod CXX)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
        'set(CMAKE_INSTALL_RPATH "\\$ORIGIN/../../../..;\\$ORIGIN/../../torch/lib")',
        "find libmpi (<venv>/lib) and torch's libraries from where the wheel lies: CMake would "
        "write down the paths of the environment it was built in, which may be gone tomorrow",
    ),
)

# Of builds for CPU operations, beside `EDITS`.
CPU_EDITS = (
    Edit(
        "CMakeLists.txt",
        "include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n",
        'set(CMAKE_CUDA_COMPILER "")\nif(FALSE)\n',
        "do not look for nvcc, which may lie on PATH without the rest of a toolkit",
    ),
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)',
        "set(Pytorch_CUDA FALSE)",
        "with a CUDA build of torch, Horovod would demand a CUDA toolkit for CPU operations too",
    ),
)

# Of builds for GPU operations, beside `EDITS`.
GPU_EDITS = (
    Edit(
        "horovod/common/ops/cuda/CMakeLists.txt",
        "set(CMAKE_CUDA_STANDARD 11)",
        "set(CMAKE_CUDA_STANDARD 17)",
        "the libraries of CUDA 13 are C++17",
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'set(TF_TARGET_LIB "tensorflow")',
        'set(TF_TARGET_LIB "tensorflow")\n'
        "get_property(CPU_DEFINITIONS DIRECTORY PROPERTY COMPILE_DEFINITIONS)\n"
        'list(FILTER CPU_DEFINITIONS EXCLUDE REGEX "^(HAVE_(CUDA|GPU|NCCL)|HOROVOD_GPU_)")\n'
        'set_property(DIRECTORY PROPERTY COMPILE_DEFINITIONS "${CPU_DEFINITIONS}")\n'
        'list(FILTER SOURCES EXCLUDE REGEX "(cuda|gpu|nccl)_operations\\\\.cc$")\n'
        "list(REMOVE_ITEM LINKER_LIBS ${NCCL_LIBRARIES})\n"
        "set(HAVE_CUDA FALSE)",
        "tensorflow-cpu has neither tensors on a GPU nor the functions that Horovod calls for them",
    ),
)
