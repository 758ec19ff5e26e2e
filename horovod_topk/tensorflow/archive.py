"""State dicts as bytes, for checkpoints: a line of JSON, then all residuals one after another."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from horovod_topk.core.state.state_dict import nested, parts_of


def pack(states: Sequence[Mapping[str, Any]]) -> bytes:
    """Serialise state dicts, for `unpack`."""
    parts: list[bytes] = []
    head = [_head(state, parts) for state in states]
    return b"\n".join([json.dumps(head).encode(), b"".join(parts)])


def _head(state: Mapping[str, Any], parts: list[bytes]) -> dict[str, Any]:
    """A state dict with dtypes instead of residuals, whose bytes are appended to `parts`."""
    residuals = state.get("residuals", {})
    parts += [residual.numpy().tobytes() for residual in residuals.values()]
    dtypes = {name: residual.dtype.name for name, residual in residuals.items()}
    within = {each: _head(state[each], parts) for each in parts_of(state)}
    return {**state, "residuals": dtypes, **within}


def unpack(data: bytes) -> list[dict[str, Any]]:
    """Restore the state dicts that `pack` serialised."""
    line, _, rest = data.partition(b"\n")
    states, at = json.loads(line), 0
    for state in [part for each in states for part in (each, *nested(each))]:
        for name, dtype in state.get("residuals", {}).items():
            count = math.prod(state["shapes"][name])
            stop = at + count * tf.as_dtype(dtype).size
            state["residuals"][name] = tf.reshape(tf.io.decode_raw(rest[at:stop], dtype), [count])
            at = stop
    return list(states)
