"""The four rules of the guard, each by itself: when it warns, and when it fires."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Iterable
from typing import Any

import pytest

import horovod_topk
from horovod_topk import reporting
from horovod_topk.core.control.guard import DENSE, FLUSHING, Memory, Watch, guard_of
from horovod_topk.core.run.substitute import parse
from horovod_topk.errors import ConfigError, StateDictError
from horovod_topk.guard import Guard
from horovod_topk.methods.topk import TopK

WARNS, FIRES = 0.5, 1.0  # shares of a rule's strikes


def verdicts(watch: Watch, values: Iterable[float]) -> list[float]:
    """Report values one by one; return the verdict after each."""
    found = []
    for value in values:
        watch.report(value)
        found.append(watch.verdict)
    return found


def end(watch: Watch, step: int = 1, *, told: Iterable[float] = (), **how: Any) -> str:
    how = {"committed": True, "flagged": False, "logs": True, **how}
    return watch.end(step, verdicts=tuple(told), **how)


def falling(count: int, noise: float = 0.05, seed: int = 0) -> list[float]:
    """Values of a loss that falls, with noise."""
    drawn = random.Random(seed)
    return [0.5 + 2.0 / (1 + step / 30) + noise * drawn.gauss(0, 1) for step in range(count)]


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
def test_a_loss_that_falls_is_in_its_trend(noise: float) -> None:
    for seed in range(10):
        assert not any(verdicts(Watch(Guard()), falling(1000, noise, seed)))


def test_a_loss_that_rises_warns_and_then_fires() -> None:
    watch = Watch(Guard())
    verdicts(watch, falling(200))
    assert verdicts(watch, [4.0] * 4) == [0, 1, 1, 9]


def test_a_loss_that_rises_slowly_is_noticed_once_it_is_smoothed() -> None:
    watch = Watch(Guard())
    verdicts(watch, [1.0 + 0.05 * (-1) ** step for step in range(100)])
    told = verdicts(watch, [1.0 + 0.04 * step + 0.05 * (-1) ** step for step in range(60)])
    assert told.index(1.0) < told.index(9.0) < 40


def test_a_loss_that_rises_at_once_is_noticed_at_the_start() -> None:
    """With too large a learning rate, the loss rises in the first steps."""
    told = verdicts(Watch(Guard()), [3.0, *falling(12, 0.2), *[6.0, 8.0, 7.5, 8.5, 9.0, 8.0]])
    assert told[-1] == 9.0


def test_one_outlier_does_nothing() -> None:
    watch = Watch(Guard())
    verdicts(watch, falling(200))
    usual = falling(220)[200:]
    assert not any(verdicts(watch, [*usual[:5], 80.0, *usual[5:]]))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e35])
def test_a_loss_that_is_no_number_has_left_every_trend(value: float) -> None:
    assert verdicts(Watch(Guard()), [1.0, *[value] * 4]) == [0, 0, 1, 1, 9]


def test_a_constant_loss_may_stay_or_fall() -> None:
    assert not any(verdicts(Watch(Guard()), [*[1.0] * 100, *[0.5] * 100]))


def swing(period: int, phase: int = 0, noise: float = 0.0, *, square: bool = False) -> list[float]:
    """1 plus and minus a half in turn, as with data in the order of classes."""
    drawn, values = random.Random(0), []
    for step in range(1000):
        value = math.sin(2 * math.pi * (step + phase + 0.5) / period)
        value = math.copysign(1.0, value) if square else value
        values.append(1.0 + 0.5 * value + noise * drawn.gauss(0, 1))
    return values


@pytest.mark.parametrize("period", [4, 10, 20])
@pytest.mark.parametrize("phase", [0, 5, 10, 15])
def test_a_steady_swing_is_healthy(period: int, phase: int) -> None:
    for noise in (0.0, 0.02, 0.1):
        told = verdicts(Watch(Guard()), swing(period, phase, noise))
        assert max(told) < 8.0
    told = verdicts(Watch(Guard()), swing(period, square=True))
    assert max(told) < 8.0
    assert verdicts(Watch(Guard()), [*swing(period, phase), *[4.0] * 30])[-1] == 9.0


@pytest.mark.parametrize("zeros", [1, 10, 50])
def test_zeros_at_the_start_tell_nothing(zeros: int) -> None:
    """A term of weight 0, or a batch that is masked whole, has a loss of 0."""
    assert not any(verdicts(Watch(Guard()), [*[0.0] * zeros, *[1e-6] * 10]))
    assert not any(verdicts(Watch(Guard()), [*[0.0] * zeros, *falling(300)]))
    late = falling(300)
    late[150:150] = [0.0] * zeros
    assert not any(verdicts(Watch(Guard()), late))


def test_a_loss_near_zero_may_vary() -> None:
    drawn = random.Random(0)
    losses = [1e-3 * math.exp(drawn.gauss(0, 1) - step / 100) for step in range(1000)]
    assert not any(verdicts(Watch(Guard()), losses))
    settled = [*falling(300), *[1e-6 * drawn.random() for _ in range(300)], *[1e-3] * 30]
    assert not any(verdicts(Watch(Guard()), settled))
    assert verdicts(Watch(Guard()), [*losses, *[1.0] * 4])[-1] == 9.0


def test_a_loss_below_zero_is_watched_alike() -> None:
    falls = [each - 10.0 for each in falling(300)]
    assert not any(verdicts(Watch(Guard()), falls))
    assert verdicts(Watch(Guard()), [*falls, *[0.5] * 16])[-1] == 9.0


@pytest.mark.parametrize("guard", [None, Guard(trend=None)])
def test_without_the_rule_nobody_looks_at_reports(guard: Guard | None) -> None:
    assert not any(verdicts(Watch(guard), [1.0, *[math.nan] * 20]))


def test_a_residual_that_leaves_its_range() -> None:
    watch = Watch(Guard(residual=10.0))
    for ratio in [0.5, 1, 2, 4, 8, 8, 9, 7, 8, 20, 8]:
        watch.sample(ratio)
        assert watch.verdict == 0.0
    told = []
    for _ in range(3):
        watch.sample(200.0)
        told.append(watch.verdict)
    assert told == [0.0, 2.0, 10.0]
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
    assert watch.verdict == (11.0 if strikes else 0.0)


def test_one_slow_rank_is_not_enough() -> None:
    watch = Watch(Guard(slower=1.5))
    assert end(watch, told=[11.0, 11.0, 0.0, 0.0]) == ""
    assert end(watch, told=[11.0, 11.0, 3.0, 0.0]) == "slower"


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
    assert end(watch, 5, told=[9.0, 0.0]) == "trend"
    seen = []
    for step in range(6, 12):
        assert end(watch, step, committed=False, flagged=True) == ""  # not committed: no new stage
        if not watch.has_ended:
            break
        seen.append(watch.memory.stage)
        assert end(watch, step, told=[9.0]) == ""
    assert seen == [FLUSHING, DENSE, DENSE]
    assert watch.memory == Memory(flagged=1, skipped=1, trend=1)
    assert "step 5: on rank 0 the reported value has left its trend" in caplog.text
    assert "gradients are compressed again" in caplog.text


def test_ranks_log_on_rank_0_alone(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch(Guard())
    assert end(watch, told=[1.0], logs=False) == ""
    assert not caplog.records
    assert "If that goes on, compression ends" in watch.warnings[0]


def test_a_warning_is_given_once_while_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch(Guard())
    for told in ([1.0], [1.0], [0.0], [1.0], [2.0]):
        end(watch, told=told)
    assert len(caplog.records) == 3


def test_a_rank_keeps_its_own_numbers_when_others_join() -> None:
    mine, theirs = Watch(Guard()), Watch(Guard())
    verdicts(mine, falling(40))
    verdicts(theirs, falling(30, seed=1))
    end(theirs, told=[9.0])
    own = mine.memory
    mine.resume(theirs.memory, own=False)
    assert mine.has_ended
    assert mine.memory.level == own.level
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
    for seed in range(30):
        of_batch, told = reporting.BatchLoss(), list[float]()
        for batch, loss, mean in keras_means(seed):
            found = of_batch(batch, mean)
            assert found == pytest.approx(loss, abs=1e-9)
            told.append(found)
        assert max(verdicts(Watch(Guard()), told)) < 8.0


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


def test_the_memory_of_an_older_version_is_loaded() -> None:
    saved = [float(each) for each in Memory(reports=30, level=2.0, noise=0.1, least=1.9)][:19]
    assert guard_of({"guard": saved}) == saved
    watch = Watch(Guard())
    watch.resume(saved, own=True)
    assert watch.memory == Memory(reports=30, level=2.0, noise=0.1, least=1.9)
    with pytest.raises(StateDictError, match="which is not a list of 21 finite numbers"):
        guard_of({"guard": saved[:18]})
