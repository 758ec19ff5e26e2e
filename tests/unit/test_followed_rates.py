"""Which learning rates residuals follow in PyTorch; no ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from horovod_topk.checkpoint.parts import Job, common_in, fitting, share_out
from horovod_topk.core.state.learning_rates import Rates
from horovod_topk.errors import ConfigError
from horovod_topk.methods.topk import TopK
from horovod_topk.torch import TopKEF
from horovod_topk.torch_training.optimizer_settings import followed

FOLLOWING = TopK(follow_lr=True)


def optimizer_of(**groups: Any) -> Any:
    """SGD with a parameter group for each rate, and the names that Horovod leaves behind."""
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in groups}
    optimizer: Any = torch.optim.SGD(
        [{"params": [p], "lr": groups[name]} for name, p in parameters.items()]
    )
    optimizer._parameter_names = {p: name for name, p in parameters.items()}
    return optimizer


def rates_of(optimizer: Any) -> Rates:
    rates = followed(optimizer, FOLLOWING, optimizer._parameter_names)
    assert rates is not None
    return rates


def test_it_is_off_by_default() -> None:
    optimizer = optimizer_of(a=0.1)
    names = optimizer._parameter_names
    assert followed(optimizer, TopKEF().config, names) is None
    assert followed(optimizer, TopKEF(follow_lr=True).config, names) is not None


def test_each_parameter_has_the_rate_of_its_group() -> None:
    optimizer = optimizer_of(a=0.1, b=torch.tensor(0.125), c=0)
    rates = rates_of(optimizer)
    assert rates.turn(0) == {}
    assert rates.units == {"a": 0.1, "b": 0.125}
    optimizer.param_groups[1]["lr"].fill_(0.5)
    optimizer.param_groups[2]["lr"] = 1.0
    assert rates.turn(1) == {"b": 0.25}
    assert rates.units == {"a": 0.1, "b": 0.5, "c": 1.0}


def test_a_scheduler_is_heard_of() -> None:
    optimizer = optimizer_of(a=0.5, b=0.25)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=2.0)
    rates = rates_of(optimizer)
    rates.turn(0)
    for step in range(1, 4):
        optimizer.step()
        scheduler.step()
        assert rates.turn(step) == {"a": 0.5, "b": 0.5}


def test_units_rise_at_once_and_fall_by_a_twentieth_at_most() -> None:
    optimizer = optimizer_of(a=0.0)
    rates, factor, unit = rates_of(optimizer), 1.0, 0.0
    schedule = (0.25, 1.0, 0.97, 0.5, *[1e-3] * 4, 0.0, 0.9, 1e-6, 1.0, 2.0)
    for step, rate in enumerate(schedule):
        optimizer.param_groups[0]["lr"] = rate
        factor *= rates.turn(step).get("a", 1.0)
        unit = max(rate, 0.95 * unit) if rate else unit
        assert rates.units["a"] == pytest.approx(unit)
        assert factor == pytest.approx(0.25 / unit)
        assert rates.decay("a") == pytest.approx(unit / rates.largest["a"])
    assert rates.largest == {"a": 2.0}


def test_what_is_no_rate_leaves_units_as_they_are() -> None:
    optimizer = optimizer_of(a=0.0)
    rates = rates_of(optimizer)
    for known, tried in (({}, (0.0, 1e-13)), ({"a": 0.5}, (0.5,))):
        for rate in (*tried, -1.0, math.nan, math.inf):
            optimizer.param_groups[0]["lr"] = rate
            assert rates.turn(0) == {}
            assert rates.saved() == {"rates": known, "largest_rates": known}
            assert rates.decay("a") == 1.0


def test_parameters_that_horovod_does_not_know_are_left_out() -> None:
    optimizer = optimizer_of(a=0.5, b=0.25)
    optimizer._parameter_names = dict(list(optimizer._parameter_names.items())[:1])
    rates = rates_of(optimizer)
    rates.turn(0)
    assert rates.units == {"a": 0.5}


def test_optimizers_without_a_rate_are_refused() -> None:
    optimizer = optimizer_of(a=0.5)
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(ConfigError, match=r"parameter group 0 of SGD has no lr.*Leave follow_lr="):
        rates_of(optimizer)


@pytest.mark.parametrize("follow_lr", [1, "yes", None, 0.1])
def test_it_is_a_bool(follow_lr: Any) -> None:
    with pytest.raises(ConfigError, match="neither True nor False"):
        TopKEF(follow_lr=follow_lr)


def state_of(**facts: Any) -> dict[str, Any]:
    return {"shapes": {"w": [2]}, "residuals": {"w": torch.ones(2)}, **facts}


def test_what_another_number_of_ranks_saved_keeps_its_rates() -> None:
    saved = state_of(rates={"w": 0.1})
    assert common_in(saved, state_of(rates={})) == {"rates": {"w": 0.1}}
    assert common_in(saved, state_of()) == {}
    assert common_in(state_of(), state_of(rates={"w": 0.2})) == {}
    assert fitting(saved, state_of(rates={"w": 0.2}))["rates"] == {"w": 0.1}


def test_other_ranks_share_what_is_owed_at_its_rates() -> None:
    facts = {"rates": {"w": 0.1}, "reduction": "average", "tensors": {"w": [2]}}
    shards = [(Path(str(rank)), state_of(**facts)) for rank in range(4)]
    own = state_of(rates={"w": 0.7})
    mine = share_out(shards, 4, own, Job(2, "average", {"w": [2]}), "torch")
    assert mine["rates"] == {"w": 0.1}
    assert mine["residuals"]["w"].tolist() == [1.0, 1.0]
