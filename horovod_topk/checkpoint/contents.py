"""Checks of a checkpoint file's contents, beside its digest.

The digest shows that a file is unchanged, but not that this version of the package wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from horovod_topk.core.run.state import check_entries
from horovod_topk.core.state.state_dict import (
    COMMITTED,
    RESIDUALS,
    STATE_VERSION,
    parts_of,
    released_of,
)
from horovod_topk.errors import CheckpointError, StateDictError

_DTYPES = ("F32", "F64", "U8")  # dtypes of states, as safetensors names them


def check(facts: Any, tensors: Mapping[str, Any], where: str) -> None:
    """Refuse a file whose state dict this version does not write.

    tensors: dtype and shape of each array, by its name in the file.
    """
    if not isinstance(facts, dict):
        raise _foreign(where, f"its state is a {type(facts).__name__}")
    for state in _states(facts).values():
        _check_version(state, where)
    if not is_count(facts.get(COMMITTED, 0)):
        raise _foreign(where, f"its {COMMITTED} is {facts[COMMITTED]!r}")
    try:
        check_entries(facts)
        for state in _states(facts).values():
            released_of(state)
    except StateDictError as error:
        raise _foreign(where, error.problem) from error
    _check_owner(facts.get("owned"), where)
    for part, state in _states(facts).items():
        _check_arrays(part, state, tensors, where)
    for name in tensors:
        if name.split("/", 1)[0] not in _states(facts):
            raise _foreign(where, "it is of no part that this version knows", tensor=name)


def check_place(facts: Mapping[str, Any], where: str) -> None:
    """Refuse a file without the entries that `checkpoint.save` adds, such as rank and step."""
    for name, is_valid in _FIELDS.items():
        if not is_valid(facts.get(name)):
            raise _foreign(where, f"its {name} is {facts.get(name)!r}")
    if not facts["rank"] < facts["ranks"]:
        raise _foreign(where, f"its rank is {facts['rank']} of {facts['ranks']}")


def _states(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {RESIDUALS: facts, **{part: facts[part] for part in parts_of(facts)}}


def _check_version(state: Any, where: str) -> None:
    version = state.get("version") if isinstance(state, dict) else None
    if version != STATE_VERSION:
        raise CheckpointError(
            f"{where} has version {version!r}, this package reads version {STATE_VERSION}",
            cure="Load it with the version of horovod_topk that wrote it",
        )


def _check_owner(owned: Any, where: str) -> None:
    if owned is None:
        return
    nodes, rank = owned.get("nodes"), owned.get("rank")
    if not (is_count(rank) and is_count(owned.get("ranks")) and rank < owned["ranks"]):
        raise _foreign(where, f"its shards are of rank {rank!r} of {owned.get('ranks')!r}")
    if nodes is not None and not (_is_nodes(nodes) and any(rank in node for node in nodes)):
        raise _foreign(where, f"its shards are of rank {rank} on nodes {nodes!r}")


def _check_arrays(part: str, state: Any, tensors: Mapping[str, Any], where: str) -> None:
    """Check that arrays and shapes are of the same tensors and sizes."""
    if not _is_shapes(state.get("shapes")):
        raise _foreign(where, f"the shapes of its {part} are {state.get('shapes')!r}")
    saved = within(part, tensors)
    for name in sorted({*saved, *state["shapes"]}):
        if name not in saved or name not in state["shapes"]:
            lacks = "a shape" if name in saved else "an array"
            raise _foreign(where, f"its {part} lack {lacks} of this tensor", tensor=name)
        expected, found = [math.prod(state["shapes"][name])], saved[name]
        if found["shape"] != expected or found["dtype"] not in _DTYPES:
            raise _foreign(
                where,
                f"its {part} have {found['dtype']} of shape {found['shape']} for this tensor, "
                f"{' or '.join(_DTYPES)} of {expected} were expected",
                tensor=name,
            )


def within(part: str, by_name: Mapping[str, Any]) -> dict[str, Any]:
    """What a file has of one part, by tensor name; `by_name` has the names in the file."""
    names = [name for name in by_name if name.startswith(f"{part}/")]
    return {name.removeprefix(f"{part}/"): by_name[name] for name in names}


def _foreign(where: str, problem: str, tensor: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"{where} is no shard as this version writes them: {problem}",
        cure="Give the folder that checkpoint.save wrote to, or an older checkpoint",
        tensor=tensor,
    )


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 0 on that 64 bits hold."""
    return type(value) is int and 0 <= value < 2**63


def _is_shapes(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(shape, list) and all(map(is_count, shape)) for shape in value.values()
    )


def _is_nodes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(node, list) and node and all(map(is_count, node)) for node in value
    )


_FIELDS = {
    "rank": is_count,
    "ranks": is_count,
    "steps": is_count,
    "reduction": lambda value: value in ("average", "sum"),
    "tensors": _is_shapes,
}
