"""State dicts as bytes, for checkpoints: a line of JSON, then all residuals one after another."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf


def pack(states: Sequence[Mapping[str, Any]]) -> bytes:
    """Bytes that `unpack` turns into equal state dicts."""
    head, parts = [], []
    for state in states:
        residuals = state.get("residuals", {})
        dtypes = {name: residual.dtype.name for name, residual in residuals.items()}
        head.append({**state, "residuals": dtypes})
        parts += [residual.numpy().tobytes() for residual in residuals.values()]
    return b"\n".join([json.dumps(head).encode(), b"".join(parts)])


def unpack(data: bytes) -> list[dict[str, Any]]:
    """The state dicts that were packed."""
    line, _, rest = data.partition(b"\n")
    states, at = json.loads(line), 0
    for state in states:
        for name, dtype in state.get("residuals", {}).items():
            count = math.prod(state["shapes"][name])
            stop = at + count * tf.as_dtype(dtype).size
            state["residuals"][name] = tf.reshape(tf.io.decode_raw(rest[at:stop], dtype), [count])
            at = stop
    return list(states)
