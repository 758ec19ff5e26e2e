"""Payloads byte for byte, put together by hand from the docstrings of `core/plan/payload.py`
and `methods/topk.py`.

A failure here means that ranks of two versions no longer understand each other: raise
`payload.VERSION` rather than edit a number below. (A new setting changes the digest alone.)
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
from oracle import wire
from oracle.backends import Backend, each_framework
from oracle.world import World

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.plan.buckets import BucketPlan, Plan, TensorSpec, make_plan
from horovod_topk.core.plan.shards import first_block
from horovod_topk.errors import PayloadError, PlanMismatchError, TopKError
from horovod_topk.methods.topk import TopK

# A bucket of one sparse and one dense tensor, at three widths: 10 elements send 2, 3 send 3.
WEIGHT = [0, 5, 0, -7, 0, 0, 1, 0, 0, 2]  # the two largest: 5 at 1, -7 at 3
BIAS = [1, -2, 0.5]


def small_plan(dtype: str, values: str = "float32", indices: str = "auto") -> Plan:
    specs = [TensorSpec("w", (10,), dtype), TensorSpec("b", (3,), dtype)]
    return make_plan(specs, TopK(ratio=0.2, values=values, indices=indices, min_numel=4))


def small_gradients(dtype: str) -> dict[str, np.ndarray[Any, Any]]:
    return {"w": np.array(WEIGHT, dtype), "b": np.array(BIAS, dtype)}


def sent(world: World, *gradients: dict[str, Any]) -> bytes:
    """The payload of rank 0's only bucket."""
    world.launch(gradients)
    return world.payloads(0)[0][1]


def header(tensors: int, digest: bytes) -> bytes:
    magic, version, method, measures, facts = b"HTKP", 2, 1, 0, 0
    return struct.pack("<4sBBHI8sI", magic, version, method, measures, tensors, digest, facts)


def ended(data: bytes) -> bytes:
    """A payload with the zeros that take its end to a multiple of 16."""
    return data + bytes(-len(data) % 16)


@each_framework
def test_every_byte_of_a_small_payload(backend: Backend) -> None:
    """The whole of one, in hexadecimal."""
    plan = small_plan("float32")
    expected = bytes.fromhex(
        "48 54 4b 50"  # magic: HTKP
        "02 01 00 00"  # version 2, method 1, no measures
        "02 00 00 00"  # two tensors
        "77 68 57 0e e5 eb 78 64"  # digest of the plan; see the next test
        "00 00 00 00"  # facts: none are stated
        "00"  # flags: nothing non-finite
        "00 00 00 00 00 00 00"  # padding to 32
        "00 00 a0 40  00 00 e0 c0"  # w: 5, -7
        "00 00 80 3f  00 00 00 c0  00 00 00 3f"  # b: 1, -2, 0.5
        "00 00 00 00"  # padding to 56; no plain indices
        "01"  # w: x = 1, 2, of which one lower bit each makes 2 + 8 // 2 bits least
        "05"  # w: and the upper parts 0, 1 are bits 0 + 0 and 1 + 1 of 6
        "00 00 00 00 00 00"  # padding to 64
    )
    assert len(expected) == 64
    assert sent(World(plan, 1, backend), small_gradients("float32")) == ended(expected)


@each_framework
def test_plain_indices(backend: Backend) -> None:
    plan = small_plan("float32", indices="plain")
    expected = (
        header(2, plan.buckets[0].digest)
        + bytes(8)
        + struct.pack("<5f", 5, -7, *BIAS)
        + bytes(4)  # 52 to 56
        + struct.pack("<2H", 1, 3)
        + bytes(4)  # 60 to 64
    )
    assert sent(World(plan, 1, backend), small_gradients("float32")) == ended(expected)


def test_the_digest_is_a_hash_of_the_buckets_plan() -> None:
    """Other languages can compute it: SHA-256 of compact JSON with sorted keys, 8 bytes."""
    text = (
        '[2,1,{"exchange":"allgather","gather_ratio":null,"indices":"auto","min_numel":4,'
        '"name":null,"ratio":0.2,"selection":"exact","values":"float32"},"average",'
        '"direct",1,null,'  # an allgather; not split among owners
        '[["w",[10],"float32",10,0,0,0,32,false,2,"packed",56],'
        '["b",[3],"float32",3,1,0,10,40,false,3,null,0]]]'
    )
    expected = hashlib.sha256(text.encode()).digest()[:8]
    assert small_plan("float32").buckets[0].digest == expected
    assert expected.hex(" ") == "77 68 57 0e e5 eb 78 64"


@each_framework
@pytest.mark.parametrize(
    ("dtype", "values", "code", "value_padding"),
    [
        ("float16", "float16", "e", 6),  # 10 bytes of values end at 42, indices start at 48
        ("float32", "float16", "e", 6),
        ("float64", "float16", "e", 6),
        ("float16", "float32", "f", 4),  # 20 bytes end at 52, indices start at 56
        ("float32", "float32", "f", 4),
        ("float64", "float32", "d", 0),  # float64 is full width for a float64 tensor
    ],
)
def test_values_of_every_width(
    backend: Backend, dtype: str, values: str, code: str, value_padding: int
) -> None:
    plan = small_plan(dtype, values)
    expected = (
        header(2, plan.buckets[0].digest)
        + bytes(8)  # flags and padding
        + struct.pack(f"<5{code}", 5, -7, *BIAS)
        + bytes(value_padding)
        + bytes([0b01, 0b000101])  # as in the first test
        + bytes(6)
    )
    assert sent(World(plan, 1, backend), small_gradients(dtype)) == ended(expected)


# Each kind of values: 40 elements send 4, and 3 send 3.
#
# w has 5 at 3, -7 at 10, 2.5 at 11 and 0.75 at 39. So x = 3, 9, 9, 36, and l = 3 makes
# 4 l + 36 // 2**l least. Lower bits 011, 001, 001, 100: 3 + (1 << 3) + (1 << 6) + (4 << 9) is
# 0x084b. Upper parts 0, 1, 1, 4: bits 0, 2, 3 and 7 of 8.
PLACES = "4b 08  8d"
KINDS = {
    "float16": "00 45  00 c7  00 41  00 3a  00 3c  00 c0  00 38  00 00",
    "bfloat16": "a0 40  e0 c0  20 40  40 3f  80 3f  00 c0  00 3f  00 00",
    "int8": (
        "62 3d"  # w: 226 / 4096, the least bfloat16 that is no less than 7 / 127
        "5b 81 2d 0e"  # 90.6, -126.9, 45.3 and 13.6 times that
        "82 3c"  # b: 130 / 8192, no less than 2 / 127
        "3f 82 20"  # 63.02, -126.03 and 31.5 times that
        "00 00 00 00 00"  # 43 to 48
    ),
    "int4": (
        "80 3f  95 12"  # w: 5, -7, 2 (2.5 rounded to even) and 1 times 7 / 7
        "93 3e  93 02"  # b: 3.5 (3.48), -7.0 and 1.7 times 147 / 512, no less than 2 / 7
    ),
    "int3": (
        "40 3f 20 40 a0 40 e0 40"  # w: 0.75, 2.5, 5 and 7
        "7a 00"  # 5 is 2 of 0 to 3, -7 is minus 3, 2.5 is 1, 0.75 is 0
        "00 3f 80 3f 00 40 00 00"  # b: 0.5, 1 and 2: the fourth region is empty
        "31 00"  # 1, minus 2, and 0
        "00 00 00 00"  # 52 to 56
    ),
    "int2": (
        "d0 3f c0 40  0d"  # w: (2.5 + 0.75) / 2 and (5 + 7) / 2
        "40 3f 00 40  0c"  # b: (1 + 0.5) / 2 and 2
        "00 00 00 00 00 00"  # 42 to 48
    ),
    "sign": (
        "74 40  02"  # w: 244 / 64, next to 7 * (46811 + 65536 + 23405 + 7021) / 65536 / 4
        "95 3f  02"  # b: 149 / 128, next to 2 * (32768 + 65536 + 16384) / 65536 / 3
        "00 00"  # 38 to 40
    ),
}
READ = {
    "float16": ([5, -7, 2.5, 0.75], [1, -2, 0.5]),
    "bfloat16": ([5, -7, 2.5, 0.75], [1, -2, 0.5]),
    "int8": (np.array([91, -127, 45, 14]) * 226 / 4096, np.array([63, -126, 32]) * 130 / 8192),
    "int4": ([5, -7, 2, 1], np.array([3, -7, 2]) * 147 / 512),
    "int3": ([5, -7, 2.5, 0.75], [1, -2, 0.5]),
    "int2": ([6, -6, 1.625, 1.625], [0.75, -2, 0.75]),
    "sign": ([3.8125, -3.8125, 3.8125, 3.8125], np.array([149, -149, 149]) / 128),
}


def kinds_plan(values: str) -> Plan:
    specs = [TensorSpec("w", (40,), "float32"), TensorSpec("b", (3,), "float32")]
    return make_plan(specs, TopK(ratio=0.1, values=values, min_numel=4))


def of_each_kind(plan: Plan, values: str) -> bytes:
    sections = bytes.fromhex(KINDS[values]) + bytes.fromhex(PLACES) + bytes(5)
    return ended(header(2, plan.buckets[0].digest) + bytes(8) + sections)


@each_framework
@pytest.mark.parametrize("values", KINDS)
def test_values_of_each_kind_are_written_and_read(backend: Backend, values: str) -> None:
    plan, w = kinds_plan(values), np.zeros(40, np.float32)
    w[[3, 10, 11, 39]] = 5, -7, 2.5, 0.75
    gradients = {"w": w, "b": np.array(BIAS, np.float32)}
    assert sent(World(plan, 1, backend), gradients) == of_each_kind(plan, values)
    w[[3, 10, 11, 39]], b = READ[values]
    read = [backend.array(np.zeros(n), "float32") for n in (40, 3)]
    decode(backend, plan.buckets[0], [of_each_kind(plan, values)] * 2, read)
    assert backend.numpy(read[0]).tolist() == (2 * w).tolist()
    assert backend.numpy(read[1]).tolist() == [2 * each for each in b]


@each_framework
@pytest.mark.parametrize(
    ("values", "count", "one", "two", "expected"),
    [
        ("int8", 128, 127, -254, "80 3f  00 40" + 128 * "7f" + "81"),
        ("int4", 128, 7, -14, "80 3f  00 40" + 64 * "77" + "09"),  # its upper half is 0
        ("int3", 1024, 1, -3, "80 3f" + 6 * "00" + "40 40" + 6 * "00" + 384 * "00" + "04"),
        ("int2", 1024, -1, 3, "80 3f 00 00  40 40 00 00" + 256 * "aa" + "00"),
        ("sign", 1024, -1, 3, "80 3f  40 40" + 128 * "ff" + "00"),
    ],
)
def test_a_scale_for_each_block(
    backend: Backend, values: str, count: int, one: float, two: float, expected: str
) -> None:
    """All scales come first; the last block has one value."""
    spec = TensorSpec("w", (count + 1,), "float32")
    plan = make_plan([spec], TopK(ratio=1.0, values=values))
    data = sent(World(plan, 1, backend), {"w": np.array([one] * count + [two], np.float32)})
    body = bytes.fromhex(expected)
    assert data[32:] == ended(body)


@each_framework
def test_a_sampled_selection(backend: Backend) -> None:
    """70,000 ascending magnitudes are 34 rows of 2,049, of which 544 elements are looked at.

    They should hold 54.4 of the 7,000 largest. The threshold is the 39th of them: all 16 of the
    rows 33 and 32, and the 7th largest of row 31, at element 31 * 2049 + 9. So elements from 63,528
    on are sent, and as many of the first as are missing.
    """
    config = TopK(ratio=0.1, indices="plain", selection="sampled", values="float32")
    plan = make_plan([TensorSpec("w", (70_000,), "float32")], config)
    g = np.arange(1, 70_001, dtype=np.float32)
    chosen = [*range(528), *range(63_528, 70_000)]
    expected = (
        header(1, plan.buckets[0].digest)
        + bytes(8)
        + struct.pack("<7000f", *g[chosen])
        + struct.pack("<7000I", *chosen)
    )
    assert sent(World(plan, 1, backend), {"w": g}) == ended(expected)


@each_framework
def test_long_indices_stand_before_short_ones(backend: Backend) -> None:
    """2**16 elements still have 16-bit indices, one more has 32-bit ones."""
    sizes = {"short": 2**16, "long": 2**16 + 1, "dense": 3}
    specs = [TensorSpec(name, (n,), "float32") for name, n in sizes.items()]
    plan = make_plan(specs, TopK(ratio=3e-5, indices="plain", min_numel=4, values="float32"))
    g = {name: np.zeros(n, np.float32) for name, n in sizes.items()}
    g["short"][[0, 65535]] = 1.5, -2.5
    g["long"][[65535, 65536]] = 3.5, -4.5
    g["dense"][:] = 7, 8, 9
    expected = (
        header(3, plan.buckets[0].digest)
        + bytes(8)
        + struct.pack("<7f", 1.5, -2.5, 3.5, -4.5, 7, 8, 9)
        + bytes(4)  # 60 to 64
        + struct.pack("<2I", 65535, 65536)
        + struct.pack("<2H", 0, 65535)
        + bytes(4)  # 76 to 80
    )
    assert sent(World(plan, 1, backend), g) == ended(expected)


@each_framework
def test_flags_are_bits_in_the_plans_order(backend: Backend) -> None:
    """Nine tensors: the first, the eighth and the ninth have a NaN or an infinity."""
    specs = [TensorSpec(str(i), (1,), "float32") for i in range(9)]
    world = World(make_plan(specs, TopK(ratio=0.01, values="float32")), 1, backend)
    bad = {0: np.nan, 7: np.inf, 8: -np.inf}
    data = sent(world, {str(i): np.array([bad.get(i, 1.0)], np.float32) for i in range(9)})
    assert data[24:32] == bytes([0b1000_0001, 0b0000_0001, 0, 0, 0, 0, 0, 0])
    assert len(data) == 32 + 48  # nine values and padding
    received = world.finish()[0]
    assert [name for name, g in received.items() if np.isnan(g).all()] == ["0", "7", "8"]


@each_framework
def test_a_written_payload_is_read_back(backend: Backend) -> None:
    """A payload that no encoder of ours wrote decodes to what the docstring says."""
    plan = small_plan("float32")
    bucket = plan.buckets[0]
    foreign = handmade(bucket)
    gradients = [backend.array(np.zeros(10), "float32"), backend.array(np.zeros(3), "float32")]
    assert decode(backend, bucket, [foreign, foreign], gradients) == []
    assert backend.numpy(gradients[0]).tolist() == [0, 0, 0, 0, 0.5, 0, 0, 0, 0, -3.0]
    assert backend.numpy(gradients[1]).tolist() == [2, 4, 6]
    assert wire.read(bucket, foreign).dense["w"].tolist() == [0, 0, 0, 0, 0.25, 0, 0, 0, 0, -1.5]


def handmade(bucket: BucketPlan) -> bytes:
    """w: 0.25 at 4 and -1.5 at 9; b: 1, 2, 3."""
    values = struct.pack("<5f", 0.25, -1.5, 1, 2, 3)
    index = bytes([0b00, 0b100100])  # x = 4, 8: upper parts 2 and 4, bits 2 + 0 and 4 + 1
    return ended(header(2, bucket.digest) + bytes(8) + values + bytes(4) + index)


def decode(
    backend: Backend, bucket: BucketPlan, payloads: list[bytes], gradients: list[Any]
) -> list[str]:
    """What `PayloadCodec.decode` makes of the sum of these payloads; returns the flagged names."""
    gathered = backend.array(np.frombuffer(b"".join(payloads), np.uint8), "uint8")
    flags = PayloadCodec(backend.ops).decode(bucket, gathered, 1.0, gradients)
    return list(bucket.names(flags))


# One test for each input a reader has to refuse.


def received(backend: Backend, at: int, byte: int) -> np.ndarray[Any, Any]:
    """Decode two payloads, the second with one byte changed; returns the gradient afterwards."""
    bucket = small_plan("float32").buckets[0]
    broken = bytearray(handmade(bucket))
    assert broken[at] != byte
    broken[at] = byte
    gradients = [backend.array(np.ones(10), "float32"), backend.array(np.ones(3), "float32")]
    try:
        decode(backend, bucket, [handmade(bucket), bytes(broken)], gradients)
    finally:
        untouched = all((backend.numpy(g) == 1).all() for g in gradients)
        assert untouched, "a gradient was written before the payload was refused"
    return backend.numpy(gradients[0])


HEADERS: list[tuple[int, int, type[TopKError], str]] = [  # byte, its value, error, message
    (0, ord("X"), PayloadError, "bucket 0, rank 1: the bytes 58544b50 do not open"),
    *((4, v, PayloadError, f"rank 1: format version {v}, .* reads version 2") for v in (0, 1, 3)),
    (5, 2, PayloadError, "rank 1: method 2, this rank's is 1"),
    # By name: the plans are equal, so that a message about plans would lead astray.
    *((at, 1, PayloadError, r"rank 1: .* bytes of measures") for at in (6, 7)),
    (8, 3, PlanMismatchError, "rank 1: its plan has 3 tensors"),
    (19, 0xFF, PlanMismatchError, r"\b7768570ee5eb78ff\b.*\b7768570ee5eb7864\b"),  # both digests
    (20, 4, PlanMismatchError, "committed steps.* rank 0.* rank 1"),
    (21, 4, PlanMismatchError, "ratio.* rank 0.* rank 1"),
    (22, 4, PlanMismatchError, "a state.* rank 0.* rank 1"),
    (23, 4, PlanMismatchError, "rates.* rank 0.* rank 1"),
]


@each_framework
@pytest.mark.parametrize(("at", "byte", "error", "message"), HEADERS)
def test_another_header_is_refused(
    backend: Backend, at: int, byte: int, error: type[TopKError], message: str
) -> None:
    with pytest.raises(error, match=message):
        received(backend, at, byte)


# Indices of "w", which sends 2 of its 10 elements, packed with one lower bit and 2 + 8 // 2 of a
# map; or plain, and for 32 bits 2 of 70,000.
SOUND = {
    ("packed", 10): "00 24",
    ("plain", 10): "0400 0900",
    ("plain", 70_000): "04000000 09000000",
}
WRONG = {
    "a bit too few": ("packed", 10, "00 04"),
    "no bits": ("packed", 10, "00 00"),
    "one of two bits beyond the map": ("packed", 10, "00 44"),
    "a bit too many": ("packed", 10, "00 2c"),
    "all bits": ("packed", 10, "00 3f"),
    "packed: 4, 10": ("packed", 10, "02 24"),  # upper parts 2 and 4, lower bits 0 and 1
    "packed: 5, 5": ("packed", 10, "01 0c"),  # upper parts 2 and 2, lower bits 1 and 0
    "int16: 9, 4": ("plain", 10, "0900 0400"),
    "int16: 4, 4": ("plain", 10, "0400 0400"),
    "int16: 4, 10": ("plain", 10, "0400 0a00"),
    "int16: 4, 65535": ("plain", 10, "0400 ffff"),
    "int32: 9, 4": ("plain", 70_000, "09000000 04000000"),
    "int32: 4, 4": ("plain", 70_000, "04000000 04000000"),
    "int32: 4, 70000": ("plain", 70_000, "04000000 70110100"),
    "int32: 4, 2**32 - 1": ("plain", 70_000, "04000000 ffffffff"),
}


def indexed(backend: Backend, indices: str, numel: int) -> tuple[BucketPlan, list[Any]]:
    """A bucket of v and w, which send 2 elements each, and b; and gradients of fives."""
    sizes = {"v": numel, "w": numel, "b": 3}
    specs = [TensorSpec(name, (n,), "float32") for name, n in sizes.items()]
    config = TopK(ratio=2 / (numel + 1), indices=indices, min_numel=4, values="float32")
    gradients = [backend.array(np.full(n, 5.0), "float32") for n in sizes.values()]
    return make_plan(specs, config).buckets[0], gradients


def payload_with(bucket: BucketPlan, section: str, flags: int = 0) -> bytes:
    """v: as w when it is sound; w: 1 and 2 at these indices; b: 1, 2, 3."""
    w = bucket.tensors[1]
    sound = SOUND["packed" if w.index == "packed" else "plain", w.spec.numel]
    data = header(3, bucket.digest) + bytes([flags]) + bytes(7)
    data += struct.pack("<7f", 1, 2, 1, 2, 1, 2, 3) + bytes(4)  # 60 to 64
    data += bytes.fromhex(sound) + bytes.fromhex(section)
    return ended(data)


@each_framework
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_indices_are_refused_by_name(
    backend: Backend, wrong: str, request: pytest.FixtureRequest
) -> None:
    """And before any gradient changes."""
    bucket, gradients = indexed(backend, *WRONG[wrong][:2])
    sound = payload_with(bucket, SOUND[WRONG[wrong][:2]])
    bad = payload_with(bucket, WRONG[wrong][2])
    try:
        with pytest.raises(PayloadError, match=r"tensor 'w': bucket 0, rank 1: its indices do not"):
            decode(backend, bucket, [sound, bad, sound], gradients)
    finally:
        assert all((backend.numpy(each) == 5).all() for each in gradients)


@each_framework
@pytest.mark.parametrize("wrong", WRONG)
def test_indices_of_a_flagged_tensor_are_ignored(backend: Backend, wrong: str) -> None:
    """Any rank's flag will do."""
    bucket, gradients = indexed(backend, *WRONG[wrong][:2])
    flagged = payload_with(bucket, SOUND[WRONG[wrong][:2]], flags=0b010)
    bad = payload_with(bucket, WRONG[wrong][2])
    assert decode(backend, bucket, [flagged, bad], gradients) == ["w"]
    v, w, b = map(backend.numpy, gradients)
    assert np.isnan(w).all()
    assert (v[[4, 9]].tolist(), np.count_nonzero(v), b.tolist()) == ([2, 4], 2, [2, 4, 6])


@each_framework
@pytest.mark.parametrize("values", ["int8", "int4", "int3", "int2", "sign"])
@pytest.mark.parametrize("scale", ["80 bf", "80 7f", "80 ff", "c0 7f", "80 80"])
def test_a_scale_that_cannot_be_is_refused_by_name(
    backend: Backend, values: str, scale: str
) -> None:
    """-1, infinities, a NaN, the smallest negative normal number; before a gradient changes."""
    plan = kinds_plan(values)
    good = of_each_kind(plan, values)
    bad = bytearray(good)
    bad[32:34] = bytes.fromhex(scale)
    gradients = [backend.array(np.full(n, 5.0), "float32") for n in (40, 3)]
    with pytest.raises(PayloadError, match=r"tensor 'w': bucket 0, rank 1: .* a scale is negative"):
        decode(backend, plan.buckets[0], [good, bytes(bad)], gradients)
    assert all((backend.numpy(each) == 5).all() for each in gradients)


@each_framework
@pytest.mark.parametrize("values", ["int8", "int4", "int3", "int2", "sign"])
@pytest.mark.parametrize("scale", ["00 00", "00 80", "7f 7f"])
def test_zeros_and_the_largest_scale_are_read(backend: Backend, values: str, scale: str) -> None:
    plan = kinds_plan(values)
    data = bytearray(of_each_kind(plan, values))
    data[32:34] = bytes.fromhex(scale)
    gradients = [backend.array(np.zeros(n), "float32") for n in (40, 3)]
    assert decode(backend, plan.buckets[0], [bytes(data)], gradients) == []


@each_framework
@pytest.mark.parametrize("size", [0, 56, 65, 128])
def test_a_rank_that_sent_another_length_is_noticed_before_a_gradient_changes(
    backend: Backend, size: int
) -> None:
    """Horovod gathers payloads of unequal length without a word."""
    world = World(small_plan("float32"), 2, backend)
    world.launch([small_gradients("float32")] * 2)
    key = (world.payloads(1)[0][0], 0)
    world.network._posted[key][1] = backend.ops.zeros(size, "uint8", "cpu")
    message = f"bucket 0: {64 + size} bytes arrived from 2 ranks, the plan says 64 from each"
    with pytest.raises(PayloadError, match=message):
        world.finish()
    after = backend.numpy(world._arrays[0]["w"])
    assert after.tolist() == WEIGHT


@pytest.mark.parametrize(
    ("name", "parts", "part", "block"),
    [
        ("net.0.weight", 4, 0, 2),
        ("net.0.weight", 4, 3, 1),
        ("head.bias", 3, 1, 2),
        ("v#2", 8, 5, 4),
    ],
)
def test_owners_of_earlier_checkpoints(name: str, parts: int, part: int, block: int) -> None:
    """Residuals of owners are saved by shard: another owner could not read them."""
    assert first_block(name, parts, part) == block
