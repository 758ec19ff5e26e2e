"""Adapts SGD's steps to compressed gradients; see `horovod_topk.core.arrivals`.

Before a step of the optimizer its momentum buffer B is prepared, so that the optimizer's own code
then computes the one that is wanted, M; after the step it is dense SGD's again. With mu the
optimizer's momentum, and G a gradient and weight decay as SGD adds them:

    M  = (1 - b) (mu B + c G) / (1 - mu),  b = mu phi^(1/4)    SGD: p = p - lr M
    B' = b (1 - mu) M / ((1 - b) mu)

Nesterov's SGD computes p = p - lr (G + mu M). With both forms a gradient moves its weight by lr c
/ (1 - mu) in all, as it does in dense SGD but for c; of Nesterov's, the first lr G is not
multiplied by c. mu B is what earlier gradients have still to move, divided by lr / (1 - mu), with
compression and without: training may go on either way, in the same run or from a checkpoint.

Nothing else of the optimizer changes: between exchange and step gradients are gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from horovod_topk.core.arrivals import ArrivedToSgd
from horovod_topk.core.compressor import Compressor
from horovod_topk.ops.torch_buffers import Buffer, Numbers, prepare, restore
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
        self._prepared: list[tuple[Tensor, Tensor, float]] = []  # buffers of this step

    @torch.no_grad()
    def prepare(self, optimizer: Any) -> None:
        """Prepare the momentum buffers for the optimizer's step, once gradients are exchanged."""
        self._prepared.clear()
        step = self._compressor().step
        if step.flagged or applies_nothing(optimizer):
            return
        arrived = step.arrivals_to_sgd()
        for group in optimizer.param_groups:
            momentum = float(group["momentum"])
            applied = [p for p in group["params"] if p.grad is not None]
            found = [p for p in applied if self._names.get(p) in arrived]
            if momentum and found:
                for p in applied:  # a fused step needs all of them
                    if optimizer.state[p].get("momentum_buffer") is None:
                        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
                pairs = zip(found, added_by(optimizer, group, found), strict=True)
                buffers = [self._buffer(optimizer, p, g, arrived) for p, g in pairs]
                prepare(buffers, Numbers(momentum, float(group["weight_decay"])))
                self._prepared += [(each.buffer, each.arrivals, momentum) for each in buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Turn the buffers that were prepared back into dense SGD's, after the step."""
        for buffer, arrivals, momentum in self._prepared:
            restore(buffer, arrivals, momentum)
        self._prepared.clear()

    def _buffer(
        self, optimizer: Any, p: Any, added: Tensor, arrived: Mapping[str, ArrivedToSgd[Tensor]]
    ) -> Buffer:
        """A parameter's momentum buffer, and what it is prepared from."""
        own, buffer = arrived[self._names[p]], optimizer.state[p]["momentum_buffer"]
        return Buffer(buffer, added, p, own.arrivals, float(own.factor), float(own.loss))
