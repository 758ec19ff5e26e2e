"""A compiled kernel is launched again without Triton's look-up, for arguments of the same kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_topk.kernels.triton import launching


class Compiled:
    """Stands for `triton.compiler.CompiledKernel`; notes how it is launched."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, programs: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launches.append((programs, arguments))


class Kernel:
    """Stands for a function under `triton.jit`; notes what it compiles."""

    arg_names = ("source", "count", "rate", "WIDTH", "KIND")

    def __init__(self, *, interprets: bool = False) -> None:
        self.fn = object()
        self.compiled: list[Compiled] = []
        self.calls = 0
        self._interprets = interprets

    def __getitem__(self, programs: tuple[int, ...]) -> Any:
        return self._compile

    def _compile(self, source: Tensor, count: int, rate: float, **constants: Any) -> Any:
        self.calls += 1
        if self._interprets:
            return None
        self.compiled.append(Compiled())
        return self.compiled[-1]


def run(kernel: Kernel, source: Tensor, count: int, rate: float, kind: int = 3) -> None:
    # As a caller may: constants are not in the kernel's order, and options come last.
    launching.launch(kernel, (7,), source, count, rate, KIND=kind, WIDTH=8, **launching.FOUR_WARPS)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_compiled", {})


def test_the_second_launch_gets_all_arguments_in_the_kernels_order() -> None:
    kernel, first, second = Kernel(), torch.zeros(8), torch.zeros(8)
    run(kernel, first, 5, 0.5)
    run(kernel, second, 5, 0.25)
    assert kernel.calls == 1
    (launched,) = kernel.compiled[0].launches
    assert launched[0] == (7, 1, 1)
    assert launched[1][0] is second
    assert launched[1][1:] == (5, 0.25, 8, 3)


def test_what_triton_compiles_for_is_compiled_anew() -> None:
    kernel, source = Kernel(), torch.zeros(8)
    run(kernel, source, 5, 0.5)
    run(kernel, source[1:], 5, 0.5)  # its address is no multiple of 16 bytes
    run(kernel, source.double(), 5, 0.5)
    run(kernel, source, 1, 0.5)  # Triton compiles 1 and multiples of 16 apart
    run(kernel, source, 16, 0.5)
    run(kernel, source, 5, 0.5, kind=2)
    assert kernel.calls == 6
    run(kernel, source.clone(), 16, 0.125)
    assert kernel.calls == 6


def test_kernels_are_told_apart() -> None:
    first, second, source = Kernel(), Kernel(), torch.zeros(8)
    run(first, source, 5, 0.5)
    run(second, source, 5, 0.5)
    assert (first.calls, second.calls) == (1, 1)


def test_the_interpreter_runs_every_launch() -> None:
    kernel, source = Kernel(interprets=True), torch.zeros(8)
    run(kernel, source, 5, 0.5)
    run(kernel, source, 5, 0.5)
    assert kernel.calls == 2
