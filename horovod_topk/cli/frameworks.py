"""A framework and the collectives of its ranks, behind a few operations that commands time.

PyTorch or TensorFlow with Horovod, or PyTorch alone. They are imported when they are needed:
`horovod_topk.cli` works with none.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from horovod_topk.cli.launcher import by_torchrun
from horovod_topk.core.plan.nodes import Location, here
from horovod_topk.ops.protocol import Ops

NO_FRAMEWORK = (
    "{}: neither PyTorch nor TensorFlow with Horovod works here, and methods are timed in one; run "
    "`horovod-topk doctor` for the reason"
)


class _OverHorovod:
    """Ranks that horovodrun or mpirun has started."""

    hvd: Any  # Horovod for the framework

    def begin(self) -> None:
        """Meet the other ranks."""
        self.hvd.init()

    def end(self) -> None:
        """Leave them."""
        self.hvd.shutdown()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return int(self.hvd.rank())

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self.hvd.size())

    @property
    def location(self) -> Location:
        """Where this rank runs."""
        return here(self.rank, self.hvd.local_rank())

    def gather(self, value: Any, name: str) -> list[Any]:
        """Return what each rank has passed, in rank order."""
        return list(self.hvd.allgather_object(value, name=name))


class _Tensors:
    """What PyTorch computes."""

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        self.ops: Ops[Any] = importlib.import_module("horovod_topk.ops.torch").TorchOps()
        self._torch.set_num_threads(1)  # a rank's kernels have one thread

    def gradient(self, numel: int) -> Any:
        """A random gradient, as an array of `ops`."""
        return self._torch.randn(numel)

    def triad(self, numel: int) -> Callable[[], None]:
        """Make a function that runs `r += g`."""
        residual, gradient = self._torch.zeros(numel), self._torch.ones(numel)
        return lambda: residual.add_(gradient)

    def multiply(self, rows: int, columns: int, rank: int) -> Callable[[], None]:
        """Make a function that multiplies a matrix by a thin one."""
        matrix, thin = self._torch.ones(rows, columns), self._torch.ones(columns, rank)
        out = self._torch.empty(rows, rank)
        return lambda: self._torch.mm(matrix, thin, out=out)


class Torch(_Tensors, _OverHorovod):
    """PyTorch with Horovod."""

    def __init__(self) -> None:
        super().__init__()
        self.hvd = importlib.import_module("horovod.torch")

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


class TorchAlone(_Tensors):
    """PyTorch without Horovod: ranks that torchrun has started, over Gloo."""

    def __init__(self) -> None:
        super().__init__()
        self._dist = importlib.import_module("torch.distributed")

    def begin(self) -> None:
        """Meet the other ranks."""
        self._dist.init_process_group("gloo")

    def end(self) -> None:
        """Leave them, all at once: a connection that closes early is an error for the other end."""
        self._dist.barrier()
        self._dist.destroy_process_group()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return int(self._dist.get_rank())

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self._dist.get_world_size())

    @property
    def location(self) -> Location:
        """Where this rank runs."""
        return here(self.rank, int(os.environ["LOCAL_RANK"]))

    def gather(self, value: Any, name: str) -> list[Any]:
        """Return what each rank has passed, in rank order."""
        found = [None] * self.size
        self._dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._dist.barrier()

    def allreduce(self, elements: int, name: str) -> Callable[[], None]:
        """Make a function that runs a blocking allreduce of float32, in place."""
        tensor = self._torch.zeros(elements)
        return lambda: self._dist.all_reduce(tensor)

    def allgather(self, size: int, name: str) -> Callable[[], None]:
        """Make a function that runs a blocking allgather of `size` bytes a rank."""
        tensor = self._torch.zeros(size, dtype=self._torch.uint8)
        found = [self._torch.empty_like(tensor) for _ in range(self.size)]
        return lambda: self._dist.all_gather(found, tensor)


class TensorFlow(_OverHorovod):
    """TensorFlow with Horovod, eagerly."""

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


Framework = Torch | TensorFlow | TorchAlone


def find() -> Framework | None:
    """The framework of these ranks; without a launcher the first that works; None: none does."""
    every: tuple[type[Framework], ...] = (Torch, TensorFlow, TorchAlone)
    for make in every[-1:] if by_torchrun() else every:
        try:
            return make()
        except ImportError:
            continue
    return None
