"""Settings of local steps, and the presets that papers have published."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Real
from typing import Any

from horovod_topk.config import check_choice, check_whole
from horovod_topk.errors import ConfigError, UnknownSettingError, check
from horovod_topk.ratios import make_plain

FORMS = ("nesterov", "heavy_ball", "averaged")
MEANS = ("ranks", "senders")
MOST = 2**20  # inner steps of a round
SPARSE = 1 / 8  # largest ratio at which elements wait for several rounds
USUAL = {"ratio": 1 / 64, "values": "int2", "momentum": 0}  # of TopKEF, if none is given


def _check_number(setting: str, value: Any, least: float, most: float, example: float) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    problem, cure = f"is no number from {least:g} to {most:g}", f"Pass {setting}={example:g}"
    check(is_number and least <= float(value) <= most, setting, value, problem, cure)


@dataclass(frozen=True, kw_only=True)
class Outer:
    """The outer optimizer: it moves the anchor x by the mean d of the ranks' movements.

    With the momentum mu, v of zeros at first, and the learning rate lr:

        nesterov     v = mu v + d             x -= lr (d + mu v)      DiLoCo
        heavy_ball   v = mu v + d             x -= lr v               SlowMo
        averaged     v = mu v + (1 - mu) d    x -= lr v               SGD with dampening

    The first outer step is x -= lr d with v = d in each form: Nesterov's would be (1 + mu) times as
    large. In the long run a step is `effective_lr` times the mean movement.

    Args:
        lr: learning rate of the outer step, above 0. 1 with momentum 0 averages the weights.
        momentum: mu, in [0, 1).
        form: "nesterov", "heavy_ball" or "averaged".
        mean: "ranks" averages each element over all ranks, "senders" over those that have sent it.
            Where one rank of four sends an element, the mean over ranks moves it by a quarter of
            that rank's movement.

    Raises:
        ConfigError: a setting is out of its range.
    """

    lr: float = 1.0
    momentum: float = 0.0
    form: str = "nesterov"
    mean: str = "ranks"

    def __post_init__(self) -> None:
        make_plain(self)
        _check_number("lr", self.lr, 1e-6, 1e3, 1.0)
        _check_number("momentum", self.momentum, 0.0, 1.0 - 1e-6, 0.9)
        check_choice("form", self.form, FORMS)
        check_choice("mean", self.mean, MEANS)

    @property
    def effective_lr(self) -> float:
        """The size of a step in mean movements, once the momentum has built up."""
        return self.lr if self.form == "averaged" else self.lr / (1.0 - self.momentum)


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """Settings of local steps.

    Args:
        every: inner steps from one outer step to the next, at least 1; or seconds, such as "60s".
            With seconds each rank takes as many inner steps as it manages, and its movement counts
            by their number; train until `rounds` has reached a number, not for a number of steps.
        outer: the outer optimizer. `LocalSteps` without it takes Outer(mean="senders") and
            alpha=0.5 for compressors that send at most an eighth of the elements, and
            Outer(lr=0.7, momentum=0.5) for others.
        decay: what a residual is multiplied by after an outer step, in (0, 1]. `LocalSteps` without
            it takes 0.8 for these compressors: an element that waits moves again in each round.
        fragments: parts of the model of about equal size, one of which is exchanged in turn every
            `every / fragments` steps.
        delay: inner steps between the start of an exchange, which then runs in the background, and
            its outer step; below `every`. 0: the ranks wait for the exchange.
        alpha: share of a rank's own progress that it keeps after an outer step, in [0, 1]. With a
            delay it is a share of the weights: w = alpha w + (1 - alpha) x. Without a delay it is a
            share of the residual e, which the rank subtracts from its weights after the next inner
            step. None: 0.5 with a delay, 0 without.
        clip: limit of a rank's movement, in medians of the ranks' norms in the last round; None: no
            limit.

    Raises:
        ConfigError, UnknownSettingError: a setting is out of its range, or does not fit another.
    """

    every: int | str = 30
    outer: Outer = field(default_factory=Outer)
    decay: float = 1.0
    fragments: int = 1
    delay: int = 0
    alpha: float | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        if isinstance(self.every, str):
            is_seconds = re.fullmatch(r"\d+(\.\d+)?s", self.every) is not None
            cure = 'Pass seconds such as every="60s", or steps such as every=30'
            check(is_seconds and self.seconds > 0.0, "every", self.every, "is no duration", cure)
        else:
            check_whole("every", self.every, 1, MOST, 30)
        cure = "Pass Outer(lr=1.0, momentum=0.0)"
        check(isinstance(self.outer, Outer), "outer", self.outer, "is no Outer", cure)
        _check_number("decay", self.decay, 1e-6, 1.0, 0.95)
        if self.alpha is None:
            object.__setattr__(self, "alpha", 0.5 if self.delay else 0.0)
        _check_number("alpha", self.alpha, 0.0, 1.0, 0.5)
        if self.clip is not None:
            _check_number("clip", self.clip, 1e-3, 1e6, 2.0)
        if self.seconds and (self.fragments, self.delay) != (1, 0):
            raise ConfigError(
                f"fragments={self.fragments} and delay={self.delay} were given with "
                f"every={self.every!r}: ranks take different numbers of steps",
                cure="Pass every= as a number of steps, or leave fragments= and delay= out",
            )
        if not self.seconds:
            check_whole("fragments", self.fragments, 1, self.steps, 1)
            check_whole("delay", self.delay, 0, self.steps - 1, 0)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> LocalConfig:
        """Make the settings from keyword arguments."""
        known = [each.name for each in fields(cls)]
        for name in settings.keys() - set(known):
            cure = f"The settings are {', '.join(known)}"
            raise UnknownSettingError(f"LocalSteps has no setting {name!r}", cure=cure)
        return cls(**settings)

    @cached_property
    def seconds(self) -> float:
        """Seconds of a round; 0: rounds are counted in steps."""
        return float(self.every[:-1]) if isinstance(self.every, str) else 0.0

    @property
    def steps(self) -> int:
        """Inner steps of a round; 0: rounds are counted in seconds."""
        return 0 if isinstance(self.every, str) else self.every

    def starts(self, step: int) -> list[int]:
        """The fragments whose exchange starts after an inner step, counted from 1.

        Fragment p of P starts after (p + 1) H / P steps of each round of H.
        """
        count, position = self.fragments, (step - 1) % self.steps + 1
        return [p for p in range(count) if step > 0 and (p + 1) * self.steps // count == position]

    def arrives(self, step: int) -> list[int]:
        """The fragments whose outer step follows an inner step."""
        return self.starts(step - self.delay)

    def under_way(self, step: int) -> list[int]:
        """The fragments whose exchange has started, and whose outer step is still to come."""
        return sorted({p for each in range(self.delay) for p in self.starts(step - each)})


@dataclass(frozen=True)
class Preset:
    """Published settings of local steps: the compressor's name and settings, and the others."""

    method: str
    compression: Mapping[str, Any]
    settings: Mapping[str, Any]


PRESETS: Mapping[str, Preset] = {
    # Stich 2018 (Local SGD Converges Fast and Communicates Little), arXiv 1805.09767
    "local_sgd": Preset("Dense", {}, {"every": 8, "outer": Outer()}),
    # Douillard et al. 2023 (DiLoCo), arXiv 2311.08105; every=30 as in 2503.09799
    "diloco": Preset("Dense", {}, {"every": 30, "outer": Outer(lr=0.7, momentum=0.9)}),
    # Sarfi et al. 2025 (SparseLoCo), arXiv 2508.15706. TopKEF selects the top k of each tensor, the
    # paper those of each chunk of 4,096 elements.
    "sparseloco": Preset("TopKEF", USUAL, {"every": 30, "outer": Outer(), "decay": 0.95}),
}


def preset_of(name: str) -> Preset:
    """The preset of a name."""
    check_choice("preset", name, tuple(PRESETS))
    return PRESETS[name]


def defaults(ratio: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that `LocalSteps` takes if they are not given (docs/local-steps.md).

    ratio: share of the elements that the compressor sends.
    given: settings that the user has given.
    """
    if ratio > SPARSE:
        return {"outer": Outer(lr=0.7, momentum=0.5)}
    if "outer" in given:
        return {"decay": 0.8}
    return {"outer": Outer(mean="senders"), "decay": 0.8, "alpha": 0.5}


def check_compression(config: Any) -> None:
    """Refuse settings of a compressor that are about gradients, and not about movements."""
    if config.momentum:
        raise ConfigError(
            f"momentum={config.momentum} was given to a compressor of local steps, which exchange "
            "movements of weights and no gradients",
            cure="Pass momentum=0, and outer=Outer(momentum=...) for the momentum of outer steps",
        )
    if config.clip_norm is not None:
        raise ConfigError(
            f"clip_norm={config.clip_norm:g} was given to a compressor of local steps",
            cure="Clip gradients in the inner step, with torch.nn.utils.clip_grad_norm_ or Keras' "
            "global_clipnorm=; LocalSteps(clip=2.0) limits a rank's movement to twice the median "
            "of all ranks",
        )


def median(numbers: list[float]) -> float:
    """The lower median of finite numbers; 0 without any."""
    finite = sorted(each for each in numbers if math.isfinite(each))
    return finite[(len(finite) - 1) // 2] if finite else 0.0
