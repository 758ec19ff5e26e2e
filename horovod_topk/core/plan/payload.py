"""Wire format of payloads, version 2.

One payload carries one bucket of one rank for one step. Integers are little-endian. Its length
and the position of every section follow from the plan alone, never from the data.

    offset          bytes   content
    0               4       magic, the ASCII letters "HTKP"
    4               1       version of this format: 2
    5               1       method: the id of the compression method, e.g. 1 for Top-K
    6               2       M, the bytes of measures: a multiple of 4
    8               4       T, the number of tensors
    12              8       digest of the bucket's plan
    20              4       facts that ranks share in this step (`core.plan.facts`), in the
                            payloads of the plan's first bucket; 0 in all others
    24              M       measures: float32 numbers that ranks tell each other, in the order in
                            which the plan names them (`core.codec.measures`)
    24 + M          F       non-finite flags, F = ceil(T / 8): bit t % 8 of byte t / 8 is set if
                            and only if the compensated gradient of tensor t has a NaN or an
                            infinity; bits beyond T MUST be 0
    body            B       data of the method, as `horovod_topk/methods/<name>.py` says

The body begins at the next multiple of 8, and the payload ends at the next multiple of 16 (NCCL is
slow with others). All bytes between MUST be 0, so that equal content is equal bytes.

A reader MUST compare bytes 0 to 19 with those of its own plan and refuse the payload where they
differ: two ranks with different plans would otherwise read noise. It MUST refuse payloads whose
facts differ: their writers would go on with different weights. A tensor that any rank flags MUST
decode to NaN on every rank, and its data in the body MUST be ignored.

There is no checksum: transports have theirs. A reader refuses a payload that could take it out of
bounds, that ranks could decode differently, or that no writer can have written. It does not notice
values that were damaged on the way.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from horovod_topk.core.plan import facts
from horovod_topk.errors import PayloadError, PlanMismatchError, TopKError

MAGIC = b"HTKP"
VERSION = 2
BODY = 8  # bytes; the body begins at a multiple of it
END = 16  # bytes; a payload ends at a multiple of it
MEASURE = 4  # bytes of a measure
_HEADER = struct.Struct("<4sBBHI8sI")
HEADER_BYTES = _HEADER.size  # 24
FACTS_AT, FACTS_BYTES = 20, 4
_OPENING = MAGIC + bytes([VERSION])


@dataclass(frozen=True)
class Layout:
    """Byte positions in a payload."""

    flags_at: int
    flags_bytes: int
    body_at: int
    payload_bytes: int


def body_at(tensors: int, measures: int = 0) -> int:
    """Byte at which the body of a payload with `tensors` tensors and `measures` numbers begins."""
    return _aligned(HEADER_BYTES + MEASURE * measures + -(-tensors // 8), BODY)


def layout(tensors: int, end: int, measures: int = 0) -> Layout:
    """Byte positions for a bucket of `tensors` tensors whose body ends at byte `end`."""
    flags_at = HEADER_BYTES + MEASURE * measures
    return Layout(flags_at, -(-tensors // 8), body_at(tensors, measures), _aligned(end, END))


def header(method: int, tensors: int, digest: bytes, measures: int = 0) -> bytes:
    """Header of a payload: the 24 bytes before measures and flags."""
    return _HEADER.pack(MAGIC, VERSION, method, MEASURE * measures, tensors, digest, 0)


def facts_within(gathered: bytes) -> list[int]:
    """Find each payload in a concatenation of payloads, and return the facts of each.

    It serves where payloads have other lengths than planned, and begin elsewhere.
    """
    starts = [at for at in range(0, len(gathered), END) if gathered.startswith(_OPENING, at)]
    heads = [gathered[at : at + HEADER_BYTES] for at in starts]
    return [facts_of(head) for head in heads if len(head) == HEADER_BYTES]


def is_payload(head: bytes) -> bool:
    """Whether bytes open as a payload of this format does."""
    return head.startswith(_OPENING)


def facts_of(head: bytes) -> int:
    """Read the facts that ranks share from the first bytes of a payload."""
    return int.from_bytes(head[FACTS_AT : FACTS_AT + FACTS_BYTES], "little")


def with_facts(payload: bytes, facts: int) -> bytes:
    """A payload that states other facts."""
    stated = facts.to_bytes(FACTS_BYTES, "little")
    return payload[:FACTS_AT] + stated + payload[FACTS_AT + FACTS_BYTES :]


def wrong_length(gathered: bytes, payload_bytes: int, ranks: int, bucket: int) -> TopKError:
    """The error for gathered bytes that are not one payload from each rank.

    It is a PlanMismatchError if these are payloads of ranks at different ratio levels.
    """
    found = facts_within(gathered)
    if len(found) == ranks and len({*found}) > 1:
        return facts.mismatch(dict(enumerate(found)))
    return PayloadError(
        f"bucket {bucket}: {len(gathered)} bytes arrived from {ranks} ranks, the plan says "
        f"{payload_bytes} from each",
        cure="Start all ranks with the same model, settings and version of horovod_topk",
    )


def check_counts(received: Sequence[int], planned: int, name: str) -> None:
    """Refuse gradients whose numbers of elements differ from the plan's.

    received: number of elements from each rank in the collective `name`.
    """
    for position, count in enumerate(received):
        if count != planned:
            raise PayloadError(
                f"{name}: {count} elements arrived from rank {position} of this node, the plan "
                f"says {planned}",
                cure="Start all ranks with the same model, settings and version of horovod_topk",
            )


def foreign(received: bytes, expected: bytes, rank: int, bucket: int) -> TopKError:
    """The error for a payload whose header differs from that of this rank's plan.

    It is a PlanMismatchError for a payload of another plan, and a PayloadError for a payload of
    another method or format, and for bytes that are no payload.
    """
    where = f"bucket {bucket}, rank {rank}"
    magic, version, method, measures, tensors, digest, _ = _HEADER.unpack(received[:HEADER_BYTES])
    own = _HEADER.unpack(expected)
    if magic != MAGIC:
        return PayloadError(
            f"{where}: the bytes {magic.hex()} do not open a payload ({MAGIC.hex()} does)",
            cure="Make sure that all ranks run horovod_topk, and that no other collective uses "
            "this name",
        )
    if version != VERSION:
        return PayloadError(
            f"{where}: format version {version}, this rank reads version {VERSION}",
            cure="Install the same version of horovod_topk on all ranks",
        )
    if method != own[2]:
        return PayloadError(
            f"{where}: method {method}, this rank's is {own[2]}",
            cure="Pass the same compression= on all ranks",
        )
    if measures != own[3]:
        return PayloadError(
            f"{where}: {measures} bytes of measures, this version writes {own[3]}",
            cure="Install the same version of horovod_topk on all ranks",
        )
    return PlanMismatchError(
        f"{where}: its plan has {tensors} tensors and digest {digest.hex()}, this rank's has "
        f"{own[4]} and {own[5].hex()}",
        cure="Start all ranks with the same model, settings and groups",
    )


def damaged(bucket: int, rank: int, tensor: str) -> PayloadError:
    """The error for a payload that no writer can have written."""
    return PayloadError(
        f"bucket {bucket}, rank {rank}: its indices do not ascend or lie outside the tensor, or a "
        "scale is negative or no number",
        tensor=tensor,
        cure="The payload was damaged on its way: check the network and the memory of that rank",
    )


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
