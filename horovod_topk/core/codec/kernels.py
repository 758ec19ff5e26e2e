"""Kernels that encode and decode whole buckets, made once for all buckets that can share one."""

from __future__ import annotations

from typing import Generic, TypeVar

from horovod_topk.core.plan.buckets import BucketPlan
from horovod_topk.methods.protocol import AnnouncingCodec, Codec
from horovod_topk.ops import Fused, Ops

Array = TypeVar("Array")


class KernelCache(Generic[Array]):
    """The kernels of the methods' buckets."""

    def __init__(self, ops: Ops[Array]) -> None:
        self._ops = ops
        self._made: dict[bytes, Fused[Array] | None] = {}  # by the bucket's fingerprint

    def decoder(self, bucket: BucketPlan) -> Fused[Array] | None:
        """The kernel that decodes a bucket; None: there is none."""
        made, key = self._made, bucket.fingerprint
        return made[key] if key in made else self._make(bucket)

    def encoder(self, bucket: BucketPlan) -> Fused[Array] | None:
        """The kernel that encodes a bucket; None: there is none, or the method announces."""
        if isinstance(bucket.config, AnnouncingCodec):
            return None
        made, key = self._made, bucket.fingerprint
        return made[key] if key in made else self._make(bucket)

    def _make(self, bucket: BucketPlan) -> Fused[Array] | None:
        kernel = self._made[bucket.fingerprint] = codec_of(bucket).kernel(self._ops, bucket)
        return kernel


def codec_of(bucket: BucketPlan) -> Codec:
    """The method of a bucket whose payloads are decoded."""
    method: object = bucket.config
    assert isinstance(method, Codec)
    return method
