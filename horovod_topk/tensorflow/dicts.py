"""State dicts in pieces: variables may be met one after another, and each takes on its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import tensorflow as tf

from horovod_topk.ops.tensorflow import Buffer

BESIDES = ("owned", "velocity")  # state dicts within a state dict


def besides_of(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The state dicts within one."""
    return (state[each] for each in BESIDES if each in state)


def joined(state: dict[str, Any], waiting: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict, and what was loaded and not asked for yet."""
    parts = ("shapes", "residuals")
    return state | {part: {**waiting.get(part, {}), **state[part]} for part in parts}


def without(state: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    """A state dict without these tensors."""
    kept = dict(state)
    for part in {"shapes", "residuals"} & set(state):
        kept[part] = {name: e for name, e in state[part].items() if name not in names}
    return kept | {each: without(state[each], names) for each in BESIDES if each in state}


def has_residuals(state: Mapping[str, Any]) -> bool:
    """Whether there is anything in it."""
    return bool(state.get("residuals")) or any(map(has_residuals, besides_of(state)))


def as_buffers(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state dict as the core reads it."""
    if "residuals" not in state:
        return state
    residuals = state["residuals"].items()
    return {**state, "residuals": {n: Buffer(tf.convert_to_tensor(e)) for n, e in residuals}}
