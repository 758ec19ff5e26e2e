"""What the kernels' tests share: each instruction set of this processor, and a fake GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_gpu import Watch, pretended

from horovod_topk.kernels import native

ISAS = ("portable", "avx2", "avx512")
FOUND = native.find()


@pytest.fixture(params=ISAS[: ISAS.index(FOUND.description) + 1] if FOUND.library else ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the instruction set that new kernel buckets use."""
    if FOUND.library is None:
        pytest.skip(f"no kernels: {FOUND.description}")
    monkeypatch.setenv("HOROVOD_TOPK_ISA", request.param)
    assert FOUND.library.topkef_isa().decode() == request.param
    return str(request.param)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Have this process believe that it has a GPU, and watch what it does with it."""
    with pretended(monkeypatch) as watch:
        yield watch
