"""Ranks compare plans before they exchange: a mismatch raises an error with rank and field.

Without this check, Horovod would silently gather payloads of unequal plans.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import TypeVar

from horovod_topk.core.exchange import Collective
from horovod_topk.core.plan import Plan, digest
from horovod_topk.errors import PlanMismatchError
from horovod_topk.ops import Ops

Array = TypeVar("Array")

CURE = (
    "Start all ranks with the same model, settings, groups and version of horovod_topk, and name "
    "layers yourself where a framework numbers them"
)
CURES = {
    "kernels": "Train on GPUs alone or on CPUs alone, with one version of Triton for all ranks"
}

_RECORD = struct.Struct("<8sI")  # a field's digest, and the bytes of its text
_ORDINAL = struct.Struct("<I")


def agree(plan: Plan, ordinal: int, ops: Ops[Array], collective: Collective[Array]) -> int:
    """Check that all ranks have one plan; return the highest ordinal that any rank proposes.

    Where the optimizer's steps depend on arrivals, their kernels have to be of one kind, too.

    A collective: every rank of the communicator must call it, in the same order among its
    collective calls.

    Args:
        plan: this rank's plan.
        ordinal: this rank's proposal for the optimizer's ordinal; it and all above are unused here.

    Raises:
        PlanMismatchError: on every rank, when any two plans differ.
    """
    devices = {bucket.device for bucket in plan.buckets} if plan.config.by_arrivals else ()
    kernels: list[object] = [*sorted(set(map(ops.kernel_kind, devices)))]
    fields = {**plan.fields(), "kernels": kernels}
    texts = {field: json.dumps(value).encode() for field, value in fields.items()}
    records = [_RECORD.pack(digest(fields[field]), len(text)) for field, text in texts.items()]
    proposal = b"".join(records) + _ORDINAL.pack(ordinal)
    gathered = gather_bytes(proposal, "topkef.agreement", ops, collective)
    for position, field in enumerate(texts):
        seen = [_RECORD.unpack_from(data, position * _RECORD.size) for data in gathered]
        if len({fingerprint for fingerprint, _ in seen}) > 1:
            width = max(length for _, length in seen)
            lists = gather_bytes(texts[field].ljust(width), "topkef.mismatch", ops, collective)
            found = {rank: json.loads(data) for rank, data in enumerate(lists)}
            raise _mismatch(field, found, collective.rank)
    return max(int(_ORDINAL.unpack(data[-_ORDINAL.size :])[0]) for data in gathered)


def gather_bytes(
    data: bytes, name: str, ops: Ops[Array], collective: Collective[Array]
) -> list[bytes]:
    """Gather host bytes of equal length from every rank. A collective.

    Raises:
        PlanMismatchError: on every rank, when lengths differ, as with different package versions.
    """
    array = ops.zeros(len(data), "uint8", "cpu")
    ops.store_bytes(array, 0, data)
    gathered = ops.to_host(collective.allgather(array, name).wait())
    if len(gathered) != len(data) * collective.size:
        raise PlanMismatchError(
            f"{collective.size} ranks sent {len(gathered)} bytes for their agreement, this one "
            f"(rank {collective.rank}) {len(data)} of them: they do not describe the same things",
            cure="Install one version of horovod_topk for all ranks",
        )
    return [gathered[r * len(data) : (r + 1) * len(data)] for r in range(collective.size)]


def mismatch(plans: Mapping[int, Mapping[str, list[object]]], rank: int) -> PlanMismatchError:
    """The error for plans that differ.

    Args:
        plans: `Plan.fields` of two ranks or more, by rank.
        rank: this process' rank.
    """
    one = plans[rank if rank in plans else min(plans)]
    field = next(f for f in one if any(other[f] != one[f] for other in plans.values()))
    return _mismatch(field, {r: fields[field] for r, fields in plans.items()}, rank)


def _mismatch(field: str, lists: Mapping[int, list[object]], rank: int) -> PlanMismatchError:
    """The error for one field; compares this rank, or the first one, with one that differs."""
    one = rank if rank in lists else min(lists)
    other = next(r for r, theirs in lists.items() if theirs != lists[one])
    here, there = _first_difference(lists[one], lists[other])
    this = " (this one)" if one == rank else ""
    return PlanMismatchError(
        f"ranks disagree on {field}: {there} on rank {other}, {here} on rank {one}{this}",
        cure=CURES.get(field, CURE),
    )


def _first_difference(here: list[object], there: list[object]) -> tuple[str, str]:
    for mine, theirs in zip(here, there, strict=False):
        if mine != theirs:
            return json.dumps(mine), json.dumps(theirs)
    return f"{len(here)} entries", f"{len(there)} entries"
