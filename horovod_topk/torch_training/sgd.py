"""Adapts SGD's steps to compressed gradients; see `horovod_topk.core.arrivals`.

For a step of the optimizer its momentum buffer B is prepared, so that the optimizer's own code
computes the one that is wanted, M; after the step it is dense SGD's again. With mu the optimizer's
momentum, and g the exchanged gradient and weight decay as SGD adds them:

    M  = (1 - b) (mu B + c g) / (1 - mu),  b = mu phi^(1/4)    SGD: p = p - lr M
    B' = b (1 - mu) M / ((1 - b) mu)

Nesterov's SGD computes p = p - lr (g + mu M). With both forms a gradient moves its weight by lr c
/ (1 - mu) in all, as it does in dense SGD but for c (in Nesterov's first lr g, c is 1). mu B is
what earlier gradients have still to move, divided by lr / (1 - mu) (with Nesterov's form, by mu
times that), with compression and without: training may go on either way, in the same run or from a
checkpoint. After dense steps phi is 1 before the first compressed one, or what has still to move
would move at once.

Nothing else of the optimizer changes: between exchange and step gradients are gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from horovod_topk.core.arrivals import RATE, ArrivedToSgd
from horovod_topk.core.base_compressor import elastic
from horovod_topk.core.compressor import Compressor
from horovod_topk.core.optimizers import not_a_momentum
from horovod_topk.ops.torch_buffers import Buffer, Numbers, prepare, restore, undo
from horovod_topk.torch_training.added import added_by, applies_nothing, versions
from horovod_topk.torch_training.group_settings import number_in

TINY = 1e-6  # phi below this, before a step, is that of a run without earlier steps

Found = Sequence[tuple[Any, ArrivedToSgd[Tensor]]]  # parameters, and what arrived of them


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
        self._is_new, self._was_dense = True, False  # before the first step; after a dense one
        self._former = True, False  # the same before this step
        self._prepared: list[tuple[list[Buffer], Numbers, list[object]]] = []  # by groups

    @torch.no_grad()
    def prepare(self, optimizer: Any) -> None:
        """Prepare the momentum buffers for the optimizer's step, once gradients are exchanged.

        Raises:
            ConfigError: a group has a momentum of 1 or more, or a dampening; nothing has changed.
        """
        self.undo()  # what a step that raised has left
        self._former = self._is_new, self._was_dense
        step = self._compressor().step
        arrived = {} if step.flagged else step.arrivals_to_sgd()
        groups: list[tuple[Any, Found]] = []
        for group in optimizer.param_groups:
            applied = [p for p in group["params"] if p.grad is not None]
            for p in applied:
                if p.grad.is_sparse:  # Horovod makes it so again after a dense exchange
                    p.grad = p.grad.to_dense()
            known = [(p, self._names.get(p)) for p in applied]
            found = [(p, arrived[name]) for p, name in known if name in arrived]
            if found and group["momentum"]:
                _check(optimizer, group)
                groups.append((group, found))
        for group, pairs in groups:
            is_fused = group.get("fused")  # a fused step needs buffers of all parameters
            _make_buffers(optimizer, group["params"] if is_fused else [p for p, _ in pairs])
        if applies_nothing(optimizer):
            return
        self._begin(optimizer, [each for _, pairs in groups for each in pairs])
        self._was_dense = self._was_dense if step.flagged else not (arrived or elastic())
        for group, pairs in groups:
            momentum = number_in(optimizer, group, "momentum")
            decay = number_in(optimizer, group, "weight_decay")
            added = added_by(optimizer, group, [p for p, _ in pairs])
            buffers = [
                Buffer(optimizer.state[p]["momentum_buffer"], g, p, own.arrivals, own.loss)
                for (p, own), g in zip(pairs, added, strict=True)
            ]
            numbers = Numbers(momentum, decay)
            prepare(buffers, numbers)
            self._prepared.append((buffers, numbers, list(map(_versions, buffers))))

    @torch.no_grad()
    def restore(self) -> None:
        """Turn the buffers that were prepared back into dense SGD's, after the step."""
        for buffers, numbers, _ in self._prepared:
            _restore(buffers, numbers)
        self._prepared.clear()

    @torch.no_grad()
    def undo(self) -> None:
        """After a step that has raised, turn prepared buffers back into dense SGD's.

        A buffer that the step has changed, or whose gradient has been changed since, is restored
        as after a step. Any other becomes what it was before, to rounding. PyTorch does not count
        the writes of fused steps, so they count as steps that have changed no buffer.
        """
        for buffers, numbers, before in self._prepared:
            pairs = [(b, _versions(b) == old) for b, old in zip(buffers, before, strict=True)]
            _restore([each for each, is_unused in pairs if not is_unused], numbers)
            undo([each for each, is_unused in pairs if is_unused], numbers)
            self._is_new, self._was_dense = self._former
        self._prepared.clear()

    def _begin(self, optimizer: Any, found: Found) -> None:
        """Have phi begin at 1 where a buffer is that of dense steps.

        A rank that joins an elastic job later has what the others have.
        """
        is_new = self._is_new and not (elastic() and self._compressor().counter.committed)
        for p, own in found if is_new or self._was_dense else ():
            moves = bool(optimizer.state[p]["momentum_buffer"].any())
            arrived = (p.grad != 0).flatten() * RATE
            if moves and (self._was_dense or float((own.arrivals - arrived).max()) < TINY):
                own.arrivals.copy_(arrived + (1.0 - RATE))
        self._is_new = self._is_new and not found


def _versions(each: Buffer) -> tuple[int, ...]:
    return versions(each.buffer, each.added)


def _restore(buffers: Sequence[Buffer], numbers: Numbers) -> None:
    restore([(each.buffer, each.arrivals) for each in buffers], numbers.momentum)


def _check(optimizer: Any, group: Mapping[str, Any]) -> None:
    """Refuse a momentum that has become invalid during training."""
    momentum, dampening = (number_in(optimizer, group, s) for s in ("momentum", "dampening"))
    if not 0.0 < momentum < 1.0 or dampening:
        shown = f"momentum={momentum:g} and dampening={dampening:g}"
        raise not_a_momentum(f"a parameter group of {type(optimizer).__name__}", shown)


def _make_buffers(optimizer: Any, parameters: Sequence[Any]) -> None:
    """Make the momentum buffers that are missing: zeros."""
    for p in parameters:
        if optimizer.state[p].get("momentum_buffer") is None:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
