"""Print which functions of horovod_topk a bucket passes on its way to the network and back.

    horovodrun -np 2 python scripts/trace_bucket.py

The bucket has the two parameters of a linear layer. `out` begins with Horovod's hook and ends where
Horovod's collective is called. `back` begins where Horovod asks for the exchanged gradient and ends
when it is in `p.grad`. Comprehensions, and functions that `dataclass` writes, are
not listed. The first bucket of a step also has to look whether ranks, learning rates or the ratio
have changed: `once` lists the functions for that. At the end are the files that run in a step with
SGD's momentum, from `backward()` to the applied weight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import horovod.torch as hvd
import torch

import horovod_topk
from horovod_topk.torch import TopKEF

ROOT = Path(horovod_topk.__file__).parent
ONCE = "StepRunner._begin_step"  # what is called below it is done once a step
LATER = 20  # steps after which TopKEF does not look for a GradScaler any more


class Trace:
    """Functions of the package that were called, by the part of the way in which they were."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {"out": [], "once": [], "back": []}
        self._part = "out"
        self._within_once = 0  # depth of the calls below `ONCE`

    def during(self, part: str, function: Callable[[], Any]) -> Any:
        """Call a function and note what it calls."""
        self._part = part
        sys.setprofile(self._note)
        try:
            return function()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if ROOT not in Path(code.co_filename).parents or "<" in code.co_name:
            return
        if event == "return":
            self._within_once = max(self._within_once - 1, 0)
        elif event == "call":
            if self._within_once or code.co_qualname == ONCE:
                self._within_once += 1
            part = "once" if self._within_once else self._part
            name = code.co_qualname.rpartition("<locals>.")[2]
            line = f"{Path(code.co_filename).relative_to(ROOT)} {name}"
            if line not in self.found[part]:
                self.found[part].append(line)


def trace(**settings: Any) -> dict[str, list[str]]:
    """Train a few steps of a linear layer; trace the last one. Every rank has to call it.

    settings: of TopKEF.

    Returns:
        "out", "once" and "back": lines with a file and a function.
    """
    model = torch.nn.Linear(512, 512)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=TopKEF(**{"warmup": None, **settings}),
    )
    hook, traced = type(optimizer)._allreduce_grad_async, Trace()

    def hook_traced(self: Any, p: torch.Tensor) -> Any:
        collect, context = traced.during("out", lambda: hook(self, p))
        return lambda: traced.during("back", collect), context

    for step in range(3):
        if step == 2:
            type(optimizer)._allreduce_grad_async = hook_traced
        optimizer.zero_grad()
        model(torch.randn(4, 512)).sum().backward()
        optimizer.step()
    return traced.found


def files() -> list[str]:
    """Files of the package that run in a later step of the default. Every rank has to call it."""
    model, found = torch.nn.Linear(512, 512), set[str]()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=TopKEF(warmup=None),
    )

    def note(frame: FrameType, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if ROOT in path.parents:
            found.add(str(path.relative_to(ROOT)))

    for step in range(LATER + 1):
        loss = model(torch.randn(4, 512)).sum()
        sys.setprofile(note if step == LATER else None)
        loss.backward()
        optimizer.step()
        sys.setprofile(None)
        optimizer.zero_grad()
    return sorted(found)


def main() -> None:
    """Print the way of a bucket on rank 0."""
    hvd.init()
    found, run = trace(), files()
    if hvd.rank() == 0:
        for part, lines in found.items():
            print(f"{part}: {len(lines)} functions", *lines, sep="\n    ")
        print(f"files: {len(run)}", *run, sep="\n    ")


if __name__ == "__main__":
    main()
