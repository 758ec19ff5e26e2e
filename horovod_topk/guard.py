"""Guard: the settings of the fall-back from compression to dense gradients."""

from __future__ import annotations

from dataclasses import dataclass, fields

from horovod_topk.errors import ConfigError
from horovod_topk.schedules import check_above, check_steps

TOLD = ("verdict",)  # what ranks tell each other for the rules of one rank; `core.measures`
OF_ONE_RANK = ("trend", "residual", "slower")  # rules that a rank judges by its own numbers
BY_CLOCK = "slower"
REASONS = ("non-finite", *OF_ONE_RANK)  # in metrics and `stats()`


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Ends compression where it does harm: pass one as `guard=`, on every rank the same.

    Each rule warns in the log first. When it fires, all ranks fall back in the same step: the next
    step sends all residuals, a momentum that was taken over goes back to the optimizer, and from
    there on gradients are dense (`horovod_topk.core.guard`). A rule that is None is off.

    Args:
        nonfinite: so many steps in a row had a NaN or an infinity on some rank, and were rolled
            back. A loss scaler that starts too high takes a few.
        trend: the value that a rank reports, such as its loss, smoothed over 8 reports, is above
            the smallest smoothed one lately by so many times the usual distance of a report from
            the one before, or 4% of the value if that is more, in 4 reports in a row. A report by
            twice as much counts at once. Lower values have to be better. The first 10 reports are
            learnt from; without `horovod_topk.report` the rule never fires.
        residual: the norm of a rank's residual over that of its gradient, at the learning rate of
            both, is so many times its usual value, in 3 samples in a row. One step in 128 is
            sampled (TensorFlow: 16). None: off, the default, as a healthy run whose gradients
            became small reached 38 times its usual value.
        slower: encoding, decoding and waiting take so many times the seconds of a dense step, on
            more than half of the ranks, in two trials in a row. It follows the clock: a run does
            not repeat to the bit. None: off, the default.
        trial_every: with `slower`, steps between two trials. A trial is three dense steps.
        cool_down: dense steps after which compression comes back. None: training stays dense.

    Raises:
        ConfigError: a value is out of its range, or no rule is left.
    """

    nonfinite: int | None = 16  # steps in a row
    trend: float | None = 3.0  # times the usual distance of a report from the one before
    residual: float | None = None  # times the usual ratio of residual and gradient norm
    slower: float | None = None  # times the seconds of a dense step
    trial_every: int = 500  # steps
    cool_down: int | None = None  # dense steps

    def __post_init__(self) -> None:
        for name in ("nonfinite", "cool_down"):
            if getattr(self, name) is not None:
                check_steps(name, getattr(self, name))
        for name, least in (("trend", 0.0), ("residual", 1.0), ("slower", 0.0)):
            if getattr(self, name) is not None:
                check_above(name, getattr(self, name), least)
        check_steps("trial_every", self.trial_every)
        if self.trial_every < 10:
            raise ConfigError(
                f"trial_every={self.trial_every}, of which a trial takes 3 dense steps",
                cure="Pass 10 or more, such as trial_every=500",
            )
        rules = [each.name for each in fields(self) if each.name in ("nonfinite", *OF_ONE_RANK)]
        if all(getattr(self, name) is None for name in rules):
            raise ConfigError("every rule of guard= is None", cure="Pass guard=None to have none")

    @property
    def measures(self) -> tuple[str, ...]:
        """What ranks tell each other in each step: nothing for the rule that flags decide."""
        return TOLD if any(getattr(self, name) is not None for name in OF_ONE_RANK) else ()
