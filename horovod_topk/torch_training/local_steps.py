"""Local steps of PyTorch optimizers, as the adapters of Horovod and torch.distributed share them.

`LocalSteps` is the optimizer that a training loop steps. It takes the inner optimizer's steps, and
an outer step when one is due: `horovod_topk.local` says what that is.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from horovod_topk.core.plan.buckets import TensorSpec
from horovod_topk.errors import ConfigError, NotAttachedError, UnsupportedOperationError
from horovod_topk.local.state import LocalState, chosen
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch_training.gradients import local, part_of, spec_of
from horovod_topk.torch_training.onebit_adam import OneBitAdam
from horovod_topk.torch_training.optimizer_settings import has_hooks
from horovod_topk.torch_training.state import TrainingCompressor, live_states
from horovod_topk.torch_training.tracing import refuse_recording, untraced

log = logging.getLogger("horovod_topk")

WRAPPED = (
    "LocalSteps: all names of parameters begin with 'module.', as those of DistributedDataParallel "
    "do. It exchanges gradients in every step; train the model inside it"
)


class TorchWeights:
    """`horovod_topk.local.rounds.Weights` of an optimizer's parameters."""

    def __init__(self, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        self._parameters, self._optimizer = parameters, optimizer

    def read(self, name: str) -> Tensor:
        """`Weights.read`."""
        return self._weights(name).reshape(-1)

    def moved(self, name: str, anchor: Tensor) -> Tensor:
        """`Weights.moved`: anchor and weights are both rounded to the weights' dtype."""
        weights = self.read(name).to(anchor.device)
        if weights.dtype != anchor.dtype:
            anchor = anchor.to(weights.dtype).to(anchor.dtype)
        return anchor - weights

    def blend(self, name: str, anchor: Tensor, alpha: float) -> None:
        """`Weights.blend`."""
        p = self._weights(name)
        anchor = anchor.to(p.device).view(p.shape)
        p.copy_(anchor if alpha == 0.0 else p * alpha + anchor * (1.0 - alpha))

    def is_exact(self, name: str) -> bool:
        """`Weights.is_exact`."""
        return self._weights(name).dtype in (torch.float32, torch.float64)

    def recover(self) -> None:
        """`Weights.recover`: the inner optimizer's states that are not finite begin anew."""
        for p, state in list(self._optimizer.state.items()):
            floats = [each for each in state.values() if torch.is_tensor(each)]
            if not all(bool(each.isfinite().all()) for each in floats):
                log.warning("LocalSteps resets a state of the inner optimizer that is not finite")
                del self._optimizer.state[p]

    def _weights(self, name: str) -> Tensor:
        weights: Tensor = local(self._parameters[name].detach())  # `p.data` may be another by now
        return weights


class ParametersState(LocalState[Tensor]):
    """Error feedback and anchors of local steps, as `TopKEF.of(optimizer)` returns it."""

    framework = "torch"
    broadcast = (
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0), or dist.broadcast of each "
        "parameter"
    )
    is_new = True  # until the first inner step, also of a rank that has joined an elastic job

    def forget(self) -> None:
        """As `LocalState.forget`."""
        super().forget()
        self.is_new = True

    def _fingerprint(self, array: Tensor) -> bytes:
        """A sum of 64 bits, which wraps around."""
        bits = array.view(torch.int64 if array.element_size() == 8 else torch.int32)
        bits = bits.to(torch.int64)
        places = torch.arange(bits.numel(), device=bits.device) % 65521 + 1
        return int((bits * places).sum()).to_bytes(8, "little", signed=True)


class LocalSteps(Optimizer):
    """An optimizer whose ranks train alone, and exchange how far they have moved now and then.

    Use it in place of the optimizer: `step()` takes the inner optimizer's step, and every `every`
    steps an outer step. Learning-rate schedules count inner steps. All ranks need equal weights
    before the first step. Call `synchronize()` after the last one: ranks have equal weights then.

    Args:
        optimizer: the inner optimizer, of any kind. Its state stays on each rank.
        named_parameters: all of its parameters with names, as of `model.named_parameters()`.
        preset: "local_sgd", "diloco" or "sparseloco": published settings, which other arguments
            replace.
        compression: the compressor of movements, a class or an instance;
            `TopKEF(ratio=1 / 64, values="int2")` by default.
        named_buffers: buffers that are averaged at outer steps, such as
            `model.named_buffers()` for the statistics of batch norm. Those of whole numbers stay as
            they are. Without it, each rank keeps its own.
        offload: keep anchors, outer momentum and residuals in the host's memory, and encode there.
        settings: see `horovod_topk.local.settings.LocalConfig`: every, outer, decay, fragments,
            delay, alpha, clip.

    Raises:
        ConfigError, UnknownSettingError: settings and optimizer cannot be combined.
        PlanMismatchError: ranks have different models or settings.
    """

    compressors: ClassVar[type[TrainingCompressor]]  # the base class of the adapter's
    _step_supports_amp_scaling = True  # GradScaler calls step() also where gradients are infinite

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]],
        preset: str | None = None,
        *,
        collective: Any,
        compression: Any = None,
        named_buffers: Iterable[tuple[str, Tensor]] = (),
        offload: bool = False,
        **settings: Any,
    ) -> None:
        # Optimizer.__init__ is not called: parameter groups and state are the inner optimizer's.
        self._inner = optimizer
        _check_inner(optimizer)
        compressor, self._config = chosen(preset, compression, settings, self.compressors)
        self._names = {p: name for name, p in _named(named_parameters, "named_parameters").items()}
        trained, buffers = self._trained(), _named(named_buffers, "named_buffers")
        beside = {f"buffer {n}": b for n, b in buffers.items() if b.is_floating_point()}
        device = "cpu" if offload else None
        specs = [_wide_spec(name, p, device) for name, p in trained.items()]
        weights = TorchWeights(trained | beside, optimizer)
        label = f"{type(optimizer).__name__} with {len(trained)} parameters"
        shared = weights, compressor, self._config, TorchOps(), collective
        self._topkef = ParametersState(label, specs, *shared)
        self._topkef.part = part_of(next(iter(trained.values())))
        if all(name.startswith("module.") for name in trained):
            self._topkef.warnings = (WRAPPED,)
            log.warning("%s", WRAPPED)
        self._topkef.average([_wide_spec(name, b, device) for name, b in beside.items()])
        compressor.attached(self._topkef)
        outer, self._counter = self._config.outer, InnerSteps(weakref.ref(self))
        if has_hooks(optimizer):
            if optimizer not in _COUNTERS:
                optimizer.register_step_pre_hook(_before_inner_step)
                optimizer.register_step_post_hook(_after_inner_step)
            _COUNTERS[optimizer] = self._counter
        log.info("LocalSteps: %s, effective outer rate %.3g", self._config, outer.effective_lr)

    def __repr__(self) -> str:
        """The inner optimizer, and the settings."""
        return f"LocalSteps({self._inner!r}, {self._config})"

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner optimizer."""
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __getstate__(self) -> NoReturn:
        """Refuse to copy or pickle: anchors and residuals belong to the parameters of one model."""
        raise UnsupportedOperationError(
            "LocalSteps was copied or pickled, and its parameters would be others",
            cure="Copy the model and the inner optimizer, make LocalSteps of them, and load "
            "state_dict() and TopKEF.of(optimizer).state_dict()",
        )

    @property
    def rounds(self) -> int:
        """Outer steps so far, of each fragment; equal on all ranks."""
        return self._topkef.steps // self._config.fragments

    # What an optimizer has, of the inner one.

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The inner optimizer's parameter groups."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state."""
        return self._inner.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self._inner.defaults

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict; `TopKEF.of(optimizer).state_dict()` has the rest."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state."""
        self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters without an anchor."""
        raise ConfigError(
            "add_param_group() was called, and the new parameters have no anchor",
            cure="Add them to the inner optimizer, and make LocalSteps of it anew",
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's."""
        self._inner.zero_grad(set_to_none)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register a hook on inner steps."""
        return self._inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register a hook on inner steps."""
        return self._inner.register_step_post_hook(hook)

    def step(self, closure: Any = None) -> Any:
        """Take an inner step, and the outer steps that are due then.

        Raises:
            ConfigError: a parameter is trained that was frozen when this object was made.
        """
        if not self._begins(closure):
            return self._inner.step()  # as hvd.broadcast_optimizer_state does
        loss = self._inner_step(closure)
        self.count()
        return loss

    @untraced
    def _begins(self, closure: Any) -> bool:
        """Whether training has begun: not before the first gradient. Takes the anchors then."""
        self._counter.note_counted()
        refuse_recording("LocalSteps.step()", next(iter(self._names)).device)
        state = self._topkef
        if state.is_new and closure is None and not self._has_gradient():
            return False
        state.is_new = False
        if not state.rounds.has_begun:
            self.begin()
        return True

    @untraced
    @torch.no_grad()
    def begin(self) -> None:
        """Make the present weights the anchors, as the first `step()` does. A collective."""
        self._check_trained()
        self._topkef.begin()
        self._topkef.check_equal()

    @untraced
    @torch.no_grad()
    def count(self) -> None:
        """Count an inner step that was taken elsewhere, and take the outer steps that are due."""
        self._counter.note_counted()
        if self._topkef.count():
            self._check_trained()

    @untraced
    @torch.no_grad()
    def synchronize(self) -> None:
        """Make an outer step of all that ranks have moved since, so that they have equal weights.

        A collective: call it on every rank, after as many rounds. Before evaluation it need not be
        called: any rank's weights can be evaluated.
        """
        self._counter.note_counted()
        self._topkef.synchronize()

    def _inner_step(self, closure: Any) -> Any:
        """Take the inner step, unless gradients are infinite; GradScaler says whether they are."""
        own, inner = vars(self), self._inner
        if "found_inf" not in own:
            return inner.step() if closure is None else inner.step(closure)
        scale, found = own["grad_scale"], own["found_inf"]
        if getattr(inner, "_step_supports_amp_scaling", False):
            inner.grad_scale, inner.found_inf = scale, found  # type: ignore[attr-defined]
            try:
                return inner.step()
            finally:
                del inner.grad_scale, inner.found_inf  # type: ignore[attr-defined]
        if found.item():
            return None
        if scale is not None:
            for p in (p for group in inner.param_groups for p in group["params"]):
                if p.grad is not None:
                    p.grad.div_(scale.to(p.grad.device))
        return inner.step()

    def _trained(self) -> dict[str, Tensor]:
        """The parameters that the inner optimizer trains, by name."""
        found = {}
        for p in (p for group in self._inner.param_groups for p in group["params"]):
            if p not in self._names:
                raise ConfigError(
                    f"a parameter of shape {list(p.shape)} of the optimizer has no name",
                    cure="Pass named_parameters=model.named_parameters(), of all that it steps",
                )
            if p.requires_grad:
                found[self._names[p]] = p
        if not found:
            raise ConfigError(
                "the optimizer has no parameter that is trained",
                cure="Set requires_grad before LocalSteps is made",
            )
        return found

    def _check_trained(self) -> None:
        known = self._topkef.tensors
        for name in self._trained():
            if name not in known:
                raise ConfigError(
                    "it is trained now, and was frozen when LocalSteps was made: ranks would train "
                    "it apart",
                    tensor=name,
                    cure="Make LocalSteps anew, on every rank, when parameters are unfrozen",
                )

    def _has_gradient(self) -> bool:
        gradients = (p.grad for group in self.param_groups for p in group["params"])
        return any(g is not None and bool(local(g).any()) for g in gradients)


def _wide_spec(name: str, p: Tensor, device: str | None) -> TensorSpec:
    """The spec of a parameter's movement: in float32, or float64 for float64 parameters."""
    spec = spec_of(name, p)
    return replace(spec, dtype=spec.residual_dtype, device=device or spec.device)


@dataclass
class InnerSteps:
    """Counts inner steps that a `LocalSteps` has not counted; it outlives the `LocalSteps`."""

    steps: weakref.ref[LocalSteps]
    uncounted: int = 0  # since the last one that was counted
    is_used: bool = False  # whether the `LocalSteps` has ever counted a step

    def note_counted(self) -> None:
        """Note that the `LocalSteps` counts a step, or ends a round."""
        self.uncounted, self.is_used = 0, True


_COUNTERS: weakref.WeakKeyDictionary[Optimizer, InnerSteps]
_COUNTERS = weakref.WeakKeyDictionary()  # of the last `LocalSteps` of each inner optimizer


@untraced
def _before_inner_step(optimizer: Any, *_: Any) -> None:
    """Refuse the steps of a loop that steps the inner optimizer instead of `LocalSteps`."""
    counter, kind = _COUNTERS[optimizer], type(optimizer).__name__
    if counter.steps() is None and not counter.is_used:
        raise NotAttachedError(
            f"{kind}.step() was called, and the LocalSteps that was made of this optimizer was "
            "deleted before its first step: ranks would train apart",
            cure=f"Write optimizer = LocalSteps(optimizer, ...), and step that. To train without "
            f"it, make {kind} anew",
        )
    if counter.steps() is not None and counter.uncounted:
        raise NotAttachedError(
            f"{kind}.step() was called again, and LocalSteps has not counted the step before: "
            "ranks would train apart",
            cure="Call step() of LocalSteps, which takes this step. To train without it, call its "
            "synchronize() and delete it",
        )


@untraced
def _after_inner_step(optimizer: Any, *_: Any) -> None:
    _COUNTERS[optimizer].uncounted += 1


def _named(pairs: Any, setting: str) -> dict[str, Tensor]:
    """The tensors of a setting by name, checked."""
    found: dict[str, Tensor] = {}
    for each in [pairs] if isinstance(pairs, torch.nn.Module) else pairs:
        if not (isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str)):
            raise ConfigError(
                f"{setting} has a {type(each).__name__} in the place of a name and a tensor",
                cure=f"Pass {setting}=model.{setting}()",
            )
        name, tensor = each
        if found.setdefault(name, tensor) is not tensor:
            raise ConfigError(
                f"{setting} has two tensors of this name",
                tensor=name,
                cure=f"Give those of several models prefixes: model.{setting}(prefix='encoder')",
            )
    return found


def _check_inner(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"the optimizer is {optimizer!r:.60}, which is no torch.optim.Optimizer",
            cure="Pass the inner optimizer first; several have a LocalSteps each",
        )
    is_attached = any(state.has(optimizer) for state in live_states())
    exchanges = isinstance(optimizer, OneBitAdam | LocalSteps) or hasattr(optimizer, "synchronize")
    if is_attached or exchanges:
        how = "has a compressor attached" if is_attached else "exchanges by itself"
        raise ConfigError(
            f"{type(optimizer).__name__} {how}",
            cure="Pass the optimizer of one process, such as torch.optim.AdamW",
        )
