"""The plan of an exchange: k, buckets, arenas and payload bytes, computed once. Integers only.

A plan is a pure function of names, shapes, dtypes, groups and settings, so every rank computes
the same plan; `core.exchange.agreement` checks this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from horovod_topk.core.plan import payload
from horovod_topk.core.plan.payload import Layout
from horovod_topk.errors import ConfigError, DuplicateNameError, UnsupportedDtypeError
from horovod_topk.methods.protocol import (
    RESIDUAL_DTYPE,
    Codec,
    Method,
    Piece,
    TensorSpec,
    UpdateRule,
    whole_bytes,
)
from horovod_topk.ops.coding import BLOCK

BUCKET_ELEMENTS = 25 * 2**20 // 4  # 25 MiB of float32: large enough to amortise a negotiation
BUCKET_TENSORS = 8000  # at most, as a header counts 65,535 bytes of measures
REDUCTIONS = ("average", "sum")
WIDTH = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # bytes

__all__ = ["RESIDUAL_DTYPE", "BucketPlan", "Plan", "TensorSpec", "make_plan"]


@dataclass(frozen=True)
class BucketPlan:
    """Tensors that are compressed together and sent as one payload."""

    ordinal: int  # stable position among the plan's buckets
    tensors: tuple[Any, ...]  # pieces: `horovod_topk.methods.protocol.Piece`, or the method's own
    residual_dtype: str
    config: Method  # the method, which is its settings
    reduction: str
    layout: Layout
    digests: tuple[bytes, ...]  # 8 bytes for each writer's payload; see `headers`
    parts: int = 1  # number of owners that gradients are split among
    senders: tuple[int, ...] = ()  # ranks of the payloads as they are read; (): 0, 1, 2, ...
    direction: str = "direct"  # see `Method.piece`
    part: int = 0  # owner whose shards are in its only payload
    measures: tuple[str, ...] = ()  # names of the measures in each payload; see `core.measures`
    update_rule: UpdateRule | None = None  # what is kept and sent for the optimizer's update

    @cached_property
    def writers(self) -> int:
        """Payloads, one after another, that are read as one: more than 1 for shards."""
        return len(self.digests)

    @cached_property
    def gradients(self) -> tuple[Any, ...]:
        """One tensor for each gradient."""
        return self.tensors[: len(self.tensors) // self.writers]

    @property
    def numel(self) -> int:
        """Number of elements of its arenas."""
        stop: int = self.tensors[-1].stop
        return stop

    @property
    def flags_at(self) -> int:
        """Byte of the non-finite flags in a payload."""
        return self.layout.flags_at

    @property
    def payload_bytes(self) -> int:
        """Bytes of one payload as it is read."""
        return self.layout.payload_bytes

    @property
    def places(self) -> list[tuple[str, int, int, int]]:
        """Name, start, stop and first block of each tensor in the arenas."""
        return [(t.spec.name, t.start, t.stop, t.first) for t in self.tensors]

    @property
    def device(self) -> str:
        """The device of its arenas."""
        device: str = self.tensors[0].spec.device
        return device

    @cached_property
    def entries(self) -> int:
        """Number of values in its payload."""
        return sum(tensor.entries for tensor in self.tensors)

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes of its gradients."""
        return sum(t.numel * WIDTH[t.spec.dtype] for t in self.tensors)

    def names(self, flags: Iterable[bool]) -> tuple[str, ...]:
        """Names of the flagged gradients, given one flag for each."""
        return tuple(t.spec.name for t, flag in zip(self.gradients, flags, strict=True) if flag)

    def identity_of(self, position: int) -> tuple[str, str, int]:
        """Tensor, direction and owner of a piece: the same for the writer and for readers."""
        part = self.part if self.writers == 1 else position // len(self.gradients)
        return self.tensors[position].spec.name, self.direction, part

    def sender(self, position: int) -> int:
        """The rank that wrote the payload at a position."""
        return self.senders[position] if self.senders else position

    @property
    def digest(self) -> bytes:
        """The digest of its only payload, or of the first."""
        return self.digests[0]

    @cached_property
    def header(self) -> bytes:
        """The header of its only payload, or of the first, equal on every rank and step."""
        return self._header(self.digest)

    @cached_property
    def headers(self) -> tuple[bytes, ...]:
        """The header of each writer's payload.

        A digest is equal on two ranks if and only if they read each other's payloads.
        """
        return (self.header, *map(self._header, self.digests[1:]))

    @cached_property
    def tensor_measures(self) -> int:
        """Count the measures that describe single tensors; they come last."""
        return sum(":" in name for name in self.measures)

    @cached_property
    def fingerprint(self) -> bytes:
        """Identifies buckets that can use the same kernel."""
        pieces = [[piece.spec.name, *_facts(piece)] for piece in self.tensors]
        return digest([self.device, self.parts, self.layout.payload_bytes, *self._own, pieces])

    @property
    def _own(self) -> list[object]:
        """What all ranks that read its payloads must have in common."""
        own = [
            payload.VERSION,
            self.config.id,
            agreed(self.config, self.update_rule),
            self.reduction,
        ]
        return [*own, self.measures] if self.measures else own

    def _header(self, digest: bytes) -> bytes:
        count, measures = len(self.gradients), len(self.measures)
        return payload.header(self.config.id, count, digest, measures)


@dataclass(frozen=True)
class Plan:
    """All buckets of one optimizer, with what they were computed from."""

    config: Method  # the method, which is its settings
    reduction: str  # "average" or "sum" over ranks
    buckets: tuple[BucketPlan, ...]
    update_rule: UpdateRule | None = None  # what is kept and sent for the optimizer's update

    def tensors(self) -> Iterator[Any]:
        """Every tensor, bucket by bucket."""
        for bucket in self.buckets:
            yield from bucket.tensors

    def sent_dense(self) -> dict[str, str]:
        """Tensors that are sent whole inside their bucket, and the reason."""
        reasons = {tensor.spec.name: self.config.why_whole(tensor) for tensor in self.tensors()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def own_ratios(self) -> dict[str, float]:
        """Tensors with their own ratio, other than the plan's."""
        usual, names = self.config.ratio, [tensor.spec.name for tensor in self.tensors()]
        ratios = {name: self.config.ratio_of(name) for name in names}
        return {name: ratio for name, ratio in ratios.items() if ratio != usual}

    def bytes_of(self, names: Collection[str]) -> dict[str, int]:
        """Bytes of some tensors in a gathered payload; empty for methods that gather none."""
        config = self.config
        if not isinstance(config, Codec):
            return {}
        return {
            piece.spec.name: whole_bytes(piece) if piece.whole else config.data_bytes(piece)
            for piece in self.tensors()
            if piece.spec.name in names
        }

    def summary(self) -> str:
        """The plan in one line, for the log."""
        tensors, dense = list(self.tensors()), self.sent_dense()
        elements = sum(t.spec.numel for t in tensors if t.spec.name in dense)
        own = len(self.own_ratios())
        return (
            f"{len(tensors)} tensors in {len(self.buckets)} buckets, {len(dense)} of them "
            f"({elements} elements) sent dense{f', {own} at ratios of their own' if own else ''}"
        )

    def without(self, name: str) -> Plan:
        """The same plan without one tensor; an empty bucket is dropped."""
        kept = []
        for bucket in self.buckets:
            specs = [t.spec for t in bucket.tensors if t.spec.name != name]
            if len(specs) == len(bucket.tensors):
                kept.append(bucket)
            elif specs:
                own = self.config, self.reduction, self.update_rule
                kept.append(_plan_bucket(bucket.ordinal, specs, *own))
        return replace(self, buckets=tuple(kept))

    def under(self, config: Method, update_rule: UpdateRule | None = None) -> Plan:
        """The same tensors in the same buckets, with other settings."""
        own = config, self.reduction, update_rule
        buckets = (_plan_bucket(b.ordinal, [t.spec for t in b.tensors], *own) for b in self.buckets)
        return Plan(config, self.reduction, tuple(buckets), update_rule)

    def fields(self) -> dict[str, list[object]]:
        """Everything that ranks have to agree on, by name, as JSON-able lists."""
        specs = [tensor.spec for tensor in self.tensors()]
        settings = sorted(agreed(self.config, self.update_rule).items())
        return {
            "format": [payload.VERSION],
            "method": [type(self.config).__name__],
            "settings": [[name, each] for name, each in settings if name != "ratios"],
            "reduction": [self.reduction],
            "names": [spec.name for spec in specs],
            "shapes": [[spec.name, list(spec.shape)] for spec in specs],
            "dtypes": [[spec.name, spec.dtype] for spec in specs],
            "ratios": [[spec.name, *self._ratios_of(spec)] for spec in specs],
            "buckets": [[t.spec.name for t in bucket.tensors] for bucket in self.buckets],
            "payload": [[tensor.spec.name, *_facts(tensor)] for tensor in self.tensors()],
            "measures": list(self.config.measures),
        }

    @cached_property
    def digest(self) -> bytes:
        """8 bytes over all of `fields`; own ratios and measures count only where there are any."""
        absent = {"ratios": not self.config.own, "measures": not self.config.measures}
        fields = self.fields().items()
        return digest({key: each for key, each in fields if not absent.get(key, False)})

    def _ratios_of(self, spec: TensorSpec) -> list[float]:
        """A tensor's ratio, and the ratio at which owners send it back if that differs."""
        ratio, back = self.config.ratio, self.config.ratio_back
        if spec.name in self.config.own:
            ratio = back = self.config.own[spec.name]
        return [ratio] if back == ratio else [ratio, back]


def agreed(config: Method, update_rule: UpdateRule | None) -> dict[str, object]:
    """The settings that must be equal on all ranks, with the rule of the optimizer's update."""
    return (
        config.agreed() if update_rule is None else {**config.agreed(), "update": update_rule.name}
    )


def digest(value: object) -> bytes:
    """8 bytes that identify a JSON-able value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()[:8]


def make_plan(
    specs: Sequence[TensorSpec],
    config: Method,
    reduction: str = "average",
    groups: Iterable[Sequence[TensorSpec]] | None = None,
    names: Collection[str] | None = None,
    update_rule: UpdateRule | None = None,
) -> Plan:
    """Plan the exchange of `specs`, given in the order in which their gradients become ready.

    groups: the user's buckets; specs in none of them fill default buckets.
    names: all names that patterns of `config.ratios` may match, if more than `specs`.
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
    own = config, reduction, update_rule
    buckets = tuple(_plan_bucket(i, part, *own) for i, part in enumerate(parts))
    return Plan(config, reduction, buckets, update_rule)


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
                cure=f"Use one of {', '.join(RESIDUAL_DTYPE)}: a complex tensor can be kept as a "
                "real one of shape [..., 2], which torch.view_as_complex or tf.complex reads. Or "
                "do not train it",
            )


def _fill(specs: Iterable[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Split consecutive specs into full buckets."""
    bucket: list[TensorSpec] = []
    elements = 0
    for spec in specs:
        is_full = elements + spec.numel > BUCKET_ELEMENTS or len(bucket) == BUCKET_TENSORS
        if bucket and is_full:
            yield bucket
            bucket, elements = [], 0
        bucket.append(spec)
        elements += spec.numel
    if bucket:
        yield bucket


def _alike(group: Iterable[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Split a group by residual dtype and device, in order of first appearance."""
    parts: dict[tuple[str, str], list[TensorSpec]] = {}
    for spec in group:
        parts.setdefault((RESIDUAL_DTYPE[spec.dtype], spec.device), []).append(spec)
    yield from parts.values()


def _plan_bucket(
    ordinal: int,
    specs: Sequence[TensorSpec],
    config: Method,
    reduction: str,
    update_rule: UpdateRule | None,
) -> BucketPlan:
    parts = [Piece(spec, spec.numel, position) for position, spec in enumerate(specs)]
    pairs = [] if update_rule is None else [(p, n) for p in parts for n in update_rule.numbers(p)]
    of_tensors = tuple(f"{piece.spec.name}:{name}" for piece, name in pairs)
    if of_tensors and len(specs) > BUCKET_TENSORS:
        raise ConfigError(
            f"a group has {len(specs)} tensors, and {BUCKET_TENSORS} at most can be sent "
            "together with what the optimizer's step needs to know of each",
            tensor=specs[0].name,
            cure="Pass smaller groups=, or leave groups= out",
        )
    measures = (*config.measures, *of_tensors)
    kind = config, reduction
    return lay_out(ordinal, parts, "direct", *kind, measures=measures, update_rule=update_rule)


def lay_out(
    ordinal: int,
    parts: Sequence[Piece],
    direction: str,
    config: Method,
    reduction: str,
    *,
    alignment: int = 1,
    owners: int = 1,
    identity: object = None,
    part: int = 0,
    measures: tuple[str, ...] = (),
    update_rule: UpdateRule | None = None,
) -> BucketPlan:
    """Lay out a payload of tensors or shards, one after another in the arenas and in the body.

    Args:
        parts: the tensors or shards; their positions are set here.
        direction: see `Codec.piece`.
        alignment: elements; every part begins at a multiple of it in the arenas, and of a block
            of residuals that have blocks.
        owners: number of owners that the gradients are split among.
        identity: anything else that readers must have in common; enters the digest.
        part: owner whose shards it carries.
    """
    config = config.narrowed([each.spec.name for each in parts])
    alignment = max(alignment, BLOCK.get(config.residuals, 1))
    pieces, start = [], 0
    for each in parts:
        pieces.append(replace(config.piece(each, direction), start=start))
        start += -(-each.numel // alignment) * alignment
    body_at = payload.body_at(len(pieces), len(measures))
    placed, end = config.lay_out(pieces, body_at)
    layout = payload.layout(len(pieces), end, len(measures))
    dtype = parts[0].spec.residual_dtype
    known = ordinal, tuple(placed), dtype, config, reduction, layout, (), owners
    plan = BucketPlan(
        *known, direction=direction, part=part, measures=measures, update_rule=update_rule
    )
    facts = [[piece.spec.name, *_facts(piece)] for piece in placed]
    return replace(plan, digests=(digest([*plan._own, direction, owners, identity, facts]),))


def _facts(piece: Piece) -> list[object]:
    """What two ranks must have in common to read a piece, apart from its name."""
    # `asdict` copies every value, which took half of the time of a plan.
    names = [each.name for each in fields(piece) if each.name != "spec"]
    return [list(piece.spec.shape), piece.spec.dtype, *(getattr(piece, name) for name in names)]
