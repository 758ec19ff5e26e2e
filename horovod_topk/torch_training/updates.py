"""Steps of PyTorch's SGD, Adam and AdamW on compressed gradients.

The optimizer's own step sees no gradient of the tensors that were compressed. They are updated when
it has ended, by `horovod_topk.updates.torch`. The optimizer's state has its own keys and meaning,
`step` included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from horovod_topk.core.exchange.membership import elastic
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.errors import ConfigError
from horovod_topk.ops.coding import ALWAYS
from horovod_topk.torch_training.gradients import local
from horovod_topk.torch_training.optimizer_settings import betas_of, not_a_number, number_in
from horovod_topk.updates import formulas
from horovod_topk.updates.formulas import Adam, Sgd
from horovod_topk.updates.torch import Update, update
from horovod_topk.updates.tracker import CLASSES, AdamFollower, Moments, SgdFollower

LONGEST = 1 << 24  # steps that are told apart where numbers are rounded at random
ADAM_KEYS = "exp_avg", "exp_avg_sq", "max_exp_avg_sq"


class Updates:
    """Updates of one SGD, Adam or AdamW.

    Args:
        names: names of parameters; parameters without one are not compressed.
    """

    def __init__(self, names: Mapping[Any, str], compressor: StepRunner[Tensor]) -> None:
        self._names, self._compressor = names, compressor
        self._is_new, self._was_dense = True, False  # before the first step; after a dense one
        # Of the step that has begun:
        # Parameter group, parameter, and update of this rank's part of it.
        self._found: list[tuple[Mapping[str, Any], Tensor, Update]] = []
        self._hidden: list[tuple[Tensor, Tensor]] = []  # parameters, and their gradients
        self._whole: list[Tensor] = []  # codes of tensors that the optimizer updates by itself
        self._is_dense = False

    @torch.no_grad()
    def begin(self, optimizer: Any) -> None:
        """Hide the gradients of the tensors to update, once they are exchanged."""
        self.undo()
        if applies_nothing(optimizer):  # SGD would make momentum buffers, and not write them
            every = (p for group in optimizer.param_groups for p in group["params"])
            self._hide(p for p in every if p in self._names)
            return
        step = self._compressor.step
        arrived = {} if step.flagged else dict(self._arrived())
        normalises = _normalises(optimizer)
        for group in optimizer.param_groups:
            applied = [p for p in group["params"] if p.grad is not None]
            known = [p for p in applied if self._names.get(p) in arrived]
            if known:
                make = _adam_of if normalises else _sgd_of
                made = make(optimizer, group, known, [arrived[self._names[p]] for p in known])
                self._found += [(group, *pair) for pair in zip(known, made, strict=False)]
        if not step.flagged and not normalises:
            self._is_dense = not (arrived or self._whole or elastic())
        self._hide(p for _, p, _ in self._found)

    def _hide(self, parameters: Iterable[Tensor]) -> None:
        for p in parameters:
            if p.grad is not None:
                self._hidden.append((p, p.grad))
                p.grad = None

    def undo(self) -> None:
        """Show the gradients again that a step which has raised has left hidden."""
        for p, gradient in self._hidden:
            if p.grad is None:
                p.grad = gradient
        self.forget()

    def forget(self) -> None:
        """Forget the gradients that a step which has raised has left hidden, as if zeroed."""
        self._found, self._hidden, self._whole, self._is_dense = [], [], [], False

    @torch.no_grad()
    def end(self, optimizer: Any) -> None:
        """Update the tensors, after the optimizer's step, and show their gradients again."""
        found, whole = self._found, self._whole
        self._was_dense = self._was_dense or self._is_dense
        self.undo()
        for codes in whole:
            codes.fill_(ALWAYS)
        if found and not _normalises(optimizer):
            self._continue_dense(optimizer, [pair for _, *pair in found])
        for group, p, each in found:
            each.moments = _moments_of(optimizer.state[p], group, p, each)
        if found:
            if _normalises(optimizer):
                steps: Any = [optimizer.state[p]["step"] for _, p, _ in found]
                torch._foreach_add_(steps, 1)
            update([each for _, _, each in found])

    def _arrived(self) -> Iterator[tuple[str, tuple[Tensor, Tensor | None, float]]]:
        """Codes of phi, Adam's damping and SGD's cut of the last step, by tensor name."""
        compressor, config = self._compressor, self._compressor.plan.config
        for follower, committed in compressor.step.followers():
            assert isinstance(follower, SgdFollower | AdamFollower)
            codes = zip(follower.names, follower.codes, strict=True)
            if config.ratio == 1.0 and not config.withheld():  # the optimizer's own, bit for bit
                self._whole += [each for _, each in codes]
            elif isinstance(follower, AdamFollower):
                damping = follower.damping(committed=committed).view(-1, CLASSES)
                for (name, each), pair in zip(codes, damping, strict=True):
                    yield name, (each, pair, 0.0)
            else:
                for name, each in codes:
                    decay = compressor.decay(name) if name in follower.selecting else 0.0
                    yield name, (each, None, formulas.cut_of(decay))

    def _continue_dense(self, optimizer: Any, updates: Sequence[Sequence[Any]]) -> None:
        """Have phi begin at 1 where a momentum buffer is that of dense steps.

        A rank that joins an elastic job later has what the others have.
        """
        is_new = self._is_new and not (elastic() and self._compressor.counter.committed)
        for p, each in updates if is_new or self._was_dense else ():
            buffer = local(optimizer.state.get(p, {}).get("momentum_buffer"))
            moves = buffer is not None and bool(buffer.any())
            if moves and (self._was_dense or not bool(each.codes.any())):
                each.codes.fill_(ALWAYS)
        self._is_new, self._was_dense = False, False


def applies_nothing(optimizer: Any) -> bool:
    """Whether a fused step applies nothing, as a GradScaler has found infinite gradients."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def moments(optimizer: Any, names: Mapping[Any, str]) -> dict[str, Moments]:
    """Return beta 2 and the mean square v of each parameter for the next step, by tensor name."""
    found = dict[str, Moments]()
    for group in optimizer.param_groups:
        _, beta2 = _betas(optimizer, group)
        for p in group["params"]:
            name = names.get(p)
            if name is not None:
                squares = local(optimizer.state.get(p, {}).get("exp_avg_sq"))
                found[name] = Moments(beta2, squares)
    return found


def _sgd_of(
    optimizer: Any, group: Mapping[str, Any], parameters: Sequence[Any], arrived: Sequence[Any]
) -> list[Update]:
    momentum, dampening = (number_in(optimizer, group, s) for s in ("momentum", "dampening"))
    if not momentum:
        return []
    if not 0.0 < momentum < 1.0 or dampening:
        raise _not_adapted(optimizer, f"momentum={momentum:g} and dampening={dampening:g}")
    rate, decay = (number_in(optimizer, group, s) for s in ("lr", "weight_decay"))
    own = momentum, rate, decay, bool(group["nesterov"])
    pairs = zip(parameters, arrived, strict=True)
    return [_of(optimizer, group, p, each, Sgd(*own, each[2])) for p, each in pairs]


def _adam_of(
    optimizer: Any, group: Mapping[str, Any], parameters: Sequence[Any], arrived: Sequence[Any]
) -> list[Update]:
    beta1, beta2 = _betas(optimizer, group)
    if not beta1:
        return []
    if not (0.0 < beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise _not_adapted(optimizer, f"betas=({beta1:g}, {beta2:g})")
    rate, decay, eps = (number_in(optimizer, group, s) for s in ("lr", "weight_decay", "eps"))
    is_decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))
    decays, betas = (0.0, decay) if is_decoupled else (decay, 0.0), (beta1, beta2)
    made: dict[int, Adam] = {}
    found: list[Update] = []
    for p, count, each in zip(parameters, _counts(optimizer, parameters), arrived, strict=True):
        if count not in made:
            made[count] = formulas.adam_of(betas, count + 1, rate, decays, eps)
        found.append(_of(optimizer, group, p, each, made[count]))
        found[-1].step = (count + 1) % LONGEST
    return found


def _of(optimizer: Any, group: Mapping[str, Any], p: Any, arrived: Any, numbers: Any) -> Update:
    codes, damping, _ = arrived
    gradient = applied_gradient(optimizer, p)
    return Update(local(p), gradient, bool(group.get("maximize")), codes, damping, numbers)


def applied_gradient(optimizer: Any, p: Any) -> Any:
    """A parameter's gradient as the optimizer applies it: dense, and without the loss's scale."""
    gradient, scale = local(p.grad), getattr(optimizer, "grad_scale", None)
    if gradient.is_sparse:  # Horovod makes it so again after a dense exchange
        gradient = gradient.to_dense()
    # A GradScaler leaves unscaling to a fused step.
    return gradient if scale is None else gradient / scale


def _counts(optimizer: Any, parameters: Sequence[Any]) -> list[int]:
    """Number of steps that the optimizer has made with each parameter."""
    steps = [optimizer.state.get(p, {}).get("step", 0) for p in parameters]
    devices = {step.device for step in steps if isinstance(step, Tensor)} - {torch.device("cpu")}
    for device in devices:  # one wait for each device
        own = [at for at, step in enumerate(steps) if isinstance(step, Tensor)]
        own = [at for at in own if steps[at].device == device]
        counts = torch.stack([steps[at] for at in own]).tolist()
        for at, count in zip(own, counts, strict=True):
            steps[at] = count
    return [int(step) for step in steps]


def _moments_of(
    state: dict[str, Any], group: Mapping[str, Any], p: Tensor, each: Update
) -> list[Tensor]:
    """The optimizer's moments of a tensor, and its step: made as the optimizer makes them."""
    if isinstance(each.numbers, Sgd):
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(p)
        return [local(state["momentum_buffer"])]
    if "step" not in state:
        on_device = group.get("capturable") or group.get("fused")
        wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
        kind = torch.float64 if wide else torch.float32
        state["step"] = torch.zeros((), dtype=kind, device=p.device if on_device else "cpu")
    keys = ADAM_KEYS if group.get("amsgrad") else ADAM_KEYS[:2]
    for key in keys:
        if key not in state:
            state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return [local(state[key]) for key in keys]


def _normalises(optimizer: Any) -> bool:
    return "betas" in optimizer.param_groups[0]


def _betas(optimizer: Any, group: Mapping[str, Any]) -> tuple[float, float]:
    """Both betas of a parameter group."""
    match betas_of(group):
        case [float(beta1), float(beta2)]:
            return beta1, beta2
    raise not_a_number(optimizer, group, "betas")


def _not_adapted(optimizer: Any, shown: str) -> ConfigError:
    """The error for a momentum whose value has become invalid during training."""
    return ConfigError(
        f"a parameter group of {type(optimizer).__name__} has {shown}, and its step depends on how "
        "often elements arrive",
        cure="Keep momentum, or the first of betas, in [0, 1), and dampening at 0",
    )
