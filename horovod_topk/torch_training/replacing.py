"""Hands residuals over when a new optimizer replaces that of compressed gradients.

The new one inherits the residuals of ranks and owners, and the method's own state. Momentum,
arrivals, learning rates, warm-up, the ratio asked for and the guard's memory start anew, as they
belong to the optimizer that was replaced: in the first steps of a new one its moments form.

A residual that has grown because the learning rate has fallen (`core.state.learning_rates`) is
scaled back to gradients at the largest rate: the new optimizer's learning rate has no relation to
the old one's, and may be of another kind (SGD's and Adam's).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from horovod_topk.core.run.compressor import Compressor
from horovod_topk.core.state.state_dict import METHOD_STATE, OWNED, RESIDUALS, STEPS
from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method

REWRAP = "wrap the module anew, DistributedDataParallel(model.module), and attach to that"


def check_inherits(before: Method, config: Method, changed: Collection[str]) -> None:
    """Refuse a new optimizer that cannot inherit the residuals.

    Args:
        before: settings of the optimizer that is replaced.
        config: the new settings.
        changed: names of parameters that are trained now and were not, or the other way round.

    Raises:
        ConfigError: the method, its exchange, or the trained parameters differ.
    """
    if changed:
        raise ConfigError(
            "its requires_grad was changed since compression was attached",
            tensor=min(changed),
            cure=f"Set it back, or {REWRAP}",
        )
    old, new = (f"{type(c).__name__} with exchange={c.exchange!r}" for c in (before, config))
    if old != new:
        raise ConfigError(
            f"{old} is attached, and {new} cannot take over its residuals",
            cure=f"Attach the same compressor with the same exchange, or {REWRAP}",
        )


def inherited(before: Compressor[Tensor], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict with which a new optimizer's compression begins.

    Args:
        before: the compressor of the optimizer that is replaced.
        own: the state dict of the new optimizer's compressor.
    """
    state = before.state_dict()
    if before.rates is not None:
        for part in (state, state.get(OWNED, {})):
            for name, residual in part.get(RESIDUALS, {}).items():
                residual.mul_(before.rates.decay(name))
    kept = {key: state[key] for key in state if key in (RESIDUALS, OWNED)}
    of_method = {METHOD_STATE + n for n, part in before.states.items() if not part.is_optional}
    return {**own, **kept, **{key: state[key] for key in of_method}, STEPS: before.ended}
