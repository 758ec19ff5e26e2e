"""The residual registry: copies, refusals before any change, reset and replan."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oracle.backends import Backend, each_backend
from oracle.world import SPECS, World, gradients

from horovod_topk.core.plan.buckets import TensorSpec, make_plan
from horovod_topk.core.state.residual import ResidualRegistry
from horovod_topk.errors import StateDictError
from horovod_topk.methods.topk import TopK

A = TensorSpec("a", (2, 3), "float32")
B = TensorSpec("b", (), "float16")
C = TensorSpec("c", (4,), "float64")
PLAN = make_plan([A, B, C], TopK())
FILLED = {"a": [1.0, 2, 3, 4, 5, 6], "b": [7.0], "c": [8.0, 9, 10, 11]}


@pytest.mark.parametrize("exchange", ["allgather", "sharded", "hierarchical"])
@each_backend
def test_memory_is_free_once_a_runner_is_deleted(backend: Backend, exchange: str) -> None:
    """Python's garbage collection, which may come much later, is not needed."""
    settings: dict[str, Any] = {"exchange": exchange, "min_numel": 0, "warmup": [(1, 0.5)]}
    settings |= {} if exchange == "hierarchical" else {"momentum": 0.9}
    world = World(make_plan(SPECS, TopK(0.1, **settings)), 2, backend)
    for step in range(3):
        world.step(gradients(2, step))
    runner = world.ranks[0]
    held = [*map(weakref.ref, (runner, *runner.registry.all_arenas()))]
    del runner
    gc.collect()
    gc.disable()
    try:
        assert None not in [each() for each in held]
        world.ranks.clear()
        assert {each() for each in held} == {None}
    finally:
        gc.enable()


def filled(backend: Backend) -> ResidualRegistry[Any]:
    """A registry with a number of its own in every element."""
    registry = ResidualRegistry(PLAN, backend.ops)
    for name, values in FILLED.items():
        dtype = "float64" if name == "c" else "float32"
        backend.ops.assign(registry.residual(name), backend.array(np.array(values), dtype))
    return registry


def contents(backend: Backend, registry: ResidualRegistry[Any], names: str = "abc") -> Any:
    return {name: backend.numpy(registry.residual(name)).tolist() for name in names}


@each_backend
def test_new_residuals_are_zero_and_wide_enough(backend: Backend) -> None:
    registry = ResidualRegistry(PLAN, backend.ops)
    assert contents(backend, registry) == {"a": [0.0] * 6, "b": [0.0], "c": [0.0] * 4}
    dtypes = [str(backend.numpy(registry.residual(name)).dtype) for name in "abc"]
    assert dtypes == ["float32", "float32", "float64"]


@each_backend
def test_state_dicts_are_copied_and_say_what_they_are(backend: Backend) -> None:
    registry = filled(backend)
    state = registry.state_dict(0.01)
    assert state["version"] == 1
    assert state["ratio"] == 0.01
    assert state["shapes"] == {"a": [2, 3], "b": [], "c": [4]}
    assert {n: backend.numpy(e).tolist() for n, e in state["residuals"].items()} == FILLED
    other = ResidualRegistry(PLAN, backend.ops)
    other.load_state_dict(state)
    state["residuals"]["a"][...] = 0
    assert contents(backend, registry) == contents(backend, other) == FILLED


Spoil = Callable[[dict[str, Any], dict[str, Any]], Any]  # gets a state dict, and its residuals

LACKS_C: list[Spoil] = [lambda state, e: e.pop("c"), lambda state, e: state["shapes"].pop("c")]
REFUSED: list[tuple[Spoil, str]] = [
    *[(spoil, "tensor 'c': the state dict has no residual") for spoil in LACKS_C],
    (lambda state, e: e.update(d=e["c"]), "tensor 'd': .* a residual for it, the optimizer has no"),
    (
        lambda state, e: state["shapes"].update(a=[3, 2]),
        r"'a': .* \[3, 2\], the gradient's \[2, 3\]",
    ),
    (lambda state, e: state.update(version=2), "version 2, this version reads 1"),
    (lambda state, e: state.pop("residuals"), "the state dict lacks residuals"),
    (lambda state, e: e.update(c=e["c"][:3]), "tensor 'c': .*3 elements.*4"),
    (lambda state, e: e.update(c=e["c"][:1]), "tensor 'c': .*1 elements.*4"),
    (
        lambda state, e: e.update(c=e["c"].reshape(2, 2)),
        r"'c': .*4 elements and the shape \[2, 2\]",
    ),
]


@each_backend
@pytest.mark.parametrize(("spoil", "problem"), REFUSED)
def test_a_state_dict_that_does_not_fit_changes_nothing(
    backend: Backend, spoil: Spoil, problem: str
) -> None:
    registry = filled(backend)
    state = registry.state_dict(0.01)
    for residual in state["residuals"].values():
        residual[...] = 0
    spoil(state, state["residuals"])
    with pytest.raises(StateDictError, match=problem):
        registry.load_state_dict(state)
    assert contents(backend, registry) == FILLED


@pytest.mark.filterwarnings("ignore:overflow encountered")
@each_backend
def test_a_residual_that_would_become_infinite_is_refused(backend: Backend) -> None:
    """As one of a float64 model in one of float32."""
    registry = filled(backend)
    state = registry.state_dict(0.01)
    state["residuals"]["a"] = backend.array(np.full(6, 1e39), "float64")
    with pytest.raises(StateDictError, match=r"'a': .* or becomes one in float32"):
        registry.load_state_dict(state)
    state["residuals"]["a"] = backend.array(np.full(6, 1e38), "float64")
    with pytest.raises(StateDictError, match=r"'a': .* norm of .*, and at most 1e\+18"):
        registry.load_state_dict(state)
    assert contents(backend, registry) == FILLED
    state["residuals"]["a"] = backend.array(np.full(6, 1e17), "float64")
    registry.load_state_dict(state)
    assert contents(backend, registry, "a") == {"a": [float(np.float32(1e17))] * 6}


@each_backend
@pytest.mark.parametrize("gone", ["a", "b", "c"])
def test_replan_keeps_the_residuals_of_those_that_stay(backend: Backend, gone: str) -> None:
    registry = filled(backend)
    registry.replan(PLAN.without(gone))
    kept = "abc".replace(gone, "")
    assert contents(backend, registry, kept) == {name: FILLED[name] for name in kept}
    assert sorted(registry.state_dict(0.01)["residuals"]) == sorted(kept)
    with pytest.raises(KeyError):
        registry.residual(gone)


def without(backend: Backend, gone: str) -> ResidualRegistry[Any]:
    """One that owes nothing for a tensor, which then leaves the plan."""
    registry = filled(backend)
    registry.residual(gone)[...] = 0
    registry.replan(PLAN.without(gone))
    return registry


@each_backend
def test_no_other_tensor_may_be_missing(backend: Backend) -> None:
    state = without(backend, "b").state_dict(0.01)
    assert state["released"] == ["b"]
    for spoil in LACKS_C:
        registry, spoiled = filled(backend), dict(state)
        spoiled |= {key: dict(state[key]) for key in ("residuals", "shapes")}
        spoil(spoiled, spoiled["residuals"])
        with pytest.raises(StateDictError, match="tensor 'c': the state dict has no residual"):
            registry.load_state_dict(spoiled)
        assert contents(backend, registry) == FILLED
    del state["released"]
    with pytest.raises(StateDictError, match="tensor 'b': the state dict has no residual"):
        registry.load_state_dict(state)


@each_backend
@pytest.mark.parametrize("owed", [0.0, 1e-30, float("nan")])
def test_a_tensor_that_left_the_plan_may_be_owed_nothing(backend: Backend, owed: float) -> None:
    state = filled(backend).state_dict(0.01)
    state["residuals"]["a"][...] = 0
    state["residuals"]["a"][2:3] = owed
    state["residuals"]["c"][...] = 1
    registry = without(backend, "a")
    if owed == 0.0:
        registry.load_state_dict(state)
        assert contents(backend, registry, "bc") == {"b": [7.0], "c": [1.0] * 4}
        return
    with pytest.raises(StateDictError, match=r"tensor 'a': .*lost.*sparse_as_dense=True"):
        registry.load_state_dict(state)
    assert contents(backend, registry, "bc") == {"b": [7.0], "c": FILLED["c"]}


@each_backend
@pytest.mark.parametrize("released", ["b", ["b", 3], {"b": 1}, 7])
def test_what_was_released_is_a_list_of_names(backend: Backend, released: Any) -> None:
    registry = filled(backend)
    state = registry.state_dict(0.01) | {"released": released}
    with pytest.raises(StateDictError, match="which is no list of names"):
        registry.load_state_dict(state)
