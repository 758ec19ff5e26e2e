"""Settings, learning rates and hooks that are read from PyTorch's optimizers."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from horovod_topk.checkpoint.parts import Job, common_in, fitting, share_out
from horovod_topk.config import AUTO
from horovod_topk.core.run.optimizers import advise, kind_of
from horovod_topk.core.state.learning_rates import Rates
from horovod_topk.errors import ConfigError
from horovod_topk.methods.dense import Dense
from horovod_topk.methods.onebit import OneBit
from horovod_topk.methods.randomk import RandomK
from horovod_topk.methods.topk import TopK
from horovod_topk.torch import TopKEF
from horovod_topk.torch_training import optimizer_settings as settings
from horovod_topk.torch_training import updates
from horovod_topk.torch_training.optimizer_settings import (
    betas_of,
    check_has_hooks,
    momentum_of,
    number_of,
    optimizer_rates,
)
from horovod_topk.updates import tracker

NUMBERS: list[Any] = [
    *(0.5, np.float64(0.5), np.float32(0.5), np.array(0.5), np.array([0.5])),
    *(torch.tensor(0.5), torch.tensor([[0.5]]), torch.tensor(0.5, dtype=torch.bfloat16)),
]
NO_NUMBERS: list[Any] = [
    *(None, "0.5", [0.5], (0.5,), {}, lambda: 0.5, 0.5j, np.array([0.5, 0.5]), np.array([])),
    *(
        torch.tensor([0.5, 0.5]),
        torch.tensor([]),
        torch.tensor(0.5j),
        torch.empty(1, device="meta"),
    ),
]


def named(value: Any) -> str:
    """A name that is equal in all of pytest's processes."""
    return getattr(value, "__name__", repr(value))


@pytest.mark.parametrize("value", NUMBERS, ids=named)
def test_numbers(value: Any) -> None:
    assert number_of(value) == 0.5
    assert momentum_of({"momentum": value}) == momentum_of({"betas": (value, 0.9)}) == 0.5
    assert momentum_of({"betas": value}) == 0.5


@pytest.mark.parametrize("value", NO_NUMBERS, ids=named)
def test_what_is_no_number(value: Any) -> None:
    assert number_of(value) is None
    assert momentum_of({"momentum": value}) == (0.0 if value is None else None)
    assert betas_of({"betas": (0.9, value)}) == [0.9, None]


class Own(torch.optim.Optimizer):
    """Has the settings that it is given."""

    def __init__(self, params: Any = None, **own: Any) -> None:
        super().__init__(params or [nn.Parameter(torch.zeros(2))], own)

    def step(self, closure: Any = None) -> None: ...


@pytest.mark.parametrize("value", [*NUMBERS, *NO_NUMBERS], ids=named)
@pytest.mark.parametrize("setting", ["lr", "momentum", "betas", "weight_decay"])
def test_an_unknown_optimizer_may_have_any_settings(setting: str, value: Any) -> None:
    """They are fitted, read in each step, and read where nothing is exchanged."""
    optimizer = Own(**{setting: value})
    deferred = {"momentum": AUTO, "follow_lr": AUTO}
    config, rule, (warning,) = settings.fit_settings(optimizer, TopK(), deferred)
    assert (config.momentum, rule) == (0.0, tracker.OWN)
    assert f"does not know how {__name__}.Own uses gradients" in warning
    settings.give_back(optimizer)
    settings.hand_over(optimizer, 0.0, nesterov=False)
    update_rule = setting == "lr" and any(value is each for each in NUMBERS)
    assert (settings.why_rate_unknown(optimizer) == "") == update_rule
    names = {optimizer.param_groups[0]["params"][0]: "w"}
    assert settings.rates_of(optimizer, names) == ({"w": 0.5} if update_rule else {})


@pytest.mark.parametrize("betas", [(), 0.9, (0.9,), (0.98, 0.92, 0.99), (None, 0.9), None])
def test_a_subclass_may_have_any_betas(betas: Any) -> None:
    """As Adan's three."""

    class Adan(torch.optim.Adam):
        def step(self, closure: Any = None) -> None: ...

    optimizer = Adan([nn.Parameter(torch.zeros(2))])
    optimizer.param_groups[0]["betas"] = betas
    found = settings.fit_settings(optimizer, TopK(), {"momentum": AUTO})
    assert found[1:] == (tracker.OWN, ())


def test_a_setting_that_may_be_a_momentum_is_not_applied_twice() -> None:
    for value in (0.5, [0.5], lambda: 0.5):
        with pytest.raises(ConfigError, match=r"momentum=0.9 was given.* would be applied twice"):
            settings.check_not_twice(Own(momentum=value), 0.9)
    settings.check_not_twice(Own(momentum=None), 0.9)


def test_a_rate_that_is_no_number_is_left_out_or_refused() -> None:
    with pytest.raises(ConfigError, match=r"parameter group 0 of .*Own has no lr.*Leave follow_lr"):
        optimizer_rates(Own(), TopK(follow_lr=True), {})
    optimizer = Own([{"params": [nn.Parameter(torch.zeros(2))], "lr": 0.5}])
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer.add_param_group({"params": parameters[:1], "lr": [0.5]})
    names = {p: f"p{i}" for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    with pytest.raises(ConfigError, match=r"group 1 of .*Own has lr=\[0.5\].*Leave follow_lr= out"):
        optimizer_rates(optimizer, TopK(follow_lr=True), names)
    optimizer.param_groups[1]["lr"] = 0.25
    found = optimizer_rates(optimizer, TopK(follow_lr=True), names)
    assert found is not None
    assert found.rescalings(0) == {}
    assert found.shared() == (0.5, 0.25)
    optimizer.param_groups[1]["lr"], optimizer.param_groups[0]["lr"] = None, 1.0
    assert found.rescalings(1) == {"p0": 0.5}
    assert (found.units, found.shared()) == ({"p0": 1.0, "p1": 0.25}, (1.0,))
    optimizer.param_groups[1]["lr"] = 0.5
    assert found.rescalings(2) == {"p1": 0.5}


@pytest.mark.parametrize(("setting", "value"), [("lr", [0.1]), ("betas", (0.9,)), ("betas", None)])
def test_a_setting_of_adam_that_becomes_no_number(setting: str, value: Any) -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([p])
    optimizer.param_groups[0][setting] = value
    arrived = torch.zeros(2, dtype=torch.uint8), torch.ones(2), 0.0
    with pytest.raises(ConfigError, match=rf"AdamW has {setting}=.*Set {setting} to a number"):
        updates._adam_of(optimizer, optimizer.param_groups[0], [p], [arrived])


# Wrappers.


class Lookahead(torch.optim.Optimizer):
    """As in timm: it does not call `Optimizer.__init__`."""

    def __init__(self, base_optimizer: Any) -> None:
        self.base_optimizer, self.defaults = base_optimizer, base_optimizer.defaults
        self.param_groups, self.state = base_optimizer.param_groups, base_optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step(closure)


class ScheduleFree:
    """As Schedule-Free's wrapper: no optimizer by its class."""

    def __init__(self, base: Any) -> None:
        self.base = base

    @property
    def param_groups(self) -> Any:
        return self.base.param_groups

    def step(self, closure: Any = None) -> None: ...


class OfLightning(torch.optim.Optimizer):
    """As Lightning's: it shares the dictionaries of hooks, and has a step of its own."""

    def __init__(self, optimizer: Any) -> None:
        vars(self).update(vars(optimizer))
        self._optimizer = optimizer

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def step(self, closure: Any = None) -> None:
        self._optimizer.step()


class WithoutInit(torch.optim.Optimizer):
    def __init__(self) -> None: ...
    def step(self, closure: Any = None) -> None: ...


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)


def post_local_sgd() -> Any:
    from torch.distributed.optim import PostLocalSGDOptimizer

    return PostLocalSGDOptimizer(sgd(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Lookahead(sgd()), r"Lookahead wraps an opt.*inside it, optimizer.base_optimizer,"),
        (lambda: ScheduleFree(Lookahead(sgd())), r"inside it, optimizer.base.base_optimizer, and"),
        (lambda: OfLightning(sgd()), r"inside it, optimizer.optimizer, and go on calling the wrap"),
        (post_local_sgd, r"PostLocalSGDOptimizer wraps .*inside it, optimizer.optim,"),
        (WithoutInit, r"has not called Optimizer.__init__.*super\(\).__init__\(params, defaults\)"),
        (lambda: None, r"the optimizer is None, which is no opt.*Pass a torch.optim.Optimizer of"),
        (lambda: [nn.Parameter(torch.zeros(2))], r"which is no optimizer\. Pass a torch.optim"),
        (lambda: torch.optim.SGD, r"the optimizer is <class .*which is no optimizer"),
        (lambda: nn.Linear(2, 2), r"which is no optimizer\. Pass the model first, and then the op"),
        (lambda: [sgd()], r"which is no optimizer\. Pass a torch.optim.Optimizer of all"),
    ],
)
def test_optimizers_without_hooks(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_has_hooks(make())


def test_optimizers_with_hooks(caplog: pytest.LogCaptureFixture) -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

    caplog.set_level(logging.DEBUG)
    for optimizer in (sgd(), Around(sgd()), Own()):
        check_has_hooks(optimizer)
        assert not optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
    assert not caplog.records


def test_an_optimizer_of_another_package_is_named_with_it() -> None:
    class AdamW(torch.optim.Optimizer): ...

    AdamW.__module__ = "bitsandbytes.optim.adamw"
    assert kind_of(AdamW([nn.Parameter(torch.zeros(2))], {})) == "bitsandbytes.optim.adamw.AdamW"
    assert kind_of(torch.optim.AdamW([nn.Parameter(torch.zeros(2))])) == "AdamW"


@pytest.mark.parametrize(
    ("make", "own", "zero"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, 0.0),
        (torch.optim.Adam, {"betas": (0.9, 0.99)}, (0.0, 0.99)),
    ],
)
def test_a_momentum_that_an_older_version_has_set_to_zero_comes_back(
    make: Any, own: dict[str, Any], zero: Any
) -> None:
    """It marked the parameter groups, and a checkpoint has kept them."""
    optimizer = make([nn.Parameter(torch.zeros(2))], lr=0.1)
    (setting,) = own
    (group,) = optimizer.param_groups
    group.update({setting: zero, settings.TAKEN: (0.9, 0.0)})
    _, rule, _ = settings.fit_momentum(optimizer, TopK(), {"momentum": AUTO})
    assert group[setting] == own[setting] and settings.TAKEN not in group
    assert rule is not None


@pytest.mark.parametrize(
    ("config", "warnings"), [(Dense(values="bfloat16"), 0), (OneBit(), 1), (TopK(), 1)]
)
def test_16_bits_in_every_step_are_not_late(config: Any, warnings: int) -> None:
    assert len(advise("AdamW", config, "", normalises=True)) == warnings


def test_sums_of_all_ranks_leave_the_steps_of_sgd_alone() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    config, rule, (warning,) = settings.fit_settings(optimizer, RandomK(), {"momentum": AUTO})
    assert (config.momentum, rule) == (0.0, None)
    assert "sums of all ranks have no elements that arrive rarely" in warning


# Learning rates.

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
    rates = optimizer_rates(optimizer, FOLLOWING, optimizer._parameter_names)
    assert rates is not None
    return rates


def test_residuals_follow_rates_if_asked_to() -> None:
    assert optimizer_rates(optimizer_of(a=0.1), TopKEF().config, {}) is None
    with pytest.raises(ConfigError, match="neither True nor False"):
        TopKEF(follow_lr=1)


def test_each_parameter_has_the_rate_of_its_group() -> None:
    optimizer = optimizer_of(a=0.1, b=torch.tensor(0.125), c=0, unknown=0.5)
    del optimizer._parameter_names[optimizer.param_groups[3]["params"][0]]
    rates = rates_of(optimizer)
    assert rates.rescalings(0) == {}
    assert rates.units == {"a": 0.1, "b": 0.125}
    optimizer.param_groups[1]["lr"].fill_(0.5)
    optimizer.param_groups[2]["lr"] = 1.0
    assert rates.rescalings(1) == {"b": 0.25}
    assert rates.units == {"a": 0.1, "b": 0.5, "c": 1.0}


def test_units_rise_at_once_and_fall_by_a_twentieth_at_most() -> None:
    optimizer = optimizer_of(a=0.0)
    rates, factor, unit = rates_of(optimizer), 1.0, 0.0
    schedule = (0.25, 1.0, 0.97, 0.5, *[1e-3] * 4, 0.0, 0.9, 1e-6, 1.0, 2.0)
    for step, rate in enumerate(schedule):
        optimizer.param_groups[0]["lr"] = rate
        factor *= rates.rescalings(step).get("a", 1.0)
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
            assert rates.rescalings(0) == {}
            assert rates.saved() == {"rates": known, "largest_rates": known}
            assert rates.decay("a") == 1.0


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
