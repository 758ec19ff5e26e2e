"""The compressor against a second, dense writing of the algorithm that shares no code with it."""

from __future__ import annotations

import numpy as np
import pytest
from oracle.backends import Backend, each_framework
from oracle.reference import Reference
from oracle.world import World

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.methods.topk import TopK

RATIO, STEPS = "0.07", 10
SIZES = {"small": 15, "medium": 130, "large": 1001}  # min_numel below is 16: `small` goes dense


@pytest.mark.one_in(3)
@each_framework
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("values", ["float32", "float16"])
def test_ten_steps_equal_the_formulas(backend: Backend, ranks: int, values: str) -> None:
    specs = [TensorSpec(name, (n,), "float32") for name, n in SIZES.items()]
    config = TopK(ratio=float(RATIO), values=values, min_numel=16)
    world = World(make_plan(specs, config, reduction="sum"), ranks, backend)
    sent_as = {"float32": np.float32, "float16": np.float16}[values]
    expected = {
        name: Reference(ranks, n, "1" if name == "small" else RATIO, sent_as)
        for name, n in SIZES.items()
    }
    random = np.random.default_rng(ranks)
    for step in range(STEPS):
        g = {name: _some_gradients(random, step, (ranks, n)) for name, n in SIZES.items()}
        exchanged = world.step([{name: g[name][r] for name in g} for r in range(ranks)])
        for name, reference in expected.items():
            total = reference.step(g[name])
            assert all(np.array_equal(one[name], total) for one in exchanged)
            kept = [one[name] for one in world.residuals()]
            assert np.array_equal(kept, reference.residual)


@each_framework
def test_average_divides_by_the_number_of_ranks(backend: Backend) -> None:
    spec = TensorSpec("w", (500,), "float32")
    world = World(
        make_plan([spec], TopK(ratio=float(RATIO), min_numel=0, values="float32")), 3, backend
    )
    reference = Reference(3, 500, RATIO, np.float32)
    random = np.random.default_rng(0)
    for step in range(STEPS):
        g = _some_gradients(random, step, (3, 500))
        mean = world.step([{"w": one} for one in g])[0]["w"]
        np.testing.assert_allclose(mean, reference.step(g) / 3, rtol=1e-6)


def _some_gradients(
    random: np.random.Generator, step: int, shape: tuple[int, int]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Alternately without and with ties."""
    values = random.standard_normal(shape) if step % 2 else random.integers(-3, 4, shape)
    return values.astype(np.float32)
