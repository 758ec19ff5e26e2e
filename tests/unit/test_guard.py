"""The four rules of the guard, each by itself: when it warns, and when it fires."""

from __future__ import annotations

import math
import random
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

import horovod_topk
from horovod_topk import reporting
from horovod_topk.core.control.guard import DENSE, FLUSHING, VERDICT, Memory, Watch, guard_of
from horovod_topk.core.run.substitute import parse
from horovod_topk.errors import ConfigError, StateDictError
from horovod_topk.guard import Guard
from horovod_topk.methods.topk import TopK

WARNS, FIRES = VERDICT, 8 * VERDICT  # what a rank sends is the rule's position, in these units
OTHER_RULES = Guard(residual=10.0, slower=1.5, trial_every=20)


def replay(*ranks: Sequence[float], guard: Guard | None = Guard()) -> tuple[int, int]:  # noqa: B008
    """Report a series of values on each rank: the reports until all warn and fall back; 0: never.

    All ranks have to decide alike.
    """
    watches, warned = [Watch(guard) for _ in ranks], 0
    for step, values in enumerate(zip(*ranks, strict=True), start=1):
        for watch, value in zip(watches, values, strict=True):
            watch.report(value)
        told = [struct.unpack("f", struct.pack("f", each.tell()))[0] for each in watches]
        rules = {end(each, step, told=told, logs=False) for each in watches}
        assert len(rules) == len({each.warnings for each in watches}) == 1
        warned = warned or step * bool(watches[0].warnings)
        if rules == {"trend"}:
            return warned, step
        assert rules == {""}
    return warned, 0


def end(watch: Watch, step: int = 1, *, told: Iterable[float] = (), **how: Any) -> str:
    how = {"committed": True, "flagged": False, "logs": True, **how}
    return watch.end(step, numbers=tuple(told), **how)


def falling(count: int, noise: float = 0.05, seed: int = 0) -> list[float]:
    """Values of a loss that falls, with noise."""
    drawn = random.Random(seed)
    return [0.5 + 2.0 / (1 + step / 30) + noise * drawn.gauss(0, 1) for step in range(count)]


def wandering(again: float, spread: float = 1.0, count: int = 600, seed: int = 0) -> list[float]:
    """Noise of a standard deviation, of which each value takes over a share of the one before."""
    drawn, last = random.Random(seed), 0.0
    values = []
    for step in range(count):
        new = spread * drawn.gauss(0, 1)
        last = again * last + math.sqrt(1 - again**2) * new if step else new
        values.append(last)
    return values


def around(level: Callable[[float], float], noise: Sequence[float]) -> list[float]:
    """Values that follow a function of the share of reports so far, times one plus noise."""
    return [level(i / len(noise)) * max(1 + each, 0.01) for i, each in enumerate(noise)]


def heavy(seed: int) -> list[float]:
    """Noise around zero with heavy tails, as the loss of policy gradients."""
    drawn = random.Random(seed)
    return [drawn.gauss(0, 1) / math.sqrt(drawn.gammavariate(1.5, 1 / 1.5)) for _ in range(600)]


def swinging(period: int, seed: int) -> list[float]:
    """A loss that swings, such as that of two networks which train against each other."""
    phase, noise = random.Random(seed).uniform(0, period), wandering(0.0, 0.05, seed=seed)
    level = (1 + 0.4 * math.sin(2 * math.pi * (i + phase) / period) for i in range(600))
    return [a * (1 + b) for a, b in zip(level, noise, strict=True)]


def new_data(seed: int, rise: float, healing: float) -> list[float]:
    """A falling loss that rises by a share at once, and has its trend again after some reports."""
    at, noise = random.Random(seed).randrange(150, 500), wandering(0.5, 0.05, seed=seed)
    raised = (rise * math.exp(-(i - at) / healing) if i >= at else 0.0 for i in range(600))
    falls = (0.5 + 2 / (1 + i / 30) for i in range(600))
    return [a * (1 + b) * (1 + c) for a, b, c in zip(falls, raised, noise, strict=True)]


def new_task(seed: int, healing: float) -> list[float]:
    """A loss that falls to a thousandth, and begins anew with another task."""
    noise, learnt = wandering(0.5, 0.1, seed=seed), [math.exp(-i / 30) + 1e-3 for i in range(300)]
    again = [3 * math.exp(-i / healing) + 1e-3 for i in range(300)]
    return [a * (1 + b) for a, b in zip([*learnt, *again], noise, strict=True)]


def noisy(level: Callable[[float], float], again: float, spread: float) -> Any:
    """A function of a seed: values around a level, with noise that wanders."""
    return lambda seed: around(level, wandering(again, spread, seed=seed))


HEALTHY: dict[str, Callable[[int], list[float]]] = {
    "white noise": noisy(lambda _: 1.0, 0.0, 0.2),
    "it wanders by 8%": noisy(lambda _: 1.0, 0.8, 0.08),
    "it wanders slowly": noisy(lambda _: 1.0, 0.95, 0.15),
    "around zero": lambda seed: wandering(0.8, seed=seed),
    "heavy tails": heavy,
    "it falls": lambda seed: falling(600, 0.1, seed),
    "it falls and wanders": noisy(lambda x: 1 / (1 + 20 * x), 0.9, 0.1),
    "a cosine": noisy(lambda x: 1.5 + math.cos(math.pi * x), 0.8, 0.1),
    "to zero": noisy(lambda x: math.exp(-20 * x), 0.0, 0.5),
    "it swings fast": lambda seed: swinging(12, seed),
    "it swings": lambda seed: swinging(50, seed),
    "it swings slowly": lambda seed: swinging(150, seed),
    "harder data": lambda seed: new_data(seed, 0.3, math.inf),
    "other data": lambda seed: new_data(seed, 4.0, 30.0),
    "another task": lambda seed: new_task(seed, 20.0),
    "it rises slowly": noisy(lambda x: 1 + 2 * x, 0.8, 0.05),
    "a generator's": noisy(lambda x: 3 - 2 * math.exp(-6 * x), 0.5, 0.1),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_losses_do_not_fall_back(kind: str) -> None:
    for seed in range(4):
        assert replay(HEALTHY[kind](seed))[1] == 0, seed
    assert replay(*(HEALTHY[kind](rank) for rank in range(4)))[1] == 0


FAULTS: dict[str, tuple[int, Callable[[int], float], int]] = {  # from a report on, a factor; limit
    "it doubles in 5": (200, lambda i: min(2 ** (i / 5), 10.0), 50),
    "it doubles in 10": (200, lambda i: min(2 ** (i / 10), 10.0), 60),
    "it doubles in 20, early": (50, lambda i: min(2 ** (i / 20), 10.0), 90),
    "it doubles in 50": (200, lambda i: min(2 ** (i / 50), 10.0), 160),
    "it doubles in 50, late": (1000, lambda i: min(2 ** (i / 50), 10.0), 120),
    "to the start": (200, lambda i: 4.0, 50),
    "to the start, late": (1000, lambda i: 4.0, 75),
    "twice": (1000, lambda i: 2.0, 80),
    "a NaN": (200, lambda i: math.nan, 4),
    "an infinity": (10, lambda i: math.inf, 4),
}


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_loss_that_rises_warns_and_then_falls_back(kind: str, ranks: int) -> None:
    begin, factor, limit = FAULTS[kind]
    for seed in range(2):
        series = [falling(begin + limit, 0.03, ranks * seed + rank) for rank in range(ranks)]
        for values in series:
            values[begin:] = [factor(i) * each for i, each in enumerate(values[begin:])]
        warned, fell = replay(*series)
        assert begin < warned < fell <= begin + limit


def test_a_nan_of_one_rank_takes_all_with_it() -> None:
    usual = falling(100)
    broken = [*usual[:60], *[math.nan] * 40]
    assert replay(usual, broken, usual) == (62, 64)
    once = [math.nan if i % 5 in (0, 1, 2) else each for i, each in enumerate(usual)]
    assert replay(usual, once)[1] == 0


def test_a_nan_counts_where_there_are_no_reports_yet() -> None:
    assert replay([1.0, *[1e35] * 4]) == (3, 5)


def test_noise_counts_once_whatever_the_number_of_ranks() -> None:
    """All ranks follow the mean of all, in which one rank's noise is small."""
    own = [[1.0 + each for each in wandering(0.9, 0.3, 100, seed)] for seed in range(8)]
    watches = [Watch(Guard()) for _ in own]
    for values in zip(*own, strict=True):
        for watch, value in zip(watches, values, strict=True):
            watch.report(value)
        told = [each.tell() for each in watches]
        assert told == list(values)
        for watch in watches:
            end(watch, told=told)
    alone = Watch(Guard())
    for values in zip(*own, strict=True):
        end(alone, told=[math.fsum(values) / 8])
    common = [each.memory._replace(sent=0.0) for each in watches]
    assert common == [alone.memory] * 8


def test_a_rank_may_report_seldom_or_often() -> None:
    watch = Watch(Guard())
    assert watch.tell() == 0.0
    for value in (1.0, 2.0, 0.0, 6.0):
        watch.report(value)
    assert [watch.tell(), watch.memory.sent, watch.tell()] == [3.0, 3.0, 0.0]
    end(watch, told=[0.0, 3.0])
    end(watch, told=[0.0, 0.0])
    assert (watch.memory.reports, watch.memory.level) == (1, 3.0)
    end(watch, told=[5.0], committed=False, flagged=True)
    assert watch.memory.reports == 1


def test_outliers_do_nothing() -> None:
    for value in (80.0, 1e25, 1e-6, -50.0):
        values = falling(400)
        values[200:203] = [value] * 3
        values[300] = value
        assert replay(values) == (0, 0)


def test_a_constant_loss_may_stay_or_fall() -> None:
    assert replay([*[1.0] * 100, *[0.5] * 100]) == (0, 0)


@pytest.mark.parametrize("zeros", [1, 10, 50])
def test_zeros_tell_nothing(zeros: int) -> None:
    """A term of weight 0, or a batch that is masked whole, has a loss of 0."""
    assert replay([*[0.0] * zeros, *falling(300)]) == (0, 0)
    late = falling(300)
    late[150:150] = [0.0] * zeros
    assert replay(late) == (0, 0)


def test_a_loss_near_zero_may_vary() -> None:
    drawn = random.Random(0)
    losses = [1e-3 * math.exp(drawn.gauss(0, 1) - step / 100) for step in range(1000)]
    assert replay(losses) == (0, 0)
    settled = [*falling(300), *[1e-6 * drawn.random() for _ in range(300)]]
    assert replay([*settled, *[5e-3] * 300]) == (0, 0)
    assert replay([*settled, *[1.0] * 60])[1] > 600


def test_a_loss_below_zero_is_watched_alike() -> None:
    falls = [each - 2.0 for each in falling(300)]
    assert replay(falls) == (0, 0)
    assert replay([*falls, *[2.0] * 60])[1] > 300


@pytest.mark.parametrize("guard", [None, Guard(trend=None)])
def test_without_the_rule_nobody_looks_at_reports(guard: Guard | None) -> None:
    assert replay([1.0, *[math.nan] * 20], guard=guard) == (0, 0)


def test_a_residual_that_leaves_its_range() -> None:
    watch = Watch(OTHER_RULES)
    for ratio in [0.5, 1, 2, 4, 8, 8, 9, 7, 8, 20, 8]:
        watch.sample(ratio)
        assert watch.tell() == 0.0
    told = []
    for _ in range(3):
        watch.sample(200.0)
        told.append(watch.tell())
    assert told == [0.0, 2 * WARNS, FIRES + 2 * WARNS]
    assert watch.memory.grown == 3


def test_a_residual_that_is_not_known_counts_for_nothing() -> None:
    watch = Watch(Guard(residual=10.0))
    for ratio in (0.0, math.nan):
        watch.sample(ratio)
    assert watch.memory == Memory()


@pytest.mark.parametrize(("dense", "strikes"), [(0.1, 2), (0.3, 0)])
def test_an_exchange_that_takes_longer_than_dense(dense: float, strikes: int) -> None:
    guard = Guard(slower=1.5, trial_every=20)
    watch = Watch(guard)
    for step in range(1, 41):
        is_dense = watch.tries_dense(step - 1)
        assert is_dense == (step in (18, 19, 20, 38, 39, 40))
        first = step in (18, 38)  # it sends all residuals, and allocates buffers
        watch.time(5.0 if first else dense if is_dense else 0.2, step)
    assert watch.memory.slow == strikes
    watch.report(0.5)
    assert watch.tell() == (FIRES + 3 * WARNS if strikes else 0.5)


def test_one_slow_rank_is_not_enough() -> None:
    watch = Watch(Guard(slower=1.5))
    assert end(watch, told=[11 * WARNS, 11 * WARNS, 0.0, 0.5]) == ""
    assert end(watch, told=[11 * WARNS, 11 * WARNS, 3 * WARNS, 0.5]) == "slower"


def test_steps_with_a_nan_have_to_be_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    watch, bad = Watch(Guard(nonfinite=4)), {"committed": False, "flagged": True}
    for _ in range(2):
        assert [end(watch, **bad) for _ in range(3)] == [""] * 3
        assert [end(watch) for _ in range(12)] == [""] * 12
    assert len(caplog.records) == 2  # one warning for each two in a row
    assert [end(watch, **bad) for _ in range(4)] == ["", "", "", "non-finite"]
    assert watch.fallbacks == {"non-finite": 1}
    assert end(Watch(Guard(nonfinite=None)), **bad) == ""


@pytest.mark.parametrize("good", [0, 1, 2])
def test_a_share_of_skipped_steps_falls_back(good: int, caplog: pytest.LogCaptureFixture) -> None:
    """In 300 steps, one is skipped and `good` are committed in turn, as if gradients overflowed."""
    watch = Watch(Guard())
    told = [
        end(watch, committed=bool(i % (good + 1)), flagged=not i % (good + 1)) for i in range(300)
    ]
    assert told.count("non-finite") == 1
    assert sum("If that goes on" in each.message for each in caplog.records) <= 2


def test_a_loss_scale_that_grows_is_healthy() -> None:
    """A scaler halves its scale some 15 times at first, and then once in 2,000 steps."""
    watch = Watch(Guard())
    for step in range(20_000):
        skips = step < 15 or step in (16, 18, 20) or not step % 2000
        assert not end(watch, committed=not skips, flagged=skips)
    assert watch.memory.skipped == 0.0


def test_a_step_that_was_thrown_away_counts_for_nothing() -> None:
    watch = Watch(Guard(nonfinite=1))
    assert end(watch, committed=False) == ""
    assert watch.memory == Memory()


def test_the_stages_of_a_fall_back(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch(Guard(cool_down=2))
    assert not watch.has_ended
    assert end(watch, 5, told=[9 * WARNS, 0.5]) == "trend"
    seen = []
    for step in range(6, 12):
        assert end(watch, step, committed=False, flagged=True) == ""  # not committed: no new stage
        if not watch.has_ended:
            break
        seen.append(watch.memory.stage)
        assert end(watch, step, told=[9 * WARNS]) == ""
    assert seen == [FLUSHING, DENSE, DENSE]
    assert watch.memory == Memory(flagged=1, skipped=1, trend=1)
    assert "step 5: on rank 0 the reported value is a NaN" in caplog.text
    assert "gradients are compressed again" in caplog.text


def test_ranks_log_on_rank_0_alone(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch(Guard())
    assert end(watch, told=[WARNS], logs=False) == ""
    assert not caplog.records
    assert "If that goes on, compression ends" in watch.warnings[0]


def test_a_warning_is_given_once_while_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch(Guard())
    for told in (1, 1, 0, 1, 2):
        end(watch, told=[told * WARNS])
    assert len(caplog.records) == 3


def test_a_rank_keeps_its_own_numbers_when_others_join() -> None:
    mine, theirs = Watch(OTHER_RULES), Watch(OTHER_RULES)
    mine.sample(2.0)
    mine.report(3.0)
    theirs.sample(4.0)
    end(theirs, told=[5.0])
    mine.resume(theirs.memory, own=False)
    assert mine.memory == theirs.memory._replace(usual=math.log(2.0), unsent=3.0, waiting=1)
    mine.resume((), own=True)
    assert mine.memory == Memory()


@pytest.mark.parametrize(
    "wrong",
    [
        {"nonfinite": 0},
        {"trend": -1.0},
        {"residual": 1.0},
        {"slower": math.inf},
        {"cool_down": 0.5},
        {"trial_every": 3},
        {"nonfinite": None, "trend": None, "residual": None},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Guard(**wrong)


def test_what_is_no_guard_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a Guard"):
        TopK(guard=True)  # type: ignore[arg-type]


def test_the_environment_can_ask_for_one() -> None:
    assert parse("TopKEF(guard=Guard(trend=3.0))").settings["guard"] == Guard(trend=3.0)


class Listener:
    """A state that records reported values."""

    def __init__(self) -> None:
        self.told = list[Any]()

    def report(self, value: Any) -> None:
        self.told.append(value)

    def on_step(self, callback: Any) -> None:
        pass


def test_reports_reach_every_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "_watched", weakref.WeakSet())
    state = Listener()
    reporting.watch(state)
    horovod_topk.report(0.5)
    horovod_topk.report(step=3, loss=0.25, accuracy=0.9)
    horovod_topk.report(step=4, accuracy=0.9)
    assert state.told == [0.5, 0.25]


def keras_means(seed: int) -> list[tuple[int, float, float]]:
    """Batch number, its own loss, and the mean of the epoch so far as Keras logs it."""
    drawn, found = random.Random(seed), []
    for epoch in range(8):
        total = 0.0
        for batch in range(100):
            loss = 0.5 + 2.0 / (1 + (100 * epoch + batch) / 60) + 0.3 * drawn.gauss(0, 1)
            total += loss
            found.append((batch, loss, total / (batch + 1)))
    return found


def test_losses_of_batches_are_computed_from_the_mean_that_keras_logs() -> None:
    for seed in range(5):
        of_batch, told = reporting.BatchLoss(), list[float]()
        for batch, loss, mean in keras_means(seed):
            found = of_batch(batch, mean)
            assert found == pytest.approx(loss, abs=1e-9)
            told.append(found)
        assert replay(told)[1] == 0


def test_losses_of_several_batches_at_a_time() -> None:
    """With `steps_per_execution=10` Keras calls at every tenth batch; epochs may have one call."""
    of_batch, all_batches = reporting.BatchLoss(), keras_means(0)
    for at in range(9, 800, 10):
        batch, _, mean = all_batches[at]
        expected = sum(loss for _, loss, _ in all_batches[at - 9 : at + 1]) / 10
        assert of_batch(batch, mean) == pytest.approx(expected)
    assert [of_batch(0, mean) for mean in (3.0, 2.0)] == [3.0, 2.0]


def test_a_nan_spoils_the_mean_until_the_next_epoch() -> None:
    of_batch = reporting.BatchLoss()
    found = [of_batch(batch, mean) for batch, mean in enumerate((1.0, math.nan, math.nan))]
    assert found[0] == 1.0
    assert math.isnan(found[1] or 0.0)
    assert found[2] is None
    assert of_batch(0, 2.0) == 2.0


@pytest.mark.parametrize("value", [10**400, 1j, "0.5", b"1", [1.0], {}], ids=repr)
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"report\(\) was given loss=.*not one number"):
        reporting.number_of(value, "loss")
    with pytest.raises(ConfigError, match="an integer of 33216 bits"):
        reporting.number_of(10**9999)


@pytest.mark.parametrize("length", [19, 21])
def test_the_memory_of_an_older_version_is_loaded(length: int) -> None:
    saved = [float(each) for each in (3, 5, 0, 1, 2, 0, 4, 30, 2, 0.1, 1.8, 1.9, 7)]
    saved = [*saved, 8.0, -0.5, 1.0, 0.2, 0.1, 1.0, 0.75, 2.5][:length]
    known = Memory(3, 5, 0, 1, 2, 0, 4, skipped=0.75 if length == 21 else 0.0)
    known = known._replace(samples=8, usual=-0.5, grown=1, compressed=0.2, dense=0.1, slow=1)
    assert guard_of({"guard": saved}) == known
    assert guard_of({"guard": list(map(float, known))}) == known
    with pytest.raises(StateDictError, match="which is not a list of 27 finite numbers"):
        guard_of({"guard": saved[:18]})
