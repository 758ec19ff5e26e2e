"""Settings can be copied and sent to other processes; what is owed stays where it is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda compression: pickle.loads(pickle.dumps(compression)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_has_the_settings_and_no_optimizer(
    framework: str, copied: Callable[[Any], Any]
) -> None:
    pytest.importorskip(framework)
    pytest.importorskip(f"horovod.{framework}")
    module = pytest.importorskip(f"horovod_topk.{framework}")
    made = module.TopKEF(0.02, values="int8", warmup=5, ratios={"head.*": "dense"}, name="x")
    again = copied(made)
    assert type(again) is type(made)
    assert again.config == made.config
    assert not again._living_states()


def test_a_deep_copy_has_the_same_scaler() -> None:
    """A copied one would never hear of a change of the scale."""
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("horovod_topk.ddp")
    scaler = torch.amp.GradScaler("cpu")
    copied = copy.deepcopy({"compression": module.TopKEF(grad_scaler=scaler)})
    assert copied["compression"].grad_scaler is scaler
    both = copy.deepcopy({"scaler": scaler, "compression": module.TopKEF(grad_scaler=scaler)})
    assert both["compression"].grad_scaler is both["scaler"]
