"""The Triton kernels against the verbs, bit by bit, on the CPU under Triton's interpreter.

The interpreter has to be chosen before Triton is imported, so the cases (`case_*`) run in a pytest
of their own; where there is a GPU they run on it as well. The geometry is small, so that small
tensors take every path: several chunks, runs and tiles, and more keys than there is room for.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import sides
import torch
from torch import Tensor

from benchmarks import gpu_compiled
from horovod_topk.core.codec.codec import PayloadCodec, codec_of
from horovod_topk.core.codec.momentum import OptimizerMoments
from horovod_topk.core.plan import payload as wire
from horovod_topk.core.plan.buckets import BucketPlan, TensorSpec, make_plan
from horovod_topk.core.plan.nodes import Nodes
from horovod_topk.core.plan.shards import shard, shard_sums
from horovod_topk.core.state.residual import Arenas
from horovod_topk.kernels import triton
from horovod_topk.kernels.triton import unavailable, unsupported
from horovod_topk.kernels.triton.topk.tables import (
    COLUMNS,
    LONGEST,
    MEANS,
    SAMPLED,
    SEARCHED,
    Geometry,
    Tables,
)
from horovod_topk.methods import QSGD, ByteGrad, Codec, OneBit, TernGrad, terngrad
from horovod_topk.methods.protocol import AnnouncingCodec
from horovod_topk.methods.topk import VALUES, Entries, TopK
from horovod_topk.ops import coding
from horovod_topk.ops.philox import Stream
from horovod_topk.ops.protocol import HEAD, Arrived, TernaryKernel
from horovod_topk.ops.torch import DTYPES, TorchOps

DEVICE = os.environ.get("TRITON_CASES_ON", "cpu")
SMALL = Geometry(
    tile=256, chunk=512, slot=64, lanes=1024, run_share=16, sample=256, crowd=150, programs=64,
    parcel=256, output=512, block=128, decoders=1,
)  # fmt: skip
KINDS = ("float32", "float16", "bfloat16")


def run_cases(names: str, tier: str, path: str = __file__, **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=300"]
    done = subprocess.run(
        [*command, f"--tier={tier}", "-o", f"python_functions={names}", path],
        env={**os.environ, "TRITON_DEFAULT_FP_FUSION": "0", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr


def triton_version() -> tuple[int, ...]:
    """(0,) where there is none."""
    try:
        return tuple(map(int, metadata.version("triton").split(".")[:2]))
    except metadata.PackageNotFoundError:
        return (0,)


needs_triton = pytest.mark.skipif(triton_version() == (0,), reason="Triton is not installed")


@needs_triton
@pytest.mark.tiers("rest", "all")
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    (0,) < triton_version() < (3, 9), reason="Triton 3.6 does not interpret under NumPy 2.4"
)
def test_under_the_interpreter(tier: str) -> None:
    run_cases("case_*", tier, TRITON_INTERPRET="1", TRITON_CASES_ON="cpu")


@needs_triton
@pytest.mark.tiers("fast", "rest", "all")
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
def test_on_a_gpu(tier: str) -> None:
    run_cases("case_*", tier, TRITON_INTERPRET="0", TRITON_CASES_ON="cuda")


@needs_triton
@pytest.mark.tiers("tools", "rest", "all")
@pytest.mark.timeout(600)
def test_kernels_compile_without_a_gpu(tier: str) -> None:
    run_cases("compile_*", tier, TRITON_INTERPRET="0")


def recipe_of(*sizes: int, dtype: str = "float32", **settings: Any) -> tuple[int, ...]:
    specs = [TensorSpec(f"t{i}", (n,), dtype) for i, n in enumerate(sizes)]
    method = TopK(**{"values": "float32", **settings})
    (bucket,) = make_plan(specs, method).buckets
    return method.recipe(bucket)


def test_buckets_without_a_kernel_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(triton, "version", lambda: "3.6.0+git9844da95")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    wide, narrow = (recipe_of(5, dtype=dtype) for dtype in ("float64", "float32"))
    assert unavailable("cuda:0") is None and unavailable("cpu") is not None
    assert unsupported(narrow, "cuda:0") is None
    assert "float64" in str(unsupported(wide, "cuda:0"))
    assert "cpu" in str(unsupported(narrow, "cpu"))
    columns = (*narrow[:2], MEANS, *narrow[3:-1], LONGEST)
    assert unsupported(columns, "cuda:0") is None
    assert "a column of more" in str(unsupported((*columns[:-1], LONGEST + 1), "cuda:0"))
    for values in VALUES:
        for indices in ("packed", "plain"):
            recipe = recipe_of(5, 5000, values=values, indices=indices)
            assert unsupported(recipe, "cuda:0") is None
    large = (*narrow[:HEAD], 2**31, *narrow[HEAD + 1 :])
    assert "more than" in str(unsupported(large, "cuda:0"))
    monkeypatch.setattr(triton, "version", lambda: "3.2.0")
    assert unsupported(narrow, "cuda:0") == "Triton 3.2.0 is older than 3.6"
    monkeypatch.setattr(triton, "version", lambda: "main")
    assert "does not say its version" in str(unsupported(narrow, "cuda:0"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in str(unsupported(narrow, "cuda:0"))


def test_tables_cover_every_element_once() -> None:
    bucket = make_plan(
        [TensorSpec(str(i), (n,), "float32") for i, n in enumerate((5, 5000, 0, 512, 40000))],
        TopK(ratio=0.05, values="float32", min_numel=100),
    ).buckets[0]
    made = Tables(bucket.config.recipe(bucket), SMALL)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in made.rows]
    for t, row in enumerate(rows):
        for piece, size, owners in (
            ("chunk", SMALL.chunk, made.chunk_owners),
            ("tile", SMALL.output, made.tile_owners),
            ("run", made.run, made.run_owners),
            ("parcel", SMALL.parcel, made.parcel_owners),
        ):
            elements = row["k"] if piece == "parcel" else row["numel"]
            pieces = 0 if piece == "run" and not row["coding"] else -(-elements // size)
            assert owners.count(t) == pieces
            if pieces:
                assert owners.index(t) == row[f"{piece}0"]


def test_a_difference_of_one_bit_is_noticed() -> None:
    a = torch.tensor([0.0, 1.0, math.nan])
    assert_same(a, a.clone())
    for other in (a.view(torch.int32) ^ 1, torch.tensor([-0.0, 1.0, math.nan]).view(torch.int32)):
        with pytest.raises(AssertionError):
            assert_same(a, other.view(torch.float32))


# What follows runs under `run_cases`.


def plan(
    sizes: Sequence[int], kinds: Sequence[str] = ("float32",), min_numel: int = 10, **settings: Any
) -> BucketPlan:
    """One bucket; dtypes take turns."""
    specs = [TensorSpec(str(i), (n,), kinds[i % len(kinds)], DEVICE) for i, n in enumerate(sizes)]
    given = {"values": "float32", **settings}
    config = TopK(min_numel=min_numel, **given)
    (bucket,) = make_plan(specs, config).buckets
    return bucket


def sending(shares: Sequence[tuple[int, int]], kind: str) -> BucketPlan:
    """A bucket of (numel, k) that send indices, whether that pays or not."""
    value_at, tensors, start = wire.body_at(len(shares)), list[Entries](), 0
    index_at = -(-(value_at + 4 * sum(k for _, k in shares)) // 8) * 8
    for i, (numel, k) in enumerate(shares):
        spec = TensorSpec(str(i), (numel,), "float32", DEVICE)
        tensors.append(Entries(spec, numel, i, 0, start, value_at, False, k, kind, index_at))
        start, value_at = start + numel, value_at + 4 * k
        index_at += coding.index_bytes(kind, numel, k)
    layout = wire.layout(len(shares), index_at)
    return BucketPlan(
        0, tuple(tensors), "float32", TopK(values="float32"), "average", layout, (bytes(8),)
    )


def canonical(array: Tensor) -> Tensor:
    """Its bits, all NaNs made one: theirs are nobody's promise."""
    if array.is_floating_point():
        bits = {2: torch.int16, 4: torch.int32}[array.element_size()]
        array = array.cpu().contiguous()
        return torch.where(array.isnan(), torch.full_like(array, math.nan), array).view(bits)
    return array.cpu()


def assert_same(left: Tensor, right: Tensor) -> None:
    assert left.dtype == right.dtype and left.shape == right.shape
    assert torch.equal(canonical(left), canonical(right))


@dataclass
class Side:
    """One implementation's state of a bucket."""

    arenas: Arenas[Tensor]
    payload: Tensor


class WithTernary(TorchOps):
    """Array operations, and Triton's kernels for TernGrad."""

    def ternary(self, device: str) -> TernaryKernel[Tensor]:
        from horovod_topk.kernels.triton.baselines.ternary import TritonTernary

        return TritonTernary()


class Pair:
    """The verbs and the kernels side by side, given the same gradients."""

    def __init__(self, bucket: BucketPlan, geometry: Geometry | None = SMALL) -> None:
        from horovod_topk.kernels.triton.topk.bucket import TritonBucket

        self.bucket = bucket
        self.codec = PayloadCodec(TorchOps(kernels=False))
        self.announcing = PayloadCodec(WithTernary(kernels=False))
        for codec in (self.codec, self.announcing):
            codec.draw_from(lambda: 2**32 + 7, lambda: 1)
        ops: Any = SimpleNamespace(fused=lambda recipe, _: TritonBucket(recipe, DEVICE, geometry))
        self.kernel: Any = codec_of(bucket).kernel(ops, bucket)
        self.guards: list[Tensor] = []
        self.verbs, self.kernels = self._side("cpu"), self._side(DEVICE)

    def _side(self, device: str) -> Side:
        payload = self._guarded(self.codec.new_payload(self.bucket).to(device))
        arenas = (self._guarded(torch.zeros(self.bucket.numel, device=device)) for _ in range(2))
        return Side(Arenas(self.bucket, *arenas), payload)

    def _guarded(self, array: Tensor) -> Tensor:
        """A copy with memory behind it that nobody may write."""
        whole = torch.cat([array, torch.full((64,), 7, dtype=array.dtype, device=array.device)])
        self.guards.append(whole[-64:])
        return whole[: array.numel()]

    def encode(self, gradients: Sequence[Tensor], squares: Sequence[Tensor | None] = ()) -> Tensor:
        """Encode on both sides; they must agree. Returns the payload."""
        arenas, known = self.kernels.arenas, [None if v is None else v.cpu() for v in squares]
        own = self.verbs.arenas, [g.cpu() for g in gradients], self.verbs.payload
        self.codec.encode(*own, OptimizerMoments(squares=known))
        if isinstance(self.bucket.config, AnnouncingCodec):  # has kernels for its tensors
            self.announcing.encode(arenas, gradients, self.kernels.payload)
        else:
            pair, drawn = (arenas.residual, arenas.candidate), self.codec._streams([self.bucket])
            self.kernel.encode(*pair, gradients, self.kernels.payload, drawn, squares)
        assert self._bits(self.verbs) == self._bits(self.kernels)
        assert_same(self.verbs.arenas.candidate, arenas.candidate)
        assert all((guard == 7).all() for guard in self.guards)
        return self.kernels.payload.clone()

    def _bits(self, side: Side) -> list[bytes]:
        payload = side.payload.cpu().numpy()
        head = payload[: self.bucket.layout.body_at]
        return [head.tobytes(), *map(sides.canonical, sides.sections(self.bucket, payload))]

    def decode(self, payloads: Sequence[Tensor], scale: float, into: Sequence[Tensor]) -> None:
        """Decode on both sides into gradients like `into`; they must agree."""
        expected = [torch.zeros_like(g, device="cpu") for g in into]
        gathered = torch.cat(list(payloads))
        self.codec.decode(self.bucket, gathered.cpu(), scale, expected)
        assert self.kernel.decode(gathered, scale, [], into) is None
        for one, other in zip(expected, into, strict=True):
            assert_same(one, other)

    def commit(self) -> None:
        for side in (self.verbs, self.kernels):
            side.arenas.swap()

    def gradients(self, seed: int) -> list[Tensor]:
        """Normal ones, whose scale differs from step to step."""
        generator = torch.Generator().manual_seed(seed)
        scale = 1 + seed % 3 / 4
        return [
            (scale * torch.randn(t.spec.numel, generator=generator))
            .to(DTYPES[t.spec.dtype])
            .to(DEVICE)
            for t in self.bucket.gradients
        ]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "values", ["int4", "float32", "float16", "bfloat16", "int8", "int3", "int2", "sign"]
)
def case_steps(values: str) -> None:
    """Dense and sparse tensors, odd starts, all dtypes: with commits and a step rolled back."""
    pair = Pair(plan((5, 1501, 3000, 7, 40, 0, 1), KINDS, ratio=0.05, values=values))
    payloads = []
    for step in range(3):
        gradients = pair.gradients(step)
        payloads.append(pair.encode(gradients))
        if step != 1:
            pair.commit()
    for scale, ranks in ((1.0, 1), (1 / 3, 3)):
        pair.decode(payloads[:ranks], scale, [torch.ones_like(g) for g in gradients])


def specials(n: int) -> Iterator[Tensor]:
    """Tensors on which thresholds are hard to find."""
    normal = torch.randn(n, generator=torch.Generator().manual_seed(n))
    yield torch.zeros(n)
    yield torch.full((n,), -0.25)
    yield torch.zeros(n).index_fill(0, torch.tensor([n // 2]), 3.0)
    yield normal.sign()
    yield normal * 1e-42
    yield normal / (normal.roll(1) + 1e-6)
    yield normal.mul(2).round()
    yield normal * (normal.roll(1) > 1.6)
    yield torch.arange(n, 0.0, -1)
    yield torch.where(torch.arange(n) < n // 8, 50 * normal, normal)
    yield (normal * 9e4).round()
    yield normal * 1e38
    yield torch.where(torch.arange(n) % 7 == 0, math.inf, normal)
    yield torch.where(torch.arange(n) % 450 == 9, -math.nan, normal)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("values", "numel", "ratio"),
    [
        ("int4", 1200, 0.2), ("int4", 300, 1.0), ("float16", 600, 0.05), ("float32", 1200, 0.05),
        ("bfloat16", 600, 0.05), ("int8", 600, 0.3), ("sign", 1300, 1.0), ("int3", 1300, 1.0),
        ("int3", 1300, 0.2), ("int2", 1300, 0.3),
    ],
)  # fmt: skip
def case_special_values(values: str, numel: int, ratio: float) -> None:
    """Blocks that are full and others, of selected elements or of all, whose scales are special."""
    gradients = [g.to(DEVICE) for g in specials(numel)]
    bucket = plan([g.numel() for g in gradients], ratio=ratio, values=values)
    pair = Pair(bucket)
    pair.encode(gradients)
    payload = pair.encode([g.nan_to_num(posinf=1.0) for g in gradients])
    pair.decode([payload, payload], 0.5, gradients)


SHARES = (
    (1, 1), (700, 699), (129, 129), (2, 1), (1025, 1), (3000, 40), (65, 32), (2100, 300), (5, 4),
)  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["packed", "int16", "int32"])
def case_indices_of_any_density(kind: str) -> None:
    """k = 1, k = n - 1 and k = n; sent elements anywhere, at the beginning, or at the end."""
    pair = Pair(sending(SHARES, kind))
    for step in range(3 if kind == "packed" else 1):
        gradients = [g.mul(2).round() for g in pair.gradients(step)]
        if step:
            gradients = [g.abs().sort(descending=step == 1).values for g in gradients]
        payload = pair.encode(gradients)
        pair.commit()
    pair.decode([payload] * 3, -0.5, gradients)
    empty = Pair(plan((0, 0)))
    empty.decode([empty.encode(empty.gradients(0))], 1.0, empty.gradients(0))


@pytest.mark.slow
@pytest.mark.parametrize(("values", "indices"), [("float32", "plain"), ("int4", "packed")])
def case_large_indices_and_the_default_geometry(values: str, indices: str) -> None:
    bucket = plan((70_001, 1030), ratio=0.01, values=values, indices=indices)
    pair = Pair(bucket, Geometry(programs=2))
    for step in range(3):
        gradients = pair.gradients(step)
        payload = pair.encode(gradients)
        pair.commit()
    pair.decode([payload] * 2, 0.5, gradients)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("slot", [64, 8])
def case_the_carried_bracket_changes_no_result(slot: int) -> None:
    """Neither a good guess nor nonsense, nor too little room; and a good one is used."""
    pair = Pair(plan((1501, 2000), ratio=0.05), replace(SMALL, slot=slot))
    for _ in range(2):
        pair.encode(pair.gradients(0))
    good = pair.kernel._carried.clone()
    bottom, top = pair.kernel._take("brackets", 4)[:4].view(2, 2).T
    threshold = good + (32 << 15)
    assert (top - bottom == 2**15 - 1).all()
    assert ((bottom <= threshold) & (threshold <= top)).all()
    for guess in (good - (1 << 23), 0 * good + 1):
        pair.kernel._carried.copy_(guess)
        pair.encode(pair.gradients(0))
    assert pair.kernel._carried.tolist() == good.tolist()


def case_brackets_that_miss() -> None:
    """A sample that sees only small elements, only large ones, or too few of one size."""
    pair = Pair(plan((2000, 2000, 2000), ratio=0.2))
    stride = 2000 // (SMALL.sample // 8) | 1
    looked_at = torch.arange(2000, device=DEVICE) % stride < 8
    small, large, level = pair.gradients(0)
    pair.encode([small * ~looked_at, large * (1 + 100 * looked_at), level.where(~looked_at, 5.0)])


@pytest.mark.parametrize("ties", [False, True])
def case_sampled_thresholds(ties: bool) -> None:
    """Thresholds that are taken, and those that too many elements reach, or too few."""
    pair = Pair(plan((20_000, 70_001, 30_000, 900), ratio=0.4, selection="sampled"), None)
    rules = [row[COLUMNS.index("rule")] for row in pair.kernel._tables.rows]
    assert rules == [SAMPLED, SAMPLED, SAMPLED, SEARCHED]
    gradients = pair.gradients(0)
    if ties:
        gradients[0], gradients[1] = gradients[0].round(), torch.zeros_like(gradients[1])
        gradients[2][: 30_000 // 3 * 3] *= 1e-3
    pair.encode(gradients)


def squares_of(pair: Pair, seed: int) -> list[Tensor | None]:
    """Adam's mean squares, of many orders of magnitude and partly 0."""
    generator = torch.Generator().manual_seed(seed)
    found = list[Tensor | None]()
    for tensor in pair.bucket.gradients:
        drawn = torch.randn((2, tensor.spec.numel), generator=generator)
        found.append((drawn[0].exp() ** 3 * drawn[1].clamp(min=0)).to(DEVICE))
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("values", "selection"), [("int4", "exact"), ("float32", "exact"), ("float16", "sampled")]
)
def case_selection_by_squares(values: str, selection: str) -> None:
    """Steps with squares for some tensors, and one without; dense and empty tensors have none."""
    sizes = (1501, 3000, 7, 900, 0, 1100)
    pair = Pair(plan(sizes, KINDS, ratio=0.05, values=values, selection=selection))
    for step in range(4):
        squares = squares_of(pair, step)
        squares[2] = squares[3] = squares[4] = None
        pair.encode(pair.gradients(step), () if step == 2 else squares)
        pair.commit()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtypes", [("bfloat16",), ("float16",), ("bfloat16", "float64")])
def case_squares_of_other_dtypes(dtypes: tuple[str, ...]) -> None:
    """Those of 16-bit parameters are read as they are; kernels have one dtype for all tensors."""
    pair = Pair(plan((1501, 3000, 900), KINDS, ratio=0.05))
    for step in range(2):
        squares: list[Tensor | None] = [
            None if v is None else v.to(DTYPES[dtypes[at % len(dtypes)]])
            for at, v in enumerate(squares_of(pair, step))
        ]
        pair.encode(pair.gradients(step), squares)
        pair.commit()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("values", ["int4", "float32"])
def case_special_squares(values: str) -> None:
    """All zero, tiny, huge, not finite, too few for a sample; and no layout is required."""
    pair = Pair(plan([600] * 8 + [16], ratio=0.2, values=values))
    some = [v for v in squares_of(pair, 0) if v is not None]
    squares = [
        0 * some[0], some[1] * 1e-42, some[2] * 1e36, some[3].where(some[3] < 9, math.nan),
        some[4].where(some[4] > 1, math.inf), torch.full_like(some[5], 0.25),
        torch.stack(some[6:8], 1)[:, 1], torch.cat(some[:2])[1:601], some[8],
    ]  # fmt: skip
    gradients = pair.gradients(0)
    gradients[1][7], gradients[5][599] = math.nan, math.inf
    pair.encode(gradients, squares)


def case_sampled_selection_by_squares() -> None:
    """A threshold from a sample of weighted elements that is taken."""
    pair = Pair(plan((70_001, 900), ratio=0.4, selection="sampled", values="int4"), None)
    pair.encode(pair.gradients(0), squares_of(pair, 0))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("values", ["int4", "float32"])
def case_flags(values: str) -> None:
    """Any rank's flag makes that tensor NaN, and no other; bits lie in two bytes."""
    pair = Pair(plan([600] * 8 + [30, 5], ratio=0.05, values=values))
    gradients = pair.gradients(1)
    clean = pair.encode(gradients)
    gradients[3][599], gradients[8][0], gradients[9][4] = math.inf, math.nan, -math.inf
    flagged = pair.encode(gradients)
    at = pair.bucket.layout.flags_at
    assert flagged[at : at + 2].tolist() == [0b1000, 0b11]
    pair.decode([clean, flagged, clean], 0.5, gradients)
    assert [t for t, g in enumerate(gradients) if g.isnan().any()] == [3, 8, 9]


def case_gradients_of_any_layout() -> None:
    """Slices at odd addresses, transposed matrices, columns."""
    specs = [
        TensorSpec("a", (1501,), "float32", DEVICE),
        TensorSpec("b", (40, 30), "float16", DEVICE),
        TensorSpec("c", (64,), "bfloat16", DEVICE),
    ]
    (bucket,) = make_plan(specs, TopK(ratio=0.05, values="float32", min_numel=10)).buckets
    pair = Pair(bucket)
    one = torch.randn(1503, device=DEVICE)[1:-1]
    two = torch.randn(30, 40, device=DEVICE).half().T
    three = torch.randn(64, 2, device=DEVICE).bfloat16()[:, 1]
    payload = pair.encode([one, two, three])
    pair.decode([payload] * 2, 0.5, [one, two, three])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("values", "indices"), [("int4", "packed"), ("float32", "plain")])
def case_shards(values: str, indices: str) -> None:
    """A sharded exchange among three owners: a step, and one in which a tensor is flagged."""
    bucket = plan((5, 3300, 7, 1501, 0, 600), KINDS, ratio=0.05, values=values, indices=indices)
    split = shard(bucket, 3)
    there, back = ([*map(Pair, plans)] for plans in (split.scatter, split.gather))
    arrive, result = [*map(Pair, split.arrive)], Pair(split.result)
    for step in range(2):
        gradients = result.gradients(step)
        if step:
            gradients[1][-1] = math.inf
        squares = squares_of(result, step)[: len(gradients)]
        payloads = []
        for one, middle, other in zip(there, arrive, back, strict=True):
            sent = one.encode(gradients, squares)
            sums = [torch.ones(t.numel, device=DEVICE) for t in middle.bucket.tensors]
            middle.decode([sent] * 2, 0.5, sums)
            payloads.append(other.encode(sums))
        written = [torch.ones_like(g) for g in gradients]
        result.decode([torch.cat(payloads)], 1.0, written)
        assert [t for t, g in enumerate(written) if g.isnan().any()] == [1] * step


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("method", "adjoin"),
    [
        (TopK(ratio=0.05, min_numel=10), True), (TopK(ratio=0.05, min_numel=10), False),
        (TopK(ratio=0.05, values="float32", indices="plain", min_numel=10), True),
        (QSGD(min_numel=10), True), (QSGD(min_numel=10), False),
    ],
    ids=str,
)  # fmt: skip
def case_shards_together(method: Codec, adjoin: bool) -> None:
    """Shards encoded at once have the bits of one by one, wherever their arenas are."""
    sizes = (5, 1700, 7, 600, 0, 30, 31, 32, 8, 1100)  # flags in two bytes
    split = shard(elements_of(method, *((n,) for n in sizes)), 3)
    pairs, ops = [*map(Pair, split.scatter)], TorchOps(kernels=False)
    kernels = [pair.kernel for pair in pairs]
    numels = [pair.bucket.numel for pair in pairs]
    both = [ops.arrays(numels, "float32", DEVICE) for _ in range(2)]
    if not adjoin:
        both[1] = [torch.zeros(n + 64, device=DEVICE)[32:-32] for n in numels]
    sent = torch.zeros(3 * split.scatter_bytes, dtype=torch.uint8, device=DEVICE)
    parts = [*sent.view(3, -1)]
    for pair, part in zip(pairs, parts, strict=True):
        pair.codec.open_payload(pair.bucket, part)
    result = Pair(split.result)
    for step in range(3):
        gradients = result.gradients(step)
        if step == 1:
            gradients[1][-1], gradients[9][7] = math.inf, math.nan
        weighs = step == 2 and isinstance(method, TopK)
        squares = squares_of(result, step)[: len(gradients)] if weighs else ()
        drawn = pairs[0].codec._streams([pair.bucket for pair in pairs])
        expected = [pair.encode(gradients, squares) for pair in pairs]
        kernels[0].encode_all(kernels, *both, gradients, parts, drawn, squares)
        for pair, part, payload, candidate in zip(pairs, parts, expected, both[1], strict=True):
            assert torch.equal(part[: len(payload)], payload) and not part[len(payload) :].any()
            assert_same(candidate, pair.kernels.arenas.candidate)
            if step != 1:
                pair.commit()
        both = both[::-1] if step != 1 else both
    together = [*kernels[0]._encoders.values()]
    assert [each is not None for each in together] == ([True] if adjoin else [False] * 2)


CODED = (
    QSGD(), QSGD(bits=3, block=20), QSGD(bits=7, block=100), QSGD(bits=8, block=2048),
    QSGD(bits=2, norm="l2"), QSGD(bits=5, block=1300, norm="l2"), ByteGrad(block=50), ByteGrad(),
    ByteGrad(min_numel=0), OneBit(), OneBit(min_numel=0), TernGrad(),
    TernGrad(clip=None, min_numel=0),
)  # fmt: skip


def elements_of(method: Codec, *shapes: tuple[int, ...]) -> BucketPlan:
    """The bucket of a method; dtypes take turns."""
    specs = [TensorSpec(f"t{i}", s, KINDS[i % 3], DEVICE) for i, s in enumerate(shapes)]
    (bucket,) = make_plan(specs, method).buckets
    return bucket


@pytest.mark.one_in(4)
@pytest.mark.parametrize("method", CODED, ids=str)
def case_all_elements_in_few_bits(method: Codec) -> None:
    """Blocks of any size, whole tensors beside them, and gradients that are -0 or not finite."""
    shapes = (3, 3, 3, 16), (5,), (700,), (2100,), (40, 27), (0,), (30, 50)
    pair, payloads = Pair(elements_of(method, *shapes)), list[Tensor]()
    for step in range(3):
        gradients = [g.view(s) for g, s in zip(pair.gradients(step), shapes, strict=True)]
        if step == 1:
            gradients[0].view(-1)[:2] = torch.tensor([math.inf, math.nan])
            gradients[3].mul_(3e38)
        if step == 2:
            gradients = [g.where(torch.rand_like(g) < 0.7, -0.0) for g in gradients]
        payloads.append(pair.encode(gradients))
        pair.commit()
    pair.decode(payloads[::2], 0.5, [torch.ones_like(g) for g in gradients])


def case_moments_in_float64() -> None:
    """What float32 does not have saturates; sums of many tiles are added in pairs."""
    values = torch.randn(5121, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values[:4] = torch.tensor([math.inf, math.nan, 1e300, -1e-60], dtype=torch.float64)
    found = WithTernary().ternary(DEVICE).moments(values.to(DEVICE))
    for one, other in zip(terngrad._moments(TorchOps(), values, 5121), found, strict=True):
        assert torch.equal(one, other.cpu())


@pytest.mark.parametrize("bits", [1, 31, 32])
def case_random_bits(bits: int) -> None:
    """They do not depend on the device."""
    from horovod_topk.kernels.triton.baselines.draws import random_bits

    stream, ops = Stream((0xDEADBEEF, 0x92345678), 2**32 + 7), TorchOps(kernels=False)
    for count in (0, 3, 2050):
        expected = ops.random_bits(stream, count, bits, "cpu")
        assert torch.equal(random_bits(stream, count, bits, DEVICE).cpu(), expected)


def case_sums_of_nodes() -> None:
    """The payloads of two owners of each of two nodes, decoded as one."""
    bucket = plan((900, 40, 2100), KINDS, ratio=0.05, values="int4")
    sums = shard_sums(bucket, Nodes(((0, 1), (2, 3))))
    pairs, result = [*map(Pair, sums.sums)], Pair(sums.result)
    rows = [torch.cat([pair.encode(pair.gradients(node)) for pair in pairs]) for node in range(2)]
    result.decode(rows, 0.5, [torch.ones_like(g) for g in result.gradients(0)])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("values", ["int4", "float32", "sign"])
def case_buckets_together(values: str) -> None:
    """Decoding buckets at once has the bits of one by one: empty, dense, flagged ones too."""
    shapes = (1501, 7), (0, 0), (40, 0, 2100), (3000,), (5,)
    pairs = [Pair(plan(sizes, ratio=0.05, values=values)) for sizes in shapes]
    others = Pair(plan((900, 30), ("float16",), values=values)), Pair(plan((600,), values="int8"))
    for step in range(2):
        arrived, expected = list[Arrived[Tensor]](), list[list[Tensor]]()
        for number, pair in enumerate((*pairs, *others)):
            gradients = pair.gradients(step)
            if (step, number) == (1, 2):
                gradients[2][5] = math.inf
            gathered = torch.cat([pair.encode(gradients)] * (2 + number // 6))
            each = [torch.ones_like(g) for g in gradients]
            expected.append([torch.zeros_like(g, device="cpu") for g in gradients])
            pair.codec.decode(pair.bucket, gathered.cpu(), 0.5, expected[-1])
            arrived.append(Arrived(pair.kernel, gathered, 0.5, each))
        widths = [pair.bucket.layout.payload_bytes for pair in (*pairs, *others)]
        heads = arrived[0].kernel.heads(arrived, widths, [*range(len(widths))])
        for position, (each, width) in enumerate(zip(arrived, widths, strict=True)):
            rows = each.gathered.view(-1, width)[:, :position].tolist()
            assert heads[position] == [bytes(row) for row in rows]
        arrived[0].kernel.decode_all(arrived)
        for each, ones in zip(arrived, expected, strict=True):
            for one, other in zip(ones, each.gradients, strict=True):
                assert_same(one, other)
        assert bool(arrived[2].gradients[2].isnan().all()) == (step == 1)
    (together,) = pairs[0].kernel._decoders
    assert len(together) == len(pairs)


@pytest.mark.parametrize("indices", ["packed", "plain"])
def case_indices_outside_a_tensor_write_nowhere(indices: str) -> None:
    """Noise leaves what lies around a gradient alone; one wrong index is dropped, and no other."""
    bucket = plan((640, 900, 1000), ratio=0.05, indices=indices)  # 640: a block ends with the first
    pair = Pair(bucket, replace(SMALL, programs=1))
    sound = pair.encode(pair.gradients(0))
    noise, wrong, dropped = sound.clone(), sound.clone(), []
    for tensor in bucket.tensors:
        size = coding.index_bytes(tensor.index, tensor.spec.numel, tensor.k)
        section = slice(tensor.index_at, tensor.index_at + size)
        noise[section].copy_(torch.randint(256, (size,)))
        if indices == "plain":
            dropped.append(int(wrong[section].view(torch.int16)[-1]))
            wrong[section].view(torch.int16)[-1] = tensor.spec.numel
    around = torch.full((3, 4000), 7.0, device=DEVICE)
    gradients = [
        row[1500 : 1500 + t.spec.numel] for row, t in zip(around, bucket.tensors, strict=True)
    ]
    pair.kernel.decode(torch.cat([noise] * 2), 1.0, [], gradients)
    for row, tensor in zip(around, bucket.tensors, strict=True):
        assert (row[:1500] == 7).all() and (row[1500 + tensor.spec.numel :] == 7).all()
    pair.decode([sound] * 2, 1.0, gradients)
    expected = [gradient.clone() for gradient in gradients]
    pair.kernel.decode(torch.cat([wrong] * 2), 1.0, [], gradients)
    for position, at in enumerate(dropped):
        expected[position][at] = 0.0
    for gradient, one in zip(gradients, expected, strict=True):
        assert_same(gradient, one)


@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize(
    "kind", [gpu_compiled.MIXED, pytest.param(gpu_compiled.FLOAT32, marks=pytest.mark.slow)]
)
def compile_all(kind: int, third: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Denormals survive, sums and products are rounded apart, and no register is spilled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = [*gpu_compiled.VALUES][kind == gpu_compiled.FLOAT32 :: 2]
    for build in [*gpu_compiled.of_buckets(names, kind)][third::3]:
        found = build.compiled("90")
        ptx = found["ptx"]
        assert ".ftz" not in ptx and "fma." not in ptx and "div.full" not in ptx
        assert gpu_compiled.resources(found)[1] == 0
