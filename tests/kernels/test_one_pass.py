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
from numpy.typing import NDArray

from horovod_topk.core.codec.momentum import velocities_of
from horovod_topk.core.codec.payload_codec import PayloadCodec
from horovod_topk.core.plan.buckets import BucketPlan, TensorSpec, make_plan
from horovod_topk.core.plan.shards import shard
from horovod_topk.core.state.residual import Arenas
from horovod_topk.kernels import native
from horovod_topk.methods.topk import TopK
from horovod_topk.ops.numpy import NumpyOps
from horovod_topk.ops.torch import TorchOps

Array = NDArray[Any]

FOUND = native.find()
pytestmark = pytest.mark.skipif(FOUND.library is None, reason=f"no kernels: {FOUND.description}")

ISAS = ("portable", "avx2", "avx512")
SIZES = (5, 1500, 1300, 64, 4096, 70_001, 100_000, 1)


class Side:
    """One rank's state, compressed by one implementation.

    Args:
        ops: the implementation.
        bucket: whole, with the velocities.
        parts: the bucket itself, or its shards.
        array: makes an array of it, from NumPy's.
    """

    def __init__(self, ops: Any, bucket: BucketPlan, parts: list[BucketPlan], array: Any) -> None:
        self.ops, self.array, self.codec = ops, array, PayloadCodec(ops)
        self.residuals = [self.arenas(part) for part in parts]
        self.velocity = self.arenas(bucket)
        self.payloads = [self.codec.new_payload(part) for part in parts]
        self.squares: list[Any] = []

    def arenas(self, plan: BucketPlan) -> Arenas[Any]:
        zeros = np.zeros(plan.numel, plan.residual_dtype)
        return Arenas(plan, self.array(zeros.copy()), self.array(zeros.copy()))

    def rescale(self, factors: list[float]) -> None:
        """Multiply the residual of each tensor, once it is read."""
        for arenas in self.residuals:
            for tensor, factor in zip(arenas.plan.tensors, factors, strict=True):
                if factor != 1.0:
                    arenas.rescale(tensor.start, tensor.stop, factor, self.ops)

    def encode(self, gradients: list[Array], momentum: TopK | None) -> None:
        """One step as far as its payloads."""
        own = None if momentum is None else velocities_of(momentum, self.velocity, self.ops)
        given_ = [self.array(g.copy()) for g in gradients]
        self.codec.encode_shards(self.residuals, given_, self.payloads, own, self.squares)

    def weigh(self, squares: list[Array | None]) -> None:
        """Select by these mean squares of the gradients."""
        self.squares = [None if v is None else self.array(v.copy()) for v in squares]

    def swap(self) -> None:
        """Commit."""
        for arenas in (*self.residuals, self.velocity):
            arenas.swap()

    def state(self) -> list[bytes]:
        """All bits that a commit or a roll-back leaves."""
        return [np.asarray(a.residual).tobytes() for a in (*self.residuals, self.velocity)]

    def candidates(self) -> list[bytes]:
        """All bits that a step writes."""
        written = [*self.payloads, *(a.candidate for a in (*self.residuals, self.velocity))]
        return [np.asarray(each).tobytes() for each in written]


class Both:
    """The same state twice: by kernels, and by the oracle's verbs."""

    def __init__(self, dtype: str, parts: int = 1, sizes: tuple[int, ...] = SIZES, **settings: Any):
        specs = [TensorSpec(f"t{i}", (n,), dtype) for i, n in enumerate(sizes)]
        settings |= {"ratio": 0.02, "exchange": "allgather" if parts == 1 else "sharded"}
        (self.bucket,) = make_plan(specs, TopK(**settings)).buckets
        each = [self.bucket] if parts == 1 else list(shard(self.bucket, parts).scatter)
        self.fused = Side(TorchOps(), self.bucket, each, torch.from_numpy)
        self.verbs = Side(NumpyOps(), self.bucket, each, lambda array: array)
        self.rng = np.random.default_rng(3)

    def gradients(self, scale: float = 1.0) -> list[Array]:
        shapes = (t.spec for t in self.bucket.tensors)
        return [(scale * self.rng.standard_normal(s.shape)).astype(s.dtype) for s in shapes]

    def step(self, gradients: list[Array], momentum: TopK | None, *, commit: bool) -> None:
        """One step of both; refuses a difference of a bit."""
        for side in (self.fused, self.verbs):
            side.encode(gradients, momentum)
        assert self.fused.candidates() == self.verbs.candidates()
        if commit:
            self.fused.swap()
            self.verbs.swap()
        assert self.fused.state() == self.verbs.state()


@pytest.fixture(params=ISAS[: ISAS.index(FOUND.description) + 1] if FOUND.library else ())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes new buckets use one instruction set."""
    monkeypatch.setenv("HOROVOD_TOPK_ISA", request.param)
    return str(request.param)


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
    both = Both(dtype, parts, selection=selection, values="int4")
    for step, scale in enumerate((1.0, 1.1, 0.2, 3.0, 0.0)):
        if rescaled and step:
            factors = [1.0 + 0.01 * (step + i % 3) for i in range(len(SIZES))]
            both.fused.rescale(factors)
            both.verbs.rescale(factors)
        both.step(both.gradients(scale), momentum, commit=step != 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("momentum", [None, NESTEROV])
@pytest.mark.parametrize("selection", ["exact", "sampled"])
def test_selection_by_mean_squares_has_the_bits_of_the_verbs(
    isa: str, selection: str, momentum: TopK | None, dtype: str, parts: int
) -> None:
    """Squares of very different sizes, zeros among them, infinite ones, and tensors without any."""
    both = Both(dtype, parts, selection=selection, values="int4")
    sizes = enumerate(sizes_of(both))
    squares: list[Array | None] = [
        None if at == 2 else (both.rng.standard_normal(n) ** 8 * 1e-9).astype(dtype)
        for at, n in sizes
    ]
    for v in squares[5:]:
        assert v is not None
        v[:: v.size // 3 + 1] = 0.0
    squares[4] = np.zeros(sizes_of(both)[4], dtype)
    for step, last in enumerate((0.0, np.inf, np.nan, np.copysign(np.nan, -1.0), 1e-30)):
        assert squares[6] is not None
        squares[6][[0, -1]] = last
        for side in (both.fused, both.verbs):
            side.weigh(squares)
        both.step(both.gradients(1.0 + step), momentum, commit=step != 1)


def sizes_of(both: Both) -> list[int]:
    return [t.spec.numel for t in both.bucket.tensors]


@pytest.mark.parametrize("weighted", [False, True])
def test_what_moves_adam_most_is_selected(weighted: bool) -> None:
    """A tenth of the elements has 81 times larger squares and 2.9 times larger gradients."""
    both = Both("float32", sizes=(20_000,), values="float32")
    is_large = np.arange(20_000) % 10 == 0
    v = np.where(is_large, 81.0, 1.0).astype(np.float32)
    for side in (both.fused, both.verbs):
        side.weigh([v if weighted else None])
    gradients = both.gradients()
    gradients[0] *= np.where(is_large, 2.9, 1.0).astype(np.float32)
    both.step(gradients, None, commit=True)
    sent = gradients[0] != np.asarray(both.fused.residuals[0].residual)
    assert sent.sum() == 400
    share = (sent & is_large).sum() / sent.sum()
    assert (share < 0.2) if weighted else (share > 0.8)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("values", ["float32", "float16", "int8", "sign"])
@pytest.mark.parametrize("indices", ["packed", "plain"])
@pytest.mark.parametrize("threads", [1, 3])
def test_all_formats_and_threads(
    values: str, indices: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor is large enough for several threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    both = Both("float32", sizes=(700, 1_700_000, 9_000), values=values, indices=indices)
    for step in range(3):
        if step:
            both.fused.rescale([0.97, 1.02, 1.0])
            both.verbs.rescale([0.97, 1.02, 1.0])
        both.step(both.gradients(), NESTEROV, commit=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_residuals_of_short_gradients_take_new_units(dtype: str) -> None:
    """Without momentum, which they cannot have."""
    arenas = []
    spec = TensorSpec("w", (70_001,), dtype)
    (bucket,) = make_plan([spec], TopK(0.02, "int4")).buckets
    gradient = torch.randn(spec.numel, generator=torch.Generator().manual_seed(1))
    for ops in (TorchOps(), TorchOps(kernels=False)):
        codec: PayloadCodec[torch.Tensor] = PayloadCodec(ops)
        own = Arenas(bucket, torch.randn(bucket.numel).fill_(0.5), torch.zeros(bucket.numel))
        own.rescale(0, spec.numel, 1.3, ops)
        codec.encode(own, [gradient.to(getattr(torch, dtype))], codec.new_payload(bucket))
        arenas.append(own)
    assert torch.equal(arenas[0].candidate, arenas[1].candidate)
    assert torch.equal(arenas[0].residual, arenas[1].residual)


def test_a_step_that_is_rolled_back_writes_candidates_alone() -> None:
    """NaN in its gradients and factors that wait: residual and velocity stay, bit for bit."""
    both = Both("float32", values="int4")
    both.step(both.gradients(), NESTEROV, commit=True)
    residual, velocity = both.fused.residuals[0].unscaled()[0].clone(), both.fused.state()[-1]
    factors = [1.25] * len(SIZES)
    both.fused.rescale(factors)
    spoilt = both.gradients()
    for gradient in spoilt:
        gradient[0] = np.nan
    both.fused.encode(spoilt, NESTEROV)
    assert torch.equal(both.fused.residuals[0].unscaled()[0], residual)
    assert both.fused.state()[-1] == velocity
    assert torch.equal(both.fused.residuals[0].residual, residual * 1.25)  # its new units are kept
    both.verbs.rescale(factors)
    both.step(both.gradients(), NESTEROV, commit=True)


@given(st.lists(st.sampled_from(["rescale", "read", "encode", "commit"]), max_size=8))
def test_factors_that_wait_are_those_that_were_applied_at_once(steps: list[str]) -> None:
    """However reads, roll-backs and commits come between them."""
    both = Both("float32", sizes=(3000, 7), values="float32")
    both.step(both.gradients(), None, commit=True)
    for position, step in enumerate(steps):
        if step == "rescale":
            for side in (both.fused, both.verbs):
                side.rescale([1.1 + position / 7, 0.9])
            both.verbs.state()  # applied at once
        elif step == "read":
            both.fused.state()
        else:
            gradients = both.gradients()
            for side in (both.fused, both.verbs):
                side.encode(gradients, None)
                if step == "commit":
                    side.swap()
    assert both.fused.state() == both.verbs.state()
