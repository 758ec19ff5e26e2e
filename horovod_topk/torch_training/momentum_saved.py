"""Zeros in an optimizer's state dict instead of the momentum that TopKEF has taken over.

The momentum itself is in the velocities of TopKEF's own state. The optimizer's own buffer is of no
use: Adam and AdamW keep the last exchanged gradient there, and an optimizer that goes on without
compression would apply it again in its next ten steps. With zeros the optimizer begins without
velocity, like a new one, and `hvd.broadcast_optimizer_state` finds the same tensors on every rank,
whichever checkpoint they come from.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch

TAKEN = "topkef_momentum"  # the taken-over momentum in parameter groups of older checkpoints
BUFFERS = "momentum_buffer", "exp_avg"  # state keys: SGD's, and that of Adam and AdamW


def save_zeros(optimizer: Any, loan: Any) -> None:
    """Have `optimizer.state_dict()` return the user's settings, and zeros for the momentum.

    Args:
        optimizer: SGD, Adam or AdamW.
        loan: the optimizer's `horovod_topk.torch_training.momentum.Loan`.
    """
    held = weakref.ref(optimizer)

    @functools.wraps(optimizer.state_dict)
    def state_dict() -> dict[str, Any]:
        own: Any = held()
        packed: dict[str, Any] = type(own).state_dict(own)
        packed["state"] = dict(packed["state"])
        pairs = zip(packed["param_groups"], own.param_groups, loan.groups(own), strict=True)
        for group, present, shown in pairs:
            group.update({key: shown[key] for key in group if key != "params"})
            group.pop(TAKEN, None)
            if loan.is_repaid:
                continue
            _put_zeros(packed["state"], group, present["params"], over=loan.is_met(present))
        return packed

    optimizer.state_dict = state_dict


def _put_zeros(
    state: dict[Any, Any], group: Mapping[str, Any], parameters: Any, *, over: bool
) -> None:
    """Put zero momenta into the packed state of one parameter group.

    over: whether to overwrite a momentum that is there. False where a state was loaded and no step
        taken since: the momentum there is the loaded one.
    """
    for index, p in zip(group["params"], parameters, strict=True):
        own = state.get(index, {})
        if "betas" in group:
            if over and "exp_avg" in own:
                state[index] = own | {"exp_avg": torch.zeros_like(own["exp_avg"])}
        elif p.requires_grad and group["momentum"] and (over or "momentum_buffer" not in own):
            state[index] = own | {"momentum_buffer": torch.zeros_like(p, requires_grad=False)}


def drop_loaded(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Drop the momentum that an optimizer without compression had saved in a checkpoint.

    Returns:
        Whether there was a momentum that is not zero.
    """
    found = False
    for p in group["params"]:
        own = optimizer.state.get(p, {})
        for key in BUFFERS:
            buffer = own.get(key)
            if buffer is not None and bool(torch.any(buffer != 0)):
                found = True
                buffer.zero_()
        if "momentum_buffer" in own:
            del own["momentum_buffer"]
            if not own:
                del optimizer.state[p]
    return found
