"""The CPU kernels of methods that send all elements in few bits, against the oracle's verbs.

The contract suite runs them too; here are block sizes that fit no tile, threads, hard values, and
payloads that no writer can have written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from horovod_topk.core.codec.payload_codec import PayloadCodec
from horovod_topk.core.plan.buckets import BucketPlan, TensorSpec, make_plan
from horovod_topk.core.state.residual import Arenas
from horovod_topk.errors import PayloadError
from horovod_topk.kernels import native
from horovod_topk.methods import QSGD, ByteGrad, Codec, OneBit, SignSGD, TernGrad
from horovod_topk.ops import Ops
from horovod_topk.ops.numpy import NumpyOps
from horovod_topk.ops.torch import TorchOps

Array = NDArray[Any]
FOUND = native.find()
pytestmark = pytest.mark.skipif(FOUND.library is None, reason=f"no kernels: {FOUND.description}")
ISAS = ("portable", "avx2", "avx512")

SHAPES = ((5,), (40, 50), (7, 3), (3001,), (2, 2501), (33, 77), (3, 512), (9, 1024), (2, 16_385))
METHODS: dict[str, Codec] = {
    "signs": SignSGD(min_numel=0),
    "one bit": OneBit(min_numel=0),
    **{f"bytes, {n}": ByteGrad(block=n, min_numel=0) for n in (16, 100, 2048, 2501)},
    **{f"qsgd, {n} bits": QSGD(bits=n, min_numel=0) for n in range(2, 9)},
    **{f"qsgd, l2, {n}": QSGD(bits=5, norm="l2", block=n, min_numel=0) for n in (37, 3000)},
    "ternary": TernGrad(min_numel=0),
    "ternary, unclipped": TernGrad(clip=None, min_numel=0),
}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


class Side:
    """One bucket's state, encoded and decoded by kernels or by verbs."""

    def __init__(self, ops: Ops[Any], bucket: BucketPlan, wrap: Any) -> None:
        self.codec, self.bucket, self.wrap = PayloadCodec(ops), bucket, wrap
        self.codec.draw_from(lambda: 2**32 + 7, lambda: 1)
        zeros = (wrap(np.zeros(bucket.numel, bucket.residual_dtype)) for _ in range(2))
        self.arenas: Arenas[Any] = Arenas(bucket, *zeros)
        self.payload = self.codec.new_payload(bucket)

    def encode(self, gradients: list[Array]) -> tuple[Array, Array]:
        """The payload, and what is left, which becomes the residual."""
        self.codec.encode(self.arenas, [self.wrap(g.copy()) for g in gradients], self.payload)
        self.arenas.swap()
        return np.asarray(self.payload), np.asarray(self.arenas.residual)

    def decode(self, gathered: Array) -> list[Array]:
        """The gradients that payloads add up to, a third of them."""
        specs = (t.spec for t in self.bucket.tensors)
        outputs = [self.wrap(np.empty(spec.shape, spec.dtype)) for spec in specs]
        self.codec.decode(self.bucket, self.wrap(gathered), 1 / 3, outputs)
        return [np.asarray(output) for output in outputs]


def bucket_of(method: Codec, dtype: str, *shapes: tuple[int, ...]) -> BucketPlan:
    specs = [TensorSpec(f"t{i}", shape, dtype) for i, shape in enumerate(shapes)]
    (bucket,) = make_plan(specs, method).buckets
    return bucket


def gradients_of(bucket: BucketPlan, seed: int) -> list[Array]:
    """Of several magnitudes; in the second step with zeros, denormals and what saturates."""
    random, each = np.random.default_rng(seed), []
    for tensor in bucket.tensors:
        shape = tensor.spec.shape
        values = random.standard_normal(shape) * random.exponential(2.0, shape)
        flat = values.reshape(-1)
        if seed:
            flat[::37], flat[::101], flat[1::203] = 0.0, 1e38, -1e-45
        each.append(values.astype(tensor.spec.dtype))
    return each


@pytest.fixture(params=ISAS[: ISAS.index(FOUND.description) + 1] if FOUND.library else ())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes new buckets use one instruction set."""
    monkeypatch.setenv("HOROVOD_TOPK_ISA", request.param)
    return str(request.param)


@pytest.mark.one_in(4)
@each_method
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernels_have_the_bits_of_the_verbs(isa: str, method: Codec, dtype: str) -> None:
    bucket = bucket_of(method, dtype, *SHAPES)
    kernels, verbs = (
        Side(TorchOps(), bucket, torch.from_numpy),
        Side(NumpyOps(), bucket, np.asarray),
    )
    for step in range(2):
        gradients = gradients_of(bucket, step)
        for one, other in zip(kernels.encode(gradients), verbs.encode(gradients), strict=True):
            np.testing.assert_array_equal(one, other)
        gathered = np.concatenate([np.asarray(kernels.payload)] * 3)
        for one, other in zip(kernels.decode(gathered), verbs.decode(gathered), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.one_in(4)
@each_method
def test_what_is_not_finite_has_the_bits_of_the_verbs(isa: str, method: Codec) -> None:
    bucket = bucket_of(method, "float32", (3, 700))
    (gradient,) = gradients_of(bucket, 0)
    gradient.reshape(-1)[[0, 129, 1500]] = np.nan, np.inf, -3e38
    kernels, verbs = (
        Side(TorchOps(), bucket, torch.from_numpy),
        Side(NumpyOps(), bucket, np.asarray),
    )
    with np.errstate(invalid="ignore"):
        pairs = zip(kernels.encode([gradient]), verbs.encode([gradient]), strict=True)
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["signs", "one bit", "bytes, 2501", "qsgd, 3 bits", "ternary"])
def test_threads_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, found = bucket_of(METHODS[name], "float32", (1399, 1501), (30,)), []
    gradients = gradients_of(bucket, 0)
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        side = Side(TorchOps(), bucket, torch.from_numpy)
        found.append([each.tobytes() for each in side.encode(gradients)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "at", "damage"),
    [
        ("signs", 0, b"\x00\xbf"),  # a scale below 0
        ("one bit", 2, b"\x80\x7f"),  # an infinite mean of those below 0
        ("bytes, 100", 4, b"\x00\x00\x80\xbf"),  # a step below 0
        ("bytes, 100", 0, b"\x00\x00\xc0\x7f"),  # a low that is no number
        ("qsgd, 4 bits", 10, b"\xff"),  # a multiple above the largest
        ("qsgd, 7 bits", 0, b"\xc0\x7f"),  # a step that is no number
        ("ternary", 0, b"\x00\x00\x80\xbf"),  # a scale below 0
        ("ternary", 0, b"\x00\x00\x80\x7f"),  # an infinite scale
        ("ternary", 15, b"\xf3"),  # a fifth multiple of 2
    ],
)
def test_what_no_coder_writes_is_refused(isa: str, name: str, at: int, damage: bytes) -> None:
    bucket = bucket_of(METHODS[name], "float32", (60,))
    side = Side(TorchOps(), bucket, torch.from_numpy)
    payload = side.encode(gradients_of(bucket, 0))[0].copy()
    begin = bucket.tensors[0].at + at
    payload[begin : begin + len(damage)] = np.frombuffer(damage, np.uint8)
    with pytest.raises(PayloadError, match="t0"):
        side.decode(payload)


@pytest.mark.parametrize("size", [1, 4, 513, 2003, 300_001])
def test_encoding_by_a_kernel_of_buckets_that_announce_nothing(isa: str, size: int) -> None:
    """A bucket's own scale, unclipped: tiles end within bytes of five codes."""
    method = TernGrad(clip=None, min_numel=0)
    bucket = bucket_of(method, "float32", (size,))
    verbs, kernel = Side(NumpyOps(), bucket, np.asarray), method.kernel(TorchOps(), bucket)
    gradients, zeros = gradients_of(bucket, 1), torch.zeros(bucket.numel)
    side = Side(TorchOps(), bucket, torch.from_numpy)
    left, given = torch.ones(bucket.numel), [torch.from_numpy(each) for each in gradients]
    kernel.encode(zeros, left, given, side.payload, side.codec._streams(bucket))
    expected, rest = verbs.encode(gradients)
    np.testing.assert_array_equal(np.asarray(side.payload), expected)
    np.testing.assert_array_equal(left, rest)
