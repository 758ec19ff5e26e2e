"""What adapters share that exchange gradients in backward: compressor, state and step hooks.

Steps of other optimizers on these gradients are refused, too. Residuals change when the optimizer
that compression was attached to has stepped. To that optimizer, a step of any other one looks like
a step that was skipped: residuals stay as they were, and what was applied is sent again, so that
training goes on without error feedback.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from horovod_topk.core.exchange.agreement import agree_on_nothing
from horovod_topk.core.exchange.selection import check_owners
from horovod_topk.core.run.attached import ByHorovod
from horovod_topk.core.run.substitute import horovods
from horovod_topk.errors import ConfigError, NotAttachedError, StepBeforeSynchronizeError
from horovod_topk.methods.protocol import Method
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch_training import steps
from horovod_topk.torch_training.collective import GroupCollective
from horovod_topk.torch_training.gradients import Slot, any_applied
from horovod_topk.torch_training.state import TrainingCompressor, TrainingState, inherit
from horovod_topk.torch_training.tracing import refuse_recording, untraced

ATTACH = (
    "Attach the compressor again with the optimizer that steps from now on, before backward(); "
    "residuals stay"
)
NOT_EXCHANGED = "step() was called on gradients that were not exchanged, or were applied already"


class BackwardCompressor(TrainingCompressor):
    """A compressor that is attached to a model, and not passed to Horovod."""

    @classmethod
    def compress(cls, *arguments: Any) -> NoReturn:
        """Refuse to serve Horovod."""
        raise ConfigError(
            f"a compressor of horovod_topk.{cls.adapter} was passed to Horovod",
            cure="For hvd.DistributedOptimizer write from horovod_topk.torch import TopKEF",
        )

    def _agrees_on_horovods(self, group: dist.ProcessGroup) -> str | None:
        """Return the name of Horovod's own compression, if it is asked for in this one's place.

        All ranks of the group check that they are asked for it (`core.run.substitute`).
        """
        if self.asked(self) is not None or (name := horovods()) is None:
            return None
        if group.size() > 1:
            agree_on_nothing(name, TorchOps(), GroupCollective(group))
        return name

    @staticmethod
    def _by_horovod(problem: str, cure: str) -> Any:
        """Return the inactive state of a model, if the environment leaves gradients to Horovod."""
        if name := horovods():
            return ByHorovod(name, "torch")
        raise NotAttachedError(problem, cure=cure)


class BackwardState(TrainingState):
    """A state whose errors in backward are raised at its end, as other ranks are in it, too."""

    _each: Sequence[Any] = ()
    _slots: Mapping[int, tuple[Any, Slot]] = {}  # by the parameter's id
    _failed: BaseException | None = None  # the first error of this backward

    def __init__(self, optimizers: Sequence[Any], group: dist.ProcessGroup, label: str) -> None:
        super().__init__(optimizers, SimpleNamespace(included=lambda: True, size=group.size), label)
        self._group = group

    def check_is_new(self, optimizers: Sequence[Any], otherwise: str = "") -> None:
        """Refuse to attach once more to optimizers that this state has."""
        if self.active and all(map(self.has, optimizers)):
            raise ConfigError(
                "a compressor is attached to this model and this optimizer already",
                cure=f"Pass a new optimizer to replace this one{otherwise}. Several optimizers are "
                "attached as one list, attach(model, [muon, adamw])",
            )

    def _exchanges_for(
        self, optimizers: Sequence[Any], names: Mapping[Tensor, str], config: Method
    ) -> bool:
        """Whether gradients are exchanged; if not, `_leave` is called for each optimizer."""
        check_optimizers(optimizers, names)
        for optimizer in optimizers if not self.active else ():
            self._leave(optimizer, config)
        return self.active

    def _hooks_for_each(
        self,
        module: nn.Module,
        optimizers: Sequence[Any],
        names: Mapping[Tensor, str],
        compressor: TrainingCompressor,
        groups: Sequence[Sequence[Tensor]] | None,
        before: BackwardState | None,
    ) -> list[Any]:
        """Agree on the plans of all optimizers, inherit residuals, and register hooks on steps.

        before: the state whose residuals are inherited; its hooks stay.
        """
        check_groups(groups)
        each: list[Any] = []
        for optimizer in optimizers:
            made = optimizer, names, compressor, GroupCollective(self._group), "average"
            each.append(self._hooks_for(*made, groups or (), each))
        runners = [hooks.compressor for hooks in each]
        check_owners([runner.exchange for runner in runners])
        if before is not None and before.active:
            inherit(before._states, runners)
        try:
            for hooks, optimizer in zip(each, optimizers, strict=True):
                hooks.model = weakref.ref(module)
                self._watch(hooks, optimizer, self._accumulations(hooks))
        except BaseException:
            for hooks in each:
                hooks.remove()
            raise
        return each

    def _accumulations(self, hooks: Any) -> Iterable[tuple[Tensor, Any]]:
        """The accumulations that an optimizer's hooks check; see `steps.Hooks.watch`."""
        return ()

    def _use(self, *each: Any) -> None:
        self._slots = {i: (hooks, s) for hooks in each for i, s in hooks.buckets.slots.items()}
        super()._use(*each)

    @contextmanager
    def _failing_later(self) -> Iterator[None]:
        """Catch the first error, to raise it at the end of backward."""
        try:
            yield
        except BaseException as error:
            self._failed = self._failed or error

    def _drop_step(self) -> None:
        for hooks in self._each if self.active else ():
            hooks.compressor.abandon()
            hooks.buckets.forget()


def listed(optimizer: Any) -> Sequence[Any]:
    """Return a list of optimizers, given one optimizer or several."""
    return optimizer if isinstance(optimizer, list | tuple) else [optimizer]


def check_is_no_optimizer(model: Any) -> None:
    """Refuse an optimizer in the place of the model."""
    if isinstance(model, Optimizer):
        cure = "Pass the model first, and then the optimizer"
        raise ConfigError(f"the model is an optimizer, {type(model).__name__}", cure=cure)


def check_groups(groups: Any) -> None:
    """Refuse what would be read as groups without any parameter, such as a list of parameters."""
    lists = groups if isinstance(groups, list | tuple) else [] if groups is None else [groups]
    wrong = next((each for each in lists if not isinstance(each, list | tuple)), None)
    if wrong is not None:
        raise ConfigError(
            f"groups= has a {type(wrong).__name__} in the place of a list of parameters",
            cure="Pass the parameters that are sent together, as in groups=[[a.weight, a.bias]]",
        )


@dataclass(frozen=True)
class Refusals:
    """What an adapter says of a step on gradients that were not exchanged."""

    never: tuple[str, str]  # problem and cure where its hook was never called
    local: tuple[str, str]  # the same where only backwards without exchange have run
    not_now: str  # the cure where gradients were applied already, or are of such a backward
    incomplete: str  # the cure where some gradients came, and others did not


class BackwardHooks(steps.Hooks):
    """Step hooks that refuse gradients which backward has not exchanged.

    Attributes:
        is_registered: returns whether the adapter hears of gradients.
        model: returns the module whose gradients they are, or None if it was deleted.
    """

    refusals: ClassVar[Refusals]
    is_registered: Callable[[], bool] = staticmethod(lambda: True)
    model: Callable[[], Any]  # set by the state
    _applied = -1  # number of exchanges when the present step began to apply them; -1: no step
    _earlier: Mapping[Slot, weakref.ref[Tensor]] = {}  # gradients from before `watch`

    def watch(self, optimizer: Any, accumulations: Any) -> None:
        """As `steps.Hooks.watch`."""
        _WATCHING.add(self)
        _watch_steps()
        super().watch(optimizer, accumulations)
        pairs = ((slot, slot.parameter.grad) for slot in self.buckets.slots.values())
        self._earlier = {slot: weakref.ref(g) for slot, g in pairs if g is not None}

    def remove(self) -> None:
        """As `steps.Hooks.remove`."""
        super().remove()
        _WATCHING.discard(self)

    def check_after(self, optimizer: Any) -> None:
        """As `steps.Hooks.check_after`."""
        self._applied = -1

    def check_before(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """As `steps.Hooks.check_before`."""
        if steps.closure_of(args, kwargs) is None:
            self.check_closure(optimizer)

    def check_closure(self, optimizer: Any) -> None:
        """Refuse non-zero gradients that were not exchanged.

        Zeros are accepted: checkpoint libraries step on zero gradients to create optimizer states.
        """
        steps.check_all_are_known(optimizer, self.buckets.slots, self._names)
        slots = self.buckets.slots.values()
        gradients = [slot.gradient for slot in slots if slot.gradient is not None]
        if not any(slot.exchanged for slot in slots) and any(map(torch.any, gradients)):
            if not self.buckets.exchanges and any(map(self._is_earlier, slots)):
                raise StepBeforeSynchronizeError(
                    "attach() was called between backward() and step(), which would apply "
                    "gradients that the compressor has not exchanged",
                    cure="Call attach() before backward(); now zero_grad() and backward() first",
                )
            missing = [slot.spec.name for slot in slots if not slot.has_fired]
            if 0 < len(missing) < len(slots):
                raise StepBeforeSynchronizeError(
                    "it has no gradient, and step() was called on others that were not exchanged",
                    tensor=missing[0],
                    cure=self.refusals.incomplete,
                )
            for slot in slots:
                if slot.gradient is not None:
                    slot.check_matches(slot.gradient)
            never = self.refusals.local if self.is_registered() else self.refusals.never
            not_now = NOT_EXCHANGED, self.refusals.not_now
            problem, cure = not_now if self.buckets.exchanges else never
            raise StepBeforeSynchronizeError(problem, cure=cure)
        self._applied = self.buckets.exchanges

    def _is_earlier(self, slot: Slot) -> bool:
        """Whether a gradient is not 0, and is that from before `watch`."""
        gradient, known = slot.gradient, self._earlier.get(slot)
        is_same = known is not None and known() is slot.parameter.grad and not slot.has_fired
        return is_same and gradient is not None and bool(torch.any(gradient))

    def _names(self) -> Mapping[Any, str]:
        """Names of the module's parameters, trained or not."""
        module = self.model()
        return {} if module is None else {p: name for name, p in module.named_parameters()}

    def launch(self, ordinal: int) -> None:
        """Compress a complete bucket and start its exchange."""
        gradients = self.buckets.ready(ordinal)
        refuse_recording("the exchange of gradients", gradients[0].device)
        if self.preprocessing is not None:
            self.preprocess(ordinal, gradients)
        self.compressor.launch(ordinal, gradients)

    def receive(self) -> None:
        """Write the exchanged gradients of all buckets to the memory of the ready ones."""
        gain = 1.0 if self.preprocessing is None else self.preprocessing.gain(self.optimizer())
        ordinals = [bucket.ordinal for bucket in self.compressor.plan.buckets]
        ready = {ordinal: self.buckets.ready(ordinal) for ordinal in ordinals}
        self.compressor.step.finish(ready, gain)
        for ordinal in ordinals:
            self.buckets.note_exchanged(ordinal)

    def hand_out(self, *, zeros: bool = False) -> None:
        """Note that all gradients are exchanged, once they are in `p.grad`; see `Slot.hand_out`."""
        for slot in self.buckets.slots.values():
            slot.hand_out(zeros=zeros)
        self.exchanged()

    def check_is_alive(self) -> None:
        """Refuse to compress gradients for an optimizer that was deleted."""
        if self.optimizer() is None:
            problem = "the optimizer that compression was attached to was deleted"
            raise NotAttachedError(problem, cure=ATTACH)

    def check_other(self, optimizer: Any) -> None:
        """Refuse a step on exchanged gradients that is no part of the attached optimizer's step.

        Wrappers such as Lookahead, and torch's ZeroRedundancyOptimizer, step an inner optimizer.
        """
        own, known = self.optimizer(), self.buckets.slots
        if optimizer is own or self._applied == self.buckets.exchanges:
            return
        stepped = (id(p) for group in optimizer.param_groups for p in group["params"])
        slots = [known[p] for p in stepped if p in known]
        if any_applied(slots) and not any(each is own for each in within(optimizer)):
            raise NotAttachedError(
                f"{type(optimizer).__name__}.step() was called, and compression is attached to "
                "another optimizer of these parameters",
                tensor=slots[0].spec.name,
                cure=ATTACH,
            )


def check_optimizers(optimizers: Sequence[Any], names: Mapping[Tensor, str]) -> None:
    """Refuse optimizers whose parameters are not the model's trained parameters, each once."""
    stepped: dict[Tensor, Any] = {}
    for optimizer in optimizers:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p in names and stepped.get(p, optimizer) is not optimizer:
                kinds = type(stepped[p]).__name__, type(optimizer).__name__
                raise ConfigError(
                    f"{kinds[0]} has it, and {kinds[1]} beside it",
                    tensor=names[p],
                    cure="Give each parameter to one optimizer of the list",
                )
            stepped[p] = optimizer
    missing = next((name for p, name in names.items() if p not in stepped), None)
    if missing is not None:
        raise ConfigError(
            "the model trains it, and no optimizer has it",
            tensor=missing,
            cure="Attach all optimizers of a model at once, as a list: "
            "TopKEF().attach(model, [muon, adamw]). Set requires_grad=False for what is not "
            "trained before the model is distributed",
        )
    other = next((p for p in stepped if p.requires_grad and p not in names), None)
    if other is not None:
        raise ConfigError(
            f"{type(stepped[other]).__name__} trains it, and the distributed model does not: no "
            "gradient of it is exchanged",
            tensor=f"of shape {list(other.shape)}",
            cure="Make it a part of the module before that is distributed, or step it by an "
            "optimizer of its own",
        )


def within(wrapper: Any) -> list[Any]:
    """The attributes of an object that are not None, and items of lists, tuples and dicts."""
    found = [each for each in vars(wrapper).values() if each is not None]
    found += [each for items in found if isinstance(items, list | tuple) for each in items]
    found += [each for items in found if isinstance(items, dict) for each in items.values()]
    return found


_WATCHING: weakref.WeakSet[BackwardHooks] = weakref.WeakSet()


def hooks_on(optimizer: Any) -> list[BackwardHooks]:
    """Step hooks on an optimizer, also those for a model that was deleted."""
    return [hooks for hooks in _WATCHING if hooks.optimizer() is optimizer]


@functools.cache
def _watch_steps() -> None:
    """Register a hook with PyTorch that checks every optimizer's step before it changes weights."""

    def check(optimizer: Any) -> None:
        for each in list(_WATCHING):
            each.check_other(optimizer)

    @untraced
    def before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
        if steps.closure_of(args, kwargs) is None:
            return check(optimizer)
        # A closure computes the gradients. How often it is called is not limited here.
        return steps.with_one_exchange(args, kwargs, lambda: 0, lambda: check(optimizer))

    register_optimizer_step_pre_hook(before_step)
