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
        self.encoders: dict[bytes, Fused[Array] | None] = {}
        self.decoders: dict[bytes, Fused[Array] | None] = {}

    def decoder(self, bucket: BucketPlan) -> Fused[Array] | None:
        """The kernel that decodes a bucket; None: there is none."""
        key = bucket.fingerprint
        if key not in self.decoders:
            self.decoders[key] = codec_of(bucket).kernel(self._ops, bucket)
        return self.decoders[key]

    def encoder(self, bucket: BucketPlan) -> Fused[Array] | None:
        """The kernel that encodes a bucket; None: there is none, or the method announces."""
        announces = isinstance(bucket.config, AnnouncingCodec)
        kernel = None if announces else self.decoder(bucket)
        return self.encoders.setdefault(bucket.fingerprint, kernel)


def codec_of(bucket: BucketPlan) -> Codec:
    """The method of a bucket whose payloads are decoded."""
    method: object = bucket.config
    assert isinstance(method, Codec)
    return method
