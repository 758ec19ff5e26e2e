"""What is sent, decided beforehand: k, buckets, arenas and payload bytes. Integers only.

A plan is a pure function of names, shapes, dtypes, groups and settings, so every rank computes
the same one; `horovod_topk.core.agreement` checks that they did.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
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
from horovod_topk.ops import coding

BUCKET_ELEMENTS = 25 * 2**20 // 4  # 25 MiB of float32: large enough to amortise a negotiation
RESIDUAL_DTYPE = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
}
REDUCTIONS = ("average", "sum")
WIDTH = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # bytes
DTYPE_CODE = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}  # these three in recipes
VALUE_CODE = {
    "float32": 0,
    "float64": 0,
    "float16": 1,
    "bfloat16": 2,
    "int8": 3,
    "int4": 4,
    "sign": 5,
}
INDEX_CODE = {None: 0, "packed": 1, "int16": 2, "int32": 4}


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
    index: str | None  # int16, int32 or packed; None: all elements are sent, in order
    value_at: int  # byte of its first value in the payload
    index_at: int  # byte of its first index in the payload
    numel: int  # elements: those of the gradient, or of one shard of it
    gradient: int  # which of the bucket's gradients it is, or is a shard of
    first: int = 0  # first block of the shard; see `horovod_topk.core.shards`

    @property
    def stop(self) -> int:
        """One past its last element in the bucket's arenas."""
        return self.start + self.numel

    @property
    def recipe(self) -> tuple[int, ...]:
        """Its part of the bucket's `recipe`."""
        return (
            self.numel,
            self.k,
            self.start,
            INDEX_CODE[self.index],
            self.value_at,
            self.index_at,
            DTYPE_CODE[self.spec.dtype],
            self.first,
            self.gradient,
        )


@dataclass(frozen=True)
class BucketPlan:
    """Tensors that are compressed together and sent as one payload."""

    ordinal: int  # stable position among the plan's buckets
    tensors: tuple[TensorPlan, ...]
    residual_dtype: str
    values: str  # kind of its values, one of `VALUE_CODE`
    config: TopKConfig
    reduction: str
    sampled: bool  # select by a sampled threshold, not exactly
    layout: Layout
    digests: tuple[bytes, ...]  # of the payloads that make one, 8 bytes each; see `headers`
    parts: int = 1  # shards that gradients are dealt to
    senders: tuple[int, ...] = ()  # ranks of the payloads as they are read; (): 0, 1, 2, ...

    @property
    def writers(self) -> int:
        """Payloads, one behind the other, that are read as one: more than 1 for shards."""
        return len(self.digests)

    @property
    def gradients(self) -> tuple[TensorPlan, ...]:
        """A tensor for each gradient."""
        return self.tensors[: len(self.tensors) // self.writers]

    @property
    def numel(self) -> int:
        """Elements of its arenas."""
        return self.tensors[-1].stop

    @property
    def places(self) -> list[tuple[str, int, int, int]]:
        """What lies where in its arenas."""
        return [(t.spec.name, t.start, t.stop, t.first) for t in self.tensors]

    @property
    def device(self) -> str:
        """Where its arenas live."""
        return self.tensors[0].spec.device

    @cached_property
    def entries(self) -> int:
        """Values in its payload."""
        return sum(tensor.k for tensor in self.tensors)

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes of the gradients it stands for."""
        return sum(t.numel * WIDTH[t.spec.dtype] for t in self.tensors)

    def names(self, flags: Iterable[bool]) -> tuple[str, ...]:
        """Names of the flagged gradients, given one flag for each."""
        return tuple(t.spec.name for t, flag in zip(self.gradients, flags, strict=True) if flag)

    def sender(self, position: int) -> int:
        """The rank that wrote the payload in a position."""
        return self.senders[position] if self.senders else position

    @property
    def digest(self) -> bytes:
        """That of its only payload, or of the first."""
        return self.digests[0]

    @cached_property
    def header(self) -> bytes:
        """The first bytes of its only payload, or of the first, equal on every rank and step."""
        return payload.header(len(self.gradients), self.digest)

    @property
    def headers(self) -> tuple[bytes, ...]:
        """The first bytes of each writer's payload.

        A digest is equal on two ranks if and only if they read each other's payloads.
        """
        count = len(self.gradients)
        return (self.header, *(payload.header(count, each) for each in self.digests[1:]))

    @cached_property
    def fingerprint(self) -> bytes:
        """Tells buckets that need kernels of their own from each other."""
        return digest([self.device, *self.recipe])

    @cached_property
    def recipe(self) -> tuple[int, ...]:
        """What a kernel needs to know, as `horovod_topk.ops.protocol.Fused` has it."""
        head = (
            len(self.tensors),
            WIDTH[self.residual_dtype],
            VALUE_CODE[self.values],
            self.layout.flags_at,
            self.layout.payload_bytes,
            int(self.sampled),
            self.parts,
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
        return {t.spec.name: self._why_dense(t.spec) for t in self.tensors() if t.index is None}

    def _why_dense(self, spec: TensorSpec) -> str:
        ratio, limit = self.config.own.get(spec.name), self.config.min_numel
        if spec.numel < limit:
            return f"{spec.numel} elements, fewer than min_numel={limit}: sent dense"
        if ratio is None:
            return f"at ratio={self.config.ratio} entries cost no less: sent dense"
        return f"at its ratio of {ratio} entries cost no less: sent dense"

    def own_ratios(self) -> dict[str, float]:
        """Ratios of the tensors that have another one than the plan's."""
        own, names = self.config.own, [tensor.spec.name for tensor in self.tensors()]
        return {
            name: own[name]
            for name in names
            if own.get(name, self.config.ratio) != self.config.ratio
        }

    def summary(self) -> str:
        """One line for the log."""
        tensors, dense = list(self.tensors()), self.sent_dense()
        elements = sum(t.spec.numel for t in tensors if t.spec.name in dense)
        own = len(self.own_ratios())
        return (
            f"{len(tensors)} tensors in {len(self.buckets)} buckets, {len(dense)} of them "
            f"({elements} elements) sent dense{f', {own} at ratios of their own' if own else ''}"
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

    def under(self, config: TopKConfig) -> Plan:
        """The same tensors in the same buckets, under other settings."""
        buckets = (
            _plan_bucket(b.ordinal, [t.spec for t in b.tensors], config, self.reduction)
            for b in self.buckets
        )
        return replace(self, config=config, buckets=tuple(buckets))

    def fields(self) -> dict[str, list[object]]:
        """What ranks have to agree on, by name, as JSON-able lists."""
        specs = [tensor.spec for tensor in self.tensors()]
        settings = sorted(self.config.agreed().items())
        return {
            "format": [payload.VERSION],
            "settings": [[name, each] for name, each in settings if name != "ratios"],
            "reduction": [self.reduction],
            "names": [spec.name for spec in specs],
            "shapes": [[spec.name, list(spec.shape)] for spec in specs],
            "dtypes": [[spec.name, spec.dtype] for spec in specs],
            "ratios": [[spec.name, *self._ratios_of(spec)] for spec in specs],
            "indices": [[tensor.spec.name, tensor.index] for tensor in self.tensors()],
            "buckets": [[t.spec.name for t in bucket.tensors] for bucket in self.buckets],
        }

    @cached_property
    def digest(self) -> bytes:
        """8 bytes over all of `fields`; over ratios where they are not all that of the settings."""
        fields = self.fields().items()
        return digest({key: each for key, each in fields if key != "ratios" or self.config.own})

    def _ratios_of(self, spec: TensorSpec) -> list[float]:
        """That of a tensor, and what owners send back of it, if that is another."""
        ratio, back = self.config.ratio, self.config.ratio_back
        if spec.name in self.config.own:
            ratio = back = self.config.own[spec.name]
        return [ratio] if back == ratio else [ratio, back]


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
    names: Collection[str] | None = None,
) -> Plan:
    """Plan the exchange of `specs`, given in the order in which their gradients arrive.

    Args:
        specs: every gradient, names unique.
        config: the settings.
        reduction: "average" or "sum".
        groups: buckets asked for by the user; specs in none of them fill default ones.
        names: what patterns of `config.ratios` may match, if more than `specs`.

    Raises:
        DuplicateNameError, UnsupportedDtypeError, TensorTooLargeError, ConfigError.
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(
            f"reduction={reduction!r} is unknown", cure=f"Pass one of {', '.join(REDUCTIONS)}"
        )
    _check(specs)
    large = {spec.name: spec.shape for spec in specs if spec.numel >= config.min_numel}
    config = config.resolved(large, [spec.name for spec in specs] if names is None else names)
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
    config = config.narrowed([spec.name for spec in specs])
    values = value_kind(specs[0], config)
    shares = [
        Share(spec, spec.numel, position, *share(spec, spec.numel, config.ratio, config))
        for position, spec in enumerate(specs)
    ]
    identities = [identity(each) for each in shares]
    own = digest([payload.VERSION, config.agreed(), reduction, identities])
    layout, tensors = lay_out(shares, values)
    return BucketPlan(
        ordinal,
        tensors,
        RESIDUAL_DTYPE[specs[0].dtype],
        values,
        config,
        reduction,
        config.selection == "sampled",
        layout,
        (own,),
    )


@dataclass(frozen=True)
class Share:
    """What one tensor, or one shard of one, sends."""

    spec: TensorSpec
    numel: int  # elements of the shard
    gradient: int  # position of the tensor in its bucket
    k: int
    index: str | None  # kind of indices; None: all elements are sent, in order
    first: int = 0


def value_kind(spec: TensorSpec, config: TopKConfig) -> str:
    """How the values of a bucket are sent, given one of its tensors."""
    return RESIDUAL_DTYPE[spec.dtype] if config.values == "float32" else config.values


def identity(share: Share) -> list[object]:
    """What two ranks must have in common to read a share."""
    return [share.spec.name, list(share.spec.shape), share.spec.dtype, share.index]


def share(spec: TensorSpec, numel: int, ratio: float, config: TopKConfig) -> tuple[int, str | None]:
    """(k, kind of indices) for `numel` elements of a tensor; None where all cost no more.

    ratio: that of tensors which have none of their own.
    """
    k, values = entries(numel, config.own.get(spec.name, ratio)), value_kind(spec, config)
    index = _index_kind(spec, config)
    cost = coding.value_bytes(values, k) + coding.index_bytes(index, numel, k)
    if spec.numel < config.min_numel or cost >= coding.value_bytes(values, numel):
        return numel, None
    if spec.numel > 2**32:
        raise TensorTooLargeError(
            f"{spec.numel} elements are more than the {2**32} an index can address",
            tensor=spec.name,
            cure="Split the parameter, or leave it out of the optimizer that is compressed",
        )
    return k, index


def _index_kind(spec: TensorSpec, config: TopKConfig) -> str:
    """Packed where our kernels pack: the Triton ones do not."""
    on_host = spec.device == "cpu" or "CPU" in spec.device or not spec.device
    if config.indices == "packed" or (config.indices == "auto" and on_host):
        return "packed"
    return "int16" if spec.numel <= 2**16 else "int32"


def lay_out(
    shares: Sequence[Share], values: str, alignment: int = 1
) -> tuple[Layout, tuple[TensorPlan, ...]]:
    """A payload for shares, one after another in the arenas and in each section.

    alignment: elements; every share begins at a multiple of it in the arenas.
    """
    sizes = dict.fromkeys(("int32", "int16", "packed"), 0)
    for each in shares:
        if each.index:
            sizes[each.index] += coding.index_bytes(each.index, each.numel, each.k)
    value_sizes = [coding.value_bytes(values, each.k) for each in shares]
    layout = payload.layout(len(shares), sum(value_sizes), sizes)
    index_at = {kind: layout.index_at(kind) for kind in sizes}
    start, value_at, tensors = 0, layout.values_at, []
    for each, size in zip(shares, value_sizes, strict=True):
        at = index_at[each.index] if each.index else 0
        tensors.append(
            TensorPlan(
                each.spec,
                each.k,
                start,
                each.index,
                value_at,
                at,
                each.numel,
                each.gradient,
                each.first,
            )
        )
        start += -(-each.numel // alignment) * alignment
        value_at += size
        if each.index:
            index_at[each.index] += coding.index_bytes(each.index, each.numel, each.k)
    return layout, tuple(tensors)
