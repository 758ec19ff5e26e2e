"""Hypothesis strategies: what a training job may look like, and the gradients it may meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from horovod_topk.config import EXCHANGES
from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.methods.topk import VALUES, TopK
from oracle.world import Gradients

SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (0,),
    (1,),
    (2,),
    (7,),
    (8,),
    (3, 5),
    (2, 0),
    (40,),
    (1333,),
)
DTYPES = ("float16", "float32", "float64")
RATIOS = (0.001, 0.05, 0.1, 0.25, 0.5, 1.0)
MIN_NUMEL = (0, 1, 7, 8, 9, 1024)  # on both sides of the sizes 7 and 8
NONFINITE = (np.nan, np.inf, -np.inf)
TEXTURES = ("normal", "ties", "zeros", "spike", "extremes")

# Largest magnitude is 1e8: a residual of a few of them stays below 2**29, where subtracting the
# saturated float16 value (a multiple of 32) is exact in float32.
EXTREMES = {
    "float16": (0.0, -0.0, 6e-8, -6e-5, 1.0, -1.0, 65504.0, -65504.0),
    "float32": (0.0, -0.0, 1e-45, -1e-38, 1.0, -1.0, 65519.0, 65520.0, -1e8, 1e8),
    "float64": (0.0, -0.0, 5e-324, -1e-308, 1.0, -1.0, 1e-8, 65520.0, -1e8, 1e8),
}
# Sums of these depend on their order.
HUGE = {"float16": 6e4, "float32": 1e30, "float64": 1e300}


@dataclass(frozen=True)
class Job:
    """Specs, settings, a reduction and a number of ranks."""

    specs: tuple[TensorSpec, ...]
    config: TopK
    reduction: str
    ranks: int
    groups: tuple[tuple[TensorSpec, ...], ...] = ()

    @property
    def plan(self) -> Plan:
        """The plan of every rank."""
        return make_plan(self.specs, self.config, self.reduction, self.groups)


@st.composite
def jobs(
    draw: st.DrawFn,
    ranks: st.SearchStrategy[int] | None = None,
    values: Sequence[str] = VALUES,
    ratios: Sequence[float] = RATIOS,
    dtypes: Sequence[str] = DTYPES,
    exchanges: Sequence[str] = EXCHANGES,
    gather_ratios: Sequence[float | None] = (None, 0.3),
) -> Job:
    """Jobs of one to four tensors, in one bucket or in several."""
    kinds = draw(
        st.lists(
            st.tuples(st.sampled_from(SHAPES), st.sampled_from(list(dtypes))),
            min_size=1,
            max_size=4,
        )
    )
    specs = tuple(TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(kinds))
    exchange = draw(st.sampled_from(list(exchanges)))
    backs = gather_ratios if exchange in ("sharded", "auto") else [None]  # others have none
    config = TopK(
        ratio=draw(st.sampled_from(list(ratios))),
        values=draw(st.sampled_from(list(values))),
        indices=draw(st.sampled_from(["packed", "plain"])),
        exchange=exchange,
        gather_ratio=draw(st.sampled_from(list(backs))),
        min_numel=draw(st.sampled_from(MIN_NUMEL)),
        selection=draw(st.sampled_from(["exact", "sampled"])),
    )
    groups = draw(st.sampled_from([(), (specs[:1],), (specs[-1:], specs[:-1])]))
    reduction = draw(st.sampled_from(["average", "sum"]))
    size = draw(ranks if ranks is not None else st.integers(1, 5))
    return Job(specs, config, reduction, size, groups if len(specs) > 1 else ())


@st.composite
def steps(draw: st.DrawFn, job: Job, count: int, huge: bool = False) -> list[list[Gradients]]:
    """Finite gradients for `count` steps: steps[step][rank][name]."""
    textures = st.sampled_from((*TEXTURES, "huge") if huge else TEXTURES)
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    return [
        [
            {spec.name: gradient(random, draw(textures), spec) for spec in job.specs}
            for _ in range(job.ranks)
        ]
        for _ in range(count)
    ]


def within_float16(step: list[Gradients]) -> list[Gradients]:
    """A step whose float16 gradients add up to what float16 holds, also with what has waited.

    What it cannot hold is sent in part: tests/properties/test_conservation.py.
    """

    def clipped(g: NDArray[Any]) -> NDArray[Any]:
        return np.clip(g, -1500, 1500).astype(g.dtype) if g.dtype == np.float16 else g

    return [{name: clipped(g) for name, g in one.items()} for one in step]


def gradient(random: np.random.Generator, texture: str, spec: TensorSpec) -> NDArray[Any]:
    """One gradient of a given texture."""
    match texture:
        case "normal":
            values = random.standard_normal(spec.shape)
        case "ties":
            values = random.integers(-2, 3, spec.shape).astype(np.float64)
        case "zeros":
            values = random.choice([0.0, -0.0], spec.shape)
        case "spike":
            values = random.standard_normal(spec.shape) ** 9
        case "extremes":
            values = random.choice(EXTREMES[spec.dtype], spec.shape)
        case "huge":
            values = random.choice([1.0, HUGE[spec.dtype], -HUGE[spec.dtype]], spec.shape)
        case _:
            raise ValueError(texture)
    largest = float(np.finfo(spec.dtype).max)
    return np.asarray(np.clip(values, -largest, largest), np.float64).astype(spec.dtype)
