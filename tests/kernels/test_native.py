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
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.numpy_ops import NumpyOps
from sides import Array, Pair, Side, bucket_of, normal

from horovod_topk.core.codec.codec import PayloadCodec
from horovod_topk.core.plan.shards import shard
from horovod_topk.core.state.residual import Arenas
from horovod_topk.errors import PayloadError
from horovod_topk.kernels import compile as sources
from horovod_topk.kernels import native
from horovod_topk.methods.topk import VALUES, Entries, TopK
from horovod_topk.ops import coding
from horovod_topk.ops.torch import TorchOps

FOUND = native.find()
pytestmark = pytest.mark.skipif(FOUND.library is None, reason=f"no kernels: {FOUND.description}")

RNG = np.random.default_rng(7)


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


def pair_of(*sizes: int, dtype: str = "float32", **settings: Any) -> Pair:
    return Pair(bucket_of(TopK(**settings), *sizes, dtype=dtype))


def kernel_of(recipe: Sequence[int]) -> native.NativeBucket:
    assert FOUND.library is not None
    return native.NativeBucket(recipe, FOUND.library)


def addresses(*arrays: Array) -> list[int]:
    return [array.ctypes.data for array in arrays]


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
    both = pair_of(*sizes, dtype=dtype, ratio=0.02, **settings)
    widths = {None, "packed"} if indices == "packed" else {None, "int16", "int32"}
    assert {t.index for t in both.bucket.tensors} == widths
    payloads = [both.encode(both.normal(scale)) for scale in (1, 1.1, 0.2, 0)]
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


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("selection", ["exact", "sampled"])
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_shards_that_go_together_become_what_each_would(
    isa: str, parts: int, selection: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random values, and some that grow towards the end, so that lists run full."""
    settings = {"ratio": 0.02, "selection": selection, "exchange": "sharded"}
    sizes = (1_700_000 if threads > 1 else 300_001, 700, 40_000, 9_000)
    bucket = bucket_of(TopK(**settings), *sizes)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    each = shard(bucket, parts).scatter
    together, alone = (
        Side(TorchOps(), bucket, each),
        [Side(TorchOps(), bucket, [one]) for one in each],
    )
    for step in range(3):
        gradients = normal(bucket, RNG)
        if step == 1:
            gradients = [np.arange(g.size, dtype=np.float32) for g in gradients]
        together.encode(gradients)
        for at, own in enumerate(alone):
            own.encode(gradients)
            assert torch.equal(together.payloads[at], own.payloads[0])
            assert torch.equal(together.residuals[at].candidate, own.residuals[0].candidate)
            own.swap()
        together.swap()


@pytest.mark.parametrize("selection", ["exact", "sampled"])
@pytest.mark.parametrize(
    ("threads", "values"),
    [(1, "float32"), *((2, each) for each in ("float32", "int8", "int4", "int3", "sign"))],
)
def test_denormals_count_whatever_a_framework_has_set(
    threads: int, values: str, selection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow's threads take them for zero."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    both = pair_of(1_100_003, 5000, 900, ratio=0.01, selection=selection, values=values)
    gradients = [
        RNG.integers(-1000, 1000, t.spec.shape).astype(np.float32) * np.float32(1e-45)
        for t in both.bucket.tensors
    ]
    kept = both.encode(gradients, commit=False)
    assert torch.set_flush_denormal(True)
    try:
        both.kernels.encode(gradients)
    finally:
        torch.set_flush_denormal(False)
    assert both.kernels.payloads[0].numpy().tobytes() == kept.tobytes()


def test_threads_of_a_child_and_no_more_than_the_system_gives() -> None:
    """fork() does not copy threads: waiting for one of the parent's would be for ever.

    Where a thread cannot be made, the others do its work.
    """
    script = """
import os, resource, torch, NAME
torch.get_num_threads = lambda: 2
both = NAME.pair_of(2_100_000, ratio=0.01)
both.encode(both.normal())
child = os.fork()
both.encode(both.normal())
if child == 0:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
torch.get_num_threads = lambda: 3
gradients = both.normal()
used = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))
both.kernels.encode(gradients)
"""
    source = f"import sys; sys.path[:0] = {sys.path!r}\n" + script.replace("NAME", __name__)
    command = f"ulimit -s {2**20} && exec {shlex.quote(sys.executable)} -c {shlex.quote(source)}"
    done = subprocess.run(["bash", "-c", command], timeout=200, check=False)  # stacks of 1 GiB
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
    both = pair_of(3000, 100_000, ratio=0.01, selection=selection)
    hard = [HARD[kind](t.spec.numel).astype(np.float32) for t in both.bucket.tensors]
    for gradients in (hard, both.normal(), hard, hard):
        both.encode(gradients)
    both.decode([both.encode(hard), both.encode(both.normal())], 0.5)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_hard_values_of_each_kind(isa: str, dtype: str, values: str) -> None:
    for kind in HARD:
        both = pair_of(5000, 1100, 131, ratio=0.03, values=values, dtype=dtype)
        hard = [HARD[kind](t.spec.numel).astype(dtype) for t in both.bucket.tensors]
        both.decode([both.encode(hard), both.encode(both.normal())], 0.5)


def test_every_pair_of_hard_steps_in_a_row() -> None:
    """A threshold from one step meets whatever the next one brings."""
    for first, second in itertools.product(HARD, HARD):
        both = pair_of(20_000, ratio=0.005)
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
    both = pair_of(size, ratio=ratio, values=values, indices=indices, min_numel=0)
    payloads = []
    for _ in range(2):
        elements = data.draw(st.lists(floats, min_size=1, max_size=20))
        payloads.append(both.encode([np.resize(np.array(elements, np.float32), size)]))
    both.decode(payloads, 0.5)


def test_empty_and_nearly_whole(isa: str) -> None:
    for sizes, ratio in (((0,), 0.01), ((0, 3, 0), 0.01), ((1,), 1.0), ((5000,), 0.5)):
        for values in VALUES:
            both = pair_of(*sizes, ratio=ratio, min_numel=0, values=values)
            both.decode([both.encode(both.normal()) for _ in range(2)], 0.5)


# Places that no plan has, with nothing behind them.

FORMATS = ("float32", "float16", "bfloat16", "int8", "int4", "sign", "int2", "int3")
CODES = {values: code for code, values in enumerate(FORMATS)}
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
    kernel = kernel_of(recipe)
    gradient, residual, candidate = (np.zeros(numel, "f4") for _ in range(3))
    gradient[:] = RNG.standard_normal(numel)
    places = [*map(addresses, (residual, gradient, candidate))]
    chosen = ops.select(gradient, k)
    sections = [ops.pack_values(gradient[chosen], values), ops.pack_index(chosen, numel, index)]
    expected = np.concatenate([[0], *sections[:: -1 if values_last else 1]]).astype(np.uint8)
    gathered = before_a_fence(2 * recipe[4])
    for payload in np.split(gathered, 2):
        payload[:] = 0xFF
        kernel.encode([kernel], *places, [payload.ctypes.data], 1)
        assert payload.tobytes() == expected.tobytes()
    found = np.full(numel, 5, "f4")
    into = addresses(found)
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


@pytest.mark.one_in(3, first=2)  # the widest loads
def test_a_payload_that_ends_where_memory_ends(isa: str) -> None:
    source = f"import sys; sys.path[:0] = {sys.path!r}\nimport {__name__} as m\nm.check_all_tight()"
    command = [sys.executable, "-X", "faulthandler", "-c", source]
    done = subprocess.run(command, timeout=200, check=False, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("offset", [1, 2, 4, 12, 60])
@pytest.mark.parametrize(
    ("values", "indices"),
    [("float32", "plain"), ("float16", "packed"), ("int3", "packed"), ("sign", "plain")],
)
def test_memory_that_is_not_aligned(isa: str, values: str, indices: str, offset: int) -> None:
    """Gradients, arenas and payloads at any address."""
    both = pair_of(100_000, 30, ratio=0.01, values=values, indices=indices)
    gradients, starts = both.normal(), [4 * t.start for t in both.bucket.tensors]
    expected = both.encode(gradients)

    def moved(array: Array) -> Array:
        room = np.zeros(array.nbytes + offset, np.uint8)
        room[offset:] = array.reshape(-1).view(np.uint8)
        return room[offset:]

    residual, candidate = (moved(np.zeros(both.bucket.numel, "f4")) for _ in range(2))
    payload, shifted = moved(both.verbs.codec.new_payload(both.bucket)), [*map(moved, gradients)]
    kernel = kernel_of(both.bucket.config.recipe(both.bucket))
    arenas = ([a.ctypes.data + at for at in starts] for a in (residual, candidate))
    before, after = arenas
    kernel.encode([kernel], before, addresses(*shifted), after, addresses(payload), 1)
    assert payload.tobytes() == expected.tobytes()
    assert candidate.tobytes() == both.verbs.residuals[0].residual.tobytes()
    gathered = np.concatenate([expected, expected])
    received = moved(gathered)  # an address keeps no memory alive
    kernel.decode(*addresses(received), 2, 0.5, [False, False], addresses(*shifted), 1)
    decoded = both.verbs.decode(gathered, 0.5)
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
    kernel = kernel_of(recipe)
    payload = np.zeros(recipe[4], np.uint8)
    places = map(addresses, (zeros, gradient, candidate))
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
    isa: str, kind: str, size: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    plain = "packed" if kind == "packed" else "plain"
    both = pair_of(size, size, ratio=0.01, indices=plain, values="int8")
    first, second = tensors = cast(tuple[Entries, Entries], both.bucket.tensors)
    good, codec = both.encode(both.normal()), both.kernels.codec
    assert second.index == kind
    for bad in spoilt(good, second):
        both_wrong = bad, next(spoilt(good, first))
        for gathered, rank in (((good, bad, good), 1), (both_wrong, 0)):
            outputs = [torch.full((size,), 5.0) for _ in tensors]
            joined = torch.from_numpy(np.concatenate(gathered))
            with pytest.raises(PayloadError, match=f"t1.* rank {rank}|rank {rank}.*t1"):
                codec.decode(both.bucket, joined, 1.0, outputs)
            assert all((gradient == 5).all() for gradient in outputs)
        flagged = [each.copy() for each in (good, bad, good)]
        flagged[0][both.bucket.layout.flags_at] = 2
        kept, spoiled = both.kernels.decode(np.concatenate(flagged), 1.0)
        assert np.isnan(spoiled).all() and np.count_nonzero(kept) <= first.k


NO_RECIPE = {  # values of a number of a recipe
    0: (2, 2**62),
    1: (3,),
    2: (13, 8, -1),
    3: (10**6,),
    4: (40, 2**62),
    6: (0, 2**62),
    7: (0,),
    8: (9, -1),
    9: (-1, 2**62),
    10: (0, 99),
    12: (0, 3, 5),
    13: (-8, 10**6, 2**62),
    14: (10**6,),
    15: (4, 3),
    16: (1, -1),
    17: (1, -1),
    18: (-1,),
}


@pytest.mark.parametrize("position", NO_RECIPE)
def test_what_is_no_recipe(position: int) -> None:
    recipe = [1, 4, 0, 24, 32 + 8 * 5, 0, 1, 1, 0, 50, 5, 0, 4, 32, 52, 2, 0, 0, 0]
    kernel_of(recipe)
    for value in NO_RECIPE[position]:
        with pytest.raises(ValueError, match="not a recipe"):
            kernel_of([*recipe[:position], value, *recipe[position + 1 :]])


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("index", INDEX)
def test_sections_beyond_a_payload_are_no_recipe(values: str, index: str) -> None:
    """The last byte belongs to one of them."""
    for values_last in (False, True):
        recipe = tight(1000, 129, values, index, values_last=values_last)
        kernel_of(recipe)
        recipe[4] -= 1
        with pytest.raises(ValueError, match="not a recipe"):
            kernel_of(recipe)


# Gradients as PyTorch has them.


def encoded(gradient: torch.Tensor, ops: TorchOps) -> tuple[bytes, torch.Tensor]:
    """A payload of one gradient, and the gradient as two such payloads decode into it."""
    bucket = bucket_of(TopK(ratio=0.01), tuple(gradient.shape))
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


def test_indices_of_any_layout() -> None:
    """A copy that is packed lives until the kernel has read it; it is too large for a free list."""
    numel = 2_000_000
    index = torch.arange(numel).flip(0).view(-1, 2)[:, 0]
    values, both = torch.arange(float(numel // 2)), (TorchOps(), TorchOps(kernels=False))
    found = []
    for ops in both:
        taken, left, gradient = ops.take(torch.arange(float(numel)), index), *torch.ones(2, numel)
        ops.subtract_at(left, index, torch.arange(float(numel))[::2])
        ops.write_placed(values, index, 0.5, gradient, False)
        found.append((taken, left, gradient))
    assert all(map(torch.equal, *found))


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
            damping = p.ctypes.data, q.ctypes.data, m, k, n
            place = out.ctypes.data, out.itemsize, threads
            FOUND.library.topkef_product(*damping, 0.3, subtracts, *place)
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


@pytest.mark.skipif(FOUND.library is None, reason="no kernels were compiled")
def test_kernels_for_one_machine_are_those_that_it_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_TOPK_COMPILE", "native")
    compiled = set(sources.instructions()) & set(sources.INSTRUCTIONS)
    monkeypatch.delenv("HOROVOD_TOPK_ISA", raising=False)
    assert FOUND.library is not None
    isa = FOUND.library.topkef_isa().decode()
    assert compiled == (set() if isa == "portable" else {f"passes_{isa}.cpp"})


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native._load().library is not None
    monkeypatch.setattr(native, "digest", lambda: "another digest")
    found = native._load()
    assert found.library is None and "other sources" in found.description
