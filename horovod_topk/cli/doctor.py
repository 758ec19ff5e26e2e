"""`horovod-topk doctor`: which code compresses on this machine; each line with a cure."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

from horovod_topk import __version__
from horovod_topk.kernels import native, triton


def main() -> int:
    """Print the findings; always 0, as training works whatever they are."""
    print(f"{'horovod_topk':<22}{__version__}")
    checks: dict[str, Callable[[], str]] = {
        "kernels for the CPU": cpu_kernels,
        "in TensorFlow graphs": tensorflow_operations,
        "kernels for the GPU": gpu_kernels,
    }
    for name, check in checks.items():
        print(f"{name:<22}{check()}")
    return 0


def cpu_kernels() -> str:
    """What encodes and decodes tensors in memory."""
    found = native.find()
    if found.library is None:
        return f"none, framework operations do the work: {found.description}"
    return f"{found.description} ({native.LIBRARY})"


def tensorflow_operations() -> str:
    """Whether graphs reach the kernels."""
    if not _is_installed("tensorflow"):
        return "TensorFlow is not installed"
    operations = importlib.import_module("horovod_topk.ops.tensorflow").find_operations()
    if operations is None:
        return "none, TensorFlow's own operations do the work; the log says why"
    return "the same, as operations of a graph"


def gpu_kernels() -> str:
    """What encodes and decodes tensors on a GPU."""
    if not _is_installed("torch"):
        return "PyTorch is not installed"
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    reason = triton.unavailable("cuda")
    return f"none, PyTorch's operations do the work: {reason}" if reason else "Triton"


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
