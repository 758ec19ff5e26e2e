"""A training job of P simulated ranks, in lock-step; gradients go in and out as NumPy arrays."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.exchange.selection import choose, make_exchange
from horovod_topk.core.plan.buckets import BucketPlan, Plan, TensorSpec
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.core.run.runner import StepRunner
from horovod_topk.core.state.residual import ResidualRegistry
from horovod_topk.updates.tracker import Moments, Tracker
from oracle import wire
from oracle.loopback import Loopback

if TYPE_CHECKING:  # real ranks of one framework load no other
    from oracle.backends import Backend

Gradients = dict[str, NDArray[Any]]  # name -> gradient, of one rank
SPECS = [TensorSpec("a", (40, 32), "float32"), TensorSpec("b", (30,), "float64")]  # two buckets


def gradients(ranks: int, seed: int = 0, factor: float = 1.0) -> list[Gradients]:
    """Every rank's gradients of `SPECS`: `factor` times standard normal numbers."""
    return drawn(SPECS, ranks, seed, factor)


def drawn(
    specs: Sequence[TensorSpec], ranks: int, seed: Any, factor: float = 1.0
) -> list[Gradients]:
    """Standard normal gradients of every rank, from a seed, or from a generator that goes on."""
    random = np.random.default_rng(seed)
    return [
        {s.name: (factor * random.standard_normal(s.shape)).astype(s.dtype) for s in specs}
        for _ in range(ranks)
    ]


class World:
    """`size` compressors over one loopback network.

    nodes: two ranks on each, if not given, and one on the last where they do not divide.
    moments: what is known of Adam's second moments, by tensor name.
    """

    def __init__(
        self,
        plan: Plan,
        size: int,
        backend: Backend,
        name: str = "job.0",
        nodes: Nodes | None = None,
        moments: Mapping[str, Moments] = MappingProxyType({}),
    ) -> None:
        self.moments = moments
        self.plan, self.size, self.backend = plan, size, backend
        self.nodes = nodes or nodes_of_sizes([2] * (size // 2) + [1] * (size % 2))
        self.network: Loopback[Any] = Loopback(size, backend.ops)
        self.ranks = [self._compressor(rank, name) for rank in range(size)]
        self._arrays: list[dict[str, Any]] = []

    def launch(
        self, gradients: Sequence[Gradients], orders: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Compress and send on every rank; `orders[rank]` lists buckets as that rank sends them."""
        self._arrays = [self._to_arrays(one) for one in gradients]
        for rank, compressor in enumerate(self.ranks):
            order = orders[rank] if orders else range(len(self.plan.buckets))
            for position in order:
                bucket = self.plan.buckets[position]
                with np.errstate(all="ignore"):
                    compressor.launch(bucket.ordinal, self._of_bucket(rank, bucket))

    def finish(self, gain: float = 1.0) -> list[Gradients]:
        """Receive on every rank; returns the exchanged gradients, times `gain`."""
        for _ in range(self.ranks[0].step.stages):
            for compressor in self.ranks:
                with np.errstate(all="ignore"):
                    compressor.step.advance()
        for rank, compressor in enumerate(self.ranks):
            of = {each.ordinal: self._of_bucket(rank, each) for each in self.plan.buckets}
            with np.errstate(all="ignore"):
                compressor.step.finish(of, gain)
        to_numpy = self.backend.numpy
        return [{name: to_numpy(array) for name, array in one.items()} for one in self._arrays]

    def exchange(self, gradients: Sequence[Gradients], gain: float = 1.0) -> list[Gradients]:
        """Launch and finish; the step stays open."""
        self.launch(gradients)
        return self.finish(gain)

    def commit(self) -> list[bool]:
        """Commit on every rank; returns what each answered."""
        return [compressor.commit() for compressor in self.ranks]

    def rollback(self) -> None:
        """Roll back on every rank."""
        for compressor in self.ranks:
            compressor.rollback()

    def step(self, gradients: Sequence[Gradients]) -> list[Gradients]:
        """Exchange and commit."""
        exchanged = self.exchange(gradients)
        self.commit()
        return exchanged

    def advance(self) -> None:
        """Take the next stage of a step on every rank."""
        for compressor in self.ranks:
            compressor.step.advance()

    def end(self, ranks: Sequence[int], stages: int | None = None) -> list[NDArray[Any]]:
        """End a step of one bucket on some ranks, in lock-step; return what they would apply.

        stages: those that are left, if not all.
        """
        for _ in range(self.ranks[0].step.stages if stages is None else stages):
            for rank in ranks:
                self.ranks[rank].step.advance()
        applied = []
        for rank in ranks:
            arrays = self._of_bucket(rank, self.plan.buckets[0])
            self.ranks[rank].step.finish({0: arrays})
            self.ranks[rank].rollback()
            applied += [self.backend.numpy(each) for each in arrays if self.backend.ops.numel(each)]
        return applied

    def set_ratio(self, ratio: float | None) -> None:
        """Ask for a ratio on every rank."""
        for compressor in self.ranks:
            compressor.set_ratio(ratio)

    def load(self, other: World) -> None:
        """Load the state of another job's ranks."""
        for mine, theirs in zip(self.ranks, other.ranks, strict=True):
            mine.load_state_dict(theirs.state_dict())

    def owed(self) -> list[Gradients]:
        """Flat copies of all residuals: every rank's, and those of owners."""
        return [*self.residuals(), *self.owned()]

    def residuals(self) -> list[Gradients]:
        """Flat copies of every rank's residuals."""
        return [self._copies(compressor.registry) for compressor in self.ranks]

    def owned(self) -> list[Gradients]:
        """Flat copies of the residuals of the shards that each rank owns, if it owns any."""
        return [self._copies(c.owned) for c in self.ranks if c.owned is not None]

    def kept(self) -> list[Any]:
        """All that every rank keeps, frozen: residuals, owners' residuals, states and counts."""
        return [_frozen(self.backend, compressor.state_dict()) for compressor in self.ranks]

    def _copies(self, registry: ResidualRegistry[Any]) -> Gradients:
        names = [tensor.spec.name for tensor in self.plan.tensors()]
        return {name: self.backend.numpy(registry.residual(name)) for name in names}

    def payloads(self, rank: int) -> list[tuple[str, bytes]]:
        """Name and bytes of everything a rank has sent to all so far, and then within groups."""
        sent = list(self.network.sent[rank])
        for ranks, network in sorted(self.network.groups.items()):
            if rank in ranks:
                sent += network.sent[ranks.index(rank)]
        return [(m.name, self.backend.numpy(m.payload).tobytes()) for m in sent]

    def decoded(self, rank: int) -> wire.Decoded:
        """What a rank sent last, over all buckets, as an independent reader understands it."""
        latest = dict(self.payloads(rank))
        parts = [
            wire.read(bucket, latest[f"{self.ranks[rank].name}.{bucket.ordinal}"])
            for bucket in self.plan.buckets
        ]
        return wire.Decoded(
            set().union(*(part.flagged for part in parts)),
            {name: dense for part in parts for name, dense in part.dense.items()},
            {name: index for part in parts for name, index in part.chosen.items()},
        )

    def _compressor(self, rank: int, name: str) -> StepRunner[Any]:
        ops = self.backend.ops
        collective = self.network.collective(rank)
        kind, because = self.plan.config.exchange, ""
        if kind == "auto":
            kind, because = choose(self.plan, collective, self.nodes, can_split=True)
        exchange = make_exchange(
            kind, collective, self.nodes, because, in_rounds=self.plan.config.in_rounds
        )
        rule: Any = self.plan.update_rule
        follower = None if rule is None else Tracker(rule, ops, lambda: self.moments)
        return StepRunner(self.plan, ops, PayloadCodec(ops), exchange, name, followers=follower)

    def _to_arrays(self, gradients: Gradients) -> dict[str, Any]:
        array = self.backend.array
        return {
            t.spec.name: array(gradients[t.spec.name], t.spec.dtype) for t in self.plan.tensors()
        }

    def _of_bucket(self, rank: int, bucket: BucketPlan) -> list[Any]:
        return [self._arrays[rank][t.spec.name] for t in bucket.tensors]


def _frozen(backend: Backend, state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _frozen(backend, each) for key, each in state.items()}
    plain = isinstance(state, int | float | str | list | None)
    return state if plain else backend.numpy(state).tobytes()


def nodes_of_sizes(sizes: Sequence[int]) -> Nodes:
    """Nodes of so many ranks, one after another."""
    ends = list(itertools.accumulate(sizes))
    starts = (end - size for end, size in zip(ends, sizes, strict=True))
    return Nodes(tuple(tuple(range(*pair)) for pair in zip(starts, ends, strict=True)))


def same_bits(left: Sequence[Gradients], right: Sequence[Gradients]) -> bool:
    """Whether two lists of arrays are equal to the bit."""
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)
        for a, b in zip(left, right, strict=True)
    )
