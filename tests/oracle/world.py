"""A training job of P simulated ranks, in lock-step; gradients go in and out as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_topk.core.codec import TopK
from horovod_topk.core.compressor import Compressor
from horovod_topk.core.exchange import exchange_of
from horovod_topk.core.plan import BucketPlan, Plan
from horovod_topk.core.residual import ResidualRegistry
from oracle import wire
from oracle.backends import Backend
from oracle.loopback import Loopback

Gradients = dict[str, NDArray[Any]]  # name -> gradient, of one rank


class World:
    """`size` compressors over one loopback network."""

    def __init__(self, plan: Plan, size: int, backend: Backend, name: str = "job.0") -> None:
        self.plan, self.size, self.backend = plan, size, backend
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

    def finish(self) -> list[Gradients]:
        """Receive on every rank; returns the exchanged gradients."""
        for compressor in self.ranks:
            with np.errstate(all="ignore"):
                compressor.advance()
        for rank, compressor in enumerate(self.ranks):
            for bucket in self.plan.buckets:
                with np.errstate(all="ignore"):
                    compressor.finish(bucket.ordinal, self._of_bucket(rank, bucket))
        to_numpy = self.backend.numpy
        return [{name: to_numpy(array) for name, array in one.items()} for one in self._arrays]

    def exchange(self, gradients: Sequence[Gradients]) -> list[Gradients]:
        """Launch and finish; the step stays open."""
        self.launch(gradients)
        return self.finish()

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

    def residuals(self) -> list[Gradients]:
        """Flat copies of every rank's residuals."""
        return [self._copies(compressor.registry) for compressor in self.ranks]

    def owned(self) -> list[Gradients]:
        """Flat copies of the residuals of the shards that each rank owns, if it owns any."""
        return [self._copies(c.owned) for c in self.ranks if c.owned is not None]

    def _copies(self, registry: ResidualRegistry[Any]) -> Gradients:
        names = [tensor.spec.name for tensor in self.plan.tensors()]
        return {name: self.backend.numpy(registry.residual(name)) for name in names}

    def payloads(self, rank: int) -> list[tuple[str, bytes]]:
        """Name and bytes of everything a rank has sent so far."""
        to_host = self.backend.ops.to_host
        return [(m.name, to_host(m.payload)) for m in self.network.sent[rank]]

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

    def _compressor(self, rank: int, name: str) -> Compressor[Any]:
        ops = self.backend.ops
        exchange = exchange_of(self.plan.config.exchange, self.network.collective(rank))
        return Compressor(self.plan, ops, TopK(ops), exchange, name)

    def _to_arrays(self, gradients: Gradients) -> dict[str, Any]:
        array = self.backend.array
        return {
            t.spec.name: array(gradients[t.spec.name], t.spec.dtype) for t in self.plan.tensors()
        }

    def _of_bucket(self, rank: int, bucket: BucketPlan) -> list[Any]:
        return [self._arrays[rank][t.spec.name] for t in bucket.tensors]


def same_bits(left: Sequence[Gradients], right: Sequence[Gradients]) -> bool:
    """Whether two lists of arrays are equal to the bit."""
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)
        for a, b in zip(left, right, strict=True)
    )
