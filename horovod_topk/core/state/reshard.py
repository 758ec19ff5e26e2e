"""Resharding: residuals of a job whose number of ranks, or whose owners, have changed.

The pending mass is what all residuals together would add to the applied gradients:

    average   m = (1 / P) sum of the ranks' e + sum of the owners' e     (allgather, sharded)
              m = (1 / P) sum of the owners' e                           (hierarchical)
    sum       the same without 1 / P

`pending` adds it up from the state dicts of all ranks of one job; `share_out` gives each rank of
another job its share, so that the pending mass is the same. Owners of `sharded` then start at zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from horovod_topk.core.plan.shards import first_block
from horovod_topk.core.state.residual import as_row, scaled
from horovod_topk.ops import Ops
from horovod_topk.ops.coding import SHARD_BLOCK

Array = TypeVar("Array")
StateDict = Mapping[str, Any]


def pending(
    states: Iterable[StateDict], ranks: int, reduction: str, ops: Ops[Array]
) -> dict[str, Array]:
    """Add up all residuals of a job, in units of the applied gradient: flat, float64, by name.

    states: the state dict of every rank, in any order; only one at a time is in memory.
    """
    shared, applied = dict[str, Array](), dict[str, Array]()
    for state in states:
        for name, e in state["residuals"].items():
            _add(shared, name, ops.numel(e), None, e, ops)
        owned = state.get("owned", {})
        unit = shared if "nodes" in owned else applied
        for name, e, places, end in _saved_shards(owned, ops):
            _add(unit, name, end, places, e, ops)
    total = {name: scaled(sums, _share(reduction, ranks), ops) for name, sums in shared.items()}
    for name, sums in applied.items():
        _add(total, name, ops.numel(sums), None, sums, ops)
    return total


def share_out(
    total: Mapping[str, Array], own: StateDict, ranks: int, reduction: str, ops: Ops[Array]
) -> dict[str, Any]:
    """Make this rank's state dict, so that all ranks' residuals add up to `total`.

    total: the result of `pending`; tensors without an entry get no residual.
    own: this rank's present state dict, which shows which residuals it keeps.
    """
    share = _share(reduction, ranks)
    state = dict(own)
    state["residuals"] = {
        name: scaled(total[name], 1 / (share * ranks), ops, like=e)
        for name, e in own["residuals"].items()
        if name in total
    }
    if "owned" in own:
        nodes = own["owned"].get("nodes")
        scale = 1 / (share * len(nodes)) if nodes is not None else 0.0
        residuals = {}
        for name, e, places, _ in _saved_shards(own["owned"], ops):
            if name in total:
                residuals[name] = scaled(ops.take(total[name], places), scale, ops, like=e)
        state["owned"] = {**own["owned"], "residuals": residuals}
    return state


def rescaling(reduction: str, before: int, after: int) -> float:
    """The factor for residuals when ranks have left, or have joined with residuals of zero."""
    return _share(reduction, before) / _share(reduction, after)


def _saved_shards(owned: StateDict, ops: Ops[Array]) -> Iterator[tuple[str, Any, Array, int]]:
    """Name, residual and indices in the tensor of each shard, and one past the last of these."""
    for name, e in owned.get("residuals", {}).items():
        rank, nodes, count = owned["rank"], owned.get("nodes"), ops.numel(e)
        parts, part = owned["ranks"], rank
        if nodes is not None:
            parts = min(map(len, nodes))
            part = next(list(node).index(rank) for node in nodes if rank in node)
        first = first_block(name, parts, part)
        block, rest = divmod(count - 1, SHARD_BLOCK)
        end = (block * parts + first) * SHARD_BLOCK + rest + 1 if count else 0
        yield name, e, ops.global_index(ops.arange(count, "cpu"), parts, first), end


def _share(reduction: str, ranks: int) -> float:
    """The factor of one rank's gradient in the applied gradient."""
    return 1 / ranks if reduction == "average" else 1.0


def _add(
    sums: dict[str, Array],
    name: str,
    numel: int,
    places: Array | None,
    values: Array,
    ops: Ops[Array],
) -> None:
    """Add to the sum of a tensor; the sum grows if a later shard needs more elements."""
    known = sums.get(name)
    if known is None or ops.numel(known) < numel:
        sums[name] = ops.zeros(numel, "float64", "cpu")
        if known is not None:
            ops.assign(ops.view(sums[name], 0, ops.numel(known)), known)
    if ops.numel(values):
        index = None if places is None else as_row(ops, places)
        target = sums[name] if places is not None else ops.view(sums[name], 0, numel)
        ops.accumulate(target, index, as_row(ops, values))
