"""Adapts SGD's steps to compressed gradients; see `horovod_topk.core.arrivals`.

Before a step of the optimizer its momentum buffer is prepared, so that the optimizer's own code
then computes the one that is wanted. With mu the optimizer's momentum, G a gradient and weight
decay as SGD adds them, and R what earlier gradients have still to move, divided by lr / (1 - mu):

    M = (1 - b) (R + c G) / (1 - mu),  b = mu phi^(1/4)       SGD: p = p - lr M
    R = b0 (1 - mu) M_before / (1 - b0),  b0 = b of the step before

Nesterov's SGD computes p = p - lr (G + mu M). With both forms a gradient moves its weight by lr c
/ (1 - mu) in all, as it does in dense SGD but for c. Nothing else of the optimizer changes: between
exchange and step gradients are gradients, and the buffer M is the optimizer's.

In steps without compression the momentum is the optimizer's own. The buffers of rare elements are
then made smaller first, so that they have R left to move, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from horovod_topk.core.arrivals import ARRIVALS, ArrivedToSgd
from horovod_topk.core.compressor import Compressor
from horovod_topk.core.part import Part
from horovod_topk.ops.torch_buffers import Buffer, Numbers, prepare, release
from horovod_topk.torch_training.added import added_by, applies_nothing


class SgdSteps:
    """Prepares the steps of one SGD.

    Args:
        names: names of parameters; parameters without one are not compressed.
        compressor: returns the compressor of their gradients.
    """

    def __init__(
        self, names: Mapping[Any, str], compressor: Callable[[], Compressor[Tensor]]
    ) -> None:
        self._names, self._compressor = names, compressor
        # Whether buffers are those of SGD without compression; None: not known yet.
        self._are_dense: bool | None = None

    @torch.no_grad()
    def prepare(self, optimizer: Any) -> None:
        """Prepare the momentum buffers for the optimizer's step, once gradients are exchanged."""
        compressor = self._compressor()
        if compressor.step.flagged or applies_nothing(optimizer):
            return
        if not compressor.plan.config.follows_arrivals:
            self._release(optimizer, compressor.states[ARRIVALS])
            return
        arrived = compressor.step.arrivals_to_sgd()
        if self._are_dense is None:  # phi is 0 before the first step of a run
            self._are_dense = not any(bool(each.before.any()) for each in arrived.values())
        for group in optimizer.param_groups:
            found = [p for p in group["params"] if self._names.get(p) in arrived]
            found = [p for p in found if p.grad is not None]
            if group["momentum"] and found:
                numbers = Numbers(float(group["momentum"]), float(group["weight_decay"]))
                pairs = zip(found, added_by(optimizer, group, found), strict=True)
                prepare([self._buffer(optimizer, p, g, arrived) for p, g in pairs], numbers)
        self._are_dense = False

    def _buffer(
        self, optimizer: Any, p: Any, added: Tensor, arrived: Mapping[str, ArrivedToSgd[Tensor]]
    ) -> Buffer:
        """A parameter's momentum buffer, new in its first step, and what it is prepared from."""
        state, own = optimizer.state[p], arrived[self._names[p]]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(p)
        before = None if self._are_dense else own.before
        numbers = float(own.factor), float(own.loss)
        return Buffer(state["momentum_buffer"], added, p, own.arrivals, before, *numbers)

    def _release(self, optimizer: Any, arrivals: Part[Tensor]) -> None:
        """Make buffers those of dense SGD, before the first step without compression."""
        for group in optimizer.param_groups if self._are_dense is False else ():
            for p in group["params"] if group["momentum"] else ():
                name, buffer = self._names.get(p), optimizer.state[p].get("momentum_buffer")
                if buffer is not None and name in arrivals.pieces:
                    release(buffer, arrivals.residual(name), float(group["momentum"]))
        self._are_dense = True
