"""The guard: it watches training by four rules, and falls back from compression to dense gradients.

All ranks go through these stages alike, each from one committed step to the next:

    compressing    a rule fires at the end of a step
    flushing       one dense step, which sends gradients and all residuals
    handing over   one dense step more, where the optimizer's momentum was taken over: the residuals
                   are zero, and what is exchanged is the mean of the ranks' velocities. The
                   optimizer takes it as its momentum
    dense          the dense level, without momentum correction: no residual, no velocity
    compressing    again, after `cool_down` steps, if that is asked for

Each rank has the flags of all, and counts steps with a NaN or an infinity. By the other rules a
rank judges its own numbers: what it reports, its residual, its clock. It tells the others its
verdict in the next step, in one number of a payload's header (the measure "verdict"), so that no
decision takes a collective, and none depends on a number that ranks do not have in common.

A rule counts strikes: how often in a row its number was out of range. It warns at half of the
strikes at which it fires, so that a single outlier does nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from horovod_topk.guard import BY_CLOCK, OF_ONE_RANK, REASONS, Guard

log = logging.getLogger("horovod_topk")

# A verdict is 0, or the position in `OF_ONE_RANK`, from 1 on, of a rule that warns; and so much
# more of one that fires.
FIRES = 8.0
COMPRESSING, FLUSHING, HANDING_OVER, DENSE = range(4)

STRIKES = {"trend": 4, "residual": 3, "slower": 2}  # in a row, at which a rule fires
SMOOTH = 8  # reports or samples, over which a usual value is smoothed
REPORTS, SAMPLES = 10, 8  # from which a usual value is learnt first
LEARNT = 20  # reports, over which their noise is averaged
QUIET = 0.04  # of a smoothed value, as the least noise that is believed
FORGET = 500  # reports, over which the smallest smoothed value is forgotten
TRIAL = 3  # dense steps of a trial, of which the first does not count
FAR = 2  # times the margin, above which a report counts before the smoothed value does
HUGE = 1e30  # a report above it has left every trend
KEPT = 16  # warnings


class Memory(NamedTuple):
    """What a guard remembers: numbers, in state dicts and for ranks that join."""

    stage: float = COMPRESSING  # equal on all ranks, as are the next six
    since: float = 0  # committed steps of this stage
    flagged: float = 0  # steps in a row with a NaN or an infinity
    nonfinite: float = 0  # how often each rule has fired
    trend: float = 0
    residual: float = 0
    slower: float = 0
    reports: float = 0  # of this rank, as is all that follows
    level: float = 0.0  # of reports, smoothed
    noise: float = 0.0  # the usual distance of a report from the one before
    last: float = 0.0  # the last one
    least: float = 0.0  # the smallest level lately
    strayed: float = 0  # strikes
    samples: float = 0
    usual: float = 0.0  # logarithm of the residual's norm over the gradient's
    grown: float = 0  # strikes
    compressed: float = 0.0  # seconds of encoding, decoding and waiting
    dense: float = 0.0  # the same of a dense step
    slow: float = 0  # strikes


COMMON = Memory._fields[: Memory._fields.index("reports")]
_SHOWN = {
    "trend": "the reported value has left its trend",
    "residual": "the norm of the residual is far above its usual share of the gradient's",
    "slower": "compression takes longer than dense gradients would",
}


class Watch:
    """The guard of one optimizer.

    Args:
        guard: its settings; None: it never falls back.

    Attributes:
        memory: what it remembers from step to step.
        warnings: what it has warned of, as in the log.
        hands_over: whether the optimizer takes its momentum back in a fall-back.
    """

    def __init__(self, guard: Guard | None) -> None:
        self._guard, self.memory, self.hands_over = guard, Memory(), False
        self.warnings: tuple[str, ...] = ()
        self._warned = ""  # the rule that was warned of last, while that goes on

    # What a step asks.

    @property
    def is_over(self) -> bool:
        """Whether compression has ended: a step that begins now is dense."""
        return self.memory.stage != COMPRESSING

    @property
    def corrects(self) -> bool:
        """Whether a momentum that is corrected is corrected in a step that begins now."""
        return not (self.hands_over and self.memory.stage == DENSE)

    @property
    def is_handing_over(self) -> bool:
        """Whether the step that begins now, or is under way, exchanges the mean velocities."""
        return self.memory.stage == HANDING_OVER

    def tries_dense(self, committed: int) -> bool:
        """Whether a step is dense in order to time it, after so many committed ones."""
        guard = self._guard
        if guard is None or guard.slower is None:
            return False
        return guard.trial_every - TRIAL <= committed % guard.trial_every

    @property
    def verdict(self) -> float:
        """What this rank tells the others of its own numbers: `VERDICT`."""
        memory, found = self.memory, 0.0
        if self._guard is None or self.is_over:
            return found
        strikes = (memory.strayed, memory.grown, memory.slow)
        pairs = zip(OF_ONE_RANK, strikes, strict=True)
        for position, (rule, count) in enumerate(pairs, start=1):
            if count >= STRIKES[rule]:
                found = max(found, FIRES + position)
            elif 2 * count >= STRIKES[rule]:
                found = max(found, float(position))
        return found

    # What a rank observes.

    def report(self, value: float) -> None:
        """Look at a value that the user reports, lower being better: the rule `trend`."""
        if self._guard is None or self._guard.trend is None or self.is_over:
            return
        m = self.memory
        if not abs(value) < HUGE:
            self.memory = m._replace(strayed=m.strayed + 1)
            return
        is_learnt, noise = m.reports >= REPORTS, m.noise
        usual = max(noise, QUIET * abs(m.level))
        margin, away = self._guard.trend * usual, value - m.level
        # A single outlier moves the level by a fourth of the margin, and the noise by a tenth.
        step = min(away, 2 * margin) if is_learnt else away
        level = m.level + max(1 / SMOOTH, 1 / (m.reports + 1)) * step
        if is_learnt and (level > m.least + margin or value > m.least + FAR * margin):
            self.memory = m._replace(level=level, last=value, strayed=m.strayed + 1)
            return
        if m.reports:
            distance = abs(value - m.last)  # a slope adds little to it
            distance = min(distance, 2 * usual) if is_learnt else distance
            noise += max(1 / LEARNT, 1 / m.reports) * (distance - noise)
        least = min(level, m.least + (level - m.least) / FORGET) if m.reports else level
        learnt = {"reports": m.reports + 1, "level": level, "noise": noise, "least": least}
        self.memory = m._replace(**learnt, last=value, strayed=0)

    def sample(self, ratio: float) -> None:
        """Look at the residual's norm over the gradient's in one step: the rule `residual`."""
        if self._guard is None or self._guard.residual is None or self.is_over or not ratio > 0.0:
            return
        m, now = self.memory, math.log(ratio)
        if m.samples >= SAMPLES and now > m.usual + math.log(self._guard.residual):
            self.memory = m._replace(grown=m.grown + 1)
            return
        usual = m.usual + max(1 / SMOOTH, 1 / (m.samples + 1)) * (now - m.usual)
        self.memory = m._replace(samples=m.samples + 1, usual=usual, grown=0)

    def time(self, seconds: float, committed: int) -> None:
        """Look at what the exchange of a committed step has cost this rank: the rule `slower`.

        committed: steps, this one included.
        """
        guard, m = self._guard, self.memory
        if guard is None or guard.slower is None or self.is_over:
            return
        place = (committed - 1) % guard.trial_every  # of the step
        first = guard.trial_every - TRIAL
        if place == first or place < TRIAL:  # a change of level takes its time, too
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

    # What all ranks decide.

    def end(
        self, step: int, *, committed: bool, flagged: bool, verdicts: Sequence[float], logs: bool
    ) -> str:
        """Go on to the next stage at the end of a step, if it is time.

        Args:
            step: its number.
            committed: whether it was; else it was rolled back.
            flagged: whether some rank had a NaN or an infinity.
            verdicts: what ranks told in it, in rank order; (): nothing that can be used.
            logs: whether this rank writes to the log.

        Returns:
            The rule by which compression ends with this step; empty: it does not.
        """
        if self._guard is None or not (committed or flagged):
            return ""
        if self.is_over:
            if committed:
                self._go_on(step, logs)
            return ""
        count = 0.0 if committed else self.memory.flagged + 1
        self.memory = self.memory._replace(flagged=count)
        rule, why, fires = self._judge(verdicts if committed else ())
        if not fires:
            if rule and rule != self._warned:
                self._say(f"step {step}: {why}. If that goes on, compression ends", logs)
            self._warned = rule
            return ""
        fallen = {"stage": float(FLUSHING), rule: getattr(self.memory, rule) + 1}
        self.memory = Memory(**{each: getattr(self.memory, each) for each in COMMON})
        self.memory = self.memory._replace(since=0, flagged=0, **fallen)
        self._say(f"step {step}: {why}. All ranks go back to dense gradients. {self._then}", logs)
        return REASONS[0] if rule == "nonfinite" else rule

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """How often each rule has ended compression."""
        m = self.memory
        counts = zip(REASONS, (m.nonfinite, m.trend, m.residual, m.slower), strict=True)
        return {reason: int(count) for reason, count in counts if count}

    def resume(self, saved: Sequence[float], *, own: bool) -> None:
        """Go on where a state dict or another rank is.

        own: whether these are this rank's numbers; else it keeps its own, if it has seen any.
        """
        known = Memory(*saved) if saved else Memory()
        if own or not (self.memory.reports or self.memory.samples or self.memory.compressed):
            self.memory = known
        else:
            common = {each: getattr(known, each) for each in COMMON}
            self.memory = self.memory._replace(**common)

    @property
    def _then(self) -> str:
        """What follows a fall-back, in words."""
        assert self._guard is not None
        then = "The next step sends all residuals"
        if self.hands_over:
            then += ", and the one after it hands momentum back to the optimizer"
        if self._guard.cool_down is None:
            return then
        return f"{then}; compression comes back after {self._guard.cool_down} dense steps"

    def _judge(self, verdicts: Sequence[float]) -> tuple[str, str, bool]:
        """A rule that warns or fires, in words, and whether it fires; empty: none does."""
        assert self._guard is not None
        count, limit = int(self.memory.flagged), self._guard.nonfinite
        if limit is not None and count and 2 * count >= limit:
            found = f"{count} step{'s' * (count > 1)} in a row had a NaN or an infinity"
            return "nonfinite", found, count >= limit
        told = [each for each in verdicts if each]
        slow = [each for each in told if each % FIRES == OF_ONE_RANK.index(BY_CLOCK) + 1]
        if 2 * len(slow) <= len(verdicts):  # a slow rank makes the others wait at every level
            told = [each for each in told if each not in slow]
        if not told:
            return "", "", False
        worst = max(told)
        rule = OF_ONE_RANK[int(worst % FIRES) - 1]
        ranks = [rank for rank, each in enumerate(verdicts) if each == worst]
        where = f"on rank {', '.join(map(str, ranks[:8]))} "
        return rule, where + _SHOWN[rule], worst >= FIRES

    def _go_on(self, step: int, logs: bool) -> None:
        """Take the next stage after a committed step that was dense."""
        assert self._guard is not None
        memory = self.memory
        if memory.stage == FLUSHING:
            stage = HANDING_OVER if self.hands_over else DENSE
        elif memory.stage == HANDING_OVER:
            stage = DENSE
        elif memory.since + 1 == self._guard.cool_down:
            self.memory = memory._replace(stage=float(COMPRESSING), since=0)
            self._say(f"step {step}: gradients are compressed again", logs)
            return
        else:
            self.memory = memory._replace(since=memory.since + 1)
            return
        self.memory = memory._replace(stage=float(stage), since=0)
        if stage == DENSE:
            self._say(f"step {step}: training is dense from here on", logs)

    def _say(self, text: str, logs: bool) -> None:
        self.warnings = (*self.warnings, text)[-KEPT:]
        if logs:
            log.warning("TopKEF guard, %s", text)
