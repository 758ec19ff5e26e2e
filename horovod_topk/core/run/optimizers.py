"""How settings fit an optimizer: checks that momentum is applied exactly once, and warnings.

All frameworks share this file; each has a `momentum.py` that reads its own optimizers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from horovod_topk.config import AUTO
from horovod_topk.core.exchange.membership import elastic
from horovod_topk.errors import ConfigError
from horovod_topk.guard import Guard
from horovod_topk.methods.protocol import Method

log = logging.getLogger("horovod_topk")

FRAMEWORKS = "torch.optim.", "keras.", "tf_keras.", "horovod_topk."  # and their own optimizers


def kind_of(optimizer: object) -> str:
    """Name of an optimizer's class, with its module unless it is PyTorch's or Keras' own.

    Many packages have an AdamW. A class that Horovod has made around another one has its name.
    """
    kinds = (kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith("horovod."))
    kind = next(kinds)
    is_own = f"{kind.__module__}.".startswith(FRAMEWORKS)
    return kind.__name__ if is_own else f"{kind.__module__}.{kind.__name__}"


HAS_NONE = "it has none"  # why "auto" leaves an optimizer as it is, without a warning


def _why_not_late(config: Method) -> str:
    """Return why no element of these gradients is known to arrive late; empty if some is."""
    if config.exchange == "hierarchical":
        return "exchange='hierarchical' adds gradients up within a node"
    if not config.defers or (config.ratio == 1.0 and not config.withheld()):
        return "all elements are sent"
    return ""


def guarded(config: Method, deferred: Mapping[str, str]) -> Method:
    """Use a guard by default, unless nothing is compressed.

    Elastic jobs have no guard by default, as ranks that join may not know its state.
    """
    is_left = "guard" in deferred and config.ratio < 1.0 and not elastic()
    return replace(config, guard=Guard()) if is_left else config


def fitted(
    config: Method,
    deferred: Mapping[str, str],
    kind: str,
    why_left: Callable[[], str],
    *,
    ratio: float | None,
    is_linear: bool,
) -> tuple[Method, str | None]:
    """Decide whether an optimizer's steps depend on arrivals, and fill in `ratio` and `warmup`.

    They do with momentum="auto", unless something speaks against it. Then a family may have a ratio
    of its own, and there is a warm-up with larger ratios; linear steps have one in any case. Other
    Adams did not recover from one near the largest stable learning rate. Elastic jobs have none, as
    ranks that join may not know the number of steps.

    why_left: returns why this optimizer's steps cannot depend on arrivals; empty: they can.
    ratio: the default for optimizers of this family; None: that of the settings.

    Returns:
        The settings, and why the steps do not depend on arrivals; None: they do; empty: the user
        has given a momentum.
    """
    why: str | None = ""
    if "momentum" in deferred:
        rarely = "sums of all ranks have no elements that arrive rarely" if config.in_rounds else ""
        why = why_left() or _why_not_late(config) or rarely or None
    if "ratio" in deferred and why is None and ratio is not None:
        own: Any = {"ratio": ratio}  # of Top-K
        config = replace(config, **own)
    if "warmup" in deferred and (is_linear or why is None) and not elastic():
        config = replace(config, warmup=AUTO)
    if why:
        log.info("TopKEF leaves momentum to %s: %s", kind, why)
    return config, why


def check_once(
    kind: str,
    momentum: float,
    *,
    nesterov: bool,
    where: str,
    setting: str,
    shown: object,
    applies: bool,
    off: str,
    normalises: bool,
    besides: str = "",
) -> None:
    """Refuse momentum correction for an optimizer that applies a momentum itself.

    Args:
        where: "the optimizer", or which part of it.
        applies: whether that value means any momentum.
        off: argument that turns momentum off.
        normalises: whether it divides by the root of a mean square, as Adam.
        besides: added to the cure of an error.
    """
    if normalises and nesterov:
        raise ConfigError(
            f"momentum=({momentum}, 'nesterov') was given, and {kind} has no such form",
            cure=f"Pass momentum={momentum}",
        )
    if applies:
        raise ConfigError(
            f"momentum={momentum} was given, and {where} has {setting}={shown}: it would be "
            "applied twice",
            cure=f"Pass {off} to the optimizer, or momentum=0 to TopKEF{besides}",
        )


def none_to_correct(momentum: float, kind: str, known: str) -> ConfigError:
    """The error for an optimizer whose momentum cannot be replaced by momentum correction."""
    return ConfigError(
        f"momentum={momentum} was given, and {kind} has no momentum that it is known to stand for",
        cure=f"Use momentum correction with {known}, or leave momentum= out",
    )


def note_adapted(kind: str, *, is_known: bool) -> tuple[str, ...]:
    """Log that an optimizer's steps depend on arrivals; warn of one that is not known."""
    log.info("TopKEF: steps of %s depend on how often elements arrive", kind)
    if is_known:
        return ()
    return (
        _warned(
            f"TopKEF does not know how {kind} uses gradients. It selects what to send by the mean "
            "square of gradients, and leaves the optimizer's steps alone. Compare training with "
            "it to training without compression, and pass a larger ratio, such as "
            "TopKEF(ratio=0.1), if it is worse. TopKEF(momentum=0) turns this warning off, and "
            "selects the largest elements"
        ),
    )


def warn_of_clipping(momentum: float, seen: str) -> str:
    """Warn that clipping after the exchange clips velocities, and makes SGD's steps smaller.

    seen: clause of the sentence that says how gradients are clipped.
    """
    factor = 1.0 / (1.0 - momentum)
    return _warned(
        f"TopKEF corrects a momentum of {momentum:g}, and {seen}. With momentum correction the "
        f"exchanged gradients are velocities, up to {factor:.3g} times larger than gradients: if "
        "they are clipped to a threshold meant for gradients, the learning rate is in effect up "
        f"to {factor:.3g} times smaller. Clip with TopKEF(clip_norm=...) instead, or use a "
        f"threshold {factor:.3g} times larger"
    )


def advise(kind: str, config: Method, why: str, *, normalises: bool) -> tuple[str, ...]:
    """Warn about an optimizer whose steps are not adapted to gradients that arrive late.

    why: why "auto" has left it as it is; empty: it has not.
    normalises: whether it is an Adam or AdamW with momentum.
    """
    if config.momentum or not config.error_feedback or _why_not_late(config):
        return ()
    if why and why != HAS_NONE:
        return (warn_of_unknown(kind, why),)
    if not normalises:
        return ()
    text = (  # docs/methods.md
        f"TopKEF: {kind} divides by the mean square of gradients that arrive late and all at once, "
        "and trains language models much worse than without compression. Pass momentum='auto', "
        "the default of TopKEF, so that its steps take this into account"
    )
    return (_warned(text),)


def warn_of_unknown(kind: str, why: str) -> str:
    """Warn that an optimizer's steps do not take into account that gradients arrive late.

    why: clause of the sentence that says why they do not.
    """
    return _warned(
        f"TopKEF does not adapt the steps of {kind}: {why}. Elements that wait arrive late and all "
        "at once. Adapted steps take that into account; these do not, and training may be worse "
        "than without compression. Compare the two. momentum=0 turns this warning off"
    )


def _warned(text: str) -> str:
    """Log a warning and return it."""
    log.warning("%s", text)
    return text
