"""The settings that all compression methods share: frozen, validated, equal on every rank."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from numbers import Real
from typing import Any, Self

from horovod_topk.errors import ConfigError, UnknownSettingError, check
from horovod_topk.guard import Guard
from horovod_topk.ratios import (
    DENSE,
    Exactly,
    Rules,
    Shape,
    checked_ratio,
    checked_rules,
    make_plain,
    plain,
    resolve,
)
from horovod_topk.schedules import Schedule

RESIDUALS = ("float32", "bfloat16", "int8", "int4")  # values of `residuals`
EXCHANGES = ("allgather", "sharded", "hierarchical", "auto")  # values of `exchange`
OPTIONAL: dict[str, object] = {
    "clip_norm": None,
    "warmup": None,
    "schedule": None,
    "guard": None,
    "momentum": 0.0,
    "nesterov": False,
    "follow_lr": False,
    "ratios": None,
    "residuals": "float32",
    "allocation": "uniform",
}  # setting -> the value that switches it off
AUTO = "auto"  # value of a setting that the optimizer and the job decide
DEFERRED: Mapping[str, tuple[str, ...]] = {
    "momentum": (AUTO,),
    "follow_lr": (AUTO,),
    "warmup": (AUTO,),
    "guard": (AUTO,),
    "ratio": (AUTO,),
}  # setting -> values that are decided once the optimizer and the job are known
OTHERS = "*"  # key of a mapping `ratio`: all tensors that no other key matches
NESTEROV = "nesterov"  # beside a number for `momentum`
FOLDED = {
    "gather_ratio": "ratio",
    "ratios": "ratio",
    "indices": "values",
    "nesterov": "momentum",
}  # field of a method -> setting with which users give it
REMOVED = {
    "velocity_kept": "A number for momentum= always masks the velocities of sent elements, and "
    "momentum='auto', the default, adapts the optimizer's own steps: leave velocity_kept= out",
    "gather_ratio": "Pass a pair, what ranks send and what owners send back: ratio=(0.01, 0.02)",
    "ratios": "Pass a mapping, with '*' for all other tensors: "
    "ratio={'head.*': 'dense', '*': 0.01}",
    "indices": "Pass a pair, the format of values and that of indices: values=('int8', 'plain')",
    "nesterov": "Pass a pair: momentum=(0.9, 'nesterov')",
    "probe_every": "Call TopKEF.of(optimizer).probe(every=100) on every rank, in PyTorch",
    "commit_dir": "Pass commit_dir= to the elastic state, as in TorchState(..., commit_dir=...)",
}  # setting as users gave it in older versions -> what to write instead


Stretches = tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that all compression methods share. They have to be equal on all ranks.

    Args:
        exchange: how payloads travel between ranks: "allgather"; "sharded", in which each rank
            sums one shard, so that its bytes hardly grow with the number of ranks;
            "hierarchical", dense within a node and compressed between nodes, which needs
            `hvd.init(process_sets="dynamic")`; or "auto": the one of these that sends the fewest
            bytes from the busiest node.
        min_numel: tensors with fewer elements are sent whole, in the same payload.
        clip_norm: clip each rank's gradients before they are added to the residual, so that the
            norm of the applied gradient is at most about this (`core.codec.clipping`).
            None: off.
        warmup: larger ratios for the first steps. A number of steps: the ratio falls through
            0.25, 0.0625 and so on until it reaches `ratio` after that many steps. Pairs
            (until, ratio): this ratio as long as fewer than `until` steps are committed. "auto":
            with SGD, and with Adam and AdamW if their steps depend on arrivals, ten times `ratio`,
            at most 0.25, in the first 60 steps; none with other optimizers and in elastic jobs.
            None: off.
        schedule: decides the ratio of each step after `warmup` from measures of all ranks: one of
            `horovod_topk.schedules`. None: each step has `ratio`.
        guard: rules for ending compression and going on with dense gradients: a
            `horovod_topk.guard.Guard`. "auto": `Guard()` in PyTorch, unless nothing is compressed;
            none in TensorFlow, where graphs take longer to build with each ratio level, and in
            elastic jobs. None: compression never ends.
        momentum: "auto": SGD, Adam and AdamW keep their momentum, which then depends on how often
            an element arrives (`horovod_topk.updates.formulas`). A number: momentum correction
            (`core.codec.momentum`), which replaces the optimizer's own momentum: give the
            optimizer a momentum of 0. Exchanged gradients are velocities then, up to
            1 / (1 - momentum) times larger: clip with `clip_norm`. A pair (0.9, "nesterov"): the
            same with Nesterov's momentum. 0: neither.
        follow_lr: when the learning rate changes, multiply residuals by old rate / new rate, so
            that each gradient counts at the rate at which it was computed
            (`core.state.learning_rates`). "auto": on if the learning rate is known.
        ratio: "dense" for some tensors, which are then sent whole and unrounded but for `values`: a
            mapping such as {"head.*": "dense"}. A key is a pattern of tensor names as in `fnmatch`,
            or a function of a tensor's name and shape that returns a bool. A pattern that matches
            no tensor is an error.
        residuals: in PyTorch, the format in which residuals are stored between steps, owners' too:
            "float32" (float64 for float64 gradients), "bfloat16", or "int8" and "int4" with a scale
            for each block of 128 elements. Each step rounds the new residual once, to nearest, by
            at most 1/256 of an element with "bfloat16", and with "int8" and "int4" by at most
            1/253 and 1/13.8 of the largest element of its block.
        name: prefix of the names of the collectives, the same on all ranks. None: derived from the
            tensors and settings.

    Raises:
        ConfigError: a value is out of its range, or two values cannot be combined.
    """

    exchange: str = "allgather"  # how payloads travel; "auto": with the fewest bytes
    min_numel: int = 1024  # elements; smaller tensors are sent whole, in the same payload
    clip_norm: float | None = None  # largest norm of the applied gradient; None: off
    warmup: int | Stretches | str | None = None  # steps with larger ratios; None: off
    schedule: Schedule | None = None  # decides the ratio of each step; None: off
    guard: Guard | None = None  # when to fall back to dense gradients; None: never
    momentum: float = 0.0  # for momentum correction, in [0, 1); 0: off
    nesterov: bool = False  # whether `momentum` is Nesterov's
    follow_lr: bool = False  # rescale residuals when the learning rate changes
    ratios: Rules | None = None  # for some tensors, instead of the method's ratio; None: none
    residuals: str = "float32"  # format in which residuals are stored between steps
    name: str | None = None  # prefix of the collectives' names; None: derived from the plan

    def __post_init__(self) -> None:
        make_plain(self)
        check_choice("exchange", self.exchange, self.exchanges)
        check_choice("residuals", self.residuals, RESIDUALS)
        is_size = type(self.min_numel) is int and self.min_numel >= 0
        what = "is not a whole number of elements >= 0"
        cure = "Pass 0 to compress every tensor, or a size such as 1024"
        check(is_size, "min_numel", self.min_numel, what, cure)
        if self.clip_norm is not None:
            cure = (
                "Pass the norm that clip_grad_norm_ would clip exchanged gradients to, such as "
                "clip_norm=1.0, or None"
            )
            norm = checked_positive("clip_norm", self.clip_norm, cure)
            object.__setattr__(self, "clip_norm", norm)
        object.__setattr__(self, "warmup", _checked_warmup(self.warmup))
        object.__setattr__(self, "momentum", _checked_momentum(self.momentum, self.exchange))
        _check_nesterov(self.nesterov, self.momentum)
        object.__setattr__(self, "ratios", checked_rules(self.ratios))
        self._check_kinds()

    def _check_kinds(self) -> None:
        cure = "Pass one of horovod_topk.schedules, such as schedule=Accordion(), or None"
        is_one = self.schedule is None or isinstance(self.schedule, Schedule)
        check(is_one, "schedule", self.schedule, "is not a schedule", cure)
        cure = "Pass guard=horovod_topk.guard.Guard(), or None for none"
        is_one = self.guard is None or isinstance(self.guard, Guard)
        check(is_one, "guard", self.guard, "is not a Guard", cure)
        cure = "Pass follow_lr=True, and the learning rate to the optimizer"
        is_flag = type(self.follow_lr) is bool
        check(is_flag, "follow_lr", self.follow_lr, "is neither True nor False", cure)
        is_name = self.name is None or (isinstance(self.name, str) and bool(self.name))
        cure = "Pass a name that is the same on every rank and unique to this optimizer"
        check(is_name, "name", self.name, "is not a non-empty string", cure)

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Valid values of `exchange`."""
        return EXCHANGES

    @property
    def ratio(self) -> float:
        """Share of a tensor's elements sent a step, in (0, 1]."""
        return 1.0

    @property
    def ratio_back(self) -> float:
        """Share of a shard's elements that its owner sends back to all ranks."""
        return self.ratio

    @property
    def stretches(self) -> Stretches:
        """The warm-up as pairs (until, ratio): the ratio as long as fewer steps are committed."""
        if isinstance(self.warmup, int):
            return _exponential(self.warmup, self.ratio)
        return self.warmup if isinstance(self.warmup, tuple) else ()

    @property
    def needed_measures(self) -> tuple[str, ...]:
        """Names of the measures that the schedule and the guard need."""
        of_schedule = () if self.schedule is None else self.schedule.measures
        of_guard = () if self.guard is None else self.guard.measures
        return (*of_schedule, *of_guard)

    def common(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """Return the settings that all methods share, by name, without some of them."""
        names = {each.name for each in fields(Settings)} - {*without}
        return {name: getattr(self, name) for name in names}

    @cached_property
    def own(self) -> Mapping[str, float]:
        """Ratios by tensor name, for tensors with a ratio of their own; empty until resolved."""
        return {name: ratio for name, ratio in self.ratios or () if isinstance(name, Exactly)}

    def resolved(self, tensors: Mapping[str, Shape], names: Collection[str]) -> Self:
        """Return settings whose `ratios` name each tensor that has a ratio of its own.

        Args:
            tensors: shapes by name.
            names: names that patterns may match.

        Raises:
            ConfigError: see `horovod_topk.ratios.resolve`.
        """
        rules, others = self.ratios or (), {self.ratio, self.ratio_back}
        if all(isinstance(pattern, Exactly) for pattern, _ in rules):
            return self
        own = tuple(pair for pair in resolve(rules, tensors, names) if {pair[1]} != others)
        return replace(self, ratios=own)

    def narrowed(self, names: Iterable[str]) -> Self:
        """Return resolved settings with only those `ratios` that are for tensors of these names."""
        if not self.own:
            return self
        own = tuple((Exactly(name), self.own[name]) for name in names if name in self.own)
        return replace(self, ratios=own)

    def agreed(self) -> dict[str, object]:
        """Return the settings that must be equal on all ranks, in a fixed order.

        Settings of `OPTIONAL` that are off are left out, so that digests do not change when a
        version adds one. Ranks compare settings whose `ratios` are resolved.
        """
        agreed = {name: value for name, value in asdict(self).items() if not self._is_off(name)}
        if self.schedule is not None:
            agreed["schedule"] = [type(self.schedule).__name__, asdict(self.schedule)]
        return agreed

    def _is_off(self, name: str) -> bool:
        return name in OPTIONAL and getattr(self, name) == OPTIONAL[name]


def reject_unknown(unknown: Iterable[str], known: Iterable[str], of: str = "TopKEF") -> None:
    """Raise an error for the first keyword in `unknown`, and suggest the nearest of `known`.

    Raises:
        ConfigError: it is a setting of older versions; the message has the new spelling.
        UnknownSettingError: it was never one.
    """
    known = sorted(known)
    for keyword in unknown:
        problem = f"{of} has no setting {keyword!r}"
        if keyword in REMOVED:
            raise ConfigError(problem, cure=REMOVED[keyword])
        within = [name for name in known if name in keyword.split("_")]  # compression_ratio
        near = within or difflib.get_close_matches(keyword, known, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise UnknownSettingError(problem, cure=f"{hint}The settings are {', '.join(known)}")


def settings_of(method: type[Settings]) -> dict[str, None]:
    """Names of the settings with which users fill a method's fields."""
    return dict.fromkeys(FOLDED.get(each.name, each.name) for each in fields(method))


def fields_of(
    method: type[Settings], settings: Mapping[str, Any], name: str = "TopKEF", *more: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Convert settings as users write them to fields of a method.

    Args:
        method: the method.
        settings: the settings by name.
        name: name of the compressor, for messages.
        more: names of the compressor's settings that are not the method's.

    Returns:
        The fields, and the settings that are decided by the optimizer.

    Raises:
        ConfigError, UnknownSettingError: a setting is not one of the method's, or two are given
            that cannot be combined. The fields themselves are not checked.
    """
    known = settings_of(method)
    reject_unknown(settings.keys() - known, [*known, *more], name)
    deferred = {name: settings[name] for name in DEFERRED if _waits(settings, name)}
    names, found = {each.name for each in fields(method)}, dict[str, Any]()
    for key in settings.keys() - deferred:
        value = settings[key]
        if key == "ratio":
            found |= _ratio_fields(value, names, name)
        elif key == "momentum" and is_pair(value):
            found |= _nesterov_fields(*value)
        elif key == "values" and is_pair(value) and "indices" in names:
            found |= {"values": value[0], "indices": value[1]}
        else:
            found[key] = value
    return found, deferred


def written(given: Mapping[str, Any], config: Settings) -> dict[str, Any]:
    """Convert fields of a method to settings as users write them: the inverse of `fields_of`.

    Args:
        given: the fields that are not the defaults.
        config: the method with all its fields.
    """
    found: dict[str, Any] = {name: each for name, each in given.items() if name not in FOLDED}
    if "gather_ratio" in given:
        found["ratio"] = config.ratio, given["gather_ratio"]
    if "ratios" in given:
        others = {OTHERS: found["ratio"]} if "ratio" in found else {}
        found["ratio"] = dict(given["ratios"]) | others
    for name, beside in (("indices", "values"), ("nesterov", "momentum")):
        if name in given:
            second = NESTEROV if name == "nesterov" else given[name]
            found[beside] = getattr(config, beside), second
    return found


def check_settings(
    method: type[Settings], settings: Mapping[str, Any], name: str = "TopKEF"
) -> None:
    """Refuse settings that are invalid with every optimizer.

    Raises:
        ConfigError, UnknownSettingError: as the method, and `fields_of`.
    """
    method(**fields_of(method, settings, name)[0])


def _waits(settings: Mapping[str, Any], name: str) -> bool:
    value = settings.get(name)
    return isinstance(value, str) and value in DEFERRED[name]


def is_pair(value: object) -> bool:
    """Whether the value of a setting is a tuple or list of two."""
    return isinstance(value, tuple | list) and len(value) == 2


def _ratio_fields(value: Any, names: Collection[str], method: str) -> dict[str, Any]:
    """Fields of a method of these fields' names that are given by `ratio`."""
    if isinstance(value, Mapping):
        rules = checked_rules({key: each for key, each in value.items() if key != OTHERS})
        if OTHERS not in value:
            return {"ratios": rules}
        others = 1.0 if value[OTHERS] == DENSE else value[OTHERS]
        return {"ratios": rules} | _ratio_fields(others, names, method)
    if "ratio" not in names:
        raise ConfigError(
            f"ratio={value!r} was given to {method}, which has no ratio for all tensors",
            cure="Pass a mapping of the tensors that are sent dense, such as "
            "ratio={'head.*': 'dense'}, or leave ratio= out",
        )
    if not is_pair(value):
        return {"ratio": value}
    if "gather_ratio" not in names:
        raise ConfigError(
            f"ratio={value!r} was given to {method}, in which owners send back what they have got",
            cure=f"Pass one number, such as ratio={value[0]!r}",
        )
    return {"ratio": value[0], "gather_ratio": value[1]}


def _nesterov_fields(momentum: object, kind: object) -> dict[str, Any]:
    if kind != NESTEROV:
        raise ConfigError(
            f"momentum={(momentum, kind)!r} is no pair of a number and {NESTEROV!r}",
            cure="Pass momentum=(0.9, 'nesterov'), or a number alone",
        )
    if isinstance(momentum, str) and momentum in DEFERRED["momentum"]:
        raise ConfigError(
            f"momentum={(momentum, kind)!r} was given, and with {momentum!r} the momentum is the "
            "optimizer's, Nesterov's or not",
            cure=f"Pass momentum={momentum!r}, and set nesterov=True in the optimizer",
        )
    return {"momentum": momentum, "nesterov": True}


def check_flag(setting: str, value: object) -> None:
    """Raise ConfigError if the value of a setting is neither True nor False."""
    cure = f"Pass {setting}=True or {setting}=False"
    check(type(value) is bool, setting, value, "is neither True nor False", cure)


def check_whole(setting: str, value: object, least: int, most: int, example: int) -> int:
    """Return the value of a setting as an int; raise ConfigError unless it is in this range."""
    number: int = plain(value)
    is_valid = type(number) is int and least <= number <= most
    cure = f"Pass a whole number in this range, such as {setting}={example}"
    check(is_valid, setting, value, f"is no whole number from {least} to {most}", cure)
    return number


def check_choice(setting: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ConfigError for a value that is not a choice, and suggest the nearest choice."""
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    cure = f"{hint}Pass one of {', '.join(map(repr, choices))}"
    check(False, setting, value, "is not one of the choices", cure)


def checked_positive(setting: str, value: Any, cure: str) -> float:
    """Return the value of a setting as a float; raise ConfigError unless it is above 0."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    is_valid = is_number and 0.0 < float(value) < math.inf
    check(is_valid, setting, value, "is not a number above 0", cure)
    return float(value)


def _checked_warmup(warmup: object) -> int | Stretches | None:
    if warmup is None or (type(warmup) is int and warmup > 0):
        return warmup
    if isinstance(warmup, Sequence) and not isinstance(warmup, str) and len(warmup):
        pairs = [(plain(p[0]), p[1]) for p in warmup if isinstance(p, Sequence) and len(p) == 2]
        untils = [until for until, _ in pairs]
        whole = all(type(until) is int and until > 0 for until in untils)
        if len(pairs) == len(warmup) and whole and sorted(set(untils)) == untils:
            return tuple((until, checked_ratio(r, "a ratio of warmup")) for until, r in pairs)
    raise ConfigError(
        f"warmup={warmup!r} is neither a number of steps nor pairs (until, ratio)",
        cure="Pass a whole number of steps above 0, such as warmup=1000, or pairs whose steps "
        "ascend, such as warmup=[(500, 0.25), (1000, 0.05)]",
    )


def _exponential(steps: int, ratio: float) -> Stretches:
    """Return warm-up pairs with the ratios 0.25, 0.25 ** 2 and so on, evenly over `steps` steps."""
    count = 0
    while 0.25 ** (count + 1) > ratio:
        count += 1
    return tuple((-(-steps * i // count), 0.25**i) for i in range(1, count + 1))


def _checked_momentum(momentum: object, exchange: str) -> float:
    is_number = isinstance(momentum, Real) and not isinstance(momentum, bool)
    if not (is_number and 0.0 <= float(momentum) < 1.0):  # type: ignore[arg-type]
        raise ConfigError(
            f"momentum={momentum!r} is not a number in [0, 1)",
            cure="Leave momentum= out: 'auto', the default, adapts the optimizer's own steps. Or "
            "pass the momentum that the optimizer would have, such as momentum=0.9, and 0 to the "
            "optimizer",
        )
    if momentum and exchange == "hierarchical":
        raise ConfigError(
            f"momentum={momentum} with exchange={exchange!r}: where gradients are added up within "
            "a node, no rank knows which of its own were sent",
            cure="Pass exchange='allgather', 'sharded' or 'auto', which takes one of these",
        )
    return float(momentum)  # type: ignore[arg-type]


def _check_nesterov(nesterov: bool, momentum: float) -> None:
    if nesterov and not momentum:
        raise ConfigError(
            f"momentum=({momentum}, {NESTEROV!r}) is Nesterov's form of no momentum",
            cure="Pass momentum=(0.9, 'nesterov'), or momentum=0",
        )
