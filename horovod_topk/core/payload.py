"""The wire format, version 0.

One payload carries one bucket of one rank for one step. Integers are little-endian. Its length
and the position of every section follow from the plan alone, never from the data.

    offset          bytes   content
    0               4       magic, the ASCII letters "HTKP"
    4               1       version of this format: 0
    5               1       codec: 1 is Top-K
    6               2       reserved: a writer MUST write 0, a reader MUST refuse anything else
    8               4       T, the number of tensors
    12              8       digest of the bucket's plan
    20              4       reserved, as above
    24              F       non-finite flags, F = ceil(T / 8): bit t % 8 of byte t / 8 is set if
                            and only if the compensated gradient of tensor t has a NaN or an
                            infinity; bits beyond T MUST be 0
    values_at               values, tensor after tensor in the plan's order
    index32_at              indices of tensors with more than 2**16 elements, unsigned 32 bits
    index16_at              indices of the other tensors, unsigned 16 bits

Each of the last three sections and the end of the payload lie at the next multiple of 8; the
bytes between MUST be 0, so that equal content is equal bytes.

A tensor whose plan has no index sends all its elements in row-major order. Any other tensor
sends k entries; its indices count row-major elements from 0 and MUST ascend strictly, entry i of
the values belonging to entry i of the indices. Values are IEEE 754 binary16, binary32 or
binary64, all of one width in a bucket; a binary16 value MUST saturate at 65504 in magnitude.

A reader MUST compare bytes 0 to 23 with those of its own plan and refuse the payload where they
differ: two ranks with different plans would otherwise read noise. A tensor that any rank flags
MUST decode to NaN on every rank. Values and indices of a flagged tensor MUST be ignored.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from horovod_topk.errors import PayloadError, PlanMismatchError

MAGIC = b"HTKP"
VERSION = 0
TOPK = 1
ALIGNMENT = 8  # bytes
_HEADER = struct.Struct("<4sBBHI8sI")
HEADER_BYTES = _HEADER.size  # 24


@dataclass(frozen=True)
class Layout:
    """Byte positions in a payload."""

    flags_at: int
    flags_bytes: int
    values_at: int
    index32_at: int
    index16_at: int
    payload_bytes: int


def layout(tensors: int, value_bytes: int, index32_bytes: int, index16_bytes: int) -> Layout:
    """Positions for a bucket of `tensors` tensors with sections of the given sizes in bytes."""
    flags_bytes = -(-tensors // 8)
    values_at = _aligned(HEADER_BYTES + flags_bytes)
    index32_at = _aligned(values_at + value_bytes)
    index16_at = _aligned(index32_at + index32_bytes)
    end = _aligned(index16_at + index16_bytes)
    return Layout(HEADER_BYTES, flags_bytes, values_at, index32_at, index16_at, end)


def header(tensors: int, digest: bytes) -> bytes:
    """The 24 bytes before the flags."""
    return _HEADER.pack(MAGIC, VERSION, TOPK, 0, tensors, digest, 0)


def check_length(received: int, payload_bytes: int, ranks: int, bucket: int) -> None:
    """Refuse a gathered buffer that is not one payload a rank.

    Raises:
        PayloadError: the lengths differ.
    """
    if received != payload_bytes * ranks:
        raise PayloadError(
            f"bucket {bucket}: {received} bytes arrived from {ranks} ranks, the plan says "
            f"{payload_bytes} from each",
            cure="Start all ranks with the same model, settings and version of horovod_topk",
        )


def check_header(received: bytes, expected: bytes, rank: int, bucket: int) -> None:
    """Refuse a payload that another plan wrote.

    Raises:
        PayloadError: not a payload of this format and version.
        PlanMismatchError: a payload of another plan.
    """
    if received[:HEADER_BYTES] == expected:
        return
    where = f"bucket {bucket}, rank {rank}"
    magic, version, codec, low, tensors, digest, high = _HEADER.unpack(received[:HEADER_BYTES])
    if magic != MAGIC:
        raise PayloadError(
            f"{where}: the bytes {magic.hex()} do not open a payload ({MAGIC.hex()} does)",
            cure="Make sure that all ranks run horovod_topk, and that no other collective uses "
            "this name",
        )
    if (version, codec) != (VERSION, TOPK):
        raise PayloadError(
            f"{where}: format version {version} with codec {codec}, this rank reads version "
            f"{VERSION} with codec {TOPK}",
            cure="Install the same version of horovod_topk on all ranks",
        )
    if low or high:
        raise PayloadError(
            f"{where}: reserved bytes hold {low} and {high}, this version writes 0",
            cure="Install the same version of horovod_topk on all ranks",
        )
    own = _HEADER.unpack(expected)
    raise PlanMismatchError(
        f"{where}: its plan has {tensors} tensors and digest {digest.hex()}, this rank's has "
        f"{own[4]} and {own[5].hex()}",
        cure="Start all ranks with the same model, settings and groups",
    )


def wrong_indices(bucket: int, rank: int, tensor: str) -> PayloadError:
    """The error for a payload whose entries belong nowhere."""
    return PayloadError(
        f"bucket {bucket}, rank {rank}: its indices do not ascend, or lie outside the tensor",
        tensor=tensor,
        cure="The payload was damaged on its way: check the network and the memory of that rank",
    )


def flagged(flags: bytes, tensors: int) -> list[int]:
    """Positions of the tensors whose non-finite bit is set."""
    bits = int.from_bytes(flags, "little")
    return [t for t in range(tensors) if bits >> t & 1]


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
