"""Steps that PyTorch's other optimizers make themselves, corrected when they have ended.

The optimizer's own step sees the exchanged gradients. What it has changed is corrected by the
formulas of its family (`horovod_topk.updates.formulas.FAMILIES`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horovod_topk.core.run.runner import StepRunner
from horovod_topk.torch_training.gradients import local
from horovod_topk.torch_training.optimizer_settings import momentum_of, number_of
from horovod_topk.torch_training.updates import Updates, applied_gradient, applies_nothing
from horovod_topk.updates import formulas
from horovod_topk.updates.formulas import Family, family_of
from horovod_topk.updates.torch import VERBS, following, measure_weights
from horovod_topk.updates.tracker import CLASSES, AdamFollower, Rule

MEANS = "exp_avg", "state1"  # of gradients, in an optimizer's state


@dataclass
class OwnStep:
    """One tensor in the step that begins."""

    weight: Tensor
    before: Tensor  # the weight before the step
    gradient: Tensor  # as the optimizer adds it, flat; the step may write its own
    codes: Tensor  # of phi before the step, uint8, flat
    following: Tensor  # of phi after the step
    square: Tensor  # v, flat
    damping: Tensor  # c of both classes, [2]
    rate: float  # lr; 0: not known
    mean: Tensor | None = None  # the optimizer's mean of gradients
    mean_before: Tensor | None = None  # before the step
    sign: Tensor | float = 1.0  # c of a step that is a sign


class OwnSteps:
    """Corrects the steps of one optimizer; see `horovod_topk.torch_training.updates.Updates`."""

    def __init__(
        self, names: Mapping[Any, str], compressor: StepRunner[Tensor], family: Family
    ) -> None:
        self._names, self._compressor, self._family = names, compressor, family
        self._found: list[OwnStep] = []  # tensors in the step that has begun

    @torch.no_grad()
    def begin(self, optimizer: Any) -> None:
        """Copy the weights and gradients, and move means of gradients towards them."""
        self.undo()
        if applies_nothing(optimizer) or (step := self._compressor.step).flagged:
            return
        arrived = dict[str, tuple[Tensor, Tensor, Tensor]]()
        for follower, committed in step.followers():
            assert isinstance(follower, AdamFollower)
            damping = follower.damping(committed=committed).view(-1, CLASSES)
            kept = zip(follower.codes, follower.squares_kept, damping, strict=True)
            arrived |= zip(follower.names, kept, strict=True)
        for group in optimizer.param_groups:
            for p in group["params"]:
                own = None if p.grad is None else arrived.get(self._names.get(p, ""))
                if own is not None:
                    gradient = applied_gradient(optimizer, p)
                    self._found.append(_own_step(local(p), gradient, group, *own))
                    kept = optimizer.state.get(p, {})
                    if self._family.has_mean:
                        self._move_mean(self._found[-1], kept, group)
                    elif self._family.is_sign:
                        compare_sign(self._found[-1], kept, group)

    def _move_mean(self, each: OwnStep, state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
        mean, beta1 = _mean_of(each, state, MEANS), momentum_of(group)
        if mean is not None and beta1:
            each.mean, each.mean_before = mean, mean.clone()
            began = 1.0 - beta1**self._compressor.counter.committed
            share = formulas.share(each.following.to(each.gradient.dtype)).view(mean.shape)
            gradient = each.gradient.view(mean.shape)
            mean.copy_(formulas.own_mean(mean, gradient, share, began))

    def undo(self) -> None:
        """Forget a step that has raised."""
        for each in self._found:
            if each.mean is not None and each.mean_before is not None:
                each.mean.copy_(each.mean_before)
        self._found = []

    forget = undo

    @torch.no_grad()
    def end(self, optimizer: Any) -> None:
        """Correct what the step has changed, and note which elements have arrived."""
        found, self._found = self._found, []
        for each, rms in zip(found, measure_weights([e.before for e in found]), strict=True):
            farthest = (rms * formulas.FARTHEST).clamp(min=each.rate)
            correct(each, farthest, self._family)
            each.square.copy_(formulas.own_square(each.square, each.gradient))
            each.codes.copy_(each.following)


def compare_sign(each: OwnStep, state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Compute the factor c of an optimizer that steps by the sign of its mean of gradients."""
    mean, beta1 = _mean_of(each, state, (*MEANS, "momentum_buffer")), momentum_of(group) or 0.0
    if mean is not None and 0.0 < beta1 < 1.0:
        share = formulas.share(each.following.to(each.gradient.dtype)).view(mean.shape)
        gradient, square = each.gradient.view(mean.shape), each.square.view(mean.shape)
        each.sign = formulas.own_sign(gradient, mean, square, share, beta1, VERBS)


def _mean_of(each: OwnStep, state: Mapping[str, Any], keys: Sequence[str]) -> Tensor | None:
    """The first of these states, unless it is in few bits, as some of bitsandbytes' are."""
    mean = local(next((state[key] for key in keys if key in state), None))
    is_float = isinstance(mean, Tensor) and mean.is_floating_point()
    return mean if is_float and mean.shape == each.weight.shape else None


def updates_of(
    rule: Rule, optimizer: Any, names: Mapping[Any, str], compressor: StepRunner[Tensor]
) -> Updates | OwnSteps:
    """Make what adapts an optimizer's steps by a rule; for the others see `OwnSteps`."""
    if rule.is_own:
        return OwnSteps(names, compressor, family_of(optimizer))
    return Updates(names, compressor)


def _own_step(
    p: Tensor,
    gradient: Tensor,
    group: Mapping[str, Any],
    codes: Tensor,
    square: Tensor,
    damping: Tensor,
) -> OwnStep:
    """Note a tensor's weight, gradient and states before the optimizer's step."""
    gradient = gradient.reshape(-1).to(square.dtype, copy=True)
    later = following(codes, gradient)
    gradient = gradient.neg_() if group.get("maximize") else gradient
    rate = number_of(group.get("lr")) or 0.0
    return OwnStep(p, p.detach().clone(), gradient, codes, later, square, damping, rate)


def correct(each: OwnStep, farthest: Tensor, family: Family) -> None:
    """Correct what the optimizer's step has changed of one tensor.

    farthest: the largest change of an element that does not always arrive, [].
    """
    shape, kind = each.weight.shape, torch.promote_types(each.weight.dtype, torch.float32)
    share = formulas.share(each.following.to(kind)).view(shape)
    often = formulas.arrives_often(each.codes).view(shape)
    factor = each.sign if family.is_sign else torch.where(often, *each.damping.to(kind))
    weights, known = (each.before.to(kind), each.weight.to(kind)), (factor, share)
    each.weight.copy_(formulas.own_weight(*weights, *known, farthest.to(kind), family, VERBS))
