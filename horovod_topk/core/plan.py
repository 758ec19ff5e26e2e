"""What is sent, decided beforehand: k, buckets, arenas and payload bytes. Integers only.

A plan is a pure function of names, shapes, dtypes, groups and settings, so every rank computes
the same one; `horovod_topk.core.agreement` checks that they did.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

from horovod_topk.config import TopKConfig
from horovod_topk.core import payload
from horovod_topk.core.payload import Layout
from horovod_topk.errors import (
    ConfigError,
    DuplicateNameError,
    TensorTooLargeError,
    UnsupportedDtypeError,
)

BUCKET_ELEMENTS = 25 * 2**20 // 4  # 25 MiB of float32: large enough to amortise a negotiation
RESIDUAL_DTYPE = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
}
REDUCTIONS = ("average", "sum")
DTYPE_CODE = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}  # in recipes
WIDTH = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int16": 2, "int32": 4}  # bytes


@dataclass(frozen=True)
class TensorSpec:
    """A gradient as the framework knows it."""

    name: str  # unique within an optimizer, equal on all ranks
    shape: tuple[int, ...]
    dtype: str  # float16, bfloat16, float32 or float64
    device: str = field(default="cpu", compare=False)  # tensors of one bucket share it

    @cached_property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class TensorPlan:
    """One tensor's share of its bucket."""

    spec: TensorSpec
    k: int  # entries sent each step
    start: int  # first element in the bucket's arenas
    index: str | None  # dtype of its indices; None: all elements are sent, in order
    value_at: int  # byte of its first value in the payload
    index_at: int  # byte of its first index in the payload

    @property
    def stop(self) -> int:
        """One past its last element in the bucket's arenas."""
        return self.start + self.spec.numel

    @property
    def recipe(self) -> tuple[int, ...]:
        """Its part of the bucket's `recipe`."""
        return (
            self.spec.numel,
            self.k,
            self.start,
            WIDTH[self.index] if self.index else 0,
            self.value_at,
            self.index_at,
            DTYPE_CODE[self.spec.dtype],
        )


@dataclass(frozen=True)
class BucketPlan:
    """Tensors that are compressed together and sent as one payload."""

    ordinal: int  # stable position among the plan's buckets
    tensors: tuple[TensorPlan, ...]
    residual_dtype: str
    value_dtype: str
    sampled: bool  # select by a sampled threshold, not exactly
    layout: Layout
    digest: bytes  # 8 bytes: equal on two ranks if and only if they read each other's payloads

    @property
    def numel(self) -> int:
        """Elements of its arenas."""
        return self.tensors[-1].stop

    @property
    def device(self) -> str:
        """Where its arenas live."""
        return self.tensors[0].spec.device

    @property
    def entries(self) -> int:
        """Values in its payload."""
        return sum(tensor.k for tensor in self.tensors)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the gradients it stands for."""
        return sum(t.spec.numel * WIDTH[t.spec.dtype] for t in self.tensors)

    def names(self, flags: Iterable[bool]) -> tuple[str, ...]:
        """Names of the flagged tensors, given one flag a tensor."""
        return tuple(t.spec.name for t, flag in zip(self.tensors, flags, strict=True) if flag)

    @cached_property
    def header(self) -> bytes:
        """The payload's first bytes, equal on every rank and step."""
        return payload.header(len(self.tensors), self.digest)

    @cached_property
    def recipe(self) -> tuple[int, ...]:
        """What a kernel needs to know, as `horovod_topk.ops.protocol.Fused` has it."""
        head = (
            len(self.tensors),
            WIDTH[self.residual_dtype],
            WIDTH[self.value_dtype],
            self.layout.flags_at,
            self.layout.payload_bytes,
            int(self.sampled),
        )
        return head + tuple(number for tensor in self.tensors for number in tensor.recipe)


@dataclass(frozen=True)
class Plan:
    """All buckets of one optimizer, with what they were computed from."""

    config: TopKConfig
    reduction: str  # "average" or "sum" over ranks
    buckets: tuple[BucketPlan, ...]

    def tensors(self) -> Iterator[TensorPlan]:
        """Every tensor, bucket by bucket."""
        for bucket in self.buckets:
            yield from bucket.tensors

    def sent_dense(self) -> dict[str, str]:
        """Tensors that travel whole inside their bucket, and why."""
        ratio, limit = self.config.ratio, self.config.min_numel
        return {
            t.spec.name: (
                f"{t.spec.numel} elements, fewer than min_numel={limit}: sent dense"
                if t.spec.numel < limit
                else f"at ratio={ratio} entries cost no less: sent dense"
            )
            for t in self.tensors()
            if t.index is None
        }

    def summary(self) -> str:
        """One line for the log."""
        tensors, dense = list(self.tensors()), self.sent_dense()
        elements = sum(t.spec.numel for t in tensors if t.spec.name in dense)
        return (
            f"{len(tensors)} tensors in {len(self.buckets)} buckets, {len(dense)} of them "
            f"({elements} elements) sent dense"
        )

    def without(self, name: str) -> Plan:
        """The same plan without one tensor; a bucket left empty disappears."""
        kept = []
        for bucket in self.buckets:
            specs = [t.spec for t in bucket.tensors if t.spec.name != name]
            if len(specs) == len(bucket.tensors):
                kept.append(bucket)
            elif specs:
                kept.append(_plan_bucket(bucket.ordinal, specs, self.config, self.reduction))
        return replace(self, buckets=tuple(kept))

    def fields(self) -> dict[str, list[object]]:
        """What ranks have to agree on, by name, as JSON-able lists."""
        specs = [tensor.spec for tensor in self.tensors()]
        return {
            "format": [payload.VERSION],
            "settings": [list(item) for item in sorted(self.config.agreed().items())],
            "reduction": [self.reduction],
            "names": [spec.name for spec in specs],
            "shapes": [[spec.name, list(spec.shape)] for spec in specs],
            "dtypes": [[spec.name, spec.dtype] for spec in specs],
            "buckets": [[t.spec.name for t in bucket.tensors] for bucket in self.buckets],
        }

    @cached_property
    def digest(self) -> bytes:
        """8 bytes over all of `fields`."""
        return digest(self.fields())


def digest(value: object) -> bytes:
    """8 bytes that identify a JSON-able value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()[:8]


def entries(numel: int, ratio: float) -> int:
    """k = ceil(ratio * numel), with the ratio read as the decimal number it was written as."""
    return math.ceil(Fraction(repr(ratio)) * numel)


def make_plan(
    specs: Sequence[TensorSpec],
    config: TopKConfig,
    reduction: str = "average",
    groups: Iterable[Sequence[TensorSpec]] | None = None,
) -> Plan:
    """Plan the exchange of `specs`, given in the order in which their gradients arrive.

    Args:
        specs: every gradient, names unique.
        config: the settings.
        reduction: "average" or "sum".
        groups: buckets asked for by the user; specs in none of them fill default ones.

    Raises:
        DuplicateNameError, UnsupportedDtypeError, TensorTooLargeError, ConfigError.
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(
            f"reduction={reduction!r} is unknown", cure=f"Pass one of {', '.join(REDUCTIONS)}"
        )
    _check(specs)
    asked = [list(group) for group in groups or ()]
    _check([spec for group in asked for spec in group])
    grouped = {spec.name for group in asked for spec in group}
    rest = [spec for spec in specs if spec.name not in grouped]
    parts = [part for group in [*asked, *_fill(rest)] for part in _alike(group)]
    return Plan(
        config,
        reduction,
        tuple(_plan_bucket(i, part, config, reduction) for i, part in enumerate(parts)),
    )


def _check(specs: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise DuplicateNameError(
                "this name is given to more than one tensor",
                tensor=spec.name,
                cure="Give each parameter a name of its own, as model.named_parameters() does",
            )
        seen.add(spec.name)
        if spec.dtype not in RESIDUAL_DTYPE:
            raise UnsupportedDtypeError(
                f"dtype {spec.dtype} cannot be compressed",
                tensor=spec.name,
                cure=f"Use one of {', '.join(RESIDUAL_DTYPE)}, or leave this parameter out of "
                "the optimizer",
            )


def _fill(specs: Iterable[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Consecutive specs, split where a bucket is full."""
    bucket: list[TensorSpec] = []
    elements = 0
    for spec in specs:
        if bucket and elements + spec.numel > BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
        bucket.append(spec)
        elements += spec.numel
    if bucket:
        yield bucket


def _alike(group: Iterable[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """A group split by residual dtype and device, in order of first appearance."""
    parts: dict[tuple[str, str], list[TensorSpec]] = {}
    for spec in group:
        parts.setdefault((RESIDUAL_DTYPE[spec.dtype], spec.device), []).append(spec)
    yield from parts.values()


def _plan_bucket(
    ordinal: int, specs: Sequence[TensorSpec], config: TopKConfig, reduction: str
) -> BucketPlan:
    residual_dtype = RESIDUAL_DTYPE[specs[0].dtype]
    value_dtype = residual_dtype if config.values == "float32" else config.values
    shares = [_share(spec, config, WIDTH[value_dtype]) for spec in specs]
    layout = payload.layout(
        len(specs),
        WIDTH[value_dtype] * sum(k for k, _ in shares),
        WIDTH["int32"] * sum(k for k, index in shares if index == "int32"),
        WIDTH["int16"] * sum(k for k, index in shares if index == "int16"),
    )
    return BucketPlan(
        ordinal,
        tuple(_place(specs, shares, layout, WIDTH[value_dtype])),
        residual_dtype,
        value_dtype,
        config.selection == "sampled",
        layout,
        digest([payload.VERSION, config.agreed(), reduction, [_identity(s) for s in specs]]),
    )


def _share(spec: TensorSpec, config: TopKConfig, value_width: int) -> tuple[int, str | None]:
    """(k, dtype of indices); index None where sending all elements costs no more."""
    k = entries(spec.numel, config.ratio)
    index = "int16" if spec.numel <= 2**16 else "int32"
    cost = k * (value_width + WIDTH[index])
    if spec.numel < config.min_numel or cost >= spec.numel * value_width:
        return spec.numel, None
    if spec.numel > 2**32:
        raise TensorTooLargeError(
            f"{spec.numel} elements are more than the {2**32} an index can address",
            tensor=spec.name,
            cure="Split the parameter, or leave it out of the optimizer that is compressed",
        )
    return k, index


def _place(
    specs: Sequence[TensorSpec],
    shares: Sequence[tuple[int, str | None]],
    layout: Layout,
    value_width: int,
) -> Iterator[TensorPlan]:
    """Tensors one after another, in the arenas and in each section of the payload."""
    start, value_at = 0, layout.values_at
    index_at = {"int32": layout.index32_at, "int16": layout.index16_at}
    for spec, (k, index) in zip(specs, shares, strict=True):
        yield TensorPlan(spec, k, start, index, value_at, index_at[index] if index else 0)
        start += spec.numel
        value_at += k * value_width
        if index:
            index_at[index] += k * WIDTH[index]


def _identity(spec: TensorSpec) -> list[object]:
    return [spec.name, list(spec.shape), spec.dtype]
