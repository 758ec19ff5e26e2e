"""What is done to local gradients in PyTorch before they are compressed; no ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.amp import GradScaler

from horovod_topk.core.codec.clipping import LocalClip, local_threshold
from horovod_topk.errors import ConfigError
from horovod_topk.torch import TopKEF
from horovod_topk.torch_training.preprocessing import TorchNorms, local_clip, scale_of, unscale


def test_a_scale_on_the_host_is_a_number() -> None:
    scaler = GradScaler("cpu", init_scale=512.0)
    scale = scale_of(scaler)
    scaler.scale(torch.ones(1))
    scaler.update(8.0)
    assert (scale, scale_of(scaler)) == (512.0, 8.0)
    assert scale_of(GradScaler("cpu", enabled=False)) == 1.0


@pytest.mark.parametrize("scale", [4.0, torch.tensor(4.0)], ids=["host", "device"])
def test_gradients_are_divided_in_place(scale: float | torch.Tensor) -> None:
    gradients = [torch.tensor([8.0, -2.0]), torch.tensor(1.0, dtype=torch.float64)]
    places = [g.data_ptr() for g in gradients]
    unscale(gradients, scale)
    assert [g.tolist() for g in gradients] == [[2.0, -0.5], 0.25]
    assert [g.data_ptr() for g in gradients] == places


def test_a_scale_of_one_writes_nothing() -> None:
    gradient = torch.ones(3)
    unscale([gradient], 1.0)
    assert gradient._version == 0


@pytest.mark.parametrize("scaler", [1024.0, "dynamic", object(), torch.amp.GradScaler])
def test_what_is_no_scaler_is_refused(scaler: object) -> None:
    with pytest.raises(ConfigError, match=r"is no gradient scaler\. Pass the torch\.amp\.Grad"):
        TopKEF(grad_scaler=scaler)


# Clipping


def norm(gradients: list[torch.Tensor]) -> float:
    return math.hypot(*(float(g.double().norm()) for g in gradients))


def buckets(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    """Three buckets of two gradients."""
    random = torch.Generator().manual_seed(3)
    return [
        [(scale * torch.randn(size, generator=random)).to(dtype) for size in (40, 7000)]
        for _ in range(3)
    ]


def flat(step: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [gradient for bucket in step for gradient in bucket]


def clipped(
    clip: LocalClip[torch.Tensor], step: list[list[torch.Tensor]], ranks: int = 4
) -> list[torch.Tensor]:
    clip.begin(ranks)
    for bucket in step:
        clip.clip(bucket)
    return flat(step)


def test_a_rank_has_its_share_of_the_norm() -> None:
    """Independent gradients of this norm have a sum, or a mean, of `clip_norm`."""
    assert local_threshold(3.0, "sum", 4) == 1.5
    assert local_threshold(3.0, "average", 4) == 6.0
    assert local_threshold(3.0, "average", 1) == local_threshold(3.0, "sum", 1) == 3.0


def test_gradients_within_the_limit_are_not_touched() -> None:
    step = buckets()
    clipped(local_clip(norm(flat(step)) / 2, "average"), step)
    assert all(g._version == 0 for bucket in step for g in bucket)


class Tensors(TorchNorms):
    """Norms by the operations for accelerators, run on the host."""

    def norm(self, gradients: Any, before: Any) -> Any:
        return super().norm(gradients, torch.as_tensor(before))


@pytest.fixture(params=[TorchNorms, Tensors], ids=["host", "accelerator"])
def clip(request: pytest.FixtureRequest) -> LocalClip[torch.Tensor]:
    """A clipper to 0.5, which is 0.25 for a rank of four."""
    made = local_clip(0.5, "sum")
    made._norms = request.param()
    return made


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        *((scale, torch.float32) for scale in (1.0, 100.0, 1e18, 1e25)),  # also if squares overflow
        *((50.0, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)),
    ],
)
def test_one_bucket_is_clipped_exactly(
    scale: float, dtype: torch.dtype, clip: LocalClip[torch.Tensor]
) -> None:
    bucket = flat(buckets(scale, dtype))
    direction, near = [g.double() / norm(bucket) for g in bucket], max(torch.finfo(dtype).eps, 1e-5)
    least = 1e-6 if dtype is torch.float16 else 1e-9
    for _ in range(2):  # every step starts anew
        clipped(clip, [bucket])
        assert norm(bucket) == pytest.approx(0.25, rel=near)
    for before, after in zip(direction, bucket, strict=True):
        assert torch.allclose(before, after.double() / 0.25, rtol=2 * near, atol=least)


def test_of_several_buckets_each_is_within_the_limit(clip: LocalClip[torch.Tensor]) -> None:
    step = buckets(100.0)
    whole, last = norm(flat(step)), norm(step[-1])
    clipped(clip, step)
    assert all(norm(bucket) <= 0.25 * (1 + 1e-5) for bucket in step)
    assert norm(step[-1]) == pytest.approx(0.25 * last / whole, rel=1e-5)
    assert norm(flat(step)) <= 0.25 * math.sqrt(3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(value: float, clip: LocalClip[torch.Tensor]) -> None:
    step = buckets(100.0)
    step[1][0][3] = value
    clipped(clip, step)
    assert not step[1][0].isfinite().all()
