"""What is done to local gradients in PyTorch before they are compressed; no ranks."""

from __future__ import annotations

import pytest
import torch
from torch.amp import GradScaler

from horovod_topk.errors import ConfigError
from horovod_topk.torch import TopKEF
from horovod_topk.torch.scaling import ONE, LossScale, Scale


def test_a_scale_on_the_host_is_a_number() -> None:
    scaler = GradScaler("cpu", init_scale=512.0)
    scale = LossScale(scaler).now()
    assert scale == Scale(512.0)
    assert scale.number == 512.0
    scaler.scale(torch.ones(1))
    scaler.update(8.0)
    assert LossScale(scaler).now().number == 8.0
    assert scale.number == 512.0


@pytest.mark.parametrize("value", [4.0, torch.tensor(4.0)], ids=["host", "device"])
def test_gradients_are_divided_in_place(value: float | torch.Tensor) -> None:
    gradients = [torch.tensor([8.0, -2.0]), torch.tensor(1.0, dtype=torch.float64)]
    places = [g.data_ptr() for g in gradients]
    scale = Scale(value)
    scale.divide(gradients)
    assert [g.tolist() for g in gradients] == [[2.0, -0.5], 0.25]
    assert [g.data_ptr() for g in gradients] == places
    assert scale.number == 4.0


def test_a_scale_of_one_writes_nothing() -> None:
    gradient = torch.ones(3)
    ONE.divide([gradient])
    assert gradient._version == 0


def test_a_disabled_scaler_has_no_scale() -> None:
    assert LossScale(GradScaler("cpu", enabled=False)).now() is ONE


@pytest.mark.parametrize("scaler", [1024.0, "dynamic", object()])
def test_what_is_no_scaler_is_refused(scaler: object) -> None:
    with pytest.raises(ConfigError, match=r"is no gradient scaler\. Pass the torch\.amp\.Grad"):
        TopKEF(grad_scaler=scaler)
