"""The CPU kernels of methods that send all elements in few bits, against the oracle's verbs.

The contract suite runs them too; here are block sizes that fit no tile, threads, hard values, and
payloads that no writer can have written.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sides import Array, Pair, Side, bucket_of

from horovod_topk.core.plan.buckets import BucketPlan
from horovod_topk.errors import PayloadError
from horovod_topk.kernels import native
from horovod_topk.methods import QSGD, ByteGrad, Codec, OneBit, SignSGD, TernGrad
from horovod_topk.ops.torch import TorchOps

FOUND = native.find()
pytestmark = pytest.mark.skipif(FOUND.library is None, reason=f"no kernels: {FOUND.description}")

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


@pytest.mark.one_in(4)
@each_method
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernels_have_the_bits_of_the_verbs(isa: str, method: Codec, dtype: str) -> None:
    both = Pair(bucket_of(method, *SHAPES, dtype=dtype))
    for step in range(2):
        payload = both.encode(gradients_of(both.bucket, step))
        both.decode([payload] * 3, 1 / 3)


@pytest.mark.one_in(4)
@each_method
def test_what_is_not_finite_has_the_bits_of_the_verbs(isa: str, method: Codec) -> None:
    both = Pair(bucket_of(method, (3, 700)))
    (gradient,) = gradients_of(both.bucket, 0)
    gradient.reshape(-1)[[0, 129, 1500]] = np.nan, np.inf, -3e38
    both.encode([gradient])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["signs", "one bit", "bytes, 2501", "qsgd, 3 bits", "ternary"])
def test_threads_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    both = Pair(bucket_of(METHODS[name], (1399, 1501), (30,)))
    both.encode(gradients_of(both.bucket, 0))


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
    bucket = bucket_of(METHODS[name], 60)
    side = Side(TorchOps(), bucket, [bucket])
    side.encode(gradients_of(bucket, 0))
    payload = np.asarray(side.payloads[0]).copy()
    begin = bucket.tensors[0].at + at
    payload[begin : begin + len(damage)] = np.frombuffer(damage, np.uint8)
    with pytest.raises(PayloadError, match="t0"):
        side.decode(payload, 1.0)


@pytest.mark.parametrize("size", [1, 4, 513, 2003, 300_001])
def test_encoding_by_a_kernel_of_buckets_that_announce_nothing(isa: str, size: int) -> None:
    """A bucket's own scale, unclipped: tiles end within bytes of five codes."""
    method = TernGrad(clip=None, min_numel=0)
    both = Pair(bucket_of(method, size))
    side, kernel = both.kernels, method.kernel(TorchOps(), both.bucket)
    gradients, zeros = gradients_of(both.bucket, 1), torch.zeros(size)
    left, given = torch.ones(size), [torch.from_numpy(each) for each in gradients]
    kernel.encode(zeros, left, given, side.payloads[0], side.codec._streams([both.bucket]))
    payload = side.payloads[0].clone()
    both.verbs.encode(gradients)
    np.testing.assert_array_equal(payload, both.verbs.payloads[0])
    np.testing.assert_array_equal(left, both.verbs.residuals[0].candidate)
