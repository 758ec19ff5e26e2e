"""Local steps of PyTorch optimizers, as the adapters of Horovod and torch.distributed share them.

`LocalSteps` is the optimizer that a training loop steps. It takes the inner optimizer's steps, and
an outer step when one is due: `horovod_topk.local` says what that is.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.exchange.agreement import agree, gather_bytes
from horovod_topk.core.exchange.loopback import Loopback
from horovod_topk.core.exchange.membership import check_elastic, elastic
from horovod_topk.core.exchange.selection import exchange_of
from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.run.attached import Attached
from horovod_topk.core.run.optimizers import guarded
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.core.run.stats import describe
from horovod_topk.core.state.state_dict import LOCAL
from horovod_topk.errors import ConfigError, PlanMismatchError, StateDictError
from horovod_topk.local.outer import Rule, Told, check_tells
from horovod_topk.local.rounds import Fragment, Rounds
from horovod_topk.local.settings import LocalConfig, check_compression, preset_of
from horovod_topk.methods import METHODS, Method
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch_training.gradients import local, part_of, spec_of
from horovod_topk.torch_training.onebit_adam import OneBitAdam
from horovod_topk.torch_training.state import TrainingCompressor

log = logging.getLogger("horovod_topk")

_LIVE: weakref.WeakSet[LocalState] = weakref.WeakSet()


class TorchWeights:
    """`horovod_topk.local.rounds.Weights` of an optimizer's parameters.

    Args:
        parameters: by name.
        optimizer: the inner optimizer.
    """

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


class LocalState(Attached[StepRunner[Tensor]]):
    """Error feedback and anchors of local steps, as `TopKEF.of(optimizer)` returns it.

    Steps of `stats()` and of `on_step` are outer steps; with fragments, each fragment's count.

    Args:
        optimizer: the inner optimizer.
        parameters: its parameters that are trained, by name.
        compressor: the compressor with the settings.
        collective: of the ranks; None: this rank is alone.
        config: the settings of local steps.
        device: where anchors and residuals are; None: with the parameters.
    """

    framework = "torch"
    name: str  # prefix of the collectives' names, equal on all ranks
    is_new = True  # until the first inner step, also of a rank that has joined an elastic job

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        compressor: TrainingCompressor,
        collective: Any,
        config: LocalConfig,
        device: str | None = None,
    ) -> None:
        label = f"{type(optimizer).__name__} with {len(parameters)} parameters"
        super().__init__(None, "average", label)
        self.part = part_of(next(iter(parameters.values())))
        check_compression(compressor.config)
        check_elastic(compressor.config)
        if elastic() and config.fragments > 1:
            raise ConfigError(
                f"fragments={config.fragments} was given, and this job is elastic",
                cure="Leave fragments= out, or run without --min-np and --max-np",
            )
        self._ops = TorchOps()
        self._collective = collective or Loopback(1, self._ops).collective(0)
        method = guarded(replace(compressor.config, follow_lr=False), compressor.deferred)
        parts = _fragments(parameters, config.fragments)
        taken = [own.name for own in _LIVE]
        made = list[Fragment[Tensor]]()
        for number, part in enumerate(parts):
            specs = [_anchor_spec(name, p, device) for name, p in reversed(part.items())]
            made.append(self._fragment(method, config, number, specs, taken))
        self.name = made[0].runner.name.removesuffix(".0")
        self._runners = [fragment.runner for fragment in made]
        self._state = self._runners[0]
        self.rounds = Rounds(config, made, TorchWeights(parameters, optimizer), self._ops)
        _LIVE.add(self)

    def _fragment(
        self,
        method: Method,
        config: LocalConfig,
        number: int,
        specs: Sequence[TensorSpec],
        taken: Sequence[str],
    ) -> Fragment[Tensor]:
        """Agree with all ranks on a fragment's plan, and allocate memory."""
        rule, ops, collective = Rule(config, number), self._ops, self._collective
        plan = make_plan(specs, method)
        plan = plan.under(plan.config, rule)
        prefix = method.name or f"local.{plan.digest.hex()}"
        ordinal = sum(each.startswith(f"{prefix}.") for each in taken)
        if not elastic():
            ordinal = agree(plan, ordinal, ops, collective)
        exchange, told = exchange_of(plan, ops, collective), Told(ops)
        check_tells(rule, exchange.kind)
        timer = getattr(collective, "timer", None)
        name = f"{prefix}.{ordinal}.{number}"
        runner = StepRunner(plan, ops, PayloadCodec(ops), exchange, name, timer, told)
        log.info("LocalSteps %s: %s, %s", name, plan.summary(), describe(exchange))
        return Fragment(runner, told)

    @property
    def _states(self) -> Sequence[StepRunner[Tensor]]:
        return self._runners

    def begin(self) -> None:
        """Make the present weights the anchors, before the first inner step. A collective.

        Raises:
            PlanMismatchError: on every rank, if ranks have different weights.
        """
        self.rounds.begin()
        if elastic():
            return
        pairs = [(name, f) for f in self.rounds.fragments for name in f.names]
        sums = torch.stack([_fingerprint(f.anchor(name)) for name, f in pairs])
        own = b"".join(each.to_bytes(8, "little", signed=True) for each in sums.tolist())
        said = gather_bytes(own, f"{self.name}.weights", self._ops, self._collective)
        for at, (name, _) in enumerate(pairs):
            found = [each[8 * at : 8 * at + 8] for each in said]
            other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
            if other is not None:
                self.rounds.has_begun = False
                raise PlanMismatchError(
                    f"ranks 0 and {other} have different weights before the first step",
                    tensor=name,
                    cure="Send rank 0's weights to all ranks first, with hvd.broadcast_parameters("
                    "model.state_dict(), root_rank=0), or dist.broadcast of each parameter",
                )

    def state_dict(self) -> dict[str, Any]:
        """As `Attached.state_dict`, with anchors, outer momentum and the counters of rounds.

        It waits for an exchange in the background. In the middle of a round the weights and the
        inner optimizer's state differ from rank to rank: save those of every rank, too.
        """
        self.rounds.settle()
        counters = {**self.rounds.counters(), "ranks": self._collective.size}
        return super().state_dict() | ({LOCAL: counters} if self.rounds.has_begun else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Attached.load_state_dict`.

        A state that another number of ranks has saved begins a round at its anchors, on every rank:
        what ranks had moved since their last outer step is lost.

        Raises:
            StateDictError: it does not fit; nothing has changed.
        """
        counters = state.get(LOCAL, {})
        known = len(counters.get("fragments", self.rounds.fragments))
        if known != len(self.rounds.fragments):
            raise StateDictError(
                f"the state dict has {known} fragments, and LocalSteps has "
                f"{len(self.rounds.fragments)}",
                cure=f"Pass fragments={known}",
            )
        super().load_state_dict({key: each for key, each in state.items() if key != LOCAL})
        self.rounds.drop()
        self.rounds.has_begun = bool(counters)
        if counters:
            self.rounds.take(counters)
        if counters and counters["ranks"] != self._collective.size:
            self.rounds.restart()

    def shared_state(self) -> dict[str, Any]:
        """As `Attached.shared_state`, with the counters of rounds."""
        counters = {LOCAL: self.rounds.counters()} if self.rounds.has_begun else {}
        return super().shared_state() | counters

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """As `Attached.take_shared`."""
        super().take_shared({key: each for key, each in state.items() if key != LOCAL})
        self.rounds.drop()
        if LOCAL in state:
            self.rounds.take(state[LOCAL])

    def reset(self) -> None:
        """As `Attached.reset`: residuals become zero; anchors and outer momentum stay."""
        super().reset()
        self.rounds.drop()

    def forget(self) -> None:
        """As `Attached.forget`."""
        super().forget()
        self.rounds.drop()
        self.rounds.has_begun, self.is_new = False, True


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
        compression: the compressor of movements, a class or an instance; `TopKEF` by default.
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
        if preset is not None:
            published = preset_of(preset)
            settings = {**published.settings, **settings}
            if compression is None:
                compression = self._compressor(published.method)(**published.compression)
        compressor = self.compressors.asked(compression or self._compressor("TopKEF"))
        if compressor is None:
            raise ConfigError(
                f"compression={compression!r:.60} is none of horovod_topk, or an environment "
                "variable has replaced it",
                cure="Pass Dense, Dense(values='bfloat16') or TopKEF",
            )
        self._config = LocalConfig.of(settings)
        self._names = {p: name for name, p in named_parameters}
        trained = self._trained()
        device = "cpu" if offload else None
        shared = compressor, collective, self._config
        self._topkef = LocalState(optimizer, trained, *shared, device)
        buffers = {f"buffer {n}": b for n, b in named_buffers if b.is_floating_point()}
        self._buffers = self._averaged(buffers, collective) if buffers else None
        compressor.attached(self._topkef)  # type: ignore[arg-type]
        outer = self._config.outer
        log.info("LocalSteps: %s, effective outer rate %.3g", self._config, outer.effective_lr)

    @classmethod
    def _compressor(cls, name: str) -> type[TrainingCompressor]:
        return cls.compressors.named(name, f"horovod_topk.{cls.compressors.adapter}")

    def __repr__(self) -> str:
        """The inner optimizer, and the settings."""
        return f"LocalSteps({self._inner!r}, {self._config})"

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner optimizer."""
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

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
        """Refuse parameters without an anchor.

        Raises:
            ConfigError: always.
        """
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
        state = self._topkef
        if state.is_new and closure is None and not self._has_gradient():
            return self._inner.step()  # as hvd.broadcast_optimizer_state does
        state.is_new = False
        if not state.rounds.has_begun:
            self.begin()
        loss = self._inner_step(closure)
        self.count()
        return loss

    @torch.no_grad()
    def begin(self) -> None:
        """Make the present weights the anchors, as the first `step()` does. A collective."""
        self._check_trained()
        self._topkef.begin()

    @torch.no_grad()
    def count(self) -> None:
        """Count an inner step that was taken elsewhere, and take the outer steps that are due."""
        rounds = self._topkef.rounds
        if started := rounds.after_step():
            self._check_trained()
            if started[-1] is rounds.fragments[-1]:
                self._average_buffers()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make an outer step of all that ranks have moved since, so that they have equal weights.

        A collective: call it on every rank, after as many rounds. Before evaluation it need not be
        called: any rank's weights can be evaluated.
        """
        if self._topkef.rounds.has_begun:
            self._topkef.rounds.synchronize()
            self._average_buffers()

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

    def _averaged(self, buffers: Mapping[str, Tensor], collective: Any) -> Any:
        """Make the runner that averages buffers, dense."""
        ops = TorchOps()
        over = collective or Loopback(1, ops).collective(0)
        plan = make_plan([spec_of(*each) for each in buffers.items()], METHODS["Dense"]())
        if not elastic():
            agree(plan, 0, ops, over)
        exchange = exchange_of(plan, ops, over)
        runner = StepRunner(plan, ops, PayloadCodec(ops), exchange, f"{self._topkef.name}.buffers")
        return runner, buffers

    def _average_buffers(self) -> None:
        if self._buffers is None:
            return
        runner, buffers = self._buffers
        found = {
            bucket.ordinal: [buffers[t.spec.name].detach().clone() for t in bucket.gradients]
            for bucket in runner.plan.buckets
        }
        for ordinal, each in found.items():
            runner.launch(ordinal, each)
        for ordinal, each in found.items():
            runner.step.finish(ordinal, each)
        if runner.commit():
            for bucket in runner.plan.buckets:
                for tensor, mean in zip(bucket.gradients, found[bucket.ordinal], strict=True):
                    buffers[tensor.spec.name].copy_(mean)


def _anchor_spec(name: str, p: Tensor, device: str | None) -> TensorSpec:
    """The spec of a parameter's movement: in float32, or float64 for float64 parameters."""
    spec = spec_of(name, p)
    return replace(spec, dtype=spec.residual_dtype, device=device or spec.device)


def _check_inner(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"the optimizer is {optimizer!r:.60}, which is no torch.optim.Optimizer",
            cure="Pass the inner optimizer first; several have a LocalSteps each",
        )
    if isinstance(optimizer, OneBitAdam | LocalSteps) or hasattr(optimizer, "synchronize"):
        raise ConfigError(
            f"{type(optimizer).__name__} exchanges by itself",
            cure="Pass the optimizer of one process, such as torch.optim.AdamW",
        )


def _fragments(parameters: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Split parameters into fragments of about equal size, block by block in strides.

    A block is the parameters whose names begin alike up to their first number, such as "layers.3".
    """
    blocks: dict[str, dict[str, Tensor]] = {}
    for name, p in parameters.items():
        found = re.match(r"(.*?\.)?\d+(?=\.|$)", name)
        blocks.setdefault(found[0] if found else name.partition(".")[0], {})[name] = p
    if count > len(blocks):
        raise ConfigError(
            f"fragments={count} was given, and the model has {len(blocks)} blocks",
            cure=f"Pass fragments={len(blocks)} at most",
        )
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    sizes = [0] * count
    for block in blocks.values():
        least = min(range(count), key=lambda p: (sizes[p], p))
        parts[least] |= block
        sizes[least] += max(1, sum(p.numel() for p in block.values()))
    return parts


def _fingerprint(weights: Tensor) -> Tensor:
    """A number that equal weights have in common, of 64 bits; a sum that wraps around."""
    bits = weights.view(torch.int64 if weights.element_size() == 8 else torch.int32)
    bits = bits.to(torch.int64)
    return (bits * (torch.arange(bits.numel(), device=bits.device) % 65521 + 1)).sum().cpu()
