"""Error feedback behind one Horovod optimizer: which gradients have arrived, and what they become.

Horovod calls `arrive` from a parameter's hook, or from `synchronize()` where the hook did not
fire, and what it returns once a parameter in `synchronize()`. The last arrival of a bucket
launches it; the first collection waits for it. Nothing in a hook blocks.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from horovod_topk.config import TopKConfig
from horovod_topk.core.agreement import agree
from horovod_topk.core.codec import TopK
from horovod_topk.core.compressor import Compressor, Phase
from horovod_topk.core.exchange import Allgather
from horovod_topk.core.front import elastic, why_inactive
from horovod_topk.core.plan import Plan
from horovod_topk.core.stats import Stats, StepCounters, planned
from horovod_topk.errors import ShapeChangedError, StepBeforeSynchronizeError
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch.arrival import (
    Arrival,
    check_matches,
    check_not_exchanged,
    check_unchanged,
)
from horovod_topk.torch.collective import HorovodCollective
from horovod_topk.torch.planning import plan_of

log = logging.getLogger("horovod_topk")

_LIVE: weakref.WeakSet[OptimizerState] = weakref.WeakSet()


def live_states() -> list[OptimizerState]:
    """The states of all optimizers that exist in this process."""
    return list(_LIVE)


class OptimizerState:
    """What `TopKEF.of(optimizer)` returns. One for each distributed optimizer."""

    def __init__(self, optimizer: Any, config: TopKConfig) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._names: dict[Tensor, str] = optimizer._parameter_names
        self._skipped: dict[str, str] = {}
        self._late: Counter[str] = Counter()
        self._late_are_checked = False  # in the present synchronize()
        self._arrivals: dict[int, dict[Tensor, Arrival]] = {}  # by bucket, until it is finished
        self._exchanged: dict[Tensor, Arrival] = {}
        self._parameters: dict[int, list[Tensor]] = {}
        self._handles = optimizer._handles
        self.label = f"{type(optimizer).__name__} with {len(self._names)} parameters"
        reason = why_inactive(optimizer.process_set)
        self.active = reason is None
        if reason is not None:
            self._skip("*", reason)
            return
        plan = plan_of(optimizer, config)
        collective = HorovodCollective(optimizer.process_set)
        ops = TorchOps()
        self._prefix = config.name or f"topkef.{plan.digest.hex()}"
        self._ordinal = _free_ordinal(self._prefix)
        if not elastic():  # there, ranks that join late construct theirs alone
            self._ordinal = agree(plan, self._ordinal, ops, collective)
        self._compressor = Compressor(
            plan, ops, TopK(ops), Allgather(collective), f"{self._prefix}.{self._ordinal}"
        )
        self._index(plan)
        self._skipped |= plan.sent_dense()
        log.info("TopKEF %s: %s", self._compressor.name, plan.summary())
        optimizer._groups = None  # from here on a bucket is the unit, one hook a parameter
        trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        for p, accumulation in zip(trained, optimizer._grad_accs, strict=True):
            accumulation.register_prehook(partial(self._before_accumulation, p))
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        _LIVE.add(self)

    # What Horovod's own path asks of a compressor, for gradients that are not ours.

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        """Return the tensor as it is."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: None) -> Tensor:
        """Return the tensor as it is."""
        return tensor

    # What a user may ask.

    @torch.no_grad()
    def stats(self) -> Stats:
        """Totals and norms so far. Waits for the device; call it on any rank, it is local."""
        if not self.active:
            return Stats(skipped=dict(self._skipped))
        compressor, plan = self._compressor, self._compressor.plan
        return replace(
            planned(plan, compressor.ranks, compressor.traffic()),
            steps=compressor.steps,
            rolled_back=compressor.rolled_back,
            residual_norm=compressor.residual_norm(),
            gradient_norm=compressor.gradient_norm(),
            skipped=dict(self._skipped),
            late=dict(self._late),
        )

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's committed residuals, flat, by tensor name. Empty if inactive.

        Every rank has its own: save one file a rank.
        """
        return self._compressor.registry.state_dict() if self.active else {}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take on residuals that this rank saved; a step under way is rolled back.

        Raises:
            StateDictError: a tensor is missing, unknown or of another shape; nothing has changed.
        """
        if self.active:
            self._compressor.load_state_dict(state)
            self._forget_step()

    def reset(self) -> None:
        """Forget all residuals; a step under way is rolled back. Call it on every rank."""
        if self.active:
            self._compressor.reset()
            self._forget_step()

    def residual(self, name: str) -> Tensor:
        """A copy of one tensor's committed residual, flat, float32 (float64 for a float64 one).

        Raises:
            KeyError: no such tensor is compressed.
        """
        return self._compressor.registry.residual(name).clone()

    def on_step(self, callback: Callable[[StepCounters], None]) -> None:
        """Call `callback` at the end of every step with counters; no device is waited for."""
        if self.active:
            self._compressor.on_step(callback)

    # What the seam and the optimizer's hooks call.

    def arrive(self, p: Tensor) -> Callable[[], Tensor] | None:
        """Note that a parameter's gradient is ready; launch its bucket if it was the last.

        Returns:
            A function that waits and returns the exchanged gradient, or None where Horovod's own
            path has to take this gradient.

        Raises:
            ShapeChangedError, GradientChangedError, RepeatedSynchronizeError.
        """
        if not self.active or p not in self._bucket_of:
            return None
        optimizer: Any = self._optimizer()
        self._forget_abandoned(optimizer)
        fired = optimizer._allreduce_delay[p] == 0
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if p.grad.is_sparse and not optimizer.sparse_as_dense:
            self._release(p)
            return None
        if not fired and not self._late_are_checked:
            self._check_late()
        dense = p.grad.to_dense() if p.grad.is_sparse else p.grad
        check_matches(self._names[p], dense, self._specs[p])
        ordinal = self._bucket_of[p]
        self._arrivals[ordinal][p] = Arrival(p.grad, dense, p.grad._version, dense.data_ptr())
        if not fired:
            self._late[self._names[p]] += 1
        self._launch_if_complete(ordinal)
        return partial(self._collect, p)

    def _collect(self, p: Tensor) -> Tensor:
        """The exchanged gradient of a parameter; the first of a bucket waits for all of it."""
        ordinal = self._bucket_of[p]
        if self._compressor.phase(ordinal) is Phase.SENT:
            arrivals = self._arrivals[ordinal]
            with torch.no_grad():
                self._compressor.finish(ordinal, self._gradients(ordinal))
            self._exchanged.update(arrivals)
            arrivals.clear()
            self._late_are_checked = False
        return self._exchanged[p].dense

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer._handles and not optimizer._should_synchronize:
            raise StepBeforeSynchronizeError(
                "step() was called inside skip_synchronize() on gradients that have not been "
                "exchanged",
                cure="Call optimizer.synchronize() after backward() and before this step",
            )

    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if any(p.grad is arrival.owner for p, arrival in self._exchanged.items()):
            self._compressor.commit()
        else:  # what was exchanged has been thrown away: the step applied something else
            self._compressor.rollback()
        self._exchanged.clear()

    def _launch_if_complete(self, ordinal: int) -> None:
        if len(self._arrivals[ordinal]) == len(self._parameters[ordinal]):
            with torch.no_grad():
                self._compressor.launch(ordinal, self._gradients(ordinal))

    def _gradients(self, ordinal: int) -> list[Tensor]:
        """A complete bucket's gradients in the plan's order, once it is sure that none changed."""
        arrivals = self._arrivals[ordinal]
        check_unchanged(arrivals, self._names)
        return [arrivals[p].dense for p in self._parameters[ordinal]]

    def _forget_abandoned(self, optimizer: Any) -> None:
        """Drop a step that `optimizer.load_state_dict()` cut off: it replaces the handles."""
        if self._handles is not optimizer._handles:
            self._handles = optimizer._handles
            self._compressor.abandon()
            self._arrivals = {i: {} for i in self._parameters}
            self._forget_step()

    def _forget_step(self) -> None:
        """Let go of what a step that is over, or never will be, has left behind."""
        self._exchanged.clear()
        self._late_are_checked = False

    def _release(self, p: Tensor) -> None:
        """Leave a parameter with sparse gradients to Horovod, before its bucket is first sent."""
        name = self._names[p]
        norm = float(self._compressor.registry.residual(name).norm())
        if norm > 0.0:
            raise ShapeChangedError(
                f"its gradient became sparse, and a residual of norm {norm:.3g} would be lost",
                tensor=name,
                cure="Pass sparse_as_dense=True to hvd.DistributedOptimizer",
            )
        ordinal = self._bucket_of[p]
        self._compressor.rollback()
        self._exchanged.clear()
        plan = self._compressor.plan.without(name)
        self._compressor.replan(plan)
        self._index(plan)
        self._skip(name, "sparse gradient: exchanged by Horovod's own allgather")
        if ordinal in self._parameters:
            self._launch_if_complete(ordinal)

    def _index(self, plan: Plan) -> None:
        """Find parameters by bucket and buckets by parameter."""
        by_name = {name: p for p, name in self._names.items()}
        self._parameters = {
            bucket.ordinal: [by_name[t.spec.name] for t in bucket.tensors]
            for bucket in plan.buckets
        }
        self._specs = {by_name[t.spec.name]: t.spec for t in plan.tensors()}
        self._bucket_of = {p: i for i, group in self._parameters.items() for p in group}
        self._arrivals = {i: self._arrivals.get(i, {}) for i in self._parameters}

    def _before_accumulation(self, p: Tensor, _: Any) -> None:
        """Refuse to add to an exchanged gradient; one cleared in place is exchanged no more."""
        check_not_exchanged(self._names[p], p.grad, self._exchanged.get(p))
        self._exchanged.pop(p, None)

    def _check_late(self) -> None:
        """Refuse before `synchronize()` sends anything, as ranks visit late ones in any order."""
        for ordinal, parameters in self._parameters.items():
            if self._compressor.phase(ordinal) is Phase.SENT:
                continue
            check_unchanged(self._arrivals[ordinal], self._names)
            for q in parameters:
                if q in self._arrivals[ordinal]:
                    continue
                check_not_exchanged(self._names[q], q.grad, self._exchanged.get(q))
                if q.grad is None or not q.grad.is_sparse:
                    dense = q if q.grad is None else q.grad
                    check_matches(self._names[q], dense, self._specs[q])
        self._late_are_checked = True

    def _skip(self, name: str, reason: str) -> None:
        self._skipped[name] = reason
        log.warning("TopKEF does not compress %s: %s", name, reason)


def _free_ordinal(prefix: str) -> int:
    """One above all live optimizers of the same prefix."""
    taken = (state._ordinal for state in live_states() if state._prefix == prefix)
    return max(taken, default=-1) + 1
