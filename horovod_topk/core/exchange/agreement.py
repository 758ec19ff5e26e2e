"""Ranks compare plans before they exchange: a mismatch raises an error with rank and field.

Without this check, Horovod would silently gather payloads of unequal plans.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, TypeVar

from horovod_topk.config import OPTIONAL
from horovod_topk.core.exchange.meeting import Meets
from horovod_topk.core.exchange.protocol import Collective
from horovod_topk.core.plan import payload
from horovod_topk.core.plan.buckets import Plan, digest
from horovod_topk.errors import PlanMismatchError
from horovod_topk.ops import Ops

Array = TypeVar("Array")

CURE = (
    "Start all ranks with the same model, settings, groups and version of horovod_topk, and name "
    "layers yourself where a framework numbers them"
)
CURES = {
    "optimizer": "Give all ranks an optimizer of one class",
    "kernels": "Train on GPUs alone or on CPUs alone, with one version of Triton for all ranks",
}

ONE_VERSION = "Install one version of horovod_topk for all ranks"

# Digests of all fields and of the optimizer's class, bytes of their text, and an ordinal.
_RECORD = struct.Struct("<8s8sII")
UNKNOWN = bytes(8)  # digest of no class


def agree(
    plan: Plan,
    ordinal: int,
    ops: Ops[Array],
    collective: Collective[Array],
    *,
    optimizer: str | None = None,
    has_scaler: bool = False,
) -> int:
    """Check that all ranks have one plan; return the highest ordinal that any rank proposes.

    A rank that compresses nothing calls `agree_on_nothing`.

    Where the optimizer's update depends on the exchange, its kernels have to be of one kind, too.

    A collective: every rank of the communicator must call it, in the same order among its
    collective calls.

    Args:
        ordinal: this rank's proposal for the optimizer's ordinal; it and all above are unused here.
        optimizer: name of the optimizer's class; None: unknown, as with tapes, or each rank's own.
        has_scaler: whether residuals are kept without the scale of a loss.

    Raises:
        PlanMismatchError: on every rank, when any two plans differ.
        MissingRanksError: a rank did not come within the limit.
    """
    devices = {bucket.device for bucket in plan.buckets} if plan.update_rule is not None else ()
    kernels: list[object] = [*sorted(set(map(ops.kernel_kind, devices)))]
    others: dict[str, list[object]] = {"kernels": kernels, "grad_scaler": [has_scaler]}
    return _agree(plan.fields() | others, ordinal, ops, collective, optimizer)


def agree_on_nothing(compression: str, ops: Ops[Array], collective: Collective[Array]) -> None:
    """Check that no rank compresses gradients, as this one does not. A collective, as `agree`."""
    _agree({"format": [payload.VERSION], "method": [compression]}, 0, ops, collective)


def _agree(
    fields: Mapping[str, list[object]],
    ordinal: int,
    ops: Ops[Array],
    collective: Collective[Array],
    optimizer: str | None = None,
) -> int:
    kind = digest(optimizer) if optimizer else UNKNOWN
    text = json.dumps({"optimizer": [optimizer], **fields}).encode()
    record = _RECORD.pack(digest(fields), kind, len(text), ordinal)
    gathered = gather_bytes(record, "topkef.agreement", ops, collective)
    seen = [_RECORD.unpack(data) for data in gathered]
    kinds = {kind for _, kind, *_ in seen} - {UNKNOWN}
    if len({fingerprint for fingerprint, *_ in seen}) > 1 or len(kinds) > 1:
        width = max(length for *_, length, _ in seen)
        texts = gather_bytes(text.ljust(width), "topkef.mismatch", ops, collective)
        plans = {r: json.loads(each) for r, each in enumerate(texts)}
        if len(kinds) > 1:  # first, as settings depend on it
            known = {r: each for r, each in plans.items() if each["optimizer"] != [None]}
            raise mismatch(known, collective.rank)
        raise mismatch({r: each | {"optimizer": []} for r, each in plans.items()}, collective.rank)
    return max(int(proposed) for *_, proposed in seen)


def gather_bytes(
    data: bytes,
    name: str,
    ops: Ops[Array],
    collective: Collective[Array],
    *,
    patient: bool = False,
) -> list[bytes]:
    """Gather host bytes of equal length from every rank. A collective.

    patient: see `Meets.meet`.
    """
    if isinstance(collective, Meets):
        return collective.meet(data, name, patient=patient)
    array = ops.zeros(len(data), "uint8", "cpu")
    ops.store_bytes(array, 0, data)
    gathered = ops.to_host(collective.allgather(array, name).wait())
    return in_rows(gathered, len(data), collective.size, collective.rank)


def in_rows(gathered: bytes, length: int, ranks: int, rank: int) -> list[bytes]:
    """Split gathered bytes into those of each rank, which all have the length of this rank's."""
    if len(gathered) != length * ranks:
        raise PlanMismatchError(
            f"{ranks} ranks sent {len(gathered)} bytes for their agreement, this one (rank {rank}) "
            f"{length} of them: they do not describe the same things",
            cure=ONE_VERSION,
        )
    return [gathered[r * length : (r + 1) * length] for r in range(ranks)]


def mismatch(plans: Mapping[int, Mapping[str, list[object]]], rank: int) -> PlanMismatchError:
    """The error for plans that differ.

    plans: `Plan.fields` of two ranks or more, by rank.
    """
    one = plans[rank if rank in plans else min(plans)]
    others = plans.values()
    field = next((f for f in one if any(o.get(f, one[f]) != one[f] for o in others)), None)
    if field is None:
        names = [sorted(fields) for fields in plans.values()]
        return PlanMismatchError(f"ranks describe their plans by {names}", cure=ONE_VERSION)
    return _mismatch(field, {r: fields[field] for r, fields in plans.items()}, rank)


def _mismatch(field: str, lists: Mapping[int, list[object]], rank: int) -> PlanMismatchError:
    """The error for one field; compares this rank, or the first one, with one that differs."""
    if field == "settings":
        lists = _with_those_that_are_off(lists)
    one = rank if rank in lists else min(lists)
    other = next(r for r, theirs in lists.items() if theirs != lists[one])
    here, there = _first_difference(lists[one], lists[other])
    this = " (this one)" if one == rank else ""
    return PlanMismatchError(
        f"ranks disagree on {field}: {there} on rank {other}, {here} on rank {one}{this}",
        cure=CURES.get(field, CURE),
    )


def _with_those_that_are_off(settings: Mapping[int, list[Any]]) -> dict[int, list[object]]:
    """Lists of names and values that have equal names on all ranks."""
    by_rank = {rank: dict(each) for rank, each in settings.items()}
    names = sorted({name for each in by_rank.values() for name in each})
    return {
        rank: [[name, each.get(name, OPTIONAL.get(name))] for name in names]
        for rank, each in by_rank.items()
    }


def _first_difference(here: list[object], there: list[object]) -> tuple[str, str]:
    for mine, theirs in zip(here, there, strict=False):
        if mine != theirs:
            return json.dumps(mine), json.dumps(theirs)
    return f"{len(here)} entries", f"{len(there)} entries"
