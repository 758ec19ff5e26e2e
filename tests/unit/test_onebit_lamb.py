"""OneBitLamb by itself, in one process: LAMB, the frozen trust ratio, and refused settings.

test_onebit_adam.py tests what it shares with OneBitAdam.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from horovod_topk.errors import ConfigError
from horovod_topk.torch import OneBitAdam, OneBitLamb

Array = NDArray[np.float64]
FREEZE = 6
SIZES = {"large": 60, "small": 7, "zero": 5}
FACTORS = {"large": (1.0, 0.8), "small": (0.01, 1.0), "zero": (0.1, 1.3)}  # gradients and growth


class Published:
    """LAMB, then the compression stage of 1-bit LAMB, of one layer, with the names of the paper."""

    def __init__(self, x: Array, corrects: bool, decay: float) -> None:
        self.x, self.corrects, self.weight_decay = x.copy(), corrects, decay
        self.m, self.v, self.c_avg, self.averaged = np.zeros_like(x), np.zeros_like(x), 0.0, 0
        self.t, self.r = 0, 1.0

    def warm_up(self, g: Array) -> None:
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.99 * self.v + 0.01 * g * g
        u = self.direction() + self.weight_decay * self.x
        c = 1.0
        if self.x.any() and u.any():
            c = min(max(np.linalg.norm(self.x) / np.linalg.norm(u), 0.05), 2.0)
            self.c_avg, self.averaged = 0.8 * self.c_avg + 0.2 * c, self.averaged + 1
        self.x -= 0.1 * c * u
        self.fresh, self.v_bias = self.v / self.v_correction(self.t), self.v_correction(self.t)

    def compressed(self, m: Array) -> None:
        """m: the momentum that all ranks have after its exchange."""
        self.t += 1
        g = (m - 0.9 * self.m) / 0.1
        self.m, self.fresh = m, 0.99 * self.fresh + 0.01 * g * g
        alone = self.direction()
        u = alone + self.weight_decay * self.x
        frozen = np.sqrt(self.v / self.v_bias) + 1e-6
        r = np.max(frozen / (np.sqrt(self.fresh) + 1e-6))
        share = min(1.0, np.linalg.norm(alone) / np.linalg.norm(u))
        r = r * share + 1 - share
        r = min(max(r, 0.9 * self.r), 1.1 * self.r)
        self.r = min(max(r, 0.6), 1.05)
        c_avg = self.c_avg / (1 - 0.8**self.averaged) if self.corrects else self.c_avg
        self.x -= 0.1 * self.r * c_avg * u

    def direction(self) -> Array:
        bias = self.v_correction(self.t) if self.t <= FREEZE else self.v_bias
        m = self.m / (1 - 0.9**self.t) if self.corrects else self.m
        return m / (np.sqrt(self.v / bias) + 1e-6)

    def v_correction(self, t: int) -> float:
        return 1 - 0.99**t if self.corrects else 1.0


def lamb(parameters: Any, **settings: Any) -> OneBitLamb:
    limits = {"trust_limits": (0.05, 2.0), "trust_beta": 0.8, "factor_limits": (0.6, 1.05)}
    return OneBitLamb(
        parameters,
        **{"freeze_after": FREEZE, "lr": 0.1, "betas": (0.9, 0.99), **limits, **settings},
    )


def model() -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(1)
    made = {name: torch.randn(size, dtype=torch.float64) for name, size in SIZES.items()}
    made["zero"].zero_()
    return {name: torch.nn.Parameter(each) for name, each in made.items()}


def gradient(name: str, step: int) -> Array:
    generator = np.random.default_rng([step, *name.encode()])
    factor, growth = FACTORS[name]
    return factor * growth**step * generator.standard_normal(SIZES[name])


def signs(values: torch.Tensor) -> torch.Tensor:
    return values.sign() * values.abs().mean()


def take(optimizer: OneBitLamb, parameters: dict[str, Any], steps: range) -> None:
    """Steps whose momenta are exchanged as signs, without error feedback."""
    for step in steps:
        for name, p in parameters.items():
            p.grad = torch.from_numpy(gradient(name, step)).to(p)
        optimizer.begin_exchange(step, 1.0)
        grads = [p.grad for p in parameters.values()]
        optimizer.before_exchange(list(parameters.values()), grads)
        if step >= FREEZE:
            for each in grads:
                each.copy_(signs(each))
        optimizer.step()


@pytest.mark.parametrize("decay", [0.0, 0.02])
@pytest.mark.parametrize("corrects", [True, False])
def test_its_steps_are_the_published_ones(corrects: bool, decay: float) -> None:
    """LAMB until the variance is frozen, and from then on the paper's factor of the trust ratio."""
    parameters = model()
    optimizer = lamb(parameters.values(), bias_correction=corrects, weight_decay=decay)
    published = {
        name: Published(p.detach().numpy(), corrects, decay) for name, p in parameters.items()
    }
    factors = []
    for step in range(25):
        take(optimizer, parameters, range(step, step + 1))
        for name, layer in published.items():
            g = gradient(name, step)
            if step < FREEZE:
                layer.warm_up(g)
            else:
                layer.compressed(signs(torch.from_numpy(0.9 * layer.m + 0.1 * g)).numpy())
            mine = parameters[name].detach().numpy()
            np.testing.assert_allclose(mine, layer.x, rtol=1e-9, atol=1e-12)
            factors.append(layer.r)
    assert (min(factors), max(factors)) == (0.6, 1.05)  # both limits were reached


def test_momenta_are_exchanged_at_one_size() -> None:
    """In the paper, all layers' momenta are compressed together, with the sizes of the freeze."""
    parameters = model()
    optimizer = lamb(parameters.values())
    take(optimizer, parameters, range(FREEZE))
    optimizer.begin_exchange(FREEZE, 1.0)
    zeros = [torch.zeros_like(p) for p in parameters.values()]
    optimizer.before_exchange(list(parameters.values()), zeros)
    sizes = [each.square().mean().sqrt().item() for each in zeros]
    assert sizes == pytest.approx(sizes[:1] * 3)
    momenta = [optimizer.state[p]["exp_avg"] for p in parameters.values()]
    assert sizes[0] == pytest.approx(0.9 * np.mean([m.square().mean().sqrt() for m in momenta]))


@pytest.mark.parametrize("saved_at", [3, FREEZE, 12])
def test_a_run_goes_on_from_its_state_dict_to_the_bit(saved_at: int) -> None:
    """Also into an optimizer that is in the other phase."""
    parameters = {name: torch.nn.Parameter(p.float()) for name, p in model().items()}
    optimizer = lamb(parameters.values())
    take(optimizer, parameters, range(saved_at))
    again = copy.deepcopy(parameters)
    other = lamb(again.values(), freeze_after=99)
    take(other, copy.deepcopy(parameters), range(2))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take(optimizer, parameters, range(saved_at, 20))
    take(other, again, range(saved_at, 20))
    for name, p in parameters.items():
        assert torch.equal(p, again[name])
    assert str(optimizer.state_dict()) == str(other.state_dict())


@pytest.mark.parametrize("saved_at", [3, 12])
def test_it_goes_on_from_the_state_of_a_onebit_adam(saved_at: int) -> None:
    """Its phase and moments stay; without trust ratios, the first one stays frozen."""
    parameters = model()
    adam = OneBitAdam(parameters.values(), freeze_after=FREEZE, betas=(0.9, 0.99))
    for step in range(saved_at):
        for name, p in parameters.items():
            p.grad = torch.from_numpy(gradient(name, step))
        adam.step()
    optimizer = lamb(parameters.values())
    optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
    before = adam.state[parameters["large"]]["exp_avg_sq"].clone()
    take(optimizer, parameters, range(saved_at, 20))
    state = optimizer.state[parameters["large"]]
    assert torch.equal(state["exp_avg_sq"], before) == (saved_at > FREEZE)
    assert state["trusts"] == max(1, FREEZE - saved_at)
    assert 0.6 <= state["factor"] <= 1.05


def test_the_trust_ratio_is_1_where_a_norm_is_0() -> None:
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = OneBitLamb([p], freeze_after=2, lr=0.5)
    p.grad = torch.ones(4)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((4,), -0.5), rtol=1e-5, atol=0)
    q = torch.nn.Parameter(torch.ones(4))
    optimizer = OneBitLamb([q], freeze_after=2)
    for _ in range(4):
        q.grad = torch.zeros(4)
        optimizer.step()
    assert torch.equal(q, torch.ones(4))


@pytest.mark.parametrize(
    "settings",
    [
        {"trust_limits": (-0.1, 10.0)},
        {"trust_limits": 10.0},
        {"trust_limits": (0.1, float("inf"))},
        {"trust_beta": 1.0},
        {"trust_beta": True},
        {"factor_limits": (0.5, 0.9)},
        {"factor_limits": (0.5, "4")},
        {"factor_limits": (0.5, 2.0, 4.0)},
        {"factor_threshold": float("nan")},
        {"factor_threshold": -0.1},
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused(settings: dict[str, Any]) -> None:
    optimizer = OneBitLamb([torch.nn.Parameter(torch.ones(2))], freeze_after=1)
    (setting,) = settings
    message = rf"{setting}=.* is not in \[.*Pass {setting}="
    with pytest.raises(ConfigError, match=message):
        OneBitLamb([torch.nn.Parameter(torch.ones(2))], 10, **settings)
    with pytest.raises(ConfigError, match=message):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], **settings})
    assert len(optimizer.param_groups) == 1
