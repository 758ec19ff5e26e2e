"""One bucket compressed twice, by the CPU kernels and by the oracle's verbs, to the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from oracle.numpy_ops import NumpyOps

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.codec.momentum import OptimizerMoments, velocities_of
from horovod_topk.core.plan.buckets import BucketPlan, TensorSpec, make_plan
from horovod_topk.core.plan.shards import shard
from horovod_topk.core.state.residual import Arenas
from horovod_topk.methods import Codec
from horovod_topk.methods.topk import TopK
from horovod_topk.ops import coding
from horovod_topk.ops.torch import TorchOps

Array = NDArray[Any]
Shape = int | tuple[int, ...]


def bucket_of(method: Codec, *shapes: Shape, dtype: str = "float32") -> BucketPlan:
    """The only bucket of tensors t0, t1, ..."""
    sizes = [(shape,) if isinstance(shape, int) else shape for shape in shapes]
    specs = [TensorSpec(f"t{i}", size, dtype) for i, size in enumerate(sizes)]
    (bucket,) = make_plan(specs, method).buckets
    return bucket


def normal(bucket: BucketPlan, random: np.random.Generator, scale: float = 1.0) -> list[Array]:
    specs = [t.spec for t in bucket.tensors]
    return [(scale * random.standard_normal(s.shape)).astype(s.dtype) for s in specs]


class Side:
    """One rank's state, compressed by one implementation.

    Args:
        ops: the implementation.
        bucket: whole, with the velocities.
        parts: the bucket itself, or its shards.
    """

    def __init__(self, ops: Any, bucket: BucketPlan, parts: Sequence[BucketPlan]) -> None:
        self.ops, self.codec, self.bucket = ops, PayloadCodec(ops), bucket
        self.codec.draw_from(lambda: 2**32 + 7, lambda: 1)
        self.array: Any = torch.from_numpy if isinstance(ops, TorchOps) else np.asarray
        self.residuals = [self.arenas(part) for part in parts]
        self.velocity = self.arenas(bucket)
        self.payloads = [self.codec.new_payload(part) for part in parts]
        self.squares: list[Any] = []

    def arenas(self, plan: BucketPlan) -> Arenas[Any]:
        zeros = np.zeros(plan.numel, plan.residual_dtype)
        return Arenas(plan, self.array(zeros.copy()), self.array(zeros.copy()))

    def rescale(self, damping: list[float]) -> None:
        """Multiply the residual of each tensor, once it is read."""
        for arenas in self.residuals:
            for tensor, factor in zip(arenas.plan.tensors, damping, strict=True):
                if factor != 1.0:
                    arenas.rescale(tensor.start, tensor.stop, factor, self.ops)

    def find_floors(self, squares: list[Array | None]) -> None:
        """Select by these mean squares of the gradients."""
        self.squares = [None if v is None else self.array(v.copy()) for v in squares]

    def encode(self, gradients: list[Array], momentum: TopK | None = None) -> None:
        """One step as far as its payloads, in memory that is full of ones before."""
        velocities = None
        if momentum is not None:
            velocities = velocities_of(momentum, self.velocity, self.ops)
        own = OptimizerMoments(velocities, self.squares)
        for payload, arenas in zip(self.payloads, self.residuals, strict=True):
            for section in sections(arenas.plan, np.asarray(payload)):
                section.view(np.uint8)[:] = 0xFF
        with np.errstate(all="ignore"):
            given = [self.array(g.copy()) for g in gradients]
            self.codec.encode_shards(self.residuals, given, self.payloads, own)

    def decode(self, gathered: Array, scale: float) -> list[Array]:
        """The gradients that payloads add up to."""
        specs = [t.spec for t in self.bucket.tensors]
        outputs = [self.array(np.full(spec.shape, 5, spec.dtype)) for spec in specs]
        with np.errstate(all="ignore"):
            self.codec.decode(self.bucket, self.array(gathered), scale, outputs)
        return [np.asarray(output) for output in outputs]

    def swap(self) -> None:
        """Commit."""
        for arenas in (*self.residuals, self.velocity):
            arenas.swap()

    def state(self) -> list[bytes]:
        """All bits that a commit or a roll-back leaves."""
        return [canonical(np.asarray(a.residual)) for a in (*self.residuals, self.velocity)]

    def candidates(self) -> list[bytes]:
        """What a step writes, but what is left of flagged tensors, and the bits of NaNs."""
        found = [canonical(np.asarray(self.velocity.candidate))]
        for arenas, payload in zip(self.residuals, map(np.asarray, self.payloads), strict=True):
            plan, left = arenas.plan, np.asarray(arenas.candidate)
            flags = payload[plan.layout.flags_at :]
            found += [
                payload[: plan.layout.body_at].tobytes(),
                *map(canonical, sections(plan, payload)),
            ]
            found += [
                canonical(left[t.start : t.stop])
                for at, t in enumerate(plan.tensors)
                if not flags[at // 8] >> at % 8 & 1
            ]
        return found


class Pair:
    """A bucket's state twice, to compare two implementations of a step."""

    def __init__(self, bucket: BucketPlan, parts: int = 1) -> None:
        each = [bucket] if parts == 1 else list(shard(bucket, parts).scatter)
        self.bucket, self.random = bucket, np.random.default_rng(3)
        self.kernels, self.verbs = (Side(ops, bucket, each) for ops in (TorchOps(), NumpyOps()))
        self.sides = self.kernels, self.verbs

    def normal(self, scale: float = 1.0) -> list[Array]:
        return normal(self.bucket, self.random, scale)

    def rescale(self, damping: list[float]) -> None:
        for side in self.sides:
            side.rescale(damping)

    def encode(
        self, gradients: list[Array], momentum: TopK | None = None, *, commit: bool = True
    ) -> Array:
        """Run a step of both, commit it if no tensor is flagged, and return the first payload."""
        for side in self.sides:
            side.encode(gradients, momentum)
        assert self.kernels.candidates() == self.verbs.candidates()
        payload = np.asarray(self.kernels.payloads[0]).copy()
        flags = payload[self.bucket.layout.flags_at :][: -(-len(self.bucket.tensors) // 8)]
        if commit and not flags.any():
            for side in self.sides:
                side.swap()
        assert self.kernels.state() == self.verbs.state()
        return payload

    def decode(self, payloads: list[Array], scale: float) -> None:
        found, expected = (side.decode(np.concatenate(payloads), scale) for side in self.sides)
        assert [*map(canonical, found)] == [*map(canonical, expected)]


def sections(plan: BucketPlan, payload: Array) -> list[Array]:
    """Return each tensor's values and indices with Top-K, and its bytes with other methods."""
    if not isinstance(plan.config, TopK):
        pieces: Any = plan.tensors
        return [payload[t.at : t.at + plan.config.data_bytes(t)] for t in pieces]
    kind, views = plan.config.value_kind(plan.residual_dtype), list[Array]()
    for t in plan.tensors:
        own: Any = t
        values = payload[own.at : own.at + coding.value_bytes(kind, own.k)]
        size = coding.index_bytes(own.index, own.spec.numel, own.k)
        dtype = {"bfloat16": "uint16"}.get(kind, kind if kind.startswith("float") else "uint8")
        views += [values.view(dtype), payload[own.index_at : own.index_at + size]]
    return views


def canonical(array: Array) -> bytes:
    """Its bytes, all NaNs made one."""
    if array.dtype == np.uint16:  # bfloat16
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if array.dtype == np.uint8:
        return array.tobytes()
    return np.where(np.isnan(array), array.dtype.type(np.nan), array).tobytes()
