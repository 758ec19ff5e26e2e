"""OneBitAdam by itself, in one process, and what OneBitLamb shares: phases and refused settings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from horovod_topk.errors import ConfigError, UnsupportedOperationError
from horovod_topk.torch import OneBitAdam, OneBitLamb, SignSGD

KINDS = pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])


def gradients(step: int) -> torch.Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(step))


def stepped(optimizer: torch.optim.Optimizer, p: torch.Tensor, steps: range) -> None:
    for step in steps:
        p.grad = gradients(step)
        optimizer.step()


def test_it_is_adam_with_decoupled_decay_until_its_variance_freezes() -> None:
    p = torch.nn.Parameter(torch.ones(40))
    q = copy.deepcopy(p)
    mine = OneBitAdam([p], freeze_after=5, lr=0.1, weight_decay=0.2)
    theirs = torch.optim.AdamW([q], lr=0.1, weight_decay=0.2)
    for step in range(5):
        stepped(mine, p, range(step, step + 1))
        stepped(theirs, q, range(step, step + 1))
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    frozen = mine.state[p]["exp_avg_sq"].clone()
    stepped(mine, p, range(5, 9))
    assert torch.equal(mine.state[p]["exp_avg_sq"], frozen)
    assert not torch.equal(mine.state[p]["exp_avg"], torch.zeros(40))


def test_a_frozen_step_follows_the_paper() -> None:
    p = torch.nn.Parameter(torch.ones(40, dtype=torch.float64))
    optimizer = OneBitAdam([p], freeze_after=1, lr=0.1, eps=0.0, bias_correction=False)
    optimizer_steps = [gradients(step).double() for step in range(3)]
    m, x = torch.zeros(40, dtype=torch.float64), torch.ones(40, dtype=torch.float64)
    v = 0.001 * optimizer_steps[0] ** 2
    for g in optimizer_steps:
        p.grad = g.clone()
        optimizer.step()
        m = 0.9 * m + 0.1 * g
        x = x - 0.1 * m / v.sqrt()
        torch.testing.assert_close(p.detach(), x, rtol=1e-12, atol=1e-12)


@KINDS
def test_what_is_exchanged_turns_from_gradients_into_momenta(kind: Any) -> None:
    """The step takes an exchanged momentum as it is; one that was skipped leaves no trace."""
    p = torch.nn.Parameter(torch.ones(40))
    q = copy.deepcopy(p)
    mine, alone = (kind([each], freeze_after=2, lr=0.1) for each in (p, q))
    for step in range(6):
        mine.begin_exchange(step, 1.0)
        p.grad = gradients(99)
        mine.before_exchange([p], [p.grad])  # and the step is skipped, as after an overflow
        p.grad = gradients(step)
        before = p.grad.clone()
        mine.before_exchange([p], [p.grad])
        assert torch.equal(p.grad, before) == (step < 2)
        mine.step()
        stepped(alone, q, range(step, step + 1))
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@KINDS
def test_an_element_without_a_variance_moves_no_more(kind: Any) -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([p], freeze_after=1, lr=0.1)
    p.grad = torch.tensor([1.0, 0.0])
    optimizer.step()
    p.grad = torch.tensor([1.0, 5.0])
    optimizer.step()
    assert p[1] == 1
    assert p[0] < 0.9


def test_all_parameters_freeze_with_the_same_step() -> None:
    """One that was absent from steps has the bias correction of the steps that it was in."""
    p, q = (torch.nn.Parameter(torch.ones(40)) for _ in range(2))
    mine = OneBitAdam([p, q], freeze_after=6, lr=0.1)
    theirs = torch.optim.Adam([copy.deepcopy(q)], lr=0.1)
    (other,) = theirs.param_groups[0]["params"]
    for step in range(9):
        p.grad = gradients(step)
        q.grad = other.grad = gradients(100 + step) if step in (0, 4, 7) else None
        mine.step()
        if step < 6:
            theirs.step()
            torch.testing.assert_close(q, other, rtol=1e-5, atol=1e-6)
    assert torch.equal(mine.state[q]["exp_avg_sq"], theirs.state[other]["exp_avg_sq"])
    assert (int(mine.state[q]["step"]), mine.state[q]["squares"]) == (3, 2)
    mean = mine.state[q]["exp_avg"] / (1 - 0.9**3)
    root = (mine.state[q]["exp_avg_sq"] / (1 - 0.999**2)).sqrt() + 1e-8
    torch.testing.assert_close(other - 0.1 * mean / root, q, rtol=1e-5, atol=1e-6)


@KINDS
def test_a_first_gradient_after_the_freeze(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    p, q = (torch.nn.Parameter(torch.ones(40)) for _ in range(2))
    optimizer = kind([p, q], freeze_after=2, lr=0.1)
    optimizer.exchange_settings(SignSGD().config, {p: "p", q: "q"})
    stepped(optimizer, p, range(4))
    (warning,) = caplog.records
    assert f"{kind.__name__}: q had no gradient in the first 2 steps" in warning.getMessage()
    q.grad = torch.zeros(40)
    optimizer.step()
    assert torch.equal(q, torch.ones(40))
    before, p.grad, q.grad = p.detach().clone(), gradients(5), gradients(6)
    with pytest.raises(ConfigError, match=r"tensor 'q': it has its first.*freeze_after=2.*Pass a"):
        optimizer.step()
    assert torch.equal(p, before)
    q.grad = None
    optimizer.step()
    assert not torch.equal(p, before)


@KINDS
def test_gradients_are_not_compressed_before_the_freeze(kind: Any) -> None:
    p = torch.nn.Parameter(torch.ones(40))
    optimizer = kind([p], freeze_after=5)
    with pytest.raises(ConfigError, match=r"ratio 0.1 compresses.* 5 .*Call set_ratio\(None\)"):
        optimizer.begin_exchange(4, 0.1)
    optimizer.begin_exchange(5, 0.1)


@KINDS
@pytest.mark.parametrize("is_older", [True, False])
def test_its_state_dict_goes_on_to_the_bit(kind: Any, is_older: bool) -> None:
    """Also that of an older version, which has not counted the gradients in a variance."""
    p = torch.nn.Parameter(torch.ones(40))
    optimizer = kind([p], freeze_after=3, lr=0.1)
    stepped(optimizer, p, range(5))
    saved = copy.deepcopy(optimizer.state_dict())
    if is_older:
        del saved["state"][0]["squares"]
    other = kind([q := copy.deepcopy(p)], freeze_after=9)
    other.load_state_dict(saved)
    copied = copy.deepcopy(optimizer)
    for each, own in ((optimizer, p), (other, q)):
        stepped(each, own, range(5, 8))
    assert torch.equal(p, q)
    assert copied.param_groups[0]["freeze_after"] == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"freeze_after": 0},
        {"freeze_after": None},
        {"freeze_after": 2.5},
        {"lr": -1.0},
        {"eps": float("nan")},
        {"weight_decay": -0.1},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
        {"bias_correction": 1},
    ],
    ids=str,
)
@KINDS
def test_what_is_out_of_range_is_refused(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        kind([torch.nn.Parameter(torch.ones(2))], **{"freeze_after": 10, **settings})


@KINDS
def test_groups_freeze_together_and_sparse_gradients_are_refused(kind: Any) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [p], "freeze_after": i + 1} for i, p in enumerate(parameters)]
    with pytest.raises(ConfigError, match="different freeze_after"):
        kind(groups)
    optimizer = kind(parameters, freeze_after=1)
    for refused in ({"freeze_after": 2}, {"eps": -1.0}):
        with pytest.raises(ConfigError):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], **refused})
        assert len(optimizer.param_groups) == 1
    parameters[0].grad = torch.sparse_coo_tensor([[0]], [1.0], (2,))
    with pytest.raises(UnsupportedOperationError, match=f"{kind.__name__} .*sparse_as_dense"):
        optimizer.step()
