"""`Rounds` counts a rank's inner steps, and makes the outer steps that are due.

After an inner step a fragment's exchange may start, and another one's may end:

    move         d = x - w, for each tensor, with the anchor x and this rank's weights w
    exchange     as a gradient: e + d is compressed, the rest stays in e
    commit       e is multiplied by `decay`
    outer step   x moves by the mean d of all ranks: `local.outer`
    go on        w = x; after a delay w = alpha w + (1 - alpha) x
    keep         without a delay w -= alpha e after the next inner step, which is no movement

A NaN or an infinity on any rank rolls the round back on every rank: anchor, momentum and residuals
stay bitwise as they were, and w = x; so do other fragments where a rank's weights are not finite.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from horovod_topk.core.run.runner import StepRunner
from horovod_topk.local.outer import ANCHOR, MOMENTUM, Told, direction, momentum_after
from horovod_topk.local.settings import LocalConfig, median
from horovod_topk.ops import Ops

log = logging.getLogger("horovod_topk")

Array = TypeVar("Array")

COUNTERS = ("since", "median", "keeps")  # of a fragment, in a state dict


class Weights(Protocol[Array]):
    """This rank's weights, as an adapter has them. Arrays have the anchor's dtype and device."""

    def read(self, name: str) -> Array:
        """A tensor's weights, flat."""

    def moved(self, name: str, anchor: Array) -> Array:
        """How far a tensor is from the anchor, flat, in memory of its own: anchor - weights."""

    def blend(self, name: str, anchor: Array, alpha: float) -> None:
        """Set a tensor to alpha times itself plus (1 - alpha) times the anchor."""

    def is_exact(self, name: str) -> bool:
        """Whether a tensor's weights have the anchor's dtype, so that no sum is rounded to less."""

    def recover(self) -> None:
        """Note that a round was rolled back, as some rank's movement was not finite."""


@dataclass(eq=False)
class Fragment(Generic[Array]):
    """A part of the model that is exchanged at once.

    Attributes:
        runner: its error feedback, and its states.
        told: what the ranks tell each other.
        moved: the movement of each tensor by bucket while it is exchanged; then the mean.
        since: inner steps since its last exchange started.
        stages: rounds of its exchange that have begun since.
        median: the median of the ranks' norms in its last round; 0: there was none.
        keeps: whether this rank has moved its weights by -alpha times the residual in this round.
    """

    runner: StepRunner[Array]
    told: Told[Array]
    moved: dict[int, list[Array]] = field(default_factory=dict)
    since: int = 0
    stages: int = 0
    median: float = 0.0
    keeps: bool = False

    @property
    def names(self) -> list[str]:
        """Names of its tensors."""
        return [tensor.spec.name for tensor in self.runner.plan.tensors()]

    def anchor(self, name: str) -> Array:
        """The anchor of a tensor: a view, flat."""
        return self.runner.states[ANCHOR].residual(name)


class Rounds(Generic[Array]):
    """Counts inner steps, and makes outer steps.

    Attributes:
        steps: inner steps so far.
        origin: inner steps when the present count of rounds began.
        has_begun: whether the anchors are known.
    """

    def __init__(
        self,
        config: LocalConfig,
        fragments: Sequence[Fragment[Array]],
        weights: Weights[Array],
        ops: Ops[Array],
    ) -> None:
        self.config, self.fragments, self._weights, self._ops = config, fragments, weights, ops
        self._alpha = config.alpha or 0.0
        self._clock: Callable[[], float] = time.monotonic  # seconds
        self._began = self._clock()
        self.steps = self.origin = 0
        self.has_begun = False

    def begin(self) -> None:
        """Make the present weights the anchor, which has to be equal on all ranks."""
        for fragment in self.fragments:
            for name in fragment.names:
                self._ops.assign(fragment.anchor(name), self._weights.read(name))
            fragment.since = 0
        self._restart()
        self.has_begun = True

    def restart(self) -> None:
        """Begin a round at the anchor: what this rank has moved since is lost."""
        for fragment in self.fragments:
            self._go_on(fragment, 0.0)
            fragment.since = 0
        self._restart()

    def after_step(self) -> Sequence[Fragment[Array]]:
        """Count an inner step, make the outer steps that are due, and return what has started."""
        self.steps += 1
        for fragment in self.fragments:
            fragment.since += 1
        if self.config.seconds:
            due = self._clock() - self._began >= self.config.seconds
            started = self.fragments if due else ()
            self._round(started)
            self._keep()
            return started
        step = self.steps - self.origin
        self._advance(step)
        self._end([self.fragments[p] for p in self.config.arrives(step) if self.config.delay])
        started = [self.fragments[p] for p in self.config.starts(step)]
        if self.config.delay:
            for fragment in started:
                self._start(fragment)
        else:
            self._round(started)
            self._keep()
        return started

    def standing(self) -> list[tuple[int, bool]]:
        """Return each fragment's number of started exchanges, and whether this rank moved since."""
        late = self.config.under_way(self.steps - self.origin)
        each = enumerate(self.fragments)
        return [(f.runner.ended + bool(f.moved), f.since > 0 or p in late) for p, f in each]

    def synchronize(self, moved: Sequence[bool]) -> None:
        """Exchange the fragments that some rank has moved since, and go on with equal weights."""
        self._end([self.fragments[p] for p in self.config.under_way(self.steps - self.origin)])
        self._round([each for each, has in zip(self.fragments, moved, strict=True) if has])
        self._restart()

    def settle(self) -> None:
        """Finish the exchanges under way; weights get the new anchors when they are due."""
        for fragment in self.fragments:
            self._finish(fragment)

    def drop(self) -> None:
        """Forget abandoned exchanges; what `_keep` has subtracted counts as movement now."""
        for fragment in self.fragments:
            fragment.moved.clear()
            fragment.keeps = False

    def counters(self) -> dict[str, Any]:
        """The counters, for a state dict."""
        each = [{name: getattr(f, name) for name in COUNTERS} for f in self.fragments]
        return {"steps": self.steps, "origin": self.origin, "fragments": each}

    def take(self, counters: Mapping[str, Any]) -> None:
        """Load counters; the anchors are loaded, too."""
        self.steps, self.origin = counters["steps"], counters["origin"]
        for fragment, own in zip(self.fragments, counters["fragments"], strict=True):
            for name in own.keys() & COUNTERS:  # states of older versions have not all of them
                setattr(fragment, name, own[name])
        self._began, self.has_begun = self._clock(), True

    def _restart(self) -> None:
        self.origin, self._began = self.steps, self._clock()

    def _round(self, fragments: Sequence[Fragment[Array]]) -> None:
        """Exchange fragments, and wait."""
        for fragment in fragments:
            self._start(fragment)
        for fragment in fragments:
            self._finish(fragment)
            self._go_on(fragment, 0.0)
        if fragments:
            self._began = self._clock()

    def _end(self, fragments: Sequence[Fragment[Array]]) -> None:
        """End the exchanges of fragments that were started a while ago."""
        for fragment in fragments:
            if self._finish(fragment):
                self._go_on(fragment, self._alpha)

    def _keep(self) -> None:
        """Move the weights by -alpha times the residual after the first inner step of a round."""
        for fragment in self.fragments if self._alpha else ():
            if fragment.since == 1:
                fragment.keeps = True
                for name in fragment.names:
                    if (kept := self._kept(fragment, name)) is not None:
                        moved = self._ops.clone(kept)
                        self._ops.assign(moved, self._weights.read(name))
                        self._ops.subtract_at(moved, None, kept)
                        self._weights.blend(name, moved, 0.0)

    def _kept(self, fragment: Fragment[Array], name: str) -> Array | None:
        """Return what `_keep` has subtracted from a tensor: alpha times its residual.

        None: it has subtracted nothing. Weights of fewer bits than the residual would round it, and
        with exchange="hierarchical" a rank has no residual of its own.
        """
        registry = fragment.runner.registry
        if not (fragment.keeps and registry.pieces[name] and self._weights.is_exact(name)):
            return None
        e: Any = registry.residual(name)
        kept: Array = e * self._alpha
        return kept

    def _movement(self, fragment: Fragment[Array], name: str) -> Array:
        """Return how far this rank has trained a tensor in this round, without `_keep`'s part."""
        moved = self._weights.moved(name, fragment.anchor(name))
        if (kept := self._kept(fragment, name)) is not None:
            self._ops.subtract_at(moved, None, kept)
        return moved

    def _start(self, fragment: Fragment[Array]) -> None:
        """Compress a fragment's movement, and start its exchange."""
        runner = fragment.runner
        found = {
            bucket.ordinal: [self._movement(fragment, t.spec.name) for t in bucket.gradients]
            for bucket in runner.plan.buckets
        }
        fragment.keeps = False
        factor, norm = 1.0, 0.0
        if self.config.clip is not None:
            norm = math.hypot(*(self._ops.norm(each) for moved in found.values() for each in moved))
            limit = self.config.clip * fragment.median
            factor = limit / norm if limit and norm > limit else 1.0
        steps = max(1.0, fragment.since)
        fragment.told.own = steps, norm
        if self.config.seconds:
            factor *= steps
        for moved in found.values():
            for each in moved if factor != 1.0 else ():
                self._ops.write_scaled(self._ops.clone(each), factor, each, False)
        if self.config.seconds and steps > 1.0:  # of a residual, too: the exchange adds it once
            self._add_residuals(fragment, found, steps - 1.0)
        for ordinal, moved in found.items():
            runner.launch(ordinal, moved)
        fragment.moved, fragment.since, fragment.stages = found, 0, 0

    def _add_residuals(
        self, fragment: Fragment[Array], found: Mapping[int, Sequence[Array]], factor: float
    ) -> None:
        """Add each tensor's residual, times a factor, to its movement."""
        registry = fragment.runner.registry
        for bucket in fragment.runner.plan.buckets:
            for tensor, moved in zip(bucket.gradients, found[bucket.ordinal], strict=True):
                if registry.pieces[tensor.spec.name]:
                    e: Any = registry.residual(tensor.spec.name)
                    self._ops.subtract_at(moved, None, e * -factor)

    def _advance(self, step: int) -> None:
        """Start the next rounds of exchanges in the background, at steps that the plan fixes."""
        if not self.config.delay:
            return
        for fragment in self.fragments:
            stages = fragment.runner.step.stages
            due = (fragment.stages + 1) * self.config.delay // (stages + 1)
            if fragment.moved and fragment.stages < stages and fragment.since >= due:
                fragment.runner.step.advance()
                fragment.stages += 1

    def _finish(self, fragment: Fragment[Array]) -> bool:
        """Wait for a fragment's exchange, and move its anchor; return whether weights may stay."""
        runner, moved = fragment.runner, fragment.moved
        if not moved:
            return self.config.delay > 0
        fragment.moved = {}
        runner.step.finish(moved)
        is_first = runner.counter.committed == 0
        if not runner.commit():
            log.warning(
                "LocalSteps: a round was rolled back, as a movement was not finite on some rank; "
                "all ranks go on from the anchor, and lose their last %d inner steps",
                self.config.steps or fragment.told.own[0],
            )
            self._weights.recover()
            for each in self.fragments:
                if each is fragment or not self._is_finite(each):
                    self._go_on(each, 0.0)
            return False
        if self.config.seconds and fragment.told.own[0] > 1.0:  # back to those of a movement
            runner.registry.scale(1.0 / fragment.told.own[0])
            runner.has_changed()
        runner.decay_residuals(self.config.decay)
        heard = fragment.told.heard
        fragment.median = median([norm for _, norm in heard])
        counted = sum(steps for steps, _ in heard) / len(heard) if heard else 0.0
        weight = 1.0 / counted if self.config.seconds and counted else 1.0
        self._move(fragment, moved, weight, is_first=is_first)
        return True

    def _move(
        self,
        fragment: Fragment[Array],
        means: Mapping[int, Sequence[Array]],
        weight: float,
        *,
        is_first: bool,
    ) -> None:
        """Move the anchor by the mean movement."""
        outer, ops, states = self.config.outer, self._ops, fragment.runner.states
        for bucket in fragment.runner.plan.buckets:
            for tensor, mean in zip(bucket.gradients, means[bucket.ordinal], strict=True):
                d: Any = mean
                if weight != 1.0:
                    d = d * weight
                x: Any = fragment.anchor(tensor.spec.name)
                if outer.momentum:
                    v: Any = states[MOMENTUM].residual(tensor.spec.name)
                    ops.assign(v, d if is_first else momentum_after(v, d, outer))
                    d = d if is_first else direction(v, d, outer)
                ops.subtract_at(x, None, d * outer.lr)

    def _is_finite(self, fragment: Fragment[Array]) -> bool:
        """Return whether this rank's weights of a fragment are finite.

        A NaN that stays in them would be in the next gradients, and so in all fragments.
        """
        moved = (self._weights.moved(name, fragment.anchor(name)) for name in fragment.names)
        return all(math.isfinite(self._ops.norm(each)) for each in moved)

    def _go_on(self, fragment: Fragment[Array], alpha: float) -> None:
        fragment.keeps = False
        for name in fragment.names:
            self._weights.blend(name, fragment.anchor(name), alpha)
