"""All that the default does to a gradient in one pass of the kernels: the bits of the verbs.

Momentum (heavy-ball or Nesterov's) with its masking, residuals in new units, shards, threads, in
every combination; and what a step that is rolled back leaves.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sides import Array, Pair, bucket_of

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.state.residual import Arenas
from horovod_topk.kernels import native
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.torch import TorchOps

FOUND = native.find()
pytestmark = pytest.mark.skipif(FOUND.library is None, reason=f"no kernels: {FOUND.description}")

SIZES = (5, 1500, 1300, 64, 4096, 70_001, 100_000, 1)


def pair_of(*sizes: int, dtype: str = "float32", parts: int = 1, **settings: Any) -> Pair:
    exchange = "allgather" if parts == 1 else "sharded"
    method = TopK(**{"ratio": 0.02, "exchange": exchange, **settings})
    return Pair(bucket_of(method, *(sizes or SIZES), dtype=dtype), parts)


HEAVY_BALL, NESTEROV = TopK(momentum=0.9), TopK(momentum=0.8, nesterov=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("momentum", "rescaled"),
    [(None, True), *itertools.product((HEAVY_BALL, NESTEROV), (False, True))],
)
@pytest.mark.parametrize("selection", ["exact", "sampled"])
def test_the_bits_of_the_verbs(
    isa: str, selection: str, momentum: TopK | None, rescaled: bool, dtype: str, parts: int
) -> None:
    """Steps in a row, one of them rolled back, of tensors sent whole and in part."""
    both = pair_of(dtype=dtype, parts=parts, selection=selection, values="int4")
    for step, scale in enumerate((1.0, 1.1, 0.2, 3.0, 0.0)):
        if rescaled and step:
            damping = [1.0 + 0.01 * (step + i % 3) for i in range(len(SIZES))]
            both.rescale(damping)
        both.encode(both.normal(scale), momentum, commit=step != 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("momentum", [None, NESTEROV])
@pytest.mark.parametrize("selection", ["exact", "sampled"])
def test_selection_by_mean_squares_has_the_bits_of_the_verbs(
    isa: str, selection: str, momentum: TopK | None, dtype: str, parts: int
) -> None:
    """Squares of very different sizes, zeros among them, infinite ones, and tensors without any."""
    both = pair_of(dtype=dtype, parts=parts, selection=selection, values="int4")
    squares: list[Array | None] = [
        None if at == 2 else (both.random.standard_normal(n) ** 8 * 1e-9).astype(dtype)
        for at, n in enumerate(SIZES)
    ]
    for v in squares[5:]:
        assert v is not None
        v[:: v.size // 3 + 1] = 0.0
    squares[4] = np.zeros(SIZES[4], dtype)
    for step, last in enumerate((0.0, np.inf, np.nan, np.copysign(np.nan, -1.0), 1e-30)):
        assert squares[6] is not None
        squares[6][[0, -1]] = last
        for side in both.sides:
            side.find_floors(squares)
        both.encode(both.normal(1.0 + step), momentum, commit=step != 1)


@pytest.mark.one_in(16, first=5)
@pytest.mark.parametrize("values", ["float32", "float16", "int8", "sign"])
@pytest.mark.parametrize("indices", ["packed", "plain"])
@pytest.mark.parametrize("threads", [1, 3])
def test_all_formats_and_threads(
    values: str, indices: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor is large enough for several threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    both = pair_of(700, 1_700_000, 9_000, values=values, indices=indices)
    for step in range(3):
        if step:
            both.rescale([0.97, 1.02, 1.0])
        payload = both.encode(both.normal(), NESTEROV)
    both.decode([payload] * 2, 0.5)
    dense = pair_of(2_100_003, 100, ratio=1.0, values=values)
    dense.decode([dense.encode(dense.normal())] * 2, 0.5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_residuals_of_short_gradients_take_new_units(dtype: str) -> None:
    """Without momentum, which they cannot have."""
    arenas = []
    bucket = bucket_of(TopK(0.02, "int4"), 70_001, dtype=dtype)
    gradient = torch.randn(70_001, generator=torch.Generator().manual_seed(1))
    for ops in (TorchOps(), TorchOps(kernels=False)):
        codec: PayloadCodec[torch.Tensor] = PayloadCodec(ops)
        own = Arenas(bucket, torch.randn(bucket.numel).fill_(0.5), torch.zeros(bucket.numel))
        own.rescale(0, 70_001, 1.3, ops)
        codec.encode(own, [gradient.to(getattr(torch, dtype))], codec.new_payload(bucket))
        arenas.append(own)
    assert torch.equal(arenas[0].candidate, arenas[1].candidate)
    assert torch.equal(arenas[0].residual, arenas[1].residual)


@given(st.lists(st.sampled_from(["rescale", "read", "encode", "commit"]), max_size=8))
def test_factors_that_wait_are_those_that_were_applied_at_once(steps: list[str]) -> None:
    """However reads, roll-backs and commits come between them."""
    both = pair_of(3000, 7, values="float32")
    both.encode(both.normal())
    for position, step in enumerate(steps):
        if step == "rescale":
            for side in both.sides:
                side.rescale([1.1 + position / 7, 0.9])
            both.verbs.state()  # applied at once
        elif step == "read":
            both.kernels.state()
        else:
            gradients = both.normal()
            for side in both.sides:
                side.encode(gradients)
                if step == "commit":
                    side.swap()
    assert both.kernels.state() == both.verbs.state()
