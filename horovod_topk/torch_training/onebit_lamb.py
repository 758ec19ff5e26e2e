"""1-bit LAMB: LAMB whose variance is frozen, and whose momentum is then exchanged as signs.

Phases, exchange, m' and v' are those of `OneBitAdam`. At first, steps of a parameter x are LAMB's:

    u = m' / (sqrt(v') + eps) + weight_decay x        c = |x| / |u|, clipped to `trust_limits`
    x -= lr c u                                       C = moving average of c, corrected as m'

Then v' and C are constant. Ranks exchange s m_i, and divide what they get by s, which gives m:

    g = (m - b1 m_before) / (1 - b1)                  w = b2 w + (1 - b2) g^2, at first v'
    r = max of (sqrt(v') + eps) / (sqrt(w) + eps)     x -= lr r C u

s gives all momenta one root mean square when v' is frozen. r is clipped to `factor_limits`, and to
1 +- `factor_threshold` times its last value; before, with weight decay, it is r a + 1 - a, where a
is the share of m' / (sqrt(v') + eps) in the norm of u.

Source: Li et al. 2021 (1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with
LAMB's Convergence Speed); You et al. 2020 (Large Batch Optimization for Deep Learning), LAMB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from horovod_topk.torch_training.onebit_adam import SCALE, OneBitAdam, corrections
from horovod_topk.torch_training.optimizer_settings import number_in

# Keys in a parameter's state: w; r, or 0; C, and the number of steps in it.
FRESH, FACTOR, TRUST, TRUSTS = "exp_avg_sq_fresh", "factor", "trust", "trusts"


class OneBitLamb(OneBitAdam):
    """LAMB that sends 1 bit for each element once its variance is frozen.

    It is used as `OneBitAdam`, which says when to freeze the variance and what is refused.

    Args:
        params, freeze_after, lr, betas, eps: as of `OneBitAdam`.
        weight_decay: its product with a parameter is added to the update, before the norm.
        bias_correction: correct mean, variance and average trust ratio for their start at 0.
        trust_limits: least and largest trust ratio. Where a norm is 0, the ratio is 1.
        trust_beta: decay of the moving average of trust ratios.
        factor_limits: least and largest factor r of the frozen trust ratio.
        factor_threshold: largest relative change of this factor in a step.
    """

    def __init__(
        self,
        params: Any,
        freeze_after: int | None = None,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        trust_limits: tuple[float, float] = (0.01, 10.0),
        trust_beta: float = 0.9,
        factor_limits: tuple[float, float] = (0.5, 4.0),
        factor_threshold: float = 0.1,
    ) -> None:
        defaults: dict[str, Any] = {"freeze_after": freeze_after, "lr": lr, "betas": betas}
        defaults |= {"eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction}
        defaults |= {"trust_limits": trust_limits, "trust_beta": trust_beta}
        defaults |= {"factor_limits": factor_limits, "factor_threshold": factor_threshold}
        self._begin()
        Optimizer.__init__(self, params, defaults)

    def begin_exchange(self, committed: int, ratio: float) -> None:
        """As of `OneBitAdam`. It also finds s, before the first momentum is exchanged."""
        super().begin_exchange(committed, ratio)
        states = [each for each in self.state.values() if each]
        if self._is_frozen and not any(each[SCALE] for each in states):
            norms = [_norm(each["exp_avg"]) / each["exp_avg"].numel() ** 0.5 for each in states]
            for each, norm in zip(states, norms, strict=True):
                each[SCALE] = sum(norms) / len(norms) / norm if norm else 1.0

    def _begun(self, p: Tensor) -> dict[str, Any]:
        own = {FRESH: torch.zeros_like(p), FACTOR: 0.0, SCALE: 0.0, TRUST: 0.0, TRUSTS: 0}
        return super()._begun(p) | own

    def _update_moments(self, p: Tensor, exchanged: Tensor, group: Mapping[str, Any]) -> None:
        gradient, state, (beta, decay) = exchanged, self.state[p], map(float, group["betas"])
        if id(p) in self._momenta:
            exchanged = exchanged / (state[SCALE] or 1.0)
            gradient = (exchanged - beta * state["exp_avg"]) / (1 - beta)
        super()._update_moments(p, exchanged, group)
        if not self._is_frozen:
            state[FACTOR] = state[SCALE] = 0.0
            return
        if not state[FACTOR]:
            state[FACTOR] = 1.0
            state[FRESH].copy_(state["exp_avg_sq"])
        share = (1 - decay) * corrections(state, group)[1] ** 2  # of v, which is not corrected
        state[FRESH].mul_(decay).addcmul_(gradient, gradient, value=share)

    def _apply(self, p: Tensor, group: Mapping[str, Any]) -> None:
        state, (start, root) = self.state[p], corrections(self.state[p], group)
        divisor = self._divisor(state, group, root)
        update = (state["exp_avg"] / start).div_(divisor)
        alone = _norm(update)
        update.add_(p, alpha=group["weight_decay"])
        weight, norm, trust = _norm(p), _norm(update), 1.0
        if weight and norm:
            trust = sorted((weight / norm, *group["trust_limits"]))[1]
            if not self._is_frozen or not state[TRUSTS]:
                state[TRUSTS] += 1
                beta, corrects = group["trust_beta"], group["bias_correction"]
                part = (1 - beta) / (1 - beta ** state[TRUSTS] if corrects else 1)
                state[TRUST] += part * (trust - state[TRUST])
        if self._is_frozen and state[TRUSTS]:
            fresh = state[FRESH].sqrt().div_(root).add_(group["eps"])
            factor = float((divisor / fresh).masked_fill_(divisor.isinf(), 0.0).max())
            share, last = min(1.0, alone / norm) if norm else 1.0, state[FACTOR]
            factor = sorted((factor * share + 1 - share, *group["factor_limits"]))[1]
            change = last * group["factor_threshold"]
            state[FACTOR] = sorted((factor, last - change, last + change))[1]
            trust = state[TRUST] * state[FACTOR]
        p.sub_(update, alpha=number_in(self, group, "lr") * trust)


def _norm(values: Tensor) -> float:
    wide = None if values.element_size() > 2 else torch.float32  # squares overflow in float16
    return float(torch.linalg.vector_norm(values, dtype=wide))
