"""The laws of local steps, on simulated ranks that run in threads.

1   Nothing is lost: with momentum 0, decay 1 and outer learning rate 1 the anchor has moved by
    the mean of all movements, less the mean of the residuals. With a mean over senders each element
    has moved by the mean of what was sent of it.
2   After each outer step all ranks have the same weights, bit for bit.
3   Dense, with an outer learning rate of 1 and no momentum, averages weights: after every step
    of SGD that is dense training.
4   A state dict that is loaded goes on to the bit, in the middle of a round, too.
5   A movement that is not finite on one rank leaves no trace on any.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import horovod_topk.ddp as adapter
from horovod_topk import checkpoint
from horovod_topk.core.exchange.loopback import Loopback
from horovod_topk.core.plan.nodes import Location
from horovod_topk.core.state.reshard import rescaling
from horovod_topk.ddp import Dense, Outer, PowerSGD, SignSGD, TopKEF
from horovod_topk.ddp.compressor import Compressor
from horovod_topk.errors import (
    ConfigError,
    NotAttachedError,
    PlanMismatchError,
    StateDictError,
    UnknownSettingError,
    UnsupportedOperationError,
)
from horovod_topk.local.settings import PRESETS, LocalConfig
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch_training import local_steps

SHAPES = {"layers.0.weight": (40, 33), "layers.0.bias": (7,), "layers.1.weight": (1100,)}
SHAPES |= {"layers.2.weight": (30, 9), "head": (64, 20)}
SMALL: dict[str, Any] = {"ratio": 0.1, "min_numel": 8, "guard": None}


class LocalSteps(local_steps.LocalSteps):
    """Over any collective."""

    compressors = Compressor


class Rank:
    """A rank: weights, optimizer and gradients that depend on rank and step alone."""

    def __init__(self, rank: int, collective: Any, *preset: str, **settings: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        inner = settings.pop("inner", lambda params: torch.optim.AdamW(params, lr=0.01))
        dtype = settings.pop("dtype", torch.float32)
        self.rank = rank
        self.weights = {
            name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for name, shape in SHAPES.items()
        }
        named = self.weights.items()
        if not preset:  # formulas in these tests are of plain averages
            settings = {"outer": Outer(), "decay": 1.0, **settings}
        self.optimizer = LocalSteps(
            inner(self.weights.values()), named, *preset, collective=collective, **settings
        )
        self.steps = 0
        self.inner = list[list[Tensor]]()  # weights after each step of the inner optimizer
        self.optimizer.register_step_post_hook(lambda *_: self.inner.append(self.snapshot()))

    @property
    def state(self) -> Any:
        return TopKEF.of(self.optimizer)

    def step(self, gradient: Callable[[Tensor], Tensor] | None = None) -> None:
        """Step on random gradients, or on those that a function of a parameter returns."""
        self.steps += 1
        generator = torch.Generator().manual_seed(1000 * self.steps + self.rank)
        for p in self.weights.values():
            drawn = gradient or (lambda p: torch.randn(p.shape, generator=generator).to(p.dtype))
            p.grad = drawn(p)
        self.optimizer.step()

    def one_minute(self, steps: int, gradient: Callable[[Tensor], Tensor] | None = None) -> None:
        """Take so many steps in 60 seconds, which are one round."""
        now = [0.0]
        self.state.rounds._clock = lambda: now[0]
        self.optimizer.begin()
        for step in range(steps):
            now[0] = 60.0 * (step + 1) / steps
            self.step(gradient)
        assert self.optimizer.rounds == 1

    def snapshot(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.weights.values()]


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Subtracts the gradient."""
    return torch.optim.SGD(parameters, lr=1.0)


def of_one_tensor(**settings: Any) -> tuple[nn.Parameter, torch.optim.Optimizer, LocalSteps]:
    """A parameter, the optimizer that trains it, and local steps around that."""
    weights = nn.Parameter(torch.ones(40))
    inner = torch.optim.SGD([weights], lr=0.1)
    settings = {"collective": None, **settings}
    return weights, inner, LocalSteps(inner, [("weights", weights)], **settings)


def run(
    ranks: int,
    body: Callable[[int, Any], Any],
    patience: float = 20.0,
    locations: Sequence[Location] | None = None,
) -> list[Any]:
    """Run a function of rank and collective on simulated ranks; the first error is raised."""
    network = Loopback(ranks, TorchOps(), patience=patience, locations=locations)
    found: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def go(rank: int) -> None:
        try:
            found[rank] = body(rank, network.collective(rank))
        except BaseException as error:  # it is raised below
            errors.append(error)

    threads = [threading.Thread(target=go, args=(rank,)) for rank in range(ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(timeout=4 * patience)
    if errors:
        raise next((e for e in errors if not isinstance(e, TimeoutError)), errors[0])
    return found


def same(*lists: list[Tensor]) -> bool:
    return all(
        torch.equal(a, b) for other in lists[1:] for a, b in zip(lists[0], other, strict=True)
    )


METHODS = {
    "top-k": lambda: TopKEF(**SMALL),
    "top-k, sharded": lambda: TopKEF(**SMALL, exchange="sharded"),
    "top-k, hierarchical": lambda: TopKEF(**SMALL, exchange="hierarchical"),
    "top-k, narrow residuals": lambda: TopKEF(**SMALL, residuals="int8"),
    "top-k, adaptive": lambda: TopKEF(**SMALL, allocation="adaptive"),
    "dense": lambda: Dense(guard=None),
    "dense, gathered": lambda: Dense(guard=None, exchange="allgather"),
    "dense, reduced": lambda: Dense(guard=None, exchange="allreduce"),
    "dense, bfloat16": lambda: Dense(guard=None, values="bfloat16"),
    "PowerSGD": lambda: PowerSGD(rank=2, guard=None),
    "SignSGD": lambda: SignSGD(guard=None),
    "QSGD": lambda: adapter.QSGD(guard=None),
    "RandomK": lambda: adapter.RandomK(**SMALL),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"every": 3},
    "momentum": {"every": 3, "outer": Outer(lr=0.7, momentum=0.9), "decay": 0.9},
    "limited": {"every": 2, "clip": 1.0, "outer": Outer(lr=0.5, momentum=0.5, form="averaged")},
    "default": {"every": 3, "outer": Outer(mean="senders"), "decay": 0.8, "alpha": 0.5},
}
NO_NUMBERS = {"top-k, hierarchical", "dense, reduced"}  # payloads of which carry none of each rank
CELLS = [
    (method, setting)
    for method, setting in itertools.product(METHODS, SETTINGS)
    if not (setting == "limited" and method in NO_NUMBERS)
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("method", "setting"), CELLS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_have_the_same_weights_after_each_outer_step(
    method: str, setting: str, ranks: int
) -> None:
    settings = SETTINGS[setting]

    def train(number: int, collective: Any) -> list[list[Tensor]]:
        rank = Rank(number, collective, compression=METHODS[method](), **settings)
        found = []
        for step in range(1, 4 * settings["every"] + 1):
            rank.step()
            if step % settings["every"] == 0:
                found.append(rank.snapshot())
        assert rank.optimizer.rounds == 4
        return found

    rounds = list(zip(*run(ranks, train), strict=True))
    for weights in rounds:
        assert same(*weights)
    assert not same(rounds[0][0], rounds[-1][0])


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_nothing_is_lost(alpha: float) -> None:
    """With alpha, a rank also subtracts a share of its residual, which is no movement."""

    def train(number: int, collective: Any) -> tuple[list[Tensor], ...]:
        rank = Rank(number, collective, compression=TopKEF(**SMALL), every=4, alpha=alpha)
        first = anchor = rank.snapshot()
        kept, moved = ([torch.zeros_like(p) for p in first] for _ in range(2))
        for step in range(1, 21):
            rank.step()
            if step % 4 == 0:
                each = zip(moved, anchor, rank.inner[-1], kept, strict=True)
                moved = [total + x - w - k for total, x, w, k in each]
                anchor, left = rank.snapshot(), residuals(rank)
                kept = [alpha * e for e in left]
            if step % 4 == 1:
                assert same(rank.snapshot(), rank.inner[-1]) == (step == 1 or not alpha)
        return first, anchor, moved, left

    found = run(2, train)
    for i in range(len(SHAPES)):
        first, last, *_ = found[0]
        expected = sum(moved[i] - left[i] for _, _, moved, left in found) / 2
        torch.testing.assert_close(first[i] - last[i], expected, atol=2e-5, rtol=0.0)


@pytest.mark.parametrize(
    ("exchange", "values"),
    [*(("allgather", each) for each in ("int2", "int4", "float32")), ("sharded", "float32")],
)
def test_an_element_moves_by_the_mean_of_its_senders(exchange: str, values: str) -> None:
    def train(number: int, collective: Any) -> tuple[list[Tensor], ...]:
        settings = {**SMALL, "ratio": (0.1, 1.0) if exchange == "sharded" else 0.1}
        method = TopKEF(**settings, exchange=exchange, values=values)
        mean = Outer(mean="senders")
        rank = Rank(number, collective, compression=method, every=2, outer=mean)
        before = rank.snapshot()
        rank.step()
        rank.step()
        each = zip(before, rank.inner[-1], residuals(rank), strict=True)
        return before, rank.snapshot(), [x - w - e for x, w, e in each]

    found = run(3, train)
    partial = 0
    for i in range(len(SHAPES)):
        before, after, _ = found[0]
        sent = torch.stack([each[i] for _, _, each in found])
        senders = (sent != 0).sum(dim=0)
        partial += int(((senders > 0) & (senders < 3)).sum())
        expected = sent.sum(dim=0) / senders.clamp(min=1)
        torch.testing.assert_close(before[i] - after[i], expected, atol=1e-6, rtol=1e-5)
    assert partial > 100


def test_a_node_counts_by_its_ranks() -> None:
    """An element that one node has sent moves by the mean of that node."""
    hosts = "abbb"
    locations = [Location(host, i - hosts.index(host), 0) for i, host in enumerate(hosts)]

    def train(number: int, collective: Any) -> tuple[list[Tensor], ...]:
        def gradient(p: Tensor) -> Tensor:
            found = of_its_own(p, 2 if number else 1)
            found.view(-1)[0 if number else 1] = 8.0
            found.view(-1)[2] = 1.0 + 4.0 * (number > 0)
            return found

        method = TopKEF(**SMALL, exchange="hierarchical", values="float32")
        settings: dict[str, Any] = {"outer": Outer(mean="senders"), "inner": plain_sgd}
        rank = Rank(number, collective, compression=method, every=1, **settings)
        before = rank.snapshot()
        rank.step(gradient)
        return before, rank.snapshot()

    before, after = run(4, train, locations=locations)[0]
    for was, now in zip(before, after, strict=True):
        if was.numel() > 7:
            moved = (was - now).view(-1)[:3].tolist()
            assert moved == pytest.approx([8.0, 8.0, 4.0], rel=1e-5)


def of_its_own(p: Tensor, number: int) -> Tensor:
    """Return a gradient that is 0 except at an eighth of the elements, which differ by rank."""
    count, gradient = p.numel() // 8, torch.zeros_like(p)
    gradient.view(-1)[4 + number * count : 4 + (number + 1) * count] = 0.01
    return gradient


def residuals(rank: Rank) -> list[Tensor]:
    return [rank.state.residual(name).view(shape).clone() for name, shape in SHAPES.items()]


@pytest.mark.parametrize(("mean", "factor"), [("ranks", 2.0), ("senders", 1.0)])
def test_residuals_keep_their_units_when_ranks_join(mean: str, factor: float) -> None:
    """A residual that one rank sends moves its element equally far among any number of ranks."""

    def train(number: int, collective: Any) -> None:
        rank = Rank(
            number, collective, compression=TopKEF(**SMALL), every=1, outer=Outer(mean=mean)
        )
        rank.step()
        before = residuals(rank)
        rank.state._runners[0].ranks_before = 1
        rank.optimizer.param_groups[0]["lr"] = 0.0
        rank.step()
        pairs = zip(residuals(rank), before, strict=True)
        unsent = [(e != 0) & (e == factor * was) for e, was in pairs]
        assert sum(int(each.sum()) for each in unsent) > 2000
        assert rescaling(rank.state.residual_reduction, 1, 2) == factor

    run(2, train)


def test_half_precision_keeps_nothing_that_it_would_round() -> None:
    def train(number: int, collective: Any) -> None:
        settings: dict[str, Any] = {"alpha": 0.5, "dtype": torch.bfloat16}
        rank = Rank(number, collective, compression=TopKEF(**SMALL), every=2, **settings)
        for _ in range(3):
            rank.step()
        assert any(bool(e.any()) for e in residuals(rank))
        assert same(rank.snapshot(), rank.inner[-1])

    run(2, train)


def test_dense_averages_weights_as_dense_training() -> None:
    """After every step of SGD, to the bit where no number is rounded, else within rounding."""

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.125)

    def train(number: int, collective: Any) -> list[Tensor]:
        rank = Rank(number, collective, compression=Dense, every=1, inner=sgd)
        for p in rank.weights.values():
            p.data = (p.data * 64).round() / 64
        for step in range(10):
            for p in rank.weights.values():
                generator = torch.Generator().manual_seed(1000 * step + number)
                p.grad = (torch.randn(p.shape, generator=generator) * 64).round() / 64
            rank.optimizer.step()
        return rank.snapshot()

    def dense(number: int, collective: Any) -> list[Tensor]:
        rank = Rank(number, collective, inner=sgd)
        weights = [(p.data * 64).round() / 64 for p in rank.weights.values()]
        for step in range(10):
            for p in weights:
                both = [torch.Generator().manual_seed(1000 * step + r) for r in range(2)]
                mean = sum((torch.randn(p.shape, generator=g) * 64).round() / 64 for g in both) / 2
                p -= 0.125 * mean
        return weights

    ours, theirs = run(2, train), run(2, dense)
    assert same(*ours, *theirs)


RESUMED: dict[str, dict[str, Any]] = {
    "plain": {"every": 5, "decay": 0.95},
    "momentum": {"every": 5, "outer": Outer(lr=0.7, momentum=0.9), "clip": 1.0},
    "fragments": {"every": 6, "fragments": 3, "delay": 3, "compression": lambda: TopKEF(**SMALL)},
    "delayed, sharded": {"every": 6, "fragments": 2, "delay": 5, "compression": lambda: Dense()},
    "on the host": {"every": 5, "offload": True, "alpha": 0.5},
    "default": {"every": 5, "outer": Outer(mean="senders"), "decay": 0.8, "alpha": 0.5},
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_restart_goes_on_to_the_bit(case: str, tmp_path: Any) -> None:
    """From files, in the middle of a round; and saving changes nothing."""
    made = {"compression": METHODS["top-k"], **RESUMED[case]}
    saved: dict[int, Any] = {}

    def settings() -> dict[str, Any]:
        return {**made, "compression": made["compression"]()}

    def train(number: int, collective: Any) -> Any:
        rank = Rank(number, collective, **settings())
        for step in range(1, 24):
            rank.step()
            if step == 13:
                checkpoint.save(tmp_path, rank.state)
                saved[number] = copy.deepcopy((rank.snapshot(), rank.optimizer.state_dict()))
        return rank.snapshot(), rank.state.state_dict()

    def resume(number: int, collective: Any) -> Any:
        rank = Rank(number, collective, **settings())
        weights, optimizer = saved[number]
        for p, was in zip(rank.weights.values(), weights, strict=True):
            p.data.copy_(was)
        rank.optimizer.load_state_dict(optimizer)
        checkpoint.load(tmp_path, rank.state)
        rank.steps = 13
        for _ in range(10):
            rank.step()
        return rank.snapshot(), rank.state.state_dict()

    def undisturbed(number: int, collective: Any) -> Any:
        rank = Rank(number, collective, **settings())
        for _ in range(23):
            rank.step()
        return rank.snapshot(), rank.state.state_dict()

    first, second, whole = run(2, train), run(2, resume), run(2, undisturbed)
    for a, b, c in zip(first, second, whole, strict=True):
        assert same(a[0], b[0], c[0])
        assert same(*(list(each[1]["residuals"].values()) for each in (a, b, c)))
        assert a[1]["local"] == b[1]["local"] == c[1]["local"]


def test_another_number_of_ranks_goes_on_from_the_anchor(tmp_path: Any) -> None:
    settings = {"every": 5, "outer": Outer(lr=0.7, momentum=0.9)}
    anchors: dict[int, Any] = {}

    def train(number: int, collective: Any) -> None:
        rank = Rank(number, collective, compression=TopKEF(**SMALL), **settings)
        for _ in range(13):
            rank.step()
        checkpoint.save(tmp_path, rank.state)
        anchors[number] = rank.state.state_dict()["state.anchor"]["residuals"]

    def resume(number: int, collective: Any) -> list[list[Tensor]]:
        rank = Rank(number, collective, compression=TopKEF(**SMALL), **settings)
        for p in rank.weights.values():
            p.data += number  # a rank that has joined has any weights
        checkpoint.load(tmp_path, rank.state)
        found = [rank.snapshot()]
        for _ in range(5):
            rank.step()
        return [*found, rank.snapshot()]

    run(2, train)
    found = run(3, resume)
    expected = [anchors[0][name].view(shape) for name, shape in SHAPES.items()]
    assert same(expected, *(each[0] for each in found))
    assert same(*(each[1] for each in found))
    assert not same(expected, found[0][1])


@pytest.mark.parametrize("setting", ["plain", "momentum", "default"])
def test_a_movement_that_is_not_finite_leaves_no_trace(setting: str) -> None:
    def train(number: int, collective: Any) -> Any:
        rank = Rank(number, collective, compression=TopKEF(**SMALL), **SETTINGS[setting])
        for _ in range(6):
            rank.step()
        before, kept = rank.snapshot(), rank.state.state_dict()
        for step in range(3):
            rank.step()
            if (number, step) == (1, 0):
                rank.weights["head"].data[0] = torch.inf
                rank.optimizer.state[rank.weights["head"]]["exp_avg"][0] = torch.nan
        after = rank.state.state_dict()
        assert same(before, rank.snapshot())
        for key in ("residuals", *(k for k in kept if k.startswith("state."))):
            own = kept[key] if key == "residuals" else kept[key]["residuals"]
            now = after[key] if key == "residuals" else after[key]["residuals"]
            assert same([*own.values()], [*now.values()])
        assert rank.state.stats().rolled_back == 1
        for _ in range(6):
            rank.step()
        return rank.snapshot()

    found = run(2, train)
    assert same(*found)
    assert all(bool(each.isfinite().all()) for each in found[0])


@pytest.mark.parametrize("delay", [0, 2])
def test_a_nan_leaves_no_fragment_that_brings_it_back(delay: int) -> None:
    """A NaN in one weight makes all gradients of the next step NaN, as in most models."""

    def train(number: int, collective: Any) -> int:
        settings = {"every": 4, "fragments": 2, "delay": delay, "compression": TopKEF(**SMALL)}
        rank = Rank(number, collective, **settings)
        for step in range(40):
            every = torch.stack([p.detach().sum() for p in rank.weights.values()]).sum()
            for p in rank.weights.values():
                p.grad = torch.ones_like(p) + 0.0 * every
            if (number, step) == (1, 5):
                rank.weights["head"].grad.fill_(torch.nan)  # type: ignore[union-attr]
            rank.optimizer.step()
        assert all(bool(p.isfinite().all()) for p in rank.weights.values())
        rolled_back: int = rank.state.stats().rolled_back
        return rolled_back

    assert max(run(2, train)) <= 2


@pytest.mark.parametrize("settings", [{}, {"fragments": 2}, {"fragments": 2, "delay": 2}], ids=str)
def test_ranks_synchronize_after_different_numbers_of_steps(settings: dict[str, Any]) -> None:
    """One rank may have one batch more than another, and so has moved while the other has not."""

    def train(number: int, collective: Any) -> list[Tensor]:
        rank = Rank(number, collective, every=4, **settings, compression=TopKEF(**SMALL))
        for _ in range(8 + number):
            rank.step()
        rank.optimizer.synchronize()
        rank.optimizer.synchronize()
        for _ in range(5):
            rank.step()
        rank.optimizer.synchronize()
        return rank.snapshot()

    assert same(*run(3 if not settings else 2, train))


def test_ranks_that_synchronize_after_different_numbers_of_rounds_are_named() -> None:
    def train(number: int, collective: Any) -> Any:
        rank = Rank(number, collective, every=3)
        for _ in range(4):
            rank.step()
        if number == 1:  # as if it had taken part in a round without rank 0
            rank.state._runners[0].rolled_back += 1
        with pytest.raises(PlanMismatchError, match="0 after 1 exchanges, on rank 1 after 2"):
            rank.optimizer.synchronize()

    run(2, train)


def test_a_rank_keeps_its_residual_in_units_of_a_movement() -> None:
    """With seconds, too, where payloads are of movements times their steps."""

    def train(number: int, collective: Any) -> None:
        settings = {**SETTINGS["default"], "every": "60s", "compression": TopKEF(**SMALL)}
        rank = Rank(number, collective, **settings)
        rank.one_minute((30, 10)[number])
        rank.step()
        for w, after, e in zip(rank.inner[-1], rank.snapshot(), residuals(rank), strict=True):
            torch.testing.assert_close(w - after, 0.5 * e, atol=1e-6, rtol=1e-3)
        assert any(bool(e.any()) for e in residuals(rank))

    run(2, train)


@pytest.mark.parametrize("mean", ["ranks", "senders"])
def test_a_short_round_moves_by_no_multiple_of_residuals(mean: str) -> None:
    """With seconds, the last round of a run ends after any number of steps."""

    def train(number: int, collective: Any) -> None:
        method = TopKEF(**SMALL, values="float32")
        rank = Rank(
            number, collective, every="60s", outer=Outer(mean=mean), compression=method, decay=0.5
        )
        rank.one_minute(30)
        before = rank.snapshot()
        rank.optimizer.param_groups[0]["lr"] = 0.0
        if number == 0:
            rank.step()
        rank.optimizer.synchronize()
        moved = zip(before, rank.snapshot(), strict=True)
        most = max(float((x - w).abs().max()) for x, w in moved)
        assert 0.0 < most < 0.3  # 30 steps of AdamW at 0.01

    run(2, train)


def test_ranks_count_by_their_number_of_steps() -> None:
    """With seconds, a rank that has taken three times as many steps counts three times."""

    def train(number: int, collective: Any) -> list[Tensor]:
        method = Dense(exchange="allgather")
        rank = Rank(number, collective, compression=method, every="60s", inner=plain_sgd)
        rank.one_minute((3, 1)[number], lambda p: torch.full_like(p, (1.0, 5.0)[number]))
        return rank.snapshot()

    found, first = run(2, train), Rank(0, None, compression=Dense).snapshot()
    for before, after in zip(first, found[0], strict=True):
        expected = before - (3 * 3.0 + 1 * 5.0) / 4
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5)
    assert same(*found)


def test_an_element_of_a_fast_rank_alone_moves_by_its_movement() -> None:
    """The movement is not multiplied by the rank's steps over the mean number of steps."""

    def train(number: int, collective: Any) -> list[float]:
        def gradient(p: Tensor) -> Tensor:
            found = of_its_own(p, number)
            found.view(-1)[number] = 1.0
            return found

        method = TopKEF(**SMALL, values="float32")
        settings: dict[str, Any] = {"outer": Outer(mean="senders"), "inner": plain_sgd}
        rank = Rank(number, collective, compression=method, every="60s", **settings)
        before = rank.snapshot()[0]
        rank.one_minute((9, 1, 1)[number], gradient)
        moved: list[float] = (before - rank.snapshot()[0]).view(-1)[:4].tolist()
        return moved

    for moved in run(3, train):
        assert moved == pytest.approx([9.0, 1.0, 1.0, 0.0], rel=1e-5)


def test_a_movement_is_limited_by_the_median_of_the_last_round() -> None:
    def train(number: int, collective: Any) -> list[float]:
        settings: dict[str, Any] = {"every": 1, "clip": 1.0, "inner": plain_sgd}
        rank = Rank(number, collective, compression=Dense(exchange="allgather"), **settings)
        moved = []
        for _ in range(2):
            before = rank.snapshot()
            rank.step(lambda p: torch.full_like(p, 100.0 if number == 2 else 1.0))
            moved.append((before[0] - rank.snapshot()[0]).mean().item())
        return moved

    first, second = run(3, train)[0]
    assert first == pytest.approx((1 + 1 + 100) / 3, rel=1e-4)
    assert second == pytest.approx(1.0, rel=1e-4)


def test_delayed_fragments_keep_a_share_of_the_local_weights() -> None:
    """And ranks have equal weights after `synchronize()`, the fragments' exchanges included."""

    def train(number: int, collective: Any) -> Any:
        settings: dict[str, Any] = {"every": 4, "delay": 2, "alpha": 0.25, "inner": plain_sgd}
        rank = Rank(number, collective, compression=Dense, **settings)
        first = rank.snapshot()
        for _ in range(6):
            rank.step(lambda p: torch.full_like(p, 1.0 + 2 * number))
        mixed = [(a - b).mean().item() for a, b in zip(first, rank.snapshot(), strict=True)]
        rank.step()
        rank.optimizer.synchronize()
        return mixed, rank.snapshot()

    found = run(2, train)
    for number, (mixed, _) in enumerate(found):  # 6 steps alone, and the mean of 4 of both ranks
        expected = 0.25 * 6 * (1 + 2 * number) + 0.75 * 4 * 2
        assert mixed == pytest.approx([expected] * len(SHAPES), rel=1e-4)
    assert same(found[0][1], found[1][1])


@pytest.mark.parametrize("method", ["dense", "top-k, sharded"])
def test_weights_that_are_loaded_become_the_anchor(method: str) -> None:
    """Nothing of an exchange that was under way moves it."""

    def train(number: int, collective: Any) -> dict[str, Tensor]:
        settings = {"every": 4, "delay": 2, "fragments": 2, "compression": METHODS[method]()}
        rank = Rank(number, collective, **settings)
        for _ in range(5):
            rank.step()
        for p in rank.weights.values():
            p.detach().fill_(0.5)
        rank.optimizer.begin()
        kept: dict[str, Tensor] = rank.state.state_dict()["state.anchor"]["residuals"]
        return kept

    for kept in run(2, train):
        assert all(bool((anchor == 0.5).all()) for anchor in kept.values())


def test_fragments_share_the_model() -> None:
    def sizes(number: int, collective: Any) -> list[int]:
        rank = Rank(number, collective, every=6, fragments=3)
        parts = rank.state.rounds.fragments
        return [sum(rank.weights[name].numel() for name in part.names) for part in parts]

    (found,) = run(1, sizes)
    assert sum(found) == sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert min(found) > 0
    config = LocalConfig(every=6, fragments=3, delay=1)
    assert [config.starts(step) for step in range(1, 8)] == [[], [0], [], [1], [], [2], []]
    assert [config.arrives(step) for step in range(1, 9)] == [[], [], [0], [], [1], [], [2], []]


@pytest.mark.parametrize("form", ["nesterov", "heavy_ball", "averaged"])
def test_the_outer_step_is_the_formula(form: str) -> None:
    """As torch's SGD has it; the first step is lr d in each form."""
    outer = Outer(lr=0.5, momentum=0.9, form=form)

    def train(number: int, collective: Any) -> list[Tensor]:
        rank = Rank(number, collective, compression=Dense, every=2, outer=outer)
        for _ in range(6):
            rank.step()
        return rank.snapshot()

    def by_hand(number: int, collective: Any) -> list[Tensor]:
        rank = Rank(number, collective, compression=Dense, every=100)
        anchor = rank.snapshot()
        v = [torch.zeros_like(p) for p in anchor]
        for turn in range(3):
            rank.step()
            rank.step()
            for i, p in enumerate(rank.weights.values()):
                d = collective.allreduce((anchor[i] - p.detach()).clone(), f"{i}").wait() / 2
                if turn == 0:
                    v[i], move = d, d
                elif form == "averaged":
                    v[i] = 0.9 * v[i] + (1 - 0.9) * d
                    move = v[i]
                else:
                    v[i] = 0.9 * v[i] + d
                    move = d + 0.9 * v[i] if form == "nesterov" else v[i]
                anchor[i] = anchor[i] - 0.5 * move
                p.data.copy_(anchor[i])
        return rank.snapshot()

    ours, theirs = run(2, train), run(2, by_hand)
    for a, b in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_other_dtypes(dtype: torch.dtype) -> None:
    """The anchor is wider than half precision: rounding it is no movement."""

    def train(number: int, collective: Any) -> list[Tensor]:
        settings: dict[str, Any] = {"dtype": dtype, "every": 2, "outer": Outer(lr=1.0)}
        settings["inner"] = lambda params: torch.optim.SGD(params, lr=0.0)
        rank = Rank(number, collective, compression=Dense, **settings)
        anchors = [f.anchor(n).clone() for f in rank.state.rounds.fragments for n in f.names]
        for _ in range(4):
            rank.step()
        assert len(anchors) == len(SHAPES)
        return rank.snapshot()

    found = run(2, train)
    assert same(*found, Rank(0, None, dtype=dtype).snapshot())


def test_a_loss_scaler_that_skips_a_step_skips_no_count() -> None:
    """Ranks would wait for one another otherwise. Gradients are unscaled, and weights finite."""

    def train(number: int, collective: Any) -> Any:
        rank = Rank(number, collective, compression=Dense, every=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        schedule = torch.optim.lr_scheduler.StepLR(rank.optimizer, 1, 0.5)
        for step in range(4):
            rank.optimizer.zero_grad()
            loss = sum(p.square().sum() for p in rank.weights.values())
            scaler.scale(loss).backward()
            if (number, step) == (0, 1):
                rank.weights["head"].grad[0] = torch.inf
            before = rank.snapshot()
            scaler.step(rank.optimizer)
            scaler.update()
            schedule.step()
            if (number, step) == (0, 0):
                p, was = rank.weights["head"], before[-1]
                assert torch.allclose(p.grad, 2 * was)
        assert schedule.get_last_lr() == [0.01 / 16]
        return rank.optimizer.rounds, rank.snapshot()

    found = run(2, train)
    assert [each[0] for each in found] == [2, 2]
    assert same(found[0][1], found[1][1])


@pytest.mark.tiers("rest", "all")
def test_a_compiled_step_has_the_graphs_of_the_inner_optimizer() -> None:
    """An outer step that is traced is compiled anew for each tensor and each number."""

    def graphs(compiled: Any, rank: Rank) -> int:
        torch._dynamo.reset()
        counters.clear()
        step = torch.compile(lambda: compiled.step(), backend="eager")
        for _ in range(5):
            for p in rank.weights.values():
                p.grad = torch.ones_like(p)
            step()
        return int(counters["stats"]["unique_graphs"])

    def inner(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)

    rank, alike = (Rank(0, None, every=2, inner=inner) for _ in range(2))
    assert graphs(rank.optimizer, rank) == graphs(inner(alike.weights.values()), alike) > 0
    assert rank.optimizer.rounds == 2


def test_buffers_are_averaged() -> None:
    def train(number: int, collective: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        net = nn.BatchNorm1d(4)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        named = net.named_parameters(), net.named_buffers()
        optimizer = LocalSteps(
            inner, named[0], collective=collective, named_buffers=named[1], every=2
        )
        for step in range(2):
            optimizer.zero_grad()
            x = torch.arange(8.0).view(2, 4) * (number + 1) + step
            net(x).square().sum().backward()
            if step == 1:
                own = net.running_mean.clone()
            optimizer.step()
        assert int(net.num_batches_tracked) == 2
        return own, net.running_mean.clone()

    (own, mean), (other, same_mean) = run(2, train)
    assert not torch.equal(own, other)
    assert torch.equal(mean, same_mean)
    torch.testing.assert_close(mean, (own + other) / 2)


def test_a_guard_that_ends_compression_goes_on_with_outer_steps() -> None:
    def train(number: int, collective: Any) -> Any:
        guard = adapter.Guard(nonfinite=2, trend=None)
        compression = TopKEF(**{**SMALL, "guard": guard})
        rank = Rank(number, collective, compression=compression, every=2, clip=5.0)
        for step in range(16):
            rank.step()
            if number == 0 and step in (4, 6):
                rank.weights["head"].data[0] = torch.nan
        return rank.state.stats(), rank.snapshot()

    found = run(3, train)
    assert found[0][0].fallbacks
    assert same(*(each[1] for each in found))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no whole number": ({"every": 2.5}, "every=2.5"),
    "no duration": ({"every": "60"}, "every='60'"),
    "no outer step": ({"every": 0}, "every=0"),
    "fragments": ({"every": 4, "fragments": 5}, "fragments=5"),
    "blocks": ({"every": 9, "fragments": 6}, "fragments=6 was given, and the model has 4 blocks"),
    "delay": ({"every": 4, "delay": 4}, "delay=4"),
    "seconds and delay": ({"every": "9s", "delay": 1}, "different numbers of steps"),
    "decay": ({"decay": 0.0}, "decay=0.0"),
    "alpha": ({"alpha": 1.5}, "alpha=1.5"),
    "clip": ({"clip": 0}, "clip=0"),
    "outer": ({"outer": 0.7}, "outer=0.7"),
    "momentum": ({"compression": lambda: TopKEF(momentum=0.9)}, "momentum=0.9"),
    "clip_norm": ({"compression": lambda: TopKEF(clip_norm=1.0)}, "clip_norm=1"),
    "an unknown setting": ({"evry": 3}, "no setting 'evry'"),
    "an unknown preset": ({"preset": "dilocoo"}, "Did you mean 'diloco'"),
    "numbers": (
        {"clip": 1.0, "compression": lambda: Dense(exchange="allreduce")},
        "clip= needs numbers of every rank",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why(case: str) -> None:
    settings, text = REFUSED[case]
    given = {k: v() if k == "compression" else v for k, v in settings.items()}
    with pytest.raises((ConfigError, UnknownSettingError), match=None) as caught:
        Rank(0, None, **given)
    assert text in str(caught.value)


def test_ranks_with_other_settings_or_weights_are_named() -> None:
    with pytest.raises(PlanMismatchError, match="every=3"):
        run(2, lambda number, collective: Rank(number, collective, every=3 + number))

    def start(number: int, collective: Any) -> None:
        rank = Rank(number, collective, every=3)
        rank.weights["head"].data[0, 0] += number
        rank.step()

    with pytest.raises(PlanMismatchError, match="'head': ranks 0 and 1 have different weights"):
        run(2, start)


def test_a_frozen_parameter_is_left_alone_until_it_is_trained() -> None:
    def train(number: int, collective: Any) -> None:
        frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        weights = nn.Parameter(torch.ones(40))
        inner = torch.optim.SGD([frozen, weights], lr=0.1)
        named = [("frozen", frozen), ("weights", weights)]
        optimizer = LocalSteps(inner, named, collective=collective, every=2)
        assert list(TopKEF.of(optimizer).tensors) == ["weights"]
        for _ in range(2):
            weights.grad = torch.full_like(weights, 1.0 + number)
            optimizer.step()
        assert torch.equal(frozen, torch.ones(5))
        frozen.requires_grad = True
        for _ in range(2):
            optimizer.step()

    with pytest.raises(ConfigError, match="'frozen': it is trained now"):
        run(2, train)


def test_a_state_of_other_fragments_is_refused() -> None:
    (state,) = run(1, lambda n, c: Rank(n, c, every=6, fragments=2).state.state_dict())

    def load(number: int, collective: Any) -> None:
        rank = Rank(number, collective, every=6, fragments=2)
        rank.step()
        other = Rank(number, collective, every=6)
        other.state.load_state_dict(rank.state.state_dict())

    assert "local" not in state
    with pytest.raises(StateDictError, match="has 2 fragments"):
        run(1, load)


def test_a_model_that_exchanges_gradients_is_warned_of() -> None:
    weights = nn.Parameter(torch.ones(40))
    inner = torch.optim.SGD([weights], lr=0.1)
    optimizer = LocalSteps(inner, [("module.weights", weights)], collective=None)
    (warning,) = TopKEF.of(optimizer).stats().warnings
    assert "DistributedDataParallel" in warning


def test_a_loop_that_steps_the_inner_optimizer_is_refused() -> None:
    """Ranks would train apart, and nothing would say so."""
    weights, inner = of_one_tensor()[:2]  # another one replaces it
    optimizer = LocalSteps(inner, [("weights", weights)], collective=None, every=2)
    weights.grad = torch.ones(40)
    for _ in range(3):
        optimizer.step()
    for _ in range(2):
        inner.step()
        optimizer.count()
    inner.step()
    with pytest.raises(NotAttachedError, match=r"SGD.*not counted.*Call step\(\) of LocalSteps"):
        inner.step()
    optimizer.synchronize()
    del optimizer
    for _ in range(2):
        inner.step()


@pytest.mark.parametrize("stepped", [0, 1])
def test_a_loop_without_a_name_for_local_steps_is_refused(stepped: int) -> None:
    """`LocalSteps(inner, ...)` alone on its line: it is deleted, and counts nothing."""
    weights, inner, optimizer = of_one_tensor()
    weights.grad = torch.ones(40)
    for _ in range(stepped):
        inner.step()
    before = weights.clone()
    del optimizer
    for _ in range(2):
        with pytest.raises(NotAttachedError, match=r"SGD.*deleted.*optimizer = LocalSteps\("):
            inner.step()
    assert torch.equal(weights, before)
    optimizer = LocalSteps(inner, [("weights", weights)], collective=None)
    optimizer.step()
    assert not torch.equal(weights, before)


def test_what_is_no_pair_and_what_cannot_be_copied() -> None:
    model = nn.Linear(3, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for given in (model, model.parameters()):
        with pytest.raises(ConfigError, match=r"named_parameters=model.named_parameters\(\)"):
            LocalSteps(inner, given, collective=None)
    bias, other = [("bias", model.bias)], [("bias", model.weight)]
    for named in ({"named_parameters": bias + other}, {"named_buffers": bias + other}):
        with pytest.raises(ConfigError, match=r"'bias': named_.* has two tensors of this name"):
            settings = {"named_parameters": model.named_parameters(), "collective": None, **named}
            LocalSteps(inner, **settings)
    optimizer = LocalSteps(inner, model.named_parameters(), collective=None)
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedOperationError, match="make LocalSteps of them"):
            duplicate(optimizer)


def test_memory_is_counted() -> None:
    (state,) = run(1, lambda n, c: Rank(n, c, outer=Outer(lr=0.7, momentum=0.9)).state)
    kept = state.stats().element_bytes
    assert kept == {"residuals": 8.0, "anchor": 4.0, "outer_momentum": 4.0}


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_defaults_depend_on_what_is_sent() -> None:
    def made(compression: Any, **given: Any) -> LocalConfig:
        return of_one_tensor(compression=compression, **given)[2]._config

    for sparse in (None, TopKEF, TopKEF(ratio=0.1)):
        ours = LocalConfig(every=30, outer=Outer(mean="senders"), decay=0.8, alpha=0.5)
        assert made(sparse) == ours
        assert made(sparse, delay=5) == LocalConfig(
            outer=Outer(mean="senders"), decay=0.8, delay=5, alpha=0.5
        )
    for whole in (Dense, SignSGD, TopKEF(ratio=0.25)):
        assert made(whole) == LocalConfig(every=30, outer=Outer(lr=0.7, momentum=0.5))
    assert made(TopKEF, decay=0.5, outer=Outer()) == LocalConfig(decay=0.5, alpha=0.0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    (rank,) = run(1, lambda n, c: Rank(n, c, name))
    assert rank.optimizer._config == LocalConfig(**PRESETS[name].settings)
    (rank,) = run(1, lambda n, c: Rank(n, c, name, every=7))
    assert rank.optimizer._config == LocalConfig(**{**PRESETS[name].settings, "every": 7})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_default_does_not_overshoot_where_ranks_come_to_rest(momentum: float) -> None:
    """In a round each rank reaches its own minimum, along steep directions: an outer step at a rate
    of 2 would mirror the weights at it, again and again."""
    count = 4096
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(count, generator=generator)
    steepness = torch.logspace(-2, 0, count)[torch.randperm(count, generator=generator)]

    def train(number: int, collective: Any) -> float:
        own = target + 0.3 * torch.randn(count, generator=torch.Generator().manual_seed(number + 1))
        weights = nn.Parameter(torch.zeros(count))
        inner = torch.optim.SGD([weights], lr=0.5 * (1 - momentum), momentum=momentum)
        optimizer = LocalSteps(inner, [("weights", weights)], collective=collective)
        for _ in range(30 * 60):
            weights.grad = steepness * (weights.detach() - own)
            optimizer.step()
        missed = steepness * (weights.detach() - target).square()
        return float(missed.sum() / (steepness * target.square()).sum())

    found = run(4, train, patience=60.0)
    assert len({*found}) == 1
    assert found[0] < 0.7


def test_a_capture_of_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, refuse, captures = torch.device("cuda", 0), local_steps.refuse_recording, [False]
    monkeypatch.setattr(local_steps, "refuse_recording", lambda what, device: refuse(what, gpu))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures[0])
    (rank,) = run(1, lambda n, c: Rank(n, c, every=2))
    rank.step()
    before, captures[0] = rank.snapshot(), True
    with pytest.raises(UnsupportedOperationError, match=r"LocalSteps.step\(\) would be recorded"):
        rank.step()
    assert same(before, rank.snapshot())
    captures[0] = False
    rank.step()
    assert rank.optimizer.rounds == 1
