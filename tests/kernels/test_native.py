"""The CPU kernels against the oracle: every instruction set this processor has, threads, and memory
that does not lie where it is best.

The contract suite and the laws run them too (row "native" of `oracle.backends`); here are the
cases that the verbs do not have: many tensors at once, thresholds carried over, missed, and lists
that run full.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from horovod_topk.core.codec.payload_codec import PayloadCodec
from horovod_topk.core.plan.buckets import BucketPlan, TensorSpec, make_plan
from horovod_topk.core.plan.shards import ShardedPlan, shard
from horovod_topk.core.state.residual import Arenas
from horovod_topk.kernels import native
from horovod_topk.methods.topk import VALUES, Entries, TopK
from horovod_topk.ops import coding
from horovod_topk.ops.numpy import NumpyOps
from horovod_topk.ops.torch import TorchOps

Array = NDArray[Any]

FOUND = native.find()
pytestmark = pytest.mark.skipif(FOUND.library is None, reason=f"no kernels: {FOUND.description}")

ISAS = ("portable", "avx2", "avx512")
RNG = np.random.default_rng(7)


def isas() -> list[Any]:
    """Instruction sets up to the fastest of this processor; the fast tier has two of them."""
    fastest = ISAS.index(FOUND.description) if FOUND.library else 0
    between = [pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS[1:fastest]]
    return [ISAS[0], *between, *ISAS[1:][fastest - 1 : fastest]]


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes new buckets use one instruction set."""
    monkeypatch.setenv("HOROVOD_TOPK_ISA", request.param)
    assert FOUND.library is not None
    assert FOUND.library.topkef_isa().decode() == request.param
    return str(request.param)


@pytest.mark.parametrize(
    ("variable", "asked", "heard"),
    [
        ("HOROVOD_TOPK_ISA", "AVX2", True),
        ("HOROVOD_TOPK_ISA", "avx2", False),
        ("HOROVOD_TOPK_NATIVE", "false", True),
        ("HOROVOD_TOPK_NATIVE", "0", False),
    ],
)
def test_a_choice_that_means_nothing_is_warned_of(
    variable: str, asked: str, heard: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv(variable, asked)
    native._warn_of_unknown()
    assert (f"{variable}={asked} means nothing: use one of" in caplog.text) == heard


class Both:
    """One bucket, encoded and decoded by the kernels and by the oracle's verbs in step."""

    def __init__(self, bucket: BucketPlan, threads: int = 1) -> None:
        assert FOUND.library is not None
        self.bucket, self.threads = bucket, threads
        self.kernel = native.Bucket(bucket.config.recipe(bucket), FOUND.library)
        self.codec = PayloadCodec(NumpyOps())
        self.residual = np.zeros(bucket.numel, bucket.residual_dtype)
        self.payload = self.codec.new_payload(bucket)

    def encode(self, gradients: list[Array], *, commit: bool = True) -> Array:
        """The payload, once it and what is left are seen to be equal; NaN equal to NaN."""
        arenas = Arenas(self.bucket, self.residual.copy(), np.full_like(self.residual, 7))
        with np.errstate(all="ignore"):
            self.codec.encode(arenas, gradients, self.payload)
        payload = self.codec.new_payload(self.bucket)
        for section in self.sections(payload):
            section.view(np.uint8)[:] = 0xFF  # of the step before: no bit of it may stay
        candidate = np.full_like(self.residual, 9)
        places = self.places(self.residual), self.addresses(gradients), self.places(candidate)
        self.kernel.encode([self.kernel], *places, [payload.ctypes.data], self.threads)
        self.compare(payload, candidate, arenas.candidate)
        if commit and np.isfinite(candidate).all():
            self.residual = candidate
        return payload

    def compare(self, payload: Array, candidate: Array, expected: Array) -> None:
        """Refuses a difference in flags, indices, values, or what is left of unflagged tensors."""
        head = self.bucket.layout.body_at
        assert payload[:head].tobytes() == self.payload[:head].tobytes()
        flags = payload[self.bucket.layout.flags_at :]
        for one, other in zip(*map(self.sections, (payload, self.payload)), strict=True):
            assert self.canonical(one) == self.canonical(other)
        for position, tensor in enumerate(self.bucket.tensors):
            if not flags[position // 8] >> position % 8 & 1:
                left = slice(tensor.start, tensor.stop)
                np.testing.assert_array_equal(candidate[left], expected[left])

    def sections(self, payload: Array) -> list[Array]:
        """Values and indices of each tensor."""
        kind, views = self.bucket.config.value_kind(self.bucket.residual_dtype), []
        for t in self.bucket.tensors:
            values = payload[t.value_at : t.value_at + coding.value_bytes(kind, t.k)]
            size = coding.index_bytes(t.index, t.spec.numel, t.k)
            dtype = {"bfloat16": "uint16"}.get(kind, kind if kind.startswith("float") else "uint8")
            views += [values.view(dtype), payload[t.index_at : t.index_at + size]]
        return views

    @staticmethod
    def canonical(section: Array) -> bytes:
        """Its bytes, all NaNs made one."""
        if section.dtype == np.uint16:  # bfloat16
            section = (section.astype(np.uint32) << 16).view(np.float32)
        if section.dtype == np.uint8:
            return section.tobytes()
        return np.where(np.isnan(section), section.dtype.type(np.nan), section).tobytes()

    def decode(self, payloads: list[Array], scale: float) -> None:
        """Decode by both ways into gradients, and compare."""
        gathered = np.concatenate(payloads)
        expected, found = self.gradients(), self.gradients()
        with np.errstate(all="ignore"):
            flags = self.codec.decode(self.bucket, gathered, scale, expected)
        data, places = gathered.ctypes.data, self.addresses(found)
        assert self.kernel.decode(data, len(payloads), scale, flags, places, self.threads) is None
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)

    def gradients(self) -> list[Array]:
        return [np.full(t.spec.shape, 5, t.spec.dtype) for t in self.bucket.tensors]

    def places(self, arena: Array) -> list[int]:
        views = [arena[t.start : t.stop] for t in self.bucket.tensors]
        return self.addresses(views)

    @staticmethod
    def addresses(arrays: list[Array]) -> list[int]:
        return [array.ctypes.data for array in arrays]


def bucket_of(*sizes: int, dtype: str = "float32", **settings: Any) -> BucketPlan:
    specs = [TensorSpec(f"t{i}", (n,), dtype) for i, n in enumerate(sizes)]
    (bucket,) = make_plan(specs, TopK(**settings)).buckets
    return bucket


def normal(bucket: BucketPlan, scale: float = 1.0) -> list[Array]:
    return [
        (scale * RNG.standard_normal(t.spec.shape)).astype(t.spec.dtype) for t in bucket.tensors
    ]


# Shapes, dtypes, settings.


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    ("selection", "indices"), [("exact", "packed"), ("sampled", "plain"), ("exact", "plain")]
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("values", VALUES)
def test_steps_in_a_row(isa: str, values: str, dtype: str, selection: str, indices: str) -> None:
    """Tensors with indices of all widths and none, some long enough for several streams."""
    sizes = (5, 1500, 1300, 64, 4096, 70_001, 100_000, 1)
    settings = {"values": values, "selection": selection, "indices": indices}
    bucket = bucket_of(*sizes, dtype=dtype, ratio=0.02, **settings)
    widths = {None, "packed"} if indices == "packed" else {None, "int16", "int32"}
    assert {t.index for t in bucket.tensors} == widths
    both = Both(bucket)
    payloads = [both.encode(normal(bucket, scale)) for scale in (1, 1.1, 0.2, 0)]
    both.decode(payloads[:3], 1 / 3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("threads", [1, 3])
def test_velocities_have_the_bits_of_two_roundings(isa: str, dtype: str, threads: int) -> None:
    assert FOUND.library is not None
    for numel in (0, 1, 17, 300_001):
        u, g = (RNG.standard_normal(numel).astype(dtype) for _ in range(2))
        out = np.empty_like(u)
        places = u.ctypes.data, 0.9, g.ctypes.data, out.ctypes.data
        FOUND.library.topkef_update_velocity(*places, numel, out.itemsize, threads)
        np.testing.assert_array_equal(out, u * u.dtype.type(0.9) + g)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("values", ["float32", "float16", "int8", "int4", "sign"])
def test_threads_change_nothing(values: str, threads: int) -> None:
    bucket = bucket_of(40, 2_100_000, 30_000, 1_050_000, ratio=0.01, values=values)
    both = Both(bucket, threads)
    payloads = [both.encode(normal(bucket, scale)) for scale in (1, 3)]
    both.decode(payloads, 0.5)
    dense = bucket_of(2_100_003, 100, ratio=1.0, values=values)
    both = Both(dense, threads)
    both.decode([both.encode(normal(dense))] * 2, 0.5)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("selection", ["exact", "sampled"])
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_shards_that_go_together_become_what_each_would(
    isa: str, parts: int, selection: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random values, and some that grow towards the end, so that lists run full."""
    settings = {"ratio": 0.02, "selection": selection, "exchange": "sharded"}
    sizes = (1_700_000 if threads > 1 else 300_001, 700, 40_000, 9_000)
    split = shard(bucket_of(*sizes, **settings), parts)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    together, alone = Shards(split), Shards(split)
    for step in range(3):
        gradients = [torch.from_numpy(g) for g in normal(split.bucket)]
        if step == 1:
            gradients = [torch.arange(g.numel(), dtype=torch.float32) for g in gradients]
        together.codec.encode_shards(together.arenas, gradients, together.payloads)
        for arenas, payload in zip(alone.arenas, alone.payloads, strict=True):
            alone.codec.encode(arenas, gradients, payload)
        for one, other in zip(together.swap(), alone.swap(), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class Shards:
    """All shards of a bucket, as one rank sends them."""

    def __init__(self, split: ShardedPlan) -> None:
        self.codec = PayloadCodec(TorchOps())
        self.arenas = [
            Arenas(each, torch.zeros(each.numel), torch.zeros(each.numel)) for each in split.scatter
        ]
        self.payloads = [self.codec.new_payload(each) for each in split.scatter]

    def swap(self) -> list[torch.Tensor]:
        """Payloads and what is left."""
        for each in self.arenas:
            each.swap()
        return [*self.payloads, *(each.residual for each in self.arenas)]


@pytest.mark.parametrize("selection", ["exact", "sampled"])
@pytest.mark.parametrize(
    ("threads", "values"), [(1, "float32"), (2, "float32"), (2, "int8"), (2, "int4"), (2, "sign")]
)
def test_denormals_count_whatever_a_framework_has_set(
    threads: int, values: str, selection: str
) -> None:
    """TensorFlow's threads take them for zero."""
    bucket = bucket_of(1_100_003, 5000, 900, ratio=0.01, selection=selection, values=values)
    both = Both(bucket, threads)
    gradients = [
        RNG.integers(-1000, 1000, t.spec.shape).astype(np.float32) * np.float32(1e-45)
        for t in bucket.tensors
    ]
    kept = both.encode(gradients, commit=False)
    assert torch.set_flush_denormal(True)
    try:
        payload, candidate = both.codec.new_payload(bucket), np.empty_like(both.residual)
        residuals, candidates = map(both.places, (both.residual, candidate))
        places = residuals, both.addresses(gradients), candidates, [payload.ctypes.data]
        both.kernel.encode([both.kernel], *places, threads)
    finally:
        torch.set_flush_denormal(False)
    assert payload.tobytes() == kept.tobytes()


def test_no_more_threads_than_the_system_gives() -> None:
    """Where a thread cannot be made, the others do its work."""
    script = """
import resource, NAME
bucket = NAME.bucket_of(2_100_000, ratio=0.01)
both = NAME.Both(bucket, 3)
gradients, candidate = NAME.normal(bucket), both.residual + 1
used = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))
places = both.places(both.residual), both.addresses(gradients), both.places(candidate)
both.kernel.encode([both.kernel], *places, [both.payload.ctypes.data], 3)
"""
    source = f"import sys; sys.path[:0] = {sys.path!r}\n" + script.replace("NAME", __name__)
    command = f"ulimit -s {2**20} && exec {shlex.quote(sys.executable)} -c {shlex.quote(source)}"
    done = subprocess.run(["bash", "-c", command], timeout=200, check=False)  # stacks of 1 GiB
    assert done.returncode == 0


def test_a_child_of_a_process_with_threads_has_its_own() -> None:
    """fork() does not copy threads: waiting for one of the parent's would be for ever."""
    script = """
import os, NAME
bucket = NAME.bucket_of(2_100_000, ratio=0.01)
both = NAME.Both(bucket, 2)
both.encode(NAME.normal(bucket))
child = os.fork()
both.encode(NAME.normal(bucket))
if child:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os._exit(0)
"""
    source = f"import sys; sys.path[:0] = {sys.path!r}\n" + script.replace("NAME", __name__)
    done = subprocess.run([sys.executable, "-c", source], timeout=200, check=False)
    assert done.returncode == 0


# Values that are hard.

HARD = {
    "zeros": lambda n: np.zeros(n),
    "constant": lambda n: np.full(n, 0.5),
    "constant magnitude": lambda n: np.where(np.arange(n) % 2, 0.5, -0.5),
    "one spike": lambda n: np.eye(1, n, n // 3)[0] * 1e30,
    "last only": lambda n: np.eye(1, n, n - 1)[0],
    "denormal": lambda n: RNG.integers(-5, 6, n) * 1e-45,
    "heavy tails": lambda n: RNG.standard_cauchy(n) ** 3,
    "ascending": lambda n: np.arange(n),
    "descending": lambda n: -np.arange(n)[::-1],
    "few magnitudes": lambda n: RNG.integers(-2, 3, n),
    "sparser than k": lambda n: np.where(RNG.random(n) < 0.002, RNG.standard_normal(n), 0),
    "huge": lambda n: np.full(n, 3e38) * RNG.choice([-1, 1], n),
    "one NaN": lambda n: np.where(np.arange(n) == n // 2, np.nan, RNG.standard_normal(n)),
    "NaN among infinities": lambda n: RNG.choice([np.nan, np.inf, -np.inf, 1.0], n),
    "all NaN": lambda n: np.full(n, np.nan),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("selection", ["exact", "sampled"])
@pytest.mark.parametrize("kind", HARD)
def test_hard_values(isa: str, kind: str, selection: str) -> None:
    bucket = bucket_of(3000, 100_000, ratio=0.01, selection=selection)
    both = Both(bucket)
    hard = [HARD[kind](t.spec.numel).astype(np.float32) for t in bucket.tensors]
    for gradients in (hard, normal(bucket), hard, hard):
        both.encode(gradients)
    both.decode([both.encode(hard), both.encode(normal(bucket))], 0.5)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_hard_values_of_each_kind(isa: str, dtype: str, values: str) -> None:
    bucket = bucket_of(5000, 1100, 131, ratio=0.03, values=values, dtype=dtype)
    for kind in HARD:
        both = Both(bucket)
        hard = [HARD[kind](t.spec.numel).astype(dtype) for t in bucket.tensors]
        both.decode([both.encode(hard), both.encode(normal(bucket))], 0.5)


def test_every_pair_of_hard_steps_in_a_row() -> None:
    """A threshold from one step meets whatever the next one brings."""
    bucket = bucket_of(20_000, ratio=0.005)
    for first, second in itertools.product(HARD, HARD):
        both = Both(bucket)
        for kind in (first, second):
            both.encode([HARD[kind](20_000).astype(np.float32)])


@given(
    data=st.data(),
    size=st.integers(1, 400),
    ratio=st.sampled_from([0.001, 0.01, 0.1, 0.3, 0.49]),
    indices=st.sampled_from(["packed", "plain"]),
)
@pytest.mark.parametrize("values", VALUES)
def test_small_tensors(
    data: st.DataObject, size: int, ratio: float, values: str, indices: str
) -> None:
    floats = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, 65520.0, 1e-45, 6e-8])
    bucket = bucket_of(size, ratio=ratio, values=values, indices=indices, min_numel=0)
    both, payloads = Both(bucket), []
    for _ in range(2):
        elements = data.draw(st.lists(floats, min_size=1, max_size=20))
        payloads.append(both.encode([np.resize(np.array(elements, np.float32), size)]))
    both.decode(payloads, 0.5)


def test_empty_and_nearly_whole(isa: str) -> None:
    for sizes, ratio in (((0,), 0.01), ((0, 3, 0), 0.01), ((1,), 1.0), ((5000,), 0.5)):
        for values in VALUES:
            bucket = bucket_of(*sizes, ratio=ratio, min_numel=0, values=values)
            both = Both(bucket)
            both.decode([both.encode(normal(bucket)), both.encode(normal(bucket))], 0.5)


# Places that no plan has, with nothing behind them.

CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "int4": 4, "sign": 5}
INDEX = {"packed": 1, "int16": 2, "int32": 4}


def tight(numel: int, k: int, values: str, index: str, *, values_last: bool) -> list[int]:
    """A recipe of one float32 tensor whose sections follow each other without padding."""
    value_bytes = coding.value_bytes(values, k)
    index_bytes = coding.index_bytes(index, numel, k)
    value_at, index_at = (1 + index_bytes, 1) if values_last else (1, 1 + value_bytes)
    head = [1, 4, CODES[values], 0, 1 + value_bytes + index_bytes, 0, 1, 1, 0]
    return [*head, numel, k, 0, INDEX[index], value_at, index_at, 2, 0, 0, 0]


def before_a_fence(size: int) -> Array:
    """Bytes behind which reading and writing ends the process."""
    page = mmap.PAGESIZE
    room = mmap.mmap(-1, (size // page + 2) * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(room, np.uint8)
    stop = whole.size - page
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.ctypes.data + stop), page, 0) == 0
    return whole[stop - size : stop]


def check_tight(numel: int, k: int, values: str, index: str, *, values_last: bool) -> None:
    """Every byte of a payload is the verbs', and it decodes to what they read."""
    recipe, ops = tight(numel, k, values, index, values_last=values_last), NumpyOps()
    assert FOUND.library is not None
    kernel = native.Bucket(recipe, FOUND.library)
    gradient, residual, candidate = (np.zeros(numel, "f4") for _ in range(3))
    gradient[:] = RNG.standard_normal(numel)
    places = [*map(Both.addresses, ([residual], [gradient], [candidate]))]
    chosen = ops.select(gradient, k)
    sections = [ops.pack_values(gradient[chosen], values), ops.pack_index(chosen, numel, index)]
    expected = np.concatenate([[0], *sections[:: -1 if values_last else 1]]).astype(np.uint8)
    gathered = before_a_fence(2 * recipe[4])
    for payload in np.split(gathered, 2):
        payload[:] = 0xFF
        kernel.encode([kernel], *places, [payload.ctypes.data], 1)
        assert payload.tobytes() == expected.tobytes()
    found = np.full(numel, 5, "f4")
    into = Both.addresses([found])
    assert kernel.decode(gathered.ctypes.data, 2, 0.5, [False], into, 1) is None
    sent = np.zeros(numel, "f4")
    sent[chosen] += ops.unpack_values(sections[0][None], k, values, "float32")[0]
    assert found.tobytes() == sent.tobytes()


def check_all_tight() -> None:
    """Maps of a byte and more, lower bits that end anywhere, k = 1, n - 1 and n."""
    sizes = [(1, 1), (2, 1), (7, 3), (64, 1), (65, 64), (100, 100), (129, 13), (300, 2)]
    sizes += [(1000, k) for k in (1, 33, 128, 129, 257, 999, 1000)] + [(5000, 1025), (70_000, 70)]
    for (numel, k), values, values_last in itertools.product(sizes, CODES, [False, True]):
        for index in ("packed", "int32", "int16") if numel <= 2**16 else ("packed", "int32"):
            check_tight(numel, k, values, index, values_last=values_last)


def test_a_payload_that_ends_where_memory_ends(isa: str) -> None:
    source = f"import sys; sys.path[:0] = {sys.path!r}\nimport {__name__} as m\nm.check_all_tight()"
    command = [sys.executable, "-X", "faulthandler", "-c", source]
    done = subprocess.run(command, timeout=200, check=False, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("offset", [1, 2, 4, 12, 60])
@pytest.mark.parametrize(
    ("values", "indices"),
    [("float32", "plain"), ("float16", "packed"), ("int4", "packed"), ("sign", "plain")],
)
def test_memory_that_is_not_aligned(isa: str, values: str, indices: str, offset: int) -> None:
    """Gradients, arenas and payloads at any address."""
    bucket = bucket_of(100_000, 30, ratio=0.01, values=values, indices=indices)
    aligned = Both(bucket)
    gradients = normal(bucket)
    expected = aligned.encode(gradients)

    def moved(array: Array) -> Array:
        room = np.zeros(array.nbytes + offset, np.uint8)
        room[offset:] = array.reshape(-1).view(np.uint8)
        return room[offset:]

    residual, candidate = moved(np.zeros(bucket.numel, "f4")), moved(np.zeros(bucket.numel, "f4"))
    payload = moved(aligned.codec.new_payload(bucket))
    shifted = [moved(gradient) for gradient in gradients]
    width = [4 * t.start for t in bucket.tensors]
    places = [[a.ctypes.data + w for w in width] for a in (residual, candidate)]
    given = places[0], Both.addresses(shifted), places[1], [payload.ctypes.data]
    aligned.kernel.encode([aligned.kernel], *given, 1)
    assert payload.tobytes() == expected.tobytes()
    assert candidate.tobytes() == aligned.residual.tobytes()
    gathered = moved(np.concatenate([expected, expected]))
    aligned.kernel.decode(gathered.ctypes.data, 2, 0.5, [False, False], Both.addresses(shifted), 1)
    decoded = aligned.gradients()
    aligned.codec.decode(bucket, np.concatenate([expected, expected]), 0.5, decoded)
    assert [s.tobytes() for s in shifted] == [d.tobytes() for d in decoded]


@pytest.mark.slow
@pytest.mark.parametrize("spikes", [(0, 2**31 - 1, 2**31, 2**31 + 40)])
@pytest.mark.parametrize("kind", ["packed", "int32"])
def test_more_elements_than_a_signed_index_counts(spikes: tuple[int, ...], kind: str) -> None:
    """Zeros cost no memory while they are only read; what is written is 8 GiB."""
    numel, k = 2**31 + 41, 10
    if available_bytes() < 12 * 2**30:
        pytest.skip("needs 12 GiB of free memory")
    zeros, gradient, candidate = (untouched(numel) for _ in range(3))
    for at in spikes:
        gradient[at] = at + 1
    recipe = tight(numel, k, "float32", kind, values_last=False)
    assert FOUND.library is not None
    kernel = native.Bucket(recipe, FOUND.library)
    payload = np.zeros(recipe[4], np.uint8)
    places = map(Both.addresses, ([zeros], [gradient], [candidate]))
    kernel.encode([kernel], *places, [payload.ctypes.data], 2)
    values, rows = payload[1 : 1 + 4 * k].view("f4"), payload[None, 1 + 4 * k :]
    index, sound = NumpyOps().unpack_index(rows, k, numel, kind)
    assert sound.tolist() == [True]
    assert index[0].tolist() == sorted({*spikes, *range(k - len(spikes) + 1)})
    assert values[values > 0].tolist() == [np.float32(at + 1) for at in spikes]
    assert [candidate[at] for at in spikes] == [0.0] * len(spikes)


def untouched(numel: int) -> Array:
    """float32 zeros that take no memory before they are written."""
    room = mmap.mmap(-1, 4 * numel, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(room, np.float32)


def available_bytes() -> int:
    with open("/proc/meminfo") as lines:  # noqa: PTH123
        return next(1024 * int(line.split()[1]) for line in lines if "MemAvailable" in line)


# What must be refused.


def spoilt(payload: Array, tensor: Entries) -> Iterator[Array]:
    """Payloads with indices that are equal, lie outside, or are not k."""
    ops, numel, kind = NumpyOps(), tensor.spec.numel, str(tensor.index)
    size = coding.index_bytes(kind, numel, tensor.k)
    section = slice(tensor.index_at, tensor.index_at + size)
    index = ops.unpack_index(payload[None, section], tensor.k, numel, kind)[0][0]
    twice, outside = index.copy(), index.copy()
    twice[5], outside[-1] = index[4], numel
    sections = [ops.pack_index(wrong, numel, kind) for wrong in (twice, outside)]
    if kind == "packed":
        sections += [payload[section].copy() for _ in range(2)]
        at = coding.low_bytes(numel, tensor.k)
        sections[2][at:], sections[3][at] = 0, 0xFF
    else:
        sections.append(ops.pack_index(index[::-1], numel, kind))
    for wrong in sections:
        bad = payload.copy()
        bad[section] = wrong
        yield bad


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("kind", "size"), [("packed", 3000), ("packed", 100_000), ("int16", 3000), ("int32", 100_000)]
)
def test_wrong_indices_are_named_and_nothing_is_written(
    isa: str, kind: str, size: int, threads: int
) -> None:
    bucket = bucket_of(
        size, size, ratio=0.01, indices="packed" if kind == "packed" else "plain", values="int8"
    )
    both = Both(bucket, threads)
    good, tensor = both.encode(normal(bucket)), bucket.tensors[1]
    assert tensor.index == kind
    for bad in spoilt(good, tensor):
        gradients = both.gradients()
        arguments = 1.0, [False] * 2, both.addresses(gradients), threads
        gathered = np.concatenate([good, bad, good])
        assert both.kernel.decode(gathered.ctypes.data, 3, *arguments) == (1, 1)
        first = np.concatenate([bad, next(spoilt(good, bucket.tensors[0]))])
        assert both.kernel.decode(first.ctypes.data, 2, *arguments) == (0, 1)
        assert all((gradient == 5).all() for gradient in gradients)
        flagged = both.kernel.decode(
            gathered.ctypes.data, 3, 1.0, [False, True], both.addresses(gradients), threads
        )
        assert flagged is None
        assert np.isnan(gradients[1]).all()
        assert np.count_nonzero(gradients[0]) <= tensor.k


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, 2),
        (1, 3),
        (2, 10),
        (2, 6),
        (7, 0),
        (8, 9),
        (8, -1),
        (18, -1),
        (2, -1),
        (3, 10**6),
        (4, 40),
        (6, 0),
        (9, -1),
        (10, 0),
        (10, 99),
        (12, 0),
        (12, 3),
        (12, 5),
        (13, -8),
        (13, 10**6),
        (14, 10**6),
        (15, 4),
        (15, 3),
        (16, 1),
        (16, -1),
        (17, 1),
        (17, -1),
        (0, 2**62),
        (6, 2**62),
        (9, 2**62),
        (13, 2**62),
        (4, 2**62),
    ],
)
def test_what_is_no_recipe(position: int, value: int) -> None:
    recipe = [1, 4, 0, 24, 32 + 8 * 5, 0, 1, 1, 0, 50, 5, 0, 4, 32, 52, 2, 0, 0, 0]
    assert FOUND.library is not None
    native.Bucket(recipe, FOUND.library)
    recipe[position] = value
    with pytest.raises(ValueError, match="not a recipe"):
        native.Bucket(recipe, FOUND.library)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("index", INDEX)
def test_sections_beyond_a_payload_are_no_recipe(values: str, index: str) -> None:
    """The last byte belongs to one of them."""
    assert FOUND.library is not None
    for values_last in (False, True):
        recipe = tight(1000, 129, values, index, values_last=values_last)
        native.Bucket(recipe, FOUND.library)
        recipe[4] -= 1
        with pytest.raises(ValueError, match="not a recipe"):
            native.Bucket(recipe, FOUND.library)


# Gradients as PyTorch has them.


def encoded(gradient: torch.Tensor, ops: TorchOps) -> tuple[bytes, torch.Tensor]:
    """A payload of one gradient, and the gradient as two such payloads decode into it."""
    spec = TensorSpec("w", tuple(gradient.shape), "float32")
    (bucket,) = make_plan([spec], TopK(ratio=0.01)).buckets
    codec: PayloadCodec[torch.Tensor] = PayloadCodec(ops)
    payload = codec.new_payload(bucket)
    zeros = torch.zeros(bucket.numel)
    arenas = Arenas(bucket, zeros, zeros.clone())
    codec.encode(arenas, [gradient], payload)
    codec.decode(bucket, torch.cat([payload, payload]), 0.5, [gradient])
    return bytes(payload.tolist()), gradient


def layouts() -> dict[str, torch.Tensor]:
    values = torch.arange(1.0, 5001.0).reshape(50, 100)
    return {
        "transposed": values.t(),
        "every other": torch.arange(10_000.0)[::2],
        "negated lazily": torch._neg_view(values),
        "imaginary part": torch.complex(values, -values).conj().imag,
    }


@pytest.mark.parametrize("layout", layouts())
def test_gradients_of_any_layout(layout: str) -> None:
    ours, gradient = encoded(layouts()[layout], TorchOps())
    theirs, expected = encoded(layouts()[layout], TorchOps(kernels=False))
    assert ours == theirs
    assert torch.equal(gradient, expected)


def test_autograd_notices_that_a_gradient_was_replaced() -> None:
    gradient = torch.randn(5000)
    before = gradient._version
    encoded(gradient, TorchOps())
    assert gradient._version > before


@pytest.mark.parametrize("numel", [1000, 300_000])  # cached, and too large for caches
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entries_are_placed_among_zeros(isa: str, numel: int, dtype: torch.dtype) -> None:
    index = torch.randperm(numel, generator=torch.Generator().manual_seed(0))[:100]
    values, gradient = torch.arange(100, dtype=dtype), torch.ones(numel + 3, dtype=dtype)
    TorchOps().write_placed(values, index, 0.5, gradient[3:], False)
    wanted = torch.zeros(numel, dtype=dtype).index_copy(0, index, values * 0.5)
    assert torch.equal(gradient[3:], wanted)
    assert gradient[:3].tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("threads", [1, 3])
def test_products_are_added_in_order(isa: str, dtype: str, threads: int) -> None:
    assert FOUND.library is not None
    for m, k, n in ((1, 1, 1), (3, 4, 5), (700, 3, 1100), (2, 70, 130)):
        p, q, before = (
            RNG.standard_normal(size).astype(dtype) for size in ((m, k), (k, n), (m, n))
        )
        total = p[:, :1] * q[:1]
        for i in range(1, k):
            total = total + p[:, i : i + 1] * q[i : i + 1]
        for subtracts, expected in ((0, total * total.dtype.type(0.3)), (1, before - total)):
            out = before.copy()
            factors = p.ctypes.data, q.ctypes.data, m, k, n
            place = out.ctypes.data, out.itemsize, threads
            FOUND.library.topkef_product(*factors, 0.3, subtracts, *place)
            assert np.array_equal(out, expected)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "stable8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_are_packed_and_read_as_by_the_oracle(isa: str, kind: str, dtype: str) -> None:
    """Across blocks and chunks, with values of any size; other than NaN also as bfloat16."""
    ops, oracle = TorchOps(), NumpyOps()
    for count in (1, 127, 128, 131, 9001):
        values = (RNG.standard_normal(count) ** 5).astype(dtype)
        values[RNG.integers(0, count, 4)] = -0.0, 1e-40, 3e38, -np.inf
        values[RNG.integers(0, count)] = 0.0 if kind == "bfloat16" else np.nan
        with np.errstate(all="ignore"):
            expected = oracle.pack_values(values, kind)
        packed = ops.pack_values(torch.from_numpy(values), kind)
        assert packed.numpy().tobytes() == expected.tobytes()
        read = ops.unpack_values(packed[None], count, kind, dtype)
        assert (
            read.numpy().tobytes()
            == oracle.unpack_values(expected[None], count, kind, dtype).tobytes()
        )
