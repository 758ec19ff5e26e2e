"""PyTorch or TensorFlow with Horovod, behind a few operations that commands time.

Frameworks are imported when they are needed: `horovod_topk.cli` works with either or neither.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from horovod_topk.ops.protocol import Ops


class Torch:
    """The operations in PyTorch."""

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        self.hvd = importlib.import_module("horovod.torch")
        self.ops: Ops[Any] = importlib.import_module("horovod_topk.ops.torch").TorchOps()
        self._torch.set_num_threads(1)  # a rank's kernels have one thread

    def gradient(self, numel: int) -> Any:
        """A random gradient, as an array of `ops`."""
        return self._torch.randn(numel)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.hvd.barrier()

    def allreduce(self, elements: int, name: str) -> Callable[[], None]:
        """Make a function that runs a named, blocking allreduce of float32, in place."""
        tensor = self._torch.zeros(elements)
        return lambda: self.hvd.allreduce_(tensor, name=name, op=self.hvd.Sum)

    def allgather(self, size: int, name: str) -> Callable[[], None]:
        """Make a function that runs a named, blocking allgather of `size` bytes a rank."""
        tensor = self._torch.zeros(size, dtype=self._torch.uint8)
        return lambda: self.hvd.allgather(tensor, name=name)

    def triad(self, numel: int) -> Callable[[], None]:
        """Make a function that runs `r += g`."""
        residual, gradient = self._torch.zeros(numel), self._torch.ones(numel)
        return lambda: residual.add_(gradient)

    def multiply(self, rows: int, columns: int, rank: int) -> Callable[[], None]:
        """Make a function that multiplies a matrix by a thin one."""
        matrix, thin = self._torch.ones(rows, columns), self._torch.ones(columns, rank)
        out = self._torch.empty(rows, rank)
        return lambda: self._torch.mm(matrix, thin, out=out)


class TensorFlow:
    """The operations in TensorFlow, eagerly."""

    def __init__(self) -> None:
        self._tf = importlib.import_module("tensorflow")
        self.hvd = importlib.import_module("horovod.tensorflow")
        self._module = importlib.import_module("horovod_topk.ops.tensorflow")
        self.ops: Ops[Any] = self._module.TensorFlowOps()

    def gradient(self, numel: int) -> Any:
        """A random gradient, as an array of `ops`."""
        return self._module.Buffer(self._tf.random.normal([numel]))

    def barrier(self) -> None:
        """Wait for all ranks, by an allreduce, as Horovod has no barrier for TensorFlow."""
        self.allreduce(1, "topkef.barrier")()

    def allreduce(self, elements: int, name: str) -> Callable[[], None]:
        """Make a function that runs a named, blocking allreduce of float32."""
        tensor = self._tf.zeros([elements])
        return lambda: self.hvd.allreduce(tensor, name=name, op=self.hvd.Sum)

    def allgather(self, size: int, name: str) -> Callable[[], None]:
        """Make a function that runs a named, blocking allgather of `size` bytes a rank."""
        tensor = self._tf.zeros([size], self._tf.uint8)
        return lambda: self.hvd.allgather(tensor, name=name)

    def triad(self, numel: int) -> Callable[[], None]:
        """Make a function that runs `r += g` on a variable."""
        residual, gradient = self._tf.Variable(self._tf.zeros([numel])), self._tf.ones([numel])
        return lambda: residual.assign_add(gradient)

    def multiply(self, rows: int, columns: int, rank: int) -> Callable[[], None]:
        """Make a function that multiplies a matrix by a thin one."""
        matrix, thin = self._tf.ones([rows, columns]), self._tf.ones([columns, rank])
        return lambda: self._tf.linalg.matmul(matrix, thin)


Framework = Torch | TensorFlow


def find() -> Framework | None:
    """PyTorch if Horovod supports it, else TensorFlow, else None."""
    for make in (Torch, TensorFlow):
        try:
            return make()
        except ImportError:
            continue
    return None
