"""Methods to compare: exchanges of Horovod, torch DDP and FSDP2, any compressor and settings."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from horovod_topk.config import (
    AUTO,
    DEFERRED,
    EXCHANGES,
    check_settings,
    reject_unknown,
    settings_of,
)
from horovod_topk.core.run.substitute import parse
from horovod_topk.methods import METHODS
from horovod_topk.methods.topk import INDICES, SELECTIONS, VALUES, TopK

NONE, DENSE, TOPK, OTHER = "none", "dense", "topk", "compressor"
KINDS = {
    NONE: "no exchange",
    DENSE: "Horovod, dense",
    "dense-waiting": "Horovod, dense, sleeping while it waits",
    "fp16": "Horovod, fp16",
    "ddp": "torch DDP, dense",
    "ddp-none": "torch DDP, no exchange: copies into its buckets alone",
    "ddp-fp16": "torch DDP, fp16",
    "powersgd": "torch DDP, PowerSGD rank 4",
    "fsdp": "FSDP2, HSDP in float32",
    "fsdp-none": "FSDP2, no exchange between nodes",
    "fsdp-bf16": "FSDP2, HSDP in bfloat16",
    TOPK: "TopKEF",
}  # by the names on the command line
HOROVODS = {DENSE: "none", "dense-waiting": "none", "fp16": "fp16"}  # its own compression
DDP_KINDS = ("ddp", "ddp-none", "ddp-fp16", "powersgd")
FSDP, FSDP_NONE, FSDP_BF16 = FSDP_KINDS = ("fsdp", "fsdp-none", "fsdp-bf16")
DEFAULT = "dense,fp16,ddp,powersgd,topk,topk-int8,topk-int8-sharded"
DEFAULT_OF_TORCHRUN = "ddp,ddp-fp16,powersgd,topk,topk-int8,topk-int8-sharded"
DEFAULT_OF_SCRIPT = "dense,fp16,topk,topk-int8,topk-int8-sharded"
WORDS = {  # words of a shorthand such as topk-int8-sharded; `auto` would be ambiguous
    **dict.fromkeys(VALUES, "values"),
    **{value: "exchange" for value in EXCHANGES if value != "auto"},
    **dict.fromkeys(SELECTIONS, "selection"),
    **{value: "indices" for value in INDICES if value != "auto"},
}
# Settings that do not change the steps that are timed, which are SGD's.
UNFIT = ("name", "warmup", "schedule", "guard", "follow_lr")
SETTINGS = tuple(name for name in settings_of(TopK) if name not in UNFIT)
PREFIXES: Mapping[str, Mapping[str, Any]] = {  # of a compressor, and what they change
    "ddp+": {"adapter": "ddp"},
    "fsdp+": {"adapter": "fsdp"},
    "local+": {"is_local": True},  # LocalSteps, with an outer step after each step
}
# Time the steps that follow a warm-up; no guard ends compression.
STEADY: Mapping[str, Any] = {"warmup": None, "guard": None}
OPTIMIZERS_OWN = 0.9  # the momentum of an optimizer whose steps a compressor adapts


@dataclass(frozen=True)
class Method:
    """A method of exchanging gradients."""

    name: str  # as the user wrote it
    kind: str  # one of KINDS, or OTHER
    settings: Mapping[str, object] = field(default_factory=dict)  # settings of the compressor
    compressor: str = "TopKEF"  # one of METHODS
    adapter: str = "torch"  # of the compressor: "torch" (Horovod's optimizer), "ddp" or "fsdp"
    is_local: bool = False  # whether it exchanges movements of weights, in LocalSteps

    def __post_init__(self) -> None:
        check_settings(METHODS[self.compressor], self.settings, self.compressor)

    @property
    def what(self) -> str:
        """A short description of the method."""
        what = KINDS.get(self.kind, self.compressor)
        if self.is_local:
            return f"{what}, LocalSteps: with an outer step after each step"
        return {"torch": "", "ddp": "torch DDP, ", "fsdp": "FSDP2, "}[self.adapter] + what

    @property
    def is_ddp(self) -> bool:
        """Whether DistributedDataParallel exchanges its gradients."""
        return (self.adapter == "ddp" and not self.is_local) or self.kind in DDP_KINDS

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 shards its gradients within nodes."""
        return self.adapter == "fsdp" or self.kind in FSDP_KINDS

    @property
    def needs_group(self) -> bool:
        """Whether gradients are exchanged by torch's process group, also without Horovod."""
        return self.is_ddp or self.is_fsdp

    @property
    def own_momentum(self) -> float:
        """The momentum to give the optimizer, whose steps a compressor adapts; 0: none."""
        asked = {**METHODS[self.compressor].for_training, **self.settings}.get("momentum")
        return OPTIMIZERS_OWN if asked in DEFERRED["momentum"] else 0.0


def first_of_fsdp(methods: Iterable[Method]) -> str | None:
    """The name of the first method that FSDP2 shards for; None: there is none."""
    return next((method.name for method in methods if method.is_fsdp), None)


def parse_methods(text: str) -> list[Method]:
    """Parse a comma-separated list of methods, without `none` and duplicates."""
    methods = {name: method_of(name) for name in _names(text)}
    methods.pop(NONE, None)  # it is always measured
    if not methods:
        others = ", ".join(kind for kind in KINDS if kind != NONE)
        raise ValueError(
            f"--methods {text!r} names nothing to compare with a step without exchange: give some "
            f"of {others}"
        )
    return list(methods.values())


def _names(text: str) -> Iterator[str]:
    """Split at commas, except those between settings.

    a,topk:x=1,y=2,B(z=3,u=4) is a, topk:x=1,y=2 and B(z=3,u=4).
    """
    name = ""
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        is_open = name.count("(") > name.count(")")
        if is_open or ("=" in piece and not {*":("} & {*piece} and ":" in name):
            name = f"{name},{piece}"
            continue
        if name:
            yield name
        name = piece
    if name:
        yield name


def method_of(name: str) -> Method:
    """Parse one of KINDS, topk-WORD-WORD, topk:SETTING=VALUE,..., or a compressor in Python.

    With one of PREFIXES, a compressor is used with DistributedDataParallel, FSDP2 or LocalSteps.
    """
    for prefix, changes in PREFIXES.items():
        inner = name.removeprefix(prefix)
        if inner != name:
            method = method_of(inner)
            if method.kind not in (TOPK, OTHER) or method.is_fsdp:
                raise ValueError(
                    f"--methods: {inner!r} in {name!r} is no compressor of this package"
                )
            return replace(method, name=name, **changes)
    if name in KINDS:
        return Method(name, name)
    if "(" in name or name in METHODS:
        asked = parse(name)
        _check_steady({*asked.settings})
        kind = TOPK if asked.name == "TopKEF" else OTHER
        return Method(name, kind, asked.settings, asked.name)
    head, colon, tail = name.partition(":")
    if head == TOPK and colon:
        return Method(name, TOPK, _once(name, map(_setting, tail.split(","))))
    if name.startswith(f"{TOPK}-"):
        words = name.split("-")[1:]
        settings = _once(name, (pair for word in words for pair in _word(word, name).items()))
        if indices := settings.pop("indices", None):
            settings["values"] = settings.get("values", AUTO), indices
        return Method(name, TOPK, settings)
    raise ValueError(
        f"--methods: {name!r} is none of {', '.join(KINDS)}, nor as topk-int8-sharded, "
        "topk:values=int8,ratio=0.01 or QSGD(bits=2)"
    )


def _once(name: str, pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    settings: dict[str, object] = {}
    for key, value in pairs:
        if key in settings:
            raise ValueError(
                f"--methods: {name!r} has two of {key}, {settings[key]} and {value}: leave one out"
            )
        settings[key] = value
    return settings


def _setting(text: str) -> tuple[str, object]:
    key, _, value = (part.strip() for part in text.partition("="))
    _check_steady({key})
    reject_unknown({key} - set(SETTINGS), SETTINGS)
    return key, _literal(value)


def _literal(text: str) -> object:
    """A value as in Python, or else a text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _check_steady(settings: set[str]) -> None:
    if "warmup" in settings:
        raise ValueError(
            "--methods: of a warm-up only the first steps would be timed: write topk:ratio=0.25 "
            "for a step at that ratio"
        )
    if "guard" in settings:
        raise ValueError("--methods: all timed steps have no guard: leave guard= out")


def _word(word: str, name: str) -> Mapping[str, object]:
    if word in WORDS:
        return {WORDS[word]: word}
    if word[:1].isdigit():
        return {"ratio": _literal(word)}
    known = ", ".join(WORDS)
    raise ValueError(f"--methods: {word!r} in {name!r} is neither a ratio nor one of {known}")
