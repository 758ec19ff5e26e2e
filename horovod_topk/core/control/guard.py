"""The guard watches training by four rules and switches to dense gradients when one fires.

All ranks go through these stages in the same steps. After the first, only a committed step ends a
stage:

    compressing    until a rule fires at the end of a step
    flushing       one dense step, which sends the gradients and all residuals
    dense          the dense level, in which residuals stay zero
    compressing    again, after `cool_down` steps, if `cool_down` is set

Each rank has the non-finite flags of all ranks, and counts steps with a NaN or an infinity: those
in a row, and all of them less a quarter of the other steps. For the other rules, each rank sends
one number with its next step, in a payload's header (the measure "verdict"): the value that it
reported, or its verdict on its own residual or seconds, or on a loss that is a NaN. So a decision
takes no collective of its own, and depends only on numbers that all ranks have.

The rule `trend` follows the mean of the values of all ranks, so that more ranks add no noise, and
learns how far it usually rises, once smoothed, above its least value. These rises have the noise of
the values in them, their autocorrelation, and usual swings and drifts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from horovod_topk.core.state.state_dict import FOREIGN, GUARD, are_numbers, refused
from horovod_topk.guard import BY_CLOCK, OF_ONE_RANK, REASONS, Guard

log = logging.getLogger("horovod_topk")

# A rank's verdict is 0 if no rule warns, the rule's position in `OF_ONE_RANK` (from 1 on) if it
# warns, and FIRES plus that position if the rule fires. VERDICT times that is beyond all reports.
FIRES, VERDICT = 8, 1e33
HUGE = 1e30  # a report of this magnitude counts as a NaN
STAGES = COMPRESSING, FLUSHING, DENSE = 0, 1, 3  # 2 and 4 are of older versions' checkpoints

STRIKES = {"trend": 4, "residual": 3, "slower": 2}  # strikes in a row at which a rule fires
SMOOTH = 8  # a usual value is a running mean over about so many reports or samples
REPORTS, SAMPLES = 20, 8  # the first ones only set the usual value, and count no strike
SHARE, LITTLE = 1 / 8, 1 / 400  # least usual rise, of the least and of the largest smoothed value
WHOLE = 1 / 4  # largest usual rise, of the mean, if no loss was below zero
MEMORY = 64, 4  # usual rise and least value are of the last 64 reports and a fourth of all before
PATIENCE = 32  # reports above the limit at which `trend` fires, and one for so many before
HEALED = 0.15  # the count starts anew where the value has fallen by this share of its rise
UP = 4  # a report counts as at most so many limits (or present rises) above the rest; 1 below it
TRIAL = 3  # dense steps in a trial; the first is not timed
KEPT = 16  # newest warnings that are kept
PARDON = 0.25  # what a committed step takes off the count of skipped steps
OFTEN = 2  # the rule `nonfinite` also fires at so many times its limit of skipped steps


class Memory(NamedTuple):
    """A guard's counters and running means, as saved in state dicts and sent to joining ranks."""

    stage: float = COMPRESSING  # fields from here on are equal on all ranks
    since: float = 0  # committed steps in this stage
    flagged: float = 0  # steps in a row with a NaN or an infinity
    nonfinite: float = 0  # how often this rule has fired, as in the next three fields
    trend: float = 0
    residual: float = 0
    slower: float = 0
    skipped: float = 0.0  # steps with a NaN or an infinity, less `PARDON` for each other step
    reports: float = 0  # number of mean reports that were learnt from
    level: float = 0.0  # running mean of the mean reports
    least: float = 0.0  # the smallest recent level
    height: float = 0.0  # the largest magnitude of the level
    mean: float = 0.0  # slower running mean of the level
    rises: float = 0.0  # running mean of the squares of the level's rises above `least`
    negative: float = 0  # mean reports below zero
    strayed: float = 0  # reports in a row for which the level was above its limit
    peak: float = 0.0  # the highest level of these reports
    samples: float = 0  # number of samples of the residual; from here on, this rank's own
    usual: float = 0.0  # running mean of log(residual norm / gradient norm)
    grown: float = 0  # strikes of `residual`
    compressed: float = 0.0  # seconds of encoding, decoding and waiting in a compressed step
    dense: float = 0.0  # the same seconds in a dense step
    slow: float = 0  # strikes of `slower`
    broken: float = 0  # strikes of `trend`: reports in a row that were a NaN
    unsent: float = 0.0  # sum of the reports that this rank has not sent yet
    waiting: float = 0  # number of these reports
    sent: float = 0.0  # number that this rank sends with the present step


COMMON = Memory._fields[: Memory._fields.index("samples")]  # equal on all ranks
COUNTS = Memory._fields[3:7]  # kept in a fall-back, after which all else is learnt anew
OLDER = 19, 21  # lengths of memories that older versions saved
SIGNED = {
    "level",
    "least",
    "mean",
    "peak",
    "usual",
    "unsent",
    "sent",
}  # fields that may be negative

_SHOWN = {
    "trend": "the reported value is a NaN or too large",
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

    # Observations of this rank.

    def report(self, value: float) -> None:
        """Note a value that the user reports, for the rule `trend`; lower values are better."""
        if self._guard is None or self._guard.trend is None or self.has_ended:
            return
        m = self.memory
        if not abs(value) < HUGE:
            self.memory = m._replace(broken=m.broken + 1)
        elif value != 0.0:  # a term of weight 0, or a batch that is masked whole, tells nothing
            self.memory = m._replace(unsent=m.unsent + value, waiting=m.waiting + 1, broken=0)

    def tell(self) -> float:
        """Return the number that this rank sends to all with its next step, the measure `VERDICT`.

        It is the mean of the reports since the last call, 0 if there are none, or a verdict.
        """
        m, verdict = self.memory, 0
        pairs = zip(OF_ONE_RANK, (m.broken, m.grown, m.slow), strict=True)
        for position, (rule, count) in enumerate(pairs, start=1):
            if 2 * count >= STRIKES[rule]:
                verdict = max(verdict, position + FIRES * (count >= STRIKES[rule]))
        sent = verdict * VERDICT if verdict else m.unsent / max(m.waiting, 1.0)
        self.memory = m._replace(unsent=0.0, waiting=0, sent=sent)
        return sent

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
        self, step: int, *, committed: bool, flagged: bool, numbers: Sequence[float], logs: bool
    ) -> str:
        """Decide at the end of a step whether the guard enters its next stage.

        Args:
            step: its number.
            committed: whether the step was committed; else it was rolled back.
            flagged: whether some rank had a NaN or an infinity.
            numbers: those that ranks sent in this step, in rank order; (): none are usable.
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
        verdicts = [round(each / VERDICT) for each in numbers] if committed else []
        reports = [each for each in numbers if 0.0 < abs(each) <= HUGE] if committed else []
        if reports:
            self._follow(math.fsum(reports) / len(reports))
        rule, why, fires = self._judge(verdicts)
        if not fires:
            if rule and rule != self._warned:
                self._say(f"step {step}: {why}. If that goes on, compression ends", logs)
            self._warned = rule
            return ""
        counts = {each: getattr(self.memory, each) + (each == rule) for each in COUNTS}
        self.memory = Memory(stage=float(FLUSHING), **counts)
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

        own: whether this rank saved it; else the rank keeps its own running means.
        """
        known = Memory(*saved) if saved else Memory()
        common = {each: getattr(known, each) for each in COMMON}
        self.memory = known if own else self.memory._replace(**common)

    @property
    def _then(self) -> str:
        """Sentence for the log on the steps that follow a fall-back."""
        assert self._guard is not None
        then = "The next step sends all residuals"
        if self._guard.cool_down is None:
            return then
        return f"{then}; compression comes back after {self._guard.cool_down} dense steps"

    def _follow(self, value: float) -> None:
        """Apply the rule `trend` to the mean of the reports of all ranks."""
        m = self.memory._replace(negative=self.memory.negative + (value < 0.0))
        limit = self._limit
        is_learnt, n = m.reports >= REPORTS, m.reports + 1
        away, most = value - m.level, max(limit, m.level - m.least)
        away = max(-most, min(away, UP * most)) if is_learnt else away
        level = m.level + max(1 / SMOOTH, 1 / n) * away
        least = m.least if m.reports else level
        rise, share = level - least, 1 / (MEMORY[0] + n / MEMORY[1])
        least += rise if rise < 0 else share * rise
        if is_learnt and rise > limit:
            peak = max(level, m.peak) if m.strayed else level
            strayed = 0 if level < peak - HEALED * (peak - m.least) else m.strayed + 1
            self.memory = m._replace(level=level, least=least, strayed=strayed, peak=peak)
            return
        share = max(share, 1 / n)
        self.memory = m._replace(
            reports=n,
            level=level,
            least=least,
            height=max(m.height, abs(level)),
            mean=m.mean + share * (level - m.mean),
            rises=m.rises + share * (max(rise, 0.0) ** 2 - m.rises),
            strayed=0,
        )

    @property
    def _limit(self) -> float:
        """The largest rise of the smoothed reports above their least value that is in range."""
        assert self._guard is not None and self._guard.trend is not None
        m = self.memory
        usual = math.sqrt(m.rises) * (1 + MEMORY[0] / max(m.reports, 1.0))  # few tell too little
        if not m.negative:
            usual = min(usual, WHOLE * m.mean)
        return self._guard.trend * max(usual, SHARE * abs(m.least), LITTLE * m.height)

    def _judge(self, verdicts: Sequence[int]) -> tuple[str, str, bool]:
        """Find a rule that warns or fires: its name, a text, and whether it fires; empty: none.

        verdicts: those of all ranks on their own numbers; (): none are usable.
        """
        assert self._guard is not None
        m, limit = self.memory, self._guard.nonfinite
        share = "more than a fifth of the last steps had a NaN or an infinity"
        often = limit is not None and m.skipped >= limit
        if limit is not None and m.flagged:  # a step that was committed is no reason to fall back
            count, fires = int(m.flagged), m.flagged >= limit or m.skipped >= OFTEN * limit
            if 2 * count >= limit:
                found = f"{count} step{'s' * (count > 1)} in a row had a NaN or an infinity"
                return "nonfinite", found, fires
            if often:
                return "nonfinite", share, fires
        slow = [each for each in verdicts if each % FIRES == OF_ONE_RANK.index(BY_CLOCK) + 1]
        if 2 * len(slow) <= len(verdicts):  # a slow rank makes the others wait at every level
            verdicts = [0 if each in slow else each for each in verdicts]
        worst = max(verdicts, default=0)
        strayed = m.strayed / (PATIENCE + m.reports / PATIENCE)
        if 2 * strayed >= 1 and worst < FIRES:
            return "trend", "the mean of the reported values has left its trend", strayed >= 1
        if worst:
            rule = OF_ONE_RANK[worst % FIRES - 1]
            ranks = [str(rank) for rank, each in enumerate(verdicts) if each == worst]
            return rule, f"on rank {', '.join(ranks[:8])} {_SHOWN[rule]}", worst > FIRES
        return ("nonfinite", share, False) if often else ("", "", False)

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

    Of an older version's memory, the rule `trend` is to learn anew.

    Raises:
        StateDictError: it is not a list of as many finite numbers, or a counter is out of range.
    """
    saved: object = state.get(GUARD, [])
    if saved == []:
        return ()
    if not (are_numbers(saved) and len(saved) in (*OLDER, len(Memory._fields))):
        limits = f"which is not a list of {len(Memory._fields)} finite numbers"
        raise refused(f"a guard remembers {saved!r}, {limits}")
    known = Memory(*saved) if len(saved) not in OLDER else _of_older(saved)
    negative = (value < 0 for name, value in known._asdict().items() if name not in SIGNED)
    if known.stage not in STAGES or any(negative):
        older = "Remove 'guard' from that of an older version whose guard was handing momentum over"
        what = "of which a counter is negative or the stage is none"
        raise refused(f"a guard remembers {saved!r}, {what}", f"{FOREIGN}. {older}")
    return known


def _of_older(saved: Sequence[float]) -> Memory:
    """Convert the memory of an older version, without what its rule `trend` had learnt."""
    names = ("samples", "usual", "grown", "compressed", "dense", "slow", "skipped")
    return Memory(*saved[:7], **dict(zip(names, saved[13:20], strict=False)))
