"""The wire format, version 1.

One payload carries one bucket of one rank for one step. Integers are little-endian. Its length
and the position of every section follow from the plan alone, never from the data.

    offset          bytes   content
    0               4       magic, the ASCII letters "HTKP"
    4               1       version of this format: 1
    5               1       codec: 1 is Top-K
    6               2       reserved: a writer MUST write 0, a reader MUST refuse anything else
    8               4       T, the number of tensors
    12              8       digest of the bucket's plan
    20              4       reserved, as above
    24              F       non-finite flags, F = ceil(T / 8): bit t % 8 of byte t / 8 is set if
                            and only if the compensated gradient of tensor t has a NaN or an
                            infinity; bits beyond T MUST be 0
    values_at               values, tensor after tensor in the plan's order
    index32_at              indices of tensors whose plan says int32, unsigned 32 bits
    index16_at              indices of tensors whose plan says int16, unsigned 16 bits
    packed_at               indices of tensors whose plan says packed

Each of the last four sections and the end of the payload lie at the next multiple of 8; the
bytes between MUST be 0, so that equal content is equal bytes.

A tensor whose plan has no index sends all its elements in row-major order. Any other tensor
sends k entries; its indices count row-major elements from 0 and MUST ascend strictly, entry i of
the values belonging to entry i of the indices.

Values are of one kind in a bucket. A tensor's values begin at a byte boundary.

    float32, float64        IEEE 754 binary32 or binary64
    float16, bfloat16       binary16, or the upper half of a binary32; a value MUST saturate at the
                            largest finite magnitude (65504, 2**128 - 2**120)
    int8, int4              c bfloat16 scales, one for each block of 128 entries, c = ceil(k / 128);
                            then for each entry an integer j, and the value is j times the scale of
                            its block, exactly. int8: two's complement. int4: four bits of two's
                            complement, entry 2i in the lower half of byte i, entry 2i + 1 in the
                            upper. A writer MUST NOT write j = -128 or j = -8
    sign                    bfloat16 scales for blocks of 1024; then a bit for each entry, bit i % 8
                            of byte i / 8, set if the value is minus its block's scale, else plus

Bits after a tensor's last value MUST be 0. A scale MUST NOT be negative. How a writer chooses
scales and multiples is its own affair (`horovod_topk.ops.protocol.Ops.pack_values` has ours): what
it did not send stays in its residual.

Packed indices i_0 < i_1 < ... < i_(k-1) of a tensor with n elements begin at a byte boundary. With
x_j = i_j - j, which lies in 0 ... n - k and never descends, and the l in 0 ... 31 that makes
k * l + floor((n - k) / 2**l) least (the lower of equals):

    ceil(k * l / 8) bytes   the lower l bits of x_0, x_1, ..., the lowest bit first, without gaps
    ceil(m / 8) bytes       a map of m = k + floor((n - k) / 2**l) bits; bit j % 8 of byte j / 8 is
                            bit j. Bit floor(x_j / 2**l) + j is set for each j, no other

Bits after either MUST be 0. (Elias 1974, Fano 1971.)

A reader MUST compare bytes 0 to 23 with those of its own plan and refuse the payload where they
differ: two ranks with different plans would otherwise read noise. It MUST refuse indices that do
not ascend, lie outside their tensor, or are fewer or more than k. A tensor that any rank flags MUST
decode to NaN on every rank. Values and indices of a flagged tensor MUST be ignored.

There is no checksum: transports have theirs. What a reader refuses is what could take it out of
bounds or make ranks differ in what they read; values that were damaged on the way are values.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horovod_topk.errors import PayloadError, PlanMismatchError

MAGIC = b"HTKP"
VERSION = 1
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
    packed_at: int
    payload_bytes: int

    def index_at(self, kind: str) -> int:
        """Where the indices of a kind begin."""
        at = {"int32": self.index32_at, "int16": self.index16_at, "packed": self.packed_at}
        return at[kind]


def layout(tensors: int, value_bytes: int, index_bytes: Mapping[str, int]) -> Layout:
    """Positions for a bucket of `tensors` tensors with sections of the given sizes in bytes."""
    flags_bytes = -(-tensors // 8)
    values_at = _aligned(HEADER_BYTES + flags_bytes)
    index32_at = _aligned(values_at + value_bytes)
    index16_at = _aligned(index32_at + index_bytes["int32"])
    packed_at = _aligned(index16_at + index_bytes["int16"])
    end = _aligned(packed_at + index_bytes["packed"])
    return Layout(HEADER_BYTES, flags_bytes, values_at, index32_at, index16_at, packed_at, end)


def header(tensors: int, digest: bytes) -> bytes:
    """The 24 bytes before the flags."""
    return _HEADER.pack(MAGIC, VERSION, TOPK, 0, tensors, digest, 0)


def check_length(received: int | None, payload_bytes: int, ranks: int, bucket: int) -> None:
    """Refuse a gathered buffer that is not one payload a rank.

    received: bytes; None in a graph that outlives a number of ranks, as in elastic jobs.

    Raises:
        PayloadError: the lengths differ.
    """
    if received is not None and received != payload_bytes * ranks:
        raise PayloadError(
            f"bucket {bucket}: {received} bytes arrived from {ranks} ranks, the plan says "
            f"{payload_bytes} from each",
            cure="Start all ranks with the same model, settings and version of horovod_topk",
        )


def check_counts(received: Sequence[int], planned: int, name: str) -> None:
    """Refuse gradients of other lengths than the plan's.

    received: elements from each rank that takes part in the collective `name`.

    Raises:
        PayloadError: one sent another number.
    """
    for position, count in enumerate(received):
        if count != planned:
            raise PayloadError(
                f"{name}: {count} elements arrived from rank {position} of this node, the plan "
                f"says {planned}",
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
