"""Steps that optimizers make themselves on compressed gradients, corrected by their family."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from horovod_topk.cli.compare.simulated import exchanges
from horovod_topk.config import AUTO, fields_of
from horovod_topk.core.run.substitute import parse
from horovod_topk.methods.topk import TopK
from horovod_topk.torch_training import optimizer_settings as settings
from horovod_topk.torch_training.own_steps import OwnStep, OwnSteps, compare_sign
from horovod_topk.updates import formulas, tracker
from horovod_topk.updates.formulas import NUMBERS
from horovod_topk.updates.tracker import AdamFollower

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "RMSprop": partial(optim.RMSprop, lr=0.01),
    "RMSprop with momentum": partial(optim.RMSprop, lr=0.01, momentum=0.9),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01, weight_decay=0.1),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "Adagrad": partial(optim.Adagrad, lr=0.01),
    "Adadelta": partial(optim.Adadelta, lr=1.0),
    "Adafactor": partial(optim.Adafactor, lr=0.01),
    "Adam without momentum": partial(optim.Adam, lr=0.01, betas=(0.0, 0.99)),
    "Muon": partial(optim.Muon, lr=0.01),
}


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(40, 30, bias=False), nn.Linear(30, 40, bias=False))
    return made.to(dtype)


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()]


class Trained:
    """A model that one simulated rank trains with compressed gradients."""

    def __init__(
        self, make: Callable[..., optim.Optimizer], call: str, dtype: torch.dtype = torch.float32
    ) -> None:
        self.model = model_of(dtype)
        self.optimizer = make(self.model.parameters())
        self.exchange = exchanges.compressed(self.model, self.optimizer, 1, parse(call))

    def step(self, number: int) -> None:
        mean = self.exchange.mean([gradients(self.model, number)])
        for p, gradient in zip(self.model.parameters(), mean, strict=True):
            p.grad = gradient
        self.optimizer.step()

    @property
    def followers(self) -> list[AdamFollower[Tensor]]:
        step = self.exchange.compressors[0].step
        return [each for each, _ in step.followers() if isinstance(each, AdamFollower)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_where_every_element_always_arrives_it_is_the_optimizers_own_step(name: str) -> None:
    """To the bit."""
    dense = model_of()
    own = OPTIMIZERS[name](dense.parameters())
    trained = Trained(OPTIMIZERS[name], "TopKEF(min_numel=5000, values='float32')")
    assert trained.exchange.compressors[0].plan.update_rule == tracker.OWN
    for number in range(12):
        for p, gradient in zip(dense.parameters(), gradients(dense, number), strict=True):
            p.grad = gradient
        own.step()
        if number == 0:  # followers are known once there was an exchange
            trained.step(number)
            with torch.no_grad():
                for p, other in zip(trained.model.parameters(), dense.parameters(), strict=True):
                    p.copy_(other)
            trained.optimizer.load_state_dict(copy.deepcopy(own.state_dict()))
            for follower in trained.followers:
                for codes in follower.codes:
                    codes.fill_(255)
            continue
        trained.step(number)
        for p, other in zip(trained.model.parameters(), dense.parameters(), strict=True):
            assert p.equal(other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rare_elements_are_corrected(name: str) -> None:
    """Arrivals and mean squares are what the formulas say, from the exchanged gradients."""
    trained = Trained(OPTIMIZERS[name], "TopKEF(ratio=0.02, warmup=None)")
    squares = [torch.zeros(p.numel()) for p in trained.model.parameters()]
    for number in range(8):
        before = [p.detach().clone() for p in trained.model.parameters()]
        trained.step(number)
        for each, p in zip(squares, trained.model.parameters(), strict=True):
            assert p.grad is not None
            each.copy_(formulas.own_square(each, p.grad.reshape(-1)))
        for was, p in zip(before, trained.model.parameters(), strict=True):
            far = max(trained.optimizer.param_groups[0]["lr"], was.square().mean().sqrt() / 5)
            assert (p - was).abs().max() <= far * 1.001
    (follower,) = trained.followers
    found = dict(zip(follower.names, follower.squares_kept, strict=True))
    for (n, _), each in zip(trained.model.named_parameters(), squares, strict=True):
        torch.testing.assert_close(found[n], each)
        codes = dict(zip(follower.names, follower.codes, strict=True))[n]
        assert 0.1 < codes.ne(0).float().mean() < 0.2  # 8 steps of 2%


def test_a_step_that_raises_leaves_the_mean_of_gradients_as_it_was() -> None:
    trained = Trained(OPTIMIZERS["RAdam"], "TopKEF(ratio=0.02, warmup=None)")
    trained.step(0)
    updates = OwnSteps(
        {p: name for name, p in trained.model.named_parameters()},
        trained.exchange.compressors[0],
        formulas.MEAN,
    )
    before = [trained.optimizer.state[p]["exp_avg"].clone() for p in trained.model.parameters()]
    updates.begin(trained.optimizer)
    now = [trained.optimizer.state[p]["exp_avg"] for p in trained.model.parameters()]
    assert not any(map(torch.equal, before, now))
    updates.undo()
    assert all(map(torch.equal, before, now))


def test_a_buffer_of_updates_is_no_mean_of_gradients() -> None:
    """The momentum buffers of LARS and RMSprop hold changes of weights, not gradients."""
    trained = Trained(OPTIMIZERS["RMSprop with momentum"], "TopKEF(ratio=0.02, warmup=None)")
    trained.step(0)
    names = {p: name for name, p in trained.model.named_parameters()}
    updates = OwnSteps(names, trained.exchange.compressors[0], formulas.TRUST)
    kept = [trained.optimizer.state[p]["momentum_buffer"] for p in trained.model.parameters()]
    before = [each.clone() for each in kept]
    updates.begin(trained.optimizer)
    assert all(map(torch.equal, before, kept))


@pytest.mark.parametrize("key", ["exp_avg", "momentum_buffer"])
def test_a_sign_is_compared_where_its_gradient_has_not_arrived(key: str) -> None:
    gradient, mean = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.01, -0.2, 0.01])
    codes, square = torch.full((3,), 100, dtype=torch.uint8), torch.ones(3)
    assert bool((formulas.share(codes.float()) < 1.0).all())
    step = OwnStep(mean, mean, gradient, codes, codes, square, torch.ones(2), 0.1)
    compare_sign(step, {key: mean}, {"momentum": 0.9})
    assert isinstance(step.sign, torch.Tensor)
    expected = [0.0716, 0.8207, 1.0]  # 0.09 / sqrt(0.09^2 + pi / 2), and of 1.8
    assert step.sign.tolist() == pytest.approx(expected, abs=1e-4)


def test_formulas() -> None:
    share = (1 / 16) ** 0.25
    assert formulas.own_mean(8.0, 4.0, share, 0.5) == pytest.approx(8 / 4 + 3 / 4 * 0.5 * 4)
    assert formulas.own_mean(8.0, 4.0, 1.0, 0.5) == 8.0
    change = partial(formulas.own_change, 3.0, 0.5, share, verbs=NUMBERS)
    assert change(of=formulas.MATRIX) == 3.0
    assert change(of=formulas.SQUARES) == 1.5
    assert change(of=formulas.LARGEST) == pytest.approx(1.5 * 4)
    rare = formulas.own_change(3.0, 1.0, 0.0, formulas.LARGEST, NUMBERS)
    assert rare == pytest.approx(30.0)
    limited = [formulas.own_limited(d, 1.0, 0.5, NUMBERS) for d in (-3.0, -0.5, 3.0)]
    assert limited == [-1.0, -0.5, 1.0]
    assert formulas.own_limited(3.0, 1.0, 1.0, NUMBERS) == 3.0


def test_a_sign_counts_for_as_much_as_signs_that_arrive_leave() -> None:
    """c is near the mean sign of random gradients, and 1 for an element that has arrived."""
    generator = torch.Generator().manual_seed(0)
    for mean in (0.001, 0.01, 0.1, 1.0):
        gradients = mean + torch.randn(100_000, generator=generator)
        signs = torch.sign(0.9 * mean + 0.1 * gradients).mean().item()
        square = gradients.square().mean().item()
        left = formulas.own_sign(0.0, mean, square, 0.5, 0.9, NUMBERS)
        assert left == pytest.approx(signs, abs=0.12)
    assert formulas.own_sign(2.0, 0.01, 1.0, 0.5, 0.9, NUMBERS) == 1.0
    assert formulas.own_sign(0.0, 0.01, 1.0, 1.0, 0.9, NUMBERS) == 1.0
    assert formulas.own_sign(0.0, 0.0, 0.0, 0.5, 0.9, NUMBERS) == 1.0


NAMES = {
    "SIGN": ("Lion", "SignSGD", "PagedLion8bit"),
    "MATRIX": ("Muon", "SOAP", "DistributedShampoo"),
    "SCALED": ("Prodigy", "DAdaptAdam", "ADOPT"),
    "TRUST": ("FusedLAMB", "Lars"),
    "LARGEST": ("Adamax",),
    "COMPACT": ("AdamW8bit", "AdamW4bit", "AdamWFp8"),
    "FACTORED": ("Adafactor",),
    "MEAN": ("RAdam", "NAdam", "FlashAdamW", "AdamWScheduleFree", "AdaBelief", "Adan"),
    "SQUARES": ("RMSprop", "Adagrad", "Adadelta", "Ftrl"),
    "LINEAR": ("SGDW", "ASGD"),
    "UNKNOWN": ("Sophia",),
}


@pytest.mark.parametrize("family", NAMES)
def test_families_by_the_names_of_classes(family: str) -> None:
    for name in NAMES[family]:
        assert formulas.family_of(type(name, (), {})()) is getattr(formulas, family)
        inherits = type("Mine", (type(name, (), {}),), {})
        assert formulas.family_of(inherits()) is getattr(formulas, family)


@pytest.mark.parametrize(
    ("betas", "ratio"),
    [
        (((0.5, 0.999),), 0.25),
        (((torch.tensor(0.5), torch.tensor(0.999)),), 0.25),
        (((0.0, 0.99),), 0.25),
        (((0.9, 0.999),), 0.02),
        (((0.5, 0.999), (0.9, 0.999)), 0.02),
    ],
)
def test_a_small_first_beta_is_that_of_networks_against_each_other(
    betas: Sequence[Any], ratio: float
) -> None:
    layers = [torch.nn.Linear(4, 4) for _ in betas]
    groups = [
        {"params": each.parameters(), "betas": b} for each, b in zip(layers, betas, strict=True)
    ]
    found, deferred = fields_of(TopK, TopK.for_training)
    config, *_ = settings.fit_settings(
        optim.Adam(groups, capturable=False), TopK(**found), deferred
    )
    assert config.ratio == ratio  # type: ignore[attr-defined]


def test_a_family_has_a_ratio_of_its_own_where_the_user_gives_none() -> None:
    def ratio(**given: Any) -> float:
        found, deferred = fields_of(TopK, {**TopK.for_training, **given})
        config, *_ = settings.fit_settings(lion, TopK(**found), deferred)
        return config.ratio  # type: ignore[attr-defined, no-any-return]

    lion = type("Lion", (optim.SGD,), {"step": lambda self, closure=None: None})(
        model_of().parameters(), lr=0.1
    )
    assert ratio() == ratio(ratio=AUTO) == 0.1
    assert ratio(ratio=0.02) == 0.02
    assert ratio(momentum=0) == 0.02  # plain error feedback


@pytest.mark.parametrize("make", [optim.AdamW, partial(optim.SGD, lr=0.1, momentum=0.9)])
def test_a_narrow_parameter_leaves_the_others_adapted(make: Any) -> None:
    """Weights of 16 bits are updated by the same formulas, in float32."""
    call = "TopKEF(min_numel=5000, values='float32')"
    wide, narrow = Trained(make, call), Trained(make, call, torch.bfloat16)
    assert narrow.exchange.compressors[0].plan.update_rule is not None
    assert narrow.exchange.compressors[0].plan.update_rule.name in ("sgd", "adam")
    for number in range(5):
        wide.step(number)
        narrow.step(number)
    for p, other in zip(narrow.model.parameters(), wide.model.parameters(), strict=True):
        assert p.dtype == torch.bfloat16
        assert (p.float() - other).norm() < 0.02 * other.norm()
        assert not p.equal(model_of(torch.bfloat16)[0].weight)


class Linear(optim.Optimizer):
    """Subtracts the gradient, as nobody can tell from its name."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= p.grad


def test_the_steps_of_an_unknown_optimizer_lose_nothing() -> None:
    trained = Trained(Linear, "TopKEF(ratio=0.02)")
    assert trained.exchange.compressors[0].plan.update_rule == tracker.OWN
    expected = [p.detach().clone() for p in trained.model.parameters()]
    for number in range(5):
        trained.step(number)
        for each, p in zip(expected, trained.model.parameters(), strict=True):
            assert p.grad is not None
            each -= p.grad
    for each, p in zip(expected, trained.model.parameters(), strict=True):
        assert p.equal(each)
