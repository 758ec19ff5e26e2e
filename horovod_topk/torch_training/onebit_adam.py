"""1-bit Adam: Adam whose variance is frozen, and whose momentum is then exchanged as signs.

The first `freeze_after` steps are those of Adam, on the mean g of the ranks' gradients g_i:

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2          x -= lr m' / (sqrt(v') + eps)

Then v is constant, and each step is

    rank i    m_i = b1 m + (1 - b1) g_i      sends C(m_i + e_i),   e_i = m_i + e_i - C(m_i + e_i)
    owner     a = mean of C(m_i + e_i)       sends C(a + d),       d = a + d - C(a + d)
    all       m = C(a + d)                   x -= lr m' / (sqrt(v') + eps)

with C the sign times a mean magnitude. Each rank keeps an error e_i, and each owner of a part of a
tensor an error d: they are the residuals of `SignSGD` over the sharded exchange. The first steps
use its dense level. m' and v' are corrected for their start at 0 as in Adam, v' by the step at
which it was frozen; the paper omits this correction and eps.

The exchange counts the steps: its number of committed ones says for all parameters, on all ranks,
whether gradients or momenta are sent, and with that whether v is constant. A parameter that was
absent from some steps has a v of fewer of them. One that had no gradient in the first steps has
none: 1-bit momenta say nothing of its variance, so that its first later step is an error.

Source: Tang et al. 2021 (1-bit Adam: Communication Efficient Large-Scale Training with Adam's
Convergence Speed), algorithm 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from horovod_topk.config import check_flag, check_whole
from horovod_topk.errors import ConfigError, UnsupportedOperationError, check
from horovod_topk.methods.protocol import Method
from horovod_topk.torch_training.optimizer_settings import betas_of, number_in

log = logging.getLogger("horovod_topk")

MOST = 2**31  # largest `freeze_after`
SQUARES = "squares"  # key in a parameter's state: number of gradients in its variance
RANGES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("lr", "eps", "weight_decay"), (1e-3, (0.0, math.inf))),
    "betas": ((0.9, 0.999), (0.0, 1.0), (0.0, 1.0)),
    "trust_limits": ((0.01, 10.0), (0.0, math.inf), (0.0, math.inf)),
    "trust_beta": (0.9, (0.0, 1.0)),
    "factor_limits": ((0.5, 4.0), (0.0, 1.0), (1.0, math.inf)),
    "factor_threshold": (0.1, (0.0, 1.0)),
}  # setting: an example, and the range of each of its numbers; the last four: `OneBitLamb`
SCALE = "scale"  # factor of exchanged momenta in `OneBitLamb`; 0: not known yet


class OneBitAdam(Optimizer):
    """Adam that sends 1 bit for each element once its variance is frozen.

    Wrap it like any optimizer, without `compression=`:

        >>> optimizer = OneBitAdam(model.parameters(), freeze_after=1000, lr=1e-3)
        >>> optimizer = hvd.DistributedOptimizer(
        ...     optimizer, named_parameters=model.named_parameters()
        ... )

    `TopKEF.of(optimizer)` returns the state of its exchange, for statistics and checkpoints. It
    sends dense float32 gradients for `freeze_after` steps, then 31 times fewer bytes. Another
    compressor with error feedback may be passed, such as `SignSGD(exchange="allgather")` for
    elastic jobs, which have no owners. For torch DistributedDataParallel, attach a compressor:
    `SignSGD(exchange="sharded").attach(model, optimizer)`. Without either, it is Adam whose
    variance is frozen, and exchanges nothing.

    Freeze the variance when it has become steady, often after 15 to 25% of all steps, and after the
    warm-up of the learning rate. Elements whose variance is 0 by then (they never had a gradient)
    are updated no more. A parameter of which all elements are such is named by a warning when the
    variance is frozen, and is an error in the first step in which it has a gradient.

    Args:
        params: parameters, or parameter groups.
        freeze_after: steps of Adam with dense gradients, 1 or more; the same for all groups.
        lr: the learning rate.
        betas: decay of the mean and of the variance, both in [0, 1).
        eps: added to the square root of the variance.
        weight_decay: times lr, the share of each parameter that is subtracted in each step, as in
            AdamW.
        bias_correction: correct mean and variance for their start at 0, as Adam does. False: as
            the paper writes it.

    Raises:
        ConfigError: a value is out of its range; or, when the exchange is set up, the compressor
            does not fit.

    Source: Tang et al. 2021 (1-bit Adam: Communication Efficient Large-Scale Training with Adam's
    Convergence Speed).
    """

    def __init__(
        self,
        params: Any,
        freeze_after: int | None = None,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        defaults: dict[str, Any] = {"freeze_after": freeze_after, "lr": lr, "betas": betas}
        defaults |= {"eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction}
        self._begin()
        super().__init__(params, defaults)

    def _begin(self) -> None:
        self._taken = 0  # steps so far; if gradients are exchanged, the exchange counts them
        self._momenta = set[int]()  # ids of parameters whose `grad` is a momentum
        self._missing: list[Tensor] | None = None  # without a variance, once it is frozen
        self._names: Mapping[Tensor, str] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `torch.optim.Optimizer.add_param_group`."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
            if len({group["freeze_after"] for group in self.param_groups}) > 1:
                raise ConfigError(
                    "parameter groups have different freeze_after, and all of them are exchanged "
                    "in the same form",
                    cure="Pass one freeze_after for all groups",
                )
        except ConfigError:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        names = vars(self).get("_names", {})
        self._begin()
        self._names = names
        for group in self.param_groups:
            own = {key: self.defaults[key] for key in RANGES if key in self.defaults}
            group.update(own | group)  # which may come from another optimizer of this module
            for p in filter(self.state.get, group["params"]):
                own = self.state[p]
                own.setdefault(SQUARES, min(_steps(own), group["freeze_after"]))
                own.update(self._begun(p) | own)
                self._taken = max(self._taken, _steps(own))

    # Called by the exchange of gradients.

    def exchange_settings(self, config: Method, names: Mapping[Tensor, str]) -> Method:
        """Return the settings for exchanging the momentum: dense in the first steps."""
        name, freeze_after, self._names = type(config).__name__, self._freeze_after, names
        if not config.error_feedback:
            raise ConfigError(
                f"{name} has no error feedback as it is set, and the errors of a momentum would "
                "add up",
                cure="Leave compression= out, or pass a compressor with error feedback",
            )
        if config.warmup is None:
            return replace(config, warmup=((freeze_after, 1.0),))
        until, ratio = config.stretches[0]
        if ratio != 1.0 or until < freeze_after:
            raise ConfigError(
                f"warmup={config.warmup!r} compresses gradients in the first {freeze_after} steps, "
                "from which the variance is estimated",
                cure="Leave warmup= out",
            )
        return config

    def begin_exchange(self, committed: int, ratio: float) -> None:
        """Begin a step, before its first bucket is exchanged."""
        self._taken = committed
        if not self._is_frozen and ratio < 1.0:
            raise ConfigError(
                f"ratio {ratio} compresses gradients in the first {self._freeze_after} steps, from "
                "which the variance is estimated",
                cure="Call set_ratio(None), and set a ratio only after these steps",
            )

    @torch.no_grad()
    def before_exchange(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Turn this rank's gradients into what ranks exchange, in place.

        Ranks exchange gradients until the variance is frozen, and momenta from then on.
        """
        if not self._is_frozen:
            self._momenta.difference_update(map(id, parameters))
            return
        pairs = ((p, group["betas"]) for group in self.param_groups for p in group["params"])
        betas = {id(p): float(beta1) for p, (beta1, _) in pairs}
        for p, gradient in zip(parameters, gradients, strict=True):
            state, beta = self.state.get(p), betas[id(p)]
            gradient.mul_(1 - beta)
            if state:
                gradient.add_(state["exp_avg"], alpha=beta)
                if state.get(SCALE):
                    gradient.mul_(state[SCALE])
            self._momenta.add(id(p))

    # The optimizer's step.

    @property
    def _freeze_after(self) -> int:
        return int(self.param_groups[0]["freeze_after"])  # of all groups

    @property
    def _is_frozen(self) -> bool:
        """Whether the variance is constant in this step."""
        return self._taken >= self._freeze_after

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: evaluates the model once more and returns the loss.

        Returns:
            The loss of `closure`, if it was given.

        Raises:
            ConfigError: a parameter gets its first gradient after the variance was frozen; nothing
                has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_variances()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        self._momenta.clear()
        self._taken += 1
        return loss

    def _check_variances(self) -> None:
        """Refuse a first gradient after the variance was frozen; warn once of what has had none."""
        if not self._is_frozen:
            self._missing = None
            return
        if self._missing is None:
            every = [p for group in self.param_groups for p in group["params"]]
            squares = (self.state.get(p, {}).get("exp_avg_sq") for p in every)
            pairs = zip(every, squares, strict=True)
            self._missing = [p for p, each in pairs if each is None or not torch.any(each)]
            names = [self._name_of(p) for p in self._missing if p.requires_grad]
            if names:
                log.warning(
                    "%s: %s had no gradient in the first %d steps, and so no variance: a later one "
                    "is an error",
                    type(self).__name__,
                    ", ".join(names),
                    self._freeze_after,
                )
        for p in self._missing:
            if p.grad is not None and bool(torch.any(p.grad != 0)):
                raise ConfigError(
                    f"it has its first gradient after the variance was frozen, by freeze_after="
                    f"{self._freeze_after}, and its variance is not known",
                    tensor=self._name_of(p),
                    cure="Pass a freeze_after by which all parameters have had gradients, or set "
                    "its requires_grad to False",
                )

    def _name_of(self, p: Tensor) -> str:
        return self._names.get(p, f"of shape {list(p.shape)}")

    def _update(self, p: Tensor, exchanged: Tensor, group: Mapping[str, Any]) -> None:
        if exchanged.is_sparse:
            raise UnsupportedOperationError(
                f"{type(self).__name__} cannot apply a sparse gradient, of shape {list(p.shape)}",
                cure="Pass sparse_as_dense=True to hvd.DistributedOptimizer",
            )
        self.state[p] = self.state[p] or self._begun(p)
        self.state[p]["step"] += 1
        self._update_moments(p, exchanged, group)
        self._apply(p, group)

    def _begun(self, p: Tensor) -> dict[str, Any]:
        """Return the state of a parameter before its first step."""
        state = {"step": torch.zeros((), dtype=torch.float32, device="cpu"), SQUARES: 0}
        return state | {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def _update_moments(self, p: Tensor, exchanged: Tensor, group: Mapping[str, Any]) -> None:
        state, (beta, decay) = self.state[p], map(float, group["betas"])
        if id(p) in self._momenta:
            state["exp_avg"].copy_(exchanged)
        else:
            state["exp_avg"].mul_(beta).add_(exchanged, alpha=1 - beta)
        if not self._is_frozen:
            state[SQUARES] += 1
            state["exp_avg_sq"].mul_(decay).addcmul_(exchanged, exchanged, value=1 - decay)

    def _apply(self, p: Tensor, group: Mapping[str, Any]) -> None:
        state, rate = self.state[p], number_in(self, group, "lr")
        start, root = corrections(state, group)
        p.mul_(1 - rate * group["weight_decay"])
        p.addcdiv_(state["exp_avg"], self._divisor(state, group, root), value=-rate / start)

    def _divisor(self, state: Mapping[str, Any], group: Mapping[str, Any], root: float) -> Tensor:
        variance = state["exp_avg_sq"]
        divisor: Tensor = variance.sqrt().div_(root).add_(group["eps"])
        return divisor.masked_fill_(variance == 0, math.inf) if self._is_frozen else divisor


def corrections(state: Mapping[str, Any], group: Mapping[str, Any]) -> tuple[float, float]:
    """Divisors that correct mean and root of the variance for their start at 0, or 1."""
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta, decay = map(float, group["betas"])
    return 1 - beta ** _steps(state), math.sqrt(1 - decay ** state[SQUARES]) or 1.0


def _steps(state: Mapping[str, Any]) -> int:
    return int(state["step"])


def _check(group: dict[str, Any]) -> None:
    """Refuse settings of a parameter group that are out of their ranges."""
    steps = check_whole("freeze_after", group["freeze_after"], 1, MOST, example=1000)
    group["freeze_after"] = steps  # a checkpoint has it
    check_flag("bias_correction", group["bias_correction"])
    for setting in (each for each in RANGES if each in group):
        (example, *ranges), value = RANGES[setting], group[setting]
        numbers = [math.nan if each is None else each for each in betas_of({"betas": value})]
        fits = not isinstance(value, bool) and len(numbers) == len(ranges)
        fits = fits and all(a <= n < b for n, (a, b) in zip(numbers, ranges, strict=True))
        problem = f"is not in {' x '.join(f'[{a:g}, {b:g})' for a, b in ranges)}"
        check(fits, setting, value, problem, f"Pass {setting}={example}, or so")
