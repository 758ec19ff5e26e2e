"""The guard watches training by four rules and switches to dense gradients when one fires.

All ranks go through these stages in the same steps. After the first, only a committed step ends a
stage:

    compressing    until a rule fires at the end of a step
    flushing       one dense step, which sends the gradients and all residuals
    dense          the dense level, in which residuals stay zero
    compressing    again, after `cool_down` steps, if `cool_down` is set

Each rank has the non-finite flags of all ranks, and counts steps with a NaN or an infinity: those
in a row, and all of them less a quarter of the other steps. The other rules judge a rank's own
numbers: its reports, its residual, its seconds. The rank sends its verdict with the next step, as
one number in a payload's header (the measure "verdict"). So a decision takes no collective of its
own, and depends only on numbers that all ranks have.

A rule counts strikes: how often in a row its number was out of range; a report that is far out
counts as several. It warns at half of the strikes at which it fires, so that a single outlier does
nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from horovod_topk.core.state.state_dict import FOREIGN, GUARD, are_numbers, refused
from horovod_topk.guard import BY_CLOCK, OF_ONE_RANK, REASONS, Guard

log = logging.getLogger("horovod_topk")

# A verdict is 0 if no rule warns, the rule's position in `OF_ONE_RANK` (from 1 on) if it warns, and
# FIRES plus that position if the rule fires.
FIRES = 8.0
STAGES = COMPRESSING, FLUSHING, DENSE = 0, 1, 3  # 2 and 4 are of older versions' checkpoints

STRIKES = {"trend": 16, "residual": 3, "slower": 2}  # strikes in a row at which a rule fires
SMOOTH = 8  # a usual value is a running mean over about so many reports or samples
REPORTS, SAMPLES = 10, 8  # the first ones only set the usual value, and count no strike
LEARNT = 20  # the noise is a running mean over about so many reports
QUIET = 0.04  # least noise, as a share of the smoothed value,
SETTLED = 0.004  # and of the largest smoothed value so far
SMALLEST = 1e-4  # least noise in any case: the margin does not vanish with the value
FALL = 4  # a report counts as noise of at most so many margins where it is below the others
FORGET = 500  # reports after which the smallest smoothed value has mostly been forgotten
TRIAL = 3  # dense steps in a trial; the first is not timed
FAR = 2  # a single report above the margin times this is a strike,
VERY_FAR, WEIGHT = 4, 4  # and one above the margin times `VERY_FAR` is `WEIGHT` strikes,
HUGE = 1e30  # as is a report of this magnitude or a NaN in any case
KEPT = 16  # newest warnings that are kept
PARDON = 0.25  # what a committed step takes off the count of skipped steps
SHARE = 2  # the rule `nonfinite` also fires at so many times its limit of skipped steps


class Memory(NamedTuple):
    """A guard's counters and running means, as saved in state dicts and sent to joining ranks."""

    stage: float = COMPRESSING  # equal on all ranks, as are the next six fields and `skipped`
    since: float = 0  # committed steps in this stage
    flagged: float = 0  # steps in a row with a NaN or an infinity
    nonfinite: float = 0  # how often this rule has fired, as in the next three fields
    trend: float = 0
    residual: float = 0
    slower: float = 0
    reports: float = 0  # number of reports that were learnt from; from here on, this rank's own
    level: float = 0.0  # running mean of the reports
    noise: float = 0.0  # running mean of a report's distance from the one before or the level
    last: float = 0.0  # the last report
    least: float = 0.0  # the smallest recent level
    strayed: float = 0  # strikes of `trend`
    samples: float = 0  # number of samples of the residual
    usual: float = 0.0  # running mean of log(residual norm / gradient norm)
    grown: float = 0  # strikes of `residual`
    compressed: float = 0.0  # seconds of encoding, decoding and waiting in a compressed step
    dense: float = 0.0  # the same seconds in a dense step
    slow: float = 0  # strikes of `slower`
    skipped: float = 0.0  # steps with a NaN or an infinity, less `PARDON` for each other step
    height: float = 0.0  # the largest magnitude of `level`


COMMON = (*Memory._fields[: Memory._fields.index("reports")], "skipped")  # equal on all ranks
LENGTHS = len(Memory._fields) - 2, len(Memory._fields)  # of saved memories: of older versions, too
SIGNED = {"level", "last", "least", "usual"}  # fields that may be negative


def is_memory(numbers: Sequence[float]) -> bool:
    """Whether finite numbers are a memory that a guard can have."""
    known = Memory(*numbers)
    negative = (value < 0 for name, value in known._asdict().items() if name not in SIGNED)
    return known.stage in STAGES and not any(negative)


_SHOWN = {
    "trend": "the reported value has left its trend",
    "residual": "the norm of the residual is far above its usual share of the gradient's",
    "slower": "compression takes longer than dense gradients would",
}


class Watch:
    """The guard of one optimizer.

    Args:
        guard: its settings; None: the guard never falls back.

    Attributes:
        memory: counters and running means.
        warnings: texts of the newest warnings, as in the log.
    """

    def __init__(self, guard: Guard | None) -> None:
        self._guard, self.memory = guard, Memory()
        self.warnings: tuple[str, ...] = ()
        self._warned = ""  # the rule that warned in the last step; empty: none did

    # Questions of a step.

    @property
    def has_ended(self) -> bool:
        """Whether the guard has ended compression, so that the next step is dense."""
        return self.memory.stage != COMPRESSING

    def tries_dense(self, committed: int) -> bool:
        """Whether the step after `committed` committed ones is dense, to time a dense step."""
        guard = self._guard
        if guard is None or guard.slower is None:
            return False
        return guard.trial_every - TRIAL <= committed % guard.trial_every

    @property
    def verdict(self) -> float:
        """This rank's verdict, which it sends to the others as the measure `VERDICT`."""
        memory, found = self.memory, 0.0
        if self._guard is None or self.has_ended:
            return found
        strikes = (memory.strayed, memory.grown, memory.slow)
        pairs = zip(OF_ONE_RANK, strikes, strict=True)
        for position, (rule, count) in enumerate(pairs, start=1):
            if count >= STRIKES[rule]:
                found = max(found, FIRES + position)
            elif 2 * count >= STRIKES[rule]:
                found = max(found, float(position))
        return found

    # Observations of this rank.

    def report(self, value: float) -> None:
        """Apply the rule `trend` to a value that the user reports; lower values are better."""
        if self._guard is None or self._guard.trend is None or self.has_ended:
            return
        m = self.memory
        if value == 0.0:  # a term of weight 0, or a batch that is masked whole, tells nothing
            return
        if not abs(value) < HUGE:
            self.memory = m._replace(strayed=m.strayed + WEIGHT)
            return
        is_learnt = m.reports >= REPORTS
        usual = max(m.noise, QUIET * abs(m.level), SETTLED * m.height, SMALLEST)
        margin, away = self._guard.trend * usual, value - m.level
        # A single outlier moves the level by a fourth of the margin, and the noise by a tenth.
        step = min(away, 2 * margin) if is_learnt else away
        level = m.level + max(1 / SMOOTH, 1 / (m.reports + 1)) * step
        if is_learnt and (level > m.least + margin or value > m.least + FAR * margin):
            weight = WEIGHT if value > m.least + VERY_FAR * margin else 1
            self.memory = m._replace(level=level, last=value, strayed=m.strayed + weight)
            return
        noise = m.noise
        if m.reports:
            distance = abs(value - m.last)  # of neighbours: a falling loss adds little to it
            if is_learnt:
                # What falls may rise again by as much, as with tasks in turn.
                distance = max(min(distance, 2 * usual), min(-away, FALL * margin))
            noise += max(1 / LEARNT, 1 / m.reports) * (distance - noise)
        least = min(level, m.least + (level - m.least) / FORGET) if m.reports else level
        learnt = {"reports": m.reports + 1, "level": level, "noise": noise, "least": least}
        height = max(m.height, abs(level))
        self.memory = m._replace(**learnt, last=value, strayed=0, height=height)

    def sample(self, ratio: float) -> None:
        """Apply the rule `residual` to one step's residual norm divided by its gradient norm."""
        if self._guard is None or self._guard.residual is None or self.has_ended or not ratio > 0.0:
            return
        m, now = self.memory, math.log(ratio)
        if m.samples >= SAMPLES and now > m.usual + math.log(self._guard.residual):
            self.memory = m._replace(grown=m.grown + 1)
            return
        usual = m.usual + max(1 / SMOOTH, 1 / (m.samples + 1)) * (now - m.usual)
        self.memory = m._replace(samples=m.samples + 1, usual=usual, grown=0)

    def time(self, seconds: float, committed: int) -> None:
        """Apply the rule `slower` to the seconds that a committed step's exchange took.

        committed: number of committed steps, this one included.
        """
        guard, m = self._guard, self.memory
        if guard is None or guard.slower is None or self.has_ended:
            return
        place = (committed - 1) % guard.trial_every  # position of the step between trials
        first = guard.trial_every - TRIAL
        if place == first or place < TRIAL:  # the first steps at a new level are slower
            return
        if place < first:
            share = 1 / SMOOTH if m.compressed else 1.0
            compressed = m.compressed + share * (seconds - m.compressed)
            self.memory = m._replace(compressed=compressed)
            return
        dense = seconds if place == first + 1 else min(m.dense, seconds)
        slow = m.slow
        if place == guard.trial_every - 1:
            slow = slow + 1 if m.compressed > guard.slower * dense else 0
        self.memory = m._replace(dense=dense, slow=slow)

    # Decisions of all ranks.

    def end(
        self, step: int, *, committed: bool, flagged: bool, verdicts: Sequence[float], logs: bool
    ) -> str:
        """Decide at the end of a step whether the guard enters its next stage.

        Args:
            step: its number.
            committed: whether the step was committed; else it was rolled back.
            flagged: whether some rank had a NaN or an infinity.
            verdicts: verdicts that ranks sent in this step, in rank order; (): none are usable.
            logs: whether this rank writes to the log.

        Returns:
            The rule that ends compression with this step; empty: compression goes on.
        """
        if self._guard is None or not (committed or flagged):
            return ""
        if self.has_ended:
            if committed:
                self._go_on(step, logs)
            return ""
        m = self.memory
        count = 0.0 if committed else m.flagged + 1
        skipped = max(0.0, m.skipped - PARDON) if committed else m.skipped + 1
        self.memory = m._replace(flagged=count, skipped=skipped)
        rule, why, fires = self._judge(verdicts if committed else ())
        if not fires:
            if rule and rule != self._warned:
                self._say(f"step {step}: {why}. If that goes on, compression ends", logs)
            self._warned = rule
            return ""
        fallen = {"stage": float(FLUSHING), rule: getattr(self.memory, rule) + 1}
        self.memory = Memory(**{each: getattr(self.memory, each) for each in COMMON})
        self.memory = self.memory._replace(since=0, flagged=0, skipped=0.0, **fallen)
        self._say(f"step {step}: {why}. All ranks go back to dense gradients. {self._then}", logs)
        return REASONS[0] if rule == "nonfinite" else rule

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Number of fall-backs by reason."""
        m = self.memory
        counts = zip(REASONS, (m.nonfinite, m.trend, m.residual, m.slower), strict=True)
        return {reason: int(count) for reason, count in counts if count}

    def resume(self, saved: Sequence[float], *, own: bool) -> None:
        """Load a guard's memory from a state dict or another rank.

        own: whether this rank saved it; else the rank keeps its own running means, if it has any.
        """
        known = Memory(*saved) if saved else Memory()
        if own or not (self.memory.reports or self.memory.samples or self.memory.compressed):
            self.memory = known
        else:
            common = {each: getattr(known, each) for each in COMMON}
            self.memory = self.memory._replace(**common)

    @property
    def _then(self) -> str:
        """Sentence for the log on the steps that follow a fall-back."""
        assert self._guard is not None
        then = "The next step sends all residuals"
        if self._guard.cool_down is None:
            return then
        return f"{then}; compression comes back after {self._guard.cool_down} dense steps"

    def _judge(self, verdicts: Sequence[float]) -> tuple[str, str, bool]:
        """Find a rule that warns or fires: its name, a text, and whether it fires; empty: none."""
        assert self._guard is not None
        count, limit = int(self.memory.flagged), self._guard.nonfinite
        often = limit is not None and self.memory.skipped >= limit
        share = "more than a fifth of the last steps had a NaN or an infinity"
        if limit is not None and count:  # a step that was committed is no reason to fall back
            fires = count >= limit or self.memory.skipped >= SHARE * limit
            if 2 * count >= limit:
                found = f"{count} step{'s' * (count > 1)} in a row had a NaN or an infinity"
                return "nonfinite", found, fires
            if often:
                return "nonfinite", share, fires
        rules = [each for each in verdicts if each]
        slow = [each for each in rules if each % FIRES == OF_ONE_RANK.index(BY_CLOCK) + 1]
        if 2 * len(slow) <= len(verdicts):  # a slow rank makes the others wait at every level
            rules = [each for each in rules if each not in slow]
        if not rules:
            return ("nonfinite", share, False) if often else ("", "", False)
        worst = max(rules)
        rule = OF_ONE_RANK[int(worst % FIRES) - 1]
        ranks = [rank for rank, each in enumerate(verdicts) if each == worst]
        where = f"on rank {', '.join(map(str, ranks[:8]))} "
        return rule, where + _SHOWN[rule], worst >= FIRES

    def _go_on(self, step: int, logs: bool) -> None:
        """Enter the next stage after a committed dense step, if it is time."""
        assert self._guard is not None
        memory = self.memory
        if memory.stage == FLUSHING:
            self.memory = memory._replace(stage=float(DENSE), since=0)
            self._say(f"step {step}: training is dense from here on", logs)
        elif memory.since + 1 == self._guard.cool_down:
            self.memory = memory._replace(stage=float(COMPRESSING), since=0)
            self._say(f"step {step}: gradients are compressed again", logs)
        else:
            self.memory = memory._replace(since=memory.since + 1)

    def _say(self, text: str, logs: bool) -> None:
        self.warnings = (*self.warnings, text)[-KEPT:]
        if logs:
            log.warning("TopKEF guard, %s", text)


def guard_of(state: Mapping[str, Any]) -> Sequence[float]:
    """What a guard remembered when a state dict was made; (): nothing.

    Raises:
        StateDictError: it is not a list of as many finite numbers, or a counter is out of range.
    """
    memory = state.get(GUARD, [])
    if not (are_numbers(memory) and len(memory) in (0, *LENGTHS)):
        limits = f"which is not a list of {LENGTHS[-1]} finite numbers"
        raise refused(f"a guard remembers {memory!r}, {limits}")
    if memory and not is_memory(memory):
        older = "Remove 'guard' from that of an older version whose guard was handing momentum over"
        what = "of which a counter is negative or the stage is none"
        raise refused(f"a guard remembers {memory!r}, {what}", f"{FOREIGN}. {older}")
    return memory
