"""Steps of one optimizer: each is checked, and commits or rolls back its compression.

PyTorch's hooks before gradients are accumulated, and around the optimizer's steps, call `Hooks`.
"""

from __future__ import annotations

import abc
import inspect
import logging
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD

from horovod_topk.core.run.counting import Counting
from horovod_topk.core.run.optimizers import kind_of, warn_of_clipping
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.errors import UnsupportedOperationError
from horovod_topk.torch_training import optimizer_settings as settings
from horovod_topk.torch_training.gradients import Buckets, Use
from horovod_topk.torch_training.own_steps import OwnSteps
from horovod_topk.torch_training.preprocessing import Preprocessing, UnknownScaler
from horovod_topk.torch_training.tracing import refuse_recording, untraced
from horovod_topk.torch_training.updates import Updates, applies_nothing

log = logging.getLogger("horovod_topk")


class Hooks(abc.ABC):
    """Checks each step of one optimizer, and commits or rolls back its compression.

    An adapter's subclass checks that a step has exchanged gradients (`check_before` and others),
    and says whether a step wraps the optimizer's own step (`is_around`).

    Attributes:
        name: prefix of the names of the compressor's collectives, and the optimizer's ordinal
            among those with the same prefix.
    """

    name: tuple[str, int]  # set by `TrainingState`

    def __init__(
        self,
        optimizer: Any,
        compressor: StepRunner[Tensor],
        buckets: Buckets,
        preprocessing: Preprocessing | None,
        updates: Updates | OwnSteps | None,
        *,
        has_scaler: bool = False,
    ) -> None:
        self.optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self.compressor, self.buckets = compressor, buckets
        self.preprocessing, self.updates = preprocessing, updates
        self.warnings: list[str] = []
        self._updated = 0  # number of exchanges when an update last began
        self._is_updating = False  # until that step has ended
        self._before: Any = None  # the handle of `_before_step`
        self._use: Use | None = None  # what the present step uses of the exchanged gradients
        config = compressor.plan.config
        keeps = config.momentum or config.ratio < 1.0 or config.withheld()
        self._scaler = UnknownScaler() if keeps and not has_scaler else None
        # Adam and similar optimizers divide by the magnitude of their gradients.
        self._watches_clipping = bool(config.momentum) and isinstance(optimizer, SGD)
        self._is_handed_out = False  # exchanged, and not applied by a step yet
        self._unapplied = Unapplied(optimizer, compressor, buckets)
        self._handles: list[Any] = []  # of the registered hooks

    def watch(self, optimizer: Any, accumulations: Iterable[tuple[Tensor, Any]]) -> None:
        """Register the hooks on an optimizer and on the accumulation of its gradients.

        accumulations: parameters, and autograd's nodes that accumulate their gradients.
        """
        for p, accumulation in accumulations:
            before = partial(self._before_accumulation, id(p))
            self._handles.append(accumulation.register_prehook(before))
        self._before = optimizer.register_step_pre_hook(self._before_step)
        self._handles.append(self._before)
        if hasattr(optimizer, "register_state_dict_pre_hook"):  # PyTorch 2.1
            self._handles.append(optimizer.register_state_dict_pre_hook(self._undo))
        after = optimizer.register_step_post_hook(self._after_step)
        # Before the hooks that a user has registered: they should see the gradients.
        _move(optimizer, "_optimizer_step_post_hooks", after, last=False)
        self._handles.append(after)

    def remove(self) -> None:
        """Remove the hooks: the optimizer's gradients are no longer compressed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def preprocess(self, ordinal: int, gradients: list[Tensor]) -> None:
        """Unscale and clip a bucket's gradients, in place, if there is `preprocessing`."""
        assert self.preprocessing is not None
        if not (own := self.compressor).step.sent:
            committed = own.counter.committed
            self.preprocessing.begin(self.optimizer(), own.ranks, committed, own.ratio)
        slots = self.buckets.slots_of[ordinal]
        self.preprocessing.apply([slot.parameter for slot in slots], gradients)
        for slot in slots:
            assert slot.ready is not None  # its bucket is complete
            slot.ready.note_writing()

    def exchanged(self) -> None:
        """Note that all gradients are exchanged, so that a user may change them from now on."""
        self._is_handed_out = self._watches_clipping
        self._note(UNSEEN)
        if self._scaler is not None:
            self._scaler.note(slot.parameter.grad for slot in self.buckets.slots.values())
        if self.updates is not None and (optimizer := self.optimizer()) is not None:
            # This hook runs after the user's own hooks: those should see the gradients.
            _move(optimizer, "_optimizer_step_pre_hooks", self._before, last=True)

    def take_back(self) -> None:
        """Roll back an exchange that no step will apply, as no rank has computed a gradient."""
        self.compressor.rollback()
        self.buckets.forget_exchanged()
        self._updated = self.buckets.exchanges
        self._unapplied.forget()

    @abc.abstractmethod
    def check_before(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse a step on gradients that are not exchanged."""

    def check_closure(self, optimizer: Any) -> None:  # noqa: B027  # not all adapters can
        """As `check_before`, for gradients computed by a closure, before they are applied."""

    def check_after(self, optimizer: Any) -> None:  # noqa: B027  # not all adapters have to
        """As `check_before`, for checks that are only possible at the end of a step."""

    def is_around(self, optimizer: Any) -> bool:
        """Whether this `step` exchanges gradients and then calls the optimizer's own `step`."""
        return False

    @untraced
    def _before_accumulation(self, parameter: int, _: Any) -> None:
        """Refuse to add to an exchanged gradient, unless it was zeroed in place."""
        if self._is_updating:  # a step has raised, and a user may have zeroed what it has hidden
            assert self.updates is not None
            self.updates.forget()
            self._updated, self._is_updating = -1, False
        slot = self.buckets.slots.get(parameter)
        if slot is not None:
            slot.has_fired = True
            if slot.exchanged is not None:
                slot.check_not_exchanged()
                slot.exchanged = None

    @untraced
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Check a step before it runs; returns the arguments that the step gets instead."""
        self._undo()
        for slot in islice(self.buckets.slots.values(), 1):
            refuse_recording("the optimizer's step", slot.kind[2])
        self.check_before(optimizer, args, kwargs)
        self._check_scaler(optimizer)
        momentum = self.compressor.plan.config.momentum
        if momentum:
            settings.check_not_twice(optimizer, momentum)
        else:
            settings.give_back(optimizer)
        self.check_clipping(optimizer)
        self._use = None
        if closure_of(args, kwargs) is None and not self.is_around(optimizer):
            self._begin(optimizer)
        check = partial(self._after_closure, optimizer)
        return with_one_exchange(args, kwargs, lambda: self.buckets.exchanges, check)

    def _after_closure(self, optimizer: Any) -> None:
        """Check what a closure has computed, and begin the step with it."""
        self._undo()  # Horovod's step and the optimizer's own both come here
        self.check_closure(optimizer)
        self._begin(optimizer)

    def _begin(self, optimizer: Any) -> None:
        """Note what the step uses, which may clear gradients, and begin its updates.

        They take the place of the optimizer's own once for each exchange.
        """
        self._use = None
        if not applies_nothing(optimizer):
            zeros = self.compressor.config.may_send_nothing
            self._use = self.buckets.use_of(optimizer, with_zeros=zeros)
        exchanges = self.buckets.exchanges
        if self.updates is not None and exchanges != self._updated:
            self._is_updating = True
            self.updates.begin(optimizer)
            self._updated = exchanges

    @untraced
    def _undo(self, *_: Any) -> None:
        """Show the gradients that a step which has raised has left hidden."""
        if self._is_updating:
            assert self.updates is not None
            self.updates.undo()
            self._updated, self._is_updating = -1, False

    def _check_scaler(self, optimizer: Any) -> None:
        """Warn once of a GradScaler that the compressor was not given."""
        if self._scaler is None:
            return
        divisor = self._scaler.divisor(optimizer)
        if divisor != 1.0 or not self._scaler.looks:
            self._scaler = None
        if divisor != 1.0:
            self._warn(
                "a GradScaler that TopKEF does not know, or something that acts like one, divides "
                f"the exchanged gradients of {kind_of(optimizer)}: residuals and velocities are in "
                f"units of its scale, {divisor:g} now, and count too much or too little for some "
                "steps after each change of it. Pass TopKEF(grad_scaler=scaler)"
            )

    def check_clipping(self, optimizer: Any) -> None:
        """Warn once of SGD's gradients that were changed after their exchange.

        Horovod documents clipping as `optimizer.synchronize()`, `clip_grad_norm_` and a step inside
        `skip_synchronize()`; with DistributedDataParallel, `clip_grad_norm_` follows `backward()`.
        With momentum correction `p.grad` holds velocities by then, which are up to 1 / (1 - m)
        times larger than gradients, so that a threshold for gradients makes steps that much
        smaller. `GradScaler.unscale_` is not noticed.
        """
        if not self._is_handed_out:
            return
        self._is_handed_out = False
        tensor = self.buckets.first_changed()
        if tensor is not None:
            self._watches_clipping = False
            changed = f"the gradient of {tensor!r} was changed between its exchange and step()"
            momentum = self.compressor.plan.config.momentum
            self.warnings.append(warn_of_clipping(momentum, changed))

    def _note(self, how: str) -> None:
        """Warn once if too many exchanges, which have ended so, were not applied."""
        if text := self._unapplied.note(how):
            self._warn(text)

    def _warn(self, text: str) -> None:
        log.warning("%s", text)
        self.warnings.append(text)

    @untraced
    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_updating:
            assert self.updates is not None
            self.updates.end(optimizer)
            self._is_updating = False
        self.check_after(optimizer)
        self.check_clipping(optimizer)  # if a closure has exchanged within the step
        use, self._use = self._use, None
        try:
            if use is not None:
                self.compressor.commit(use.without, use.frozen)
            else:  # the step applied other gradients than the exchanged ones, or none
                self.compressor.rollback()
        finally:  # a user's callback may raise
            self.buckets.forget_exchanged()
        self._note(CLEARED)


def _move(optimizer: Any, hooks: str, handle: Any, *, last: bool) -> None:
    """Move a hook behind those of the same kind, or before them."""
    registered = getattr(optimizer, hooks, None)
    if isinstance(registered, OrderedDict) and handle.id in registered:  # PyTorch's own
        registered.move_to_end(handle.id, last=last)


# Closures.


def closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """The closure that was passed to a step, or None."""
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure


def with_one_exchange(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    exchanges: Callable[[], int],
    check: Callable[[], None],
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Wrap a step's closure so that it raises if called again after an exchange.

    A step commits one exchange. After two, what the first one sent would be applied and stay in the
    residual too. Optimizers with a `first_step` and a `second_step` (Foret et al. 2021, Sharpness-
    Aware Minimization) take the first step back, and apply the last exchange alone.

    args: positional arguments of the `step` call, with the optimizer as the first.
    check: called after the closure, before the step goes on; may raise.
    """
    closure, before = closure_of(args, kwargs), exchanges()
    if closure is None:
        return args, kwargs
    again = takes_back(args[0])

    def evaluate() -> Any:
        if exchanges() != before and not again:
            raise _evaluates_again(
                "the optimizer evaluated its closure once more in one step, which had exchanged "
                "gradients already, and may have moved parameters by them"
            )
        loss = closure()
        check()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": evaluate}
    return (args[0], evaluate, *args[2:]), kwargs


def check_evaluates_once(optimizer: Any) -> None:
    """Refuse an optimizer that needs several gradients for one step, such as LBFGS."""
    if not isinstance(optimizer, LBFGS):
        return
    for group in optimizer.param_groups:
        if group["max_iter"] > 1 or group["line_search_fn"] is not None:
            raise _evaluates_again(
                f"{type(optimizer).__name__} has max_iter={group['max_iter']} and line_search_fn="
                f"{group['line_search_fn']!r}, and so evaluates its closure several times a step"
            )


def _evaluates_again(problem: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"{problem}, and error feedback knows of one exchange a step",
        cure="Leave such an optimizer uncompressed (Horovod: hvd.Compression.none), or have it "
        "evaluate its closure once a step (LBFGS: max_iter=1, without line_search_fn)",
    )


def takes_back(optimizer: Any) -> bool:
    """Whether an optimizer takes the steps of a first gradient back, as SAM's variants do."""
    return hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")


def check_all_are_known(
    optimizer: Any, known: Container[Any], names: Callable[[], Mapping[Any, str]]
) -> None:
    """Refuse gradients of parameters that were not trained when the exchange was planned."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and p.grad is not None and id(p) not in known:
                raise UnsupportedOperationError(
                    "its gradient would be applied without being exchanged: it had "
                    "requires_grad=False, or was in no parameter group, when the distributed "
                    "optimizer or model was built",
                    tensor=names().get(p, f"of shape {list(p.shape)}"),
                    cure="Build it with all that will ever be trained, and set requires_grad=False "
                    "afterwards for as long as it is not; or build it anew",
                )


# Exchanges that no step applies.

LOOKED_AT = 16  # exchanges that ended last
MANY = 8  # of them that were not applied
APPLIED, CLEARED, UNSEEN = "applied", "cleared", "unseen"  # how an exchange ended

_CURES = {
    CLEARED: "When step() was called, the gradients were None or zeros. Clear them after the step, "
    "not between backward() and step()",
    UNSEEN: "No step() was seen between them{replaced}. Weights that are updated by hand, or by a "
    "step() that does not call the optimizer's own, train without error feedback: let the "
    "optimizer step, or do not compress",
    APPLIED: "Other exchanges between them were. If another loss's backward() runs through these "
    "parameters, as that of a GAN's generator does through its discriminator, these exchanges are "
    "in vain: freeze the parameters meanwhile (requires_grad_(False), and with "
    "DistributedDataParallel call model.module, or pass find_unused_parameters=True where one "
    "model has both), or run that pass inside no_sync(). If that "
    "backward() belongs to the step, as SAM's first one does, all is well",
}


class Unapplied:
    """Notices that half of the last exchanges were not applied by the optimizer.

    A step that PyTorch's hooks do not see, or that finds no gradients, looks like a step that was
    skipped: residuals stay as they were, and what was sent is sent again. If that goes on, there is
    no error feedback. A single skipped step is no fault, and steps with a NaN or an infinity are
    counted by their own means (`Stats.rolled_back`, the guard).
    """

    def __init__(self, optimizer: Any, counts: Counting[Any], buckets: Buckets) -> None:
        self._counts = counts
        names = [slot.spec.name for slot in buckets.slots.values()] or [""]
        self._kind = f"{kind_of(optimizer)} ({len(names)} tensors, such as {names[0]!r})"
        self._optimizer = weakref.ref(optimizer)
        self.forget()
        self._ended: deque[str] = deque(maxlen=LOOKED_AT)
        self._has_ended = takes_back(optimizer)  # two exchanges a step are no fault

    def forget(self) -> None:
        """Do not count the exchanges that ended after the last call of `note` as unapplied."""
        self._before = self._counts.steps, self._counts.unapplied

    def note(self, how: str) -> str:
        """Count the exchanges that have ended since the last call; return a warning, once, or "".

        how: `CLEARED` or `UNSEEN`, for those that were not applied.
        """
        before, self._before = self._before, (self._counts.steps, self._counts.unapplied)
        if self._has_ended or before == self._before:
            return ""
        applied, unapplied = (now - then for now, then in zip(self._before, before, strict=True))
        self._ended.extend([APPLIED] * applied + [how] * unapplied)
        missed = [each for each in self._ended if each != APPLIED]
        self._has_ended = len(missed) >= MANY
        return self._text(missed) if self._has_ended else ""

    def _text(self, missed: list[str]) -> str:
        replaced, optimizer = "", self._optimizer()
        own: Any = inspect.unwrap(type(optimizer).step) if optimizer is not None else None
        step: Any = inspect.unwrap(getattr(optimizer, "step", own))  # a scheduler wraps it
        if getattr(step, "__func__", step) is not own:
            name = getattr(step, "__qualname__", type(step).__name__)
            replaced = f", and the optimizer's step was replaced by {name}"
        cause = CLEARED if missed.count(CLEARED) > len(missed) // 2 else UNSEEN
        if cause == UNSEEN and APPLIED in self._ended:
            cause = APPLIED
        return (
            f"TopKEF: {len(missed)} of the last {len(self._ended)} exchanges of {self._kind} were "
            "not applied by a step of it, so that what they sent is sent again. "
            + _CURES[cause].format(replaced=replaced)
        )
