"""A GPU that is not there: tensors in host memory that say they are on `cuda:0`.

While a `Watch` counts, it notes what PyTorch and this package would do on a GPU: what they launch,
what they wait for, and what memory they take. This package's kernels only count, and compute
nothing; PyTorch's operations run on the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
FREE = ("aten::empty", "aten::new_empty", "aten::detach", "aten::lift_fresh")  # launch nothing
# Functions that copy elements to the host, or from it to a device that they are given.
READS = {"tolist", "item", "numpy", "cpu", "__array__", "__contains__", "nonzero"}
READS |= {"__bool__", "__int__", "__float__", "__index__", "__complex__"}
MAKES = {"to", "tensor", "as_tensor", "asarray"}
# Operations that wait: the size of a result depends on elements, or a number is read.
SIZED = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "repeat_interleave"}
SIZED |= {"_unique2", "unique_dim", "unique_consecutive", "bincount", "is_nonzero"}


class OnGpu(Tensor):
    """A tensor that says it is on the GPU. What is computed from it is on the GPU, too."""

    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    used_on: Any = None  # the last stream of `record_stream`

    def get_device(self) -> int:
        return 0

    def record_stream(self, stream: Any) -> None:
        self.used_on = stream


def on_gpu(tensor: Tensor) -> Tensor:
    """Return a tensor on the GPU that shares the memory of one on the host."""
    return tensor.as_subclass(OnGpu)


class Watch:
    """Counts launches, waits by name, and the bytes of new memory by operation."""

    def __init__(self) -> None:
        self.launched, self.waited, self.taken = Counter[str](), Counter[str](), Counter[str]()
        self.counts = False
        self.sent: list[Tensor] = []  # memory that collectives under way read

    def launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """Stands for `horovod_topk.kernels.triton.launching.launch`."""
        self.check_sent(kernel.fn.__name__, arguments)
        if self.counts:
            self.launched[kernel.fn.__name__] += 1

    def check_sent(self, name: str, arguments: Any) -> None:
        """Fail if what is launched may write to memory that a collective reads."""
        sent = {each.untyped_storage().data_ptr() for each in self.sent}
        given = [each for each in tree_leaves(arguments) if isinstance(each, Tensor)]
        assert not sent & {each.untyped_storage().data_ptr() for each in given}, name

    @contextmanager
    def counting(self, launched: Counter[str] | None = None) -> Iterator[None]:
        """Count, launches in a counter of their own if there is one."""
        self.counts, self.launched = True, self.launched if launched is None else launched
        yield
        self.counts = False

    @contextmanager
    def pausing(self) -> Iterator[None]:
        before, self.counts = self.counts, False
        yield
        self.counts = before


class Functions(TorchFunctionMode):
    """Makes the GPU's tensors in host memory, and notes functions that wait."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(resolve_name(func)).rpartition(".")[2], dict(kwargs or {})
        is_pinned, target = kwargs.pop("pin_memory", False), None
        if name in MAKES or kwargs.get("device") is not None:
            places = [each for each in (*args, *kwargs.values()) if _is_place(each)]
            target = torch.device(places[0]).type if places else None
            args = [HOST if _is_place(each) else each for each in args]
            kwargs = {key: HOST if _is_place(each) else each for key, each in kwargs.items()}
        reads = [each for each in tree_leaves((args, kwargs)) if isinstance(each, OnGpu)]
        if self._watch.counts and self._waits(name, args, kwargs, reads, target):
            self._watch.waited[name] += 1
        made = func(*args, **kwargs)
        if is_pinned:
            made.is_pinned_on_fake_host = True
        if target == "cuda":
            return on_gpu(made)
        return made.as_subclass(Tensor) if name == "cpu" or (target == "cpu" and reads) else made

    def _waits(self, name: str, args: Any, kwargs: Any, reads: Any, target: str | None) -> bool:
        if name == "tolist" and reads and not reads[0].is_contiguous():
            self._watch.launched["strided copy to the host"] += 1
        if name == "copy_" and len(reads) == 1 and isinstance(args[1], Tensor):
            is_pinned = hasattr(args[1], "is_pinned_on_fake_host")
            return not (is_pinned and kwargs.get("non_blocking"))
        if target is not None and name in MAKES:
            return bool(reads) == (target == "cpu")
        return name in READS and bool(reads)


class Operations(TorchDispatchMode):
    """Notes the operations on the GPU: what they launch, wait for and take."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if func._schema.is_mutable:
            self._watch.check_sent(func._schema.name, given)
        is_of_host = given and not any(isinstance(each, OnGpu) for each in given)
        if self._watch.counts and not is_of_host:
            self._note(func, given, [e for e in tree_leaves(found) if isinstance(e, Tensor)])
        return found

    def _note(self, func: Any, given: list[Tensor], found: list[Tensor]) -> None:
        name, watch = func._schema.name, self._watch
        if (given or found) and not (func.is_view or name.startswith(FREE)):
            watch.launched[name] += 1
        has_mask = name.startswith("aten::index") and any(e.dtype == torch.bool for e in given)
        if has_mask or name.removeprefix("aten::") in SIZED:
            watch.waited[name] += 1
        known = {each.untyped_storage().data_ptr() for each in given}
        for each in found:
            memory = each.untyped_storage()
            if memory.nbytes() and memory.data_ptr() not in known:
                watch.taken[name] += memory.nbytes()


def _is_place(argument: Any) -> bool:
    return isinstance(argument, torch.device | str)


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Have this process believe that it has a GPU, and watch what it does with it."""
    from horovod_topk.kernels.triton.topk import bucket
    from horovod_topk.kernels.triton.updates import lists

    found = Watch()
    for module in (bucket, lists):
        monkeypatch.setattr(module, "launch", found.launch)
    properties, stream = {"multi_processor_count": 132}, {"cuda_stream": 0}
    for name, made in {
        "device": nullcontext(),
        "current_device": 0,
        "current_stream": SimpleNamespace(**stream),
        "is_current_stream_capturing": False,
        "get_device_properties": SimpleNamespace(**properties),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *of, made=made: made)
    with Functions(found), Operations(found):
        yield found
