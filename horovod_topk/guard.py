"""Guard: the settings of the fall-back from compression to dense gradients."""

from __future__ import annotations

from dataclasses import dataclass, fields

from horovod_topk.errors import ConfigError
from horovod_topk.ratios import make_plain
from horovod_topk.schedules import check_above, check_steps

MEASURES = ("verdict",)  # measures that these rules need; see `core.codec.measures`
OF_ONE_RANK = ("trend", "residual", "slower")  # rules that need numbers of each rank
BY_CLOCK = "slower"
REASONS = ("non-finite", *OF_ONE_RANK)  # names of the rules in metrics and `stats()`


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Rules that end compression where it does harm: pass one as `guard=`, the same on all ranks.

    Each rule warns in the log first. When it fires, all ranks fall back in the same step: the next
    step sends all residuals, and from then on gradients are dense (`core.control.guard`). A
    rule that is None is off.

    Args:
        nonfinite: fires after this many steps in a row that had a NaN or an infinity on some rank,
            and were rolled back. A loss scaler that starts too high causes a few such steps. Each
            counts 1, any other step takes a quarter off, and the rule also fires at a count of
            twice this many: where more than a fifth of all steps are rolled back.
        trend: fires when reported values, such as losses, rise and stay up. Values are averaged
            over ranks and smoothed over 8 reports. A rise above the least recent value counts if it
            is larger than `trend` times the usual rise, which is learnt, and taken as at least an
            eighth of the least value: with 4.0, a value that has risen by half. The rule fires
            after 32 such reports in a row, and one more for each 32 before, unless the value falls
            by 15% of its rise; and after 4 reports in a row that were a NaN on one rank. Lower
            values have to be better. The first 20 reports are only learnt from, and 0 is ignored;
            without `horovod_topk.report` the rule never fires.
        residual: fires when (residual norm / gradient norm) of a rank, both at the same learning
            rate, is this many times its usual value in 3 samples in a row. One step in 128 is
            sampled (TensorFlow: 16). None: off, the default, as a healthy run whose gradients
            became small reached 38 times its usual value.
        slower: fires when encoding, decoding and waiting take this many times the seconds of a
            dense step, on more than half of the ranks, in two trials in a row. As the decision
            depends on measured time, a run cannot be repeated bitwise. None: off, the default.
        trial_every: with `slower`, steps between two trials. A trial is three dense steps.
        cool_down: dense steps after which compression comes back. None: training stays dense.

    Raises:
        ConfigError: a value is out of its range, or no rule is left.
    """

    nonfinite: int | None = 16  # steps in a row
    trend: float | None = 4.0  # times the usual rise of the smoothed reports
    residual: float | None = None  # times the usual ratio of residual and gradient norm
    slower: float | None = None  # times the seconds of a dense step
    trial_every: int = 500  # steps
    cool_down: int | None = None  # dense steps

    def __post_init__(self) -> None:
        make_plain(self)
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
        """Names of the measures that its rules need; `nonfinite` needs none."""
        return MEASURES if any(getattr(self, name) is not None for name in OF_ONE_RANK) else ()
