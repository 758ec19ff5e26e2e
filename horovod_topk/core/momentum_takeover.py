"""An optimizer's own momentum, beside one that is corrected: never applied twice, or not at all.

What is decided, and said, alike in every framework; each has a `momentum.py` that asks its own
optimizers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from horovod_topk.config import AUTO
from horovod_topk.core.base_compressor import elastic
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method

log = logging.getLogger("horovod_topk")


@dataclass(frozen=True)
class Words:
    """What a framework's users are told."""

    known: str  # the optimizers whose momentum can be taken over
    example: str  # of a momentum to give them


@dataclass(frozen=True)
class Own:
    """What an optimizer applies by itself."""

    kind: str  # its class
    where: str  # "the optimizer", or which part of it
    setting: str  # the argument that has it
    shown: object  # what that is
    applies: bool  # whether that is any
    off: str  # what to pass for none
    normalises: bool  # whether it divides by the root of a mean square, as Adam
    besides: str = ""  # more of a cure


def why_not_corrected(config: Method) -> str:
    """Why a momentum is left to the optimizer whatever that is; empty: it need not be."""
    if config.exchange == "hierarchical":
        return "exchange='hierarchical' adds gradients up within a node"
    if config.ratio == 1.0 and not config.withheld():
        return "all elements are sent"
    return ""


def fitted(config: Method, deferred: Mapping[str, str], *, normalises: bool | None) -> Method:
    """The settings, with what depends on the kind of optimizer.

    Without SGD there are no larger ratios at first: where the size of a step follows from the
    squares of gradients, as with Adam, training near the largest stable rate did not recover from
    them. In elastic jobs there are none, as ranks that join may not know of steps.

    Args:
        config: the settings.
        deferred: which of them are left to the compressor.
        normalises: whether the optimizer divides by the root of a mean square, as Adam, or not, as
            SGD; None: not known.
    """
    if normalises and config.velocity_kept == AUTO:
        config = replace(config, velocity_kept=0.0)
    if "warmup" in deferred and normalises is False and not elastic():
        config = replace(config, warmup=AUTO)
    return config


def check_once(momentum: float, nesterov: bool, own: Own) -> None:
    """Refuse a momentum of the optimizer's own beside one that is corrected.

    Raises:
        ConfigError: it has one, or `nesterov` is no form of it.
    """
    if own.normalises and nesterov:
        raise ConfigError(
            f"nesterov=True was given, and {own.kind} has no such form",
            cure="Leave nesterov= out",
        )
    if own.applies:
        raise ConfigError(
            f"momentum={momentum} was given, and {own.where} has {own.setting}={own.shown}: it "
            "would be applied twice",
            cure=f"Pass {own.off} to the optimizer, or momentum=0 to TopKEF{own.besides}",
        )


def none_to_correct(momentum: float, kind: str, known: str) -> ConfigError:
    """What to raise where an optimizer has nothing that momentum correction stands for."""
    return ConfigError(
        f"momentum={momentum} was given, and {kind} has no momentum that it is known to stand for",
        cure=f"Use momentum correction with {known}, or leave momentum= out",
    )


def settings_of(kind: str, own: tuple[float, bool] | None, words: Words) -> dict[str, Any]:
    """The settings of momentum correction that stand for an optimizer's momentum.

    Args:
        kind: its class.
        own: its momentum, and whether that is Nesterov's; None: none that could be corrected.
        words: of the framework.

    Raises:
        ConfigError: it has none, or none that could be corrected.
    """
    if own is None:
        raise ConfigError(
            f"momentum='optimizer' was given, and {kind} has no momentum that is known to be one "
            "that can be corrected",
            cure=f"Use it with {words.known}, or leave momentum= out",
        )
    if not own[0]:
        raise ConfigError(
            f"momentum='optimizer' was given, and {kind} has none",
            cure=f"Give it one, such as {words.example}, or leave momentum= out",
        )
    return {"momentum": own[0], "nesterov": own[1]}


def not_a_momentum(where: str, shown: str) -> ConfigError:
    """What to raise where a momentum that is taken over has become something else."""
    return ConfigError(
        f"{where} has {shown}, and its momentum is taken over",
        cure="Keep momentum, or the first of betas, in [0, 1), and dampening at 0",
    )


def note_taken(kind: str, momentum: float) -> None:
    """Say that an optimizer's momentum is taken over from here on."""
    log.info("TopKEF takes over the momentum of %s: %g", kind, momentum)


def warn_of_loaded(kind: str) -> str:
    """Warn that a momentum was loaded which has no place any more.

    Returns:
        The warning.
    """
    text = (
        f"TopKEF takes the momentum of {kind} over, and starts at zero instead of from its "
        "buffers: what was loaded is of training without compression. To go on from it, pass "
        "momentum=0 to TopKEF"
    )
    log.warning("%s", text)
    return text


def warn_of_clipping(momentum: float, seen: str) -> str:
    """Warn that clipping after the exchange sees velocities, and makes SGD's steps smaller.

    Args:
        momentum: the momentum that is corrected.
        seen: what shows that gradients are clipped there, as a clause.

    Returns:
        The warning.
    """
    factor = 1.0 / (1.0 - momentum)
    text = (
        f"TopKEF corrects a momentum of {momentum:g}, and {seen}. With momentum correction the "
        f"exchanged gradients are velocities, up to {factor:.3g} times larger than gradients: if "
        "they are clipped to a threshold meant for gradients, the learning rate is in effect up "
        f"to {factor:.3g} times smaller. Clip with TopKEF(clip_norm=...) instead, or use a "
        f"threshold {factor:.3g} times larger"
    )
    log.warning("%s", text)
    return text


def advise(kind: str) -> None:
    """Warn where plain error feedback is known to cost much (docs/frontier.md)."""
    log.warning(
        "TopKEF: %s divides by the mean square of what arrives late and all at once, and "
        "trains language models much worse than without compression; where TopKEF corrects its "
        "momentum, as it does by default, it hardly does",
        kind,
    )
