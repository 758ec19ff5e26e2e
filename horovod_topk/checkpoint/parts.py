"""Each rank's share of another job's saved residuals, in the arrays of a framework."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_topk.checkpoint.shard import naming
from horovod_topk.core.state import reshard
from horovod_topk.core.state.learning_rates import LARGEST, RATES
from horovod_topk.core.state.state_dict import (
    ALLOCATION,
    ASKED,
    COMMITTED,
    DECISION,
    GUARD,
    LOCAL,
    METHOD_STATE,
    OPTIMIZERS,
    OPTIONAL,
    SHARED,
    STEPS,
    check_nothing_is_owed,
    check_velocity,
    converted,
    owner_of,
    parts_of,
    released_of,
    without,
)
from horovod_topk.errors import CheckpointError, StateDictError

log = logging.getLogger("horovod_topk")

StateDict = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """The job that loads: its ranks, reduction and tensors."""

    ranks: int
    reduction: str  # "average" or "sum"
    tensors: Mapping[str, list[int]]  # shapes by name
    strict: bool = True  # refuse shards with other tensors; False: ignore these tensors


def share_out(
    shards: Iterable[tuple[Path, StateDict]], saved: int, own: StateDict, job: Job, framework: str
) -> dict[str, Any]:
    """Make this rank's state dict from its share of the other job's residuals.

    shards: path and contents of each rank's file; only one at a time is in memory.
    """
    ops, wrap, unwrap = _arrays(framework)
    common: dict[str, Any] = {}  # entries that are equal in all files
    gone: set[str] = set()  # tensors that the other job had stopped to compress

    def read() -> Iterator[StateDict]:
        for path, shard in shards:
            with naming(path):
                check_reduction(shard, job.reduction)
                wrapped = converted(shard, wrap)
                if job.strict:
                    gone.update(released_of(shard) - set(shard["tensors"]))
                    _check_tensors(shard, job, gone | released_of(own))
                    for part in _each_part(wrapped):
                        check_nothing_is_owed(part["residuals"], released_of(own), ops)
                    check_velocity("velocity" in own, shard)
                fitting = without(wrapped, _differing(shard, job))
                _check_finite(fitting, ops)
            common.update(common_in(shard, own))
            yield fitting

    total = reshard.pending(read(), saved, job.reduction, ops)
    for name in gone & set(job.tensors):  # these have no saved residual
        total.setdefault(name, ops.zeros(math.prod(job.tensors[name]), "float64", "cpu"))
    if "velocity" in own:
        log.warning("TopKEF: velocities of momentum correction start at zero")
        own = {**own, "velocity": _at_zero(own["velocity"])}
    for part in parts_of(own):
        if part.startswith(METHOD_STATE) and part not in common:
            if not own[part].get(OPTIONAL):
                name = part.removeprefix(METHOD_STATE)
                log.warning("TopKEF: the method's %s starts at zero", name)
            own = {**own, part: _at_zero(own[part])}
    mine = reshard.share_out(total, converted(own, wrap), job.ranks, job.reduction, ops)
    return converted({**mine, **common}, unwrap)


def common_in(saved: StateDict, own: StateDict) -> dict[str, Any]:
    """Entries that are equal on all ranks: steps, the requested ratio, and learning rates.

    Committed steps and learning rates are taken only if this rank's state dict has them.
    """
    known = [
        ALLOCATION,
        ASKED,
        DECISION,
        GUARD,
        LOCAL,
        STEPS,
        *({COMMITTED, RATES, LARGEST} & set(own)),
    ]
    known += [part for part in parts_of(own) if own[part].get(SHARED)]
    counters = {OPTIMIZERS: saved.get(OPTIMIZERS, [])} if OPTIMIZERS in own else {}
    return {key: saved[key] for key in known if key in saved} | counters


def check_reduction(shard: StateDict, reduction: str) -> None:
    """Refuse residuals of another reduction, since their units differ."""
    if shard["reduction"] != reduction:
        raise CheckpointError(
            f"the checkpoint is of gradients reduced to their {shard['reduction']}, these are "
            f"reduced to their {reduction}",
            cure="Pass the same op= as when it was saved",
        )


def _differing(shard: StateDict, job: Job) -> list[str]:
    """Tensors that are not in both jobs, or have other shapes."""
    names = sorted({*shard["tensors"], *job.tensors})
    return [name for name in names if shard["tensors"].get(name) != job.tensors.get(name)]


def _check_tensors(shard: StateDict, job: Job, released: Collection[str]) -> None:
    for name in _differing(shard, job):
        if name in released:
            continue
        raise StateDictError(
            f"the checkpoint's shape is {shard['tensors'].get(name)}, the gradient's "
            f"{job.tensors.get(name)}",
            tensor=name,
            cure="Load the checkpoint into the model it was saved from, or pass strict=False",
        )


def _check_finite(state: StateDict, ops: Any) -> None:
    for part in _each_part(state):
        for name, e in part["residuals"].items():
            if not math.isfinite(ops.norm(e)):
                raise StateDictError(
                    "the checkpoint's residual has a NaN or an infinity",
                    tensor=name,
                    cure="Load an older checkpoint, or pass strict=False",
                )


def _each_part(state: StateDict) -> Iterator[StateDict]:
    """The state dict of a rank's residuals, and that of the owner's residuals."""
    yield state
    if "owned" in state:
        yield state["owned"]


def _arrays(framework: str) -> tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]:
    """Operations of a framework, and functions from its tensors to their arrays and back."""
    module = importlib.import_module(f"horovod_topk.ops.{framework}")
    if framework == "tensorflow":
        return module.TensorFlowOps(), module.Buffer, lambda array: array.value
    return module.TorchOps(), lambda tensor: tensor, lambda tensor: tensor


def _at_zero(state: StateDict) -> dict[str, Any]:
    return {**state, "residuals": {name: e - e for name, e in state["residuals"].items()}}


def fitting(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's own state dict with all residuals that fit, and zeros for the others."""
    fitting = {**own, **common_in(saved, own), "residuals": _residuals(saved, own, "residual")}
    if "owned" in own:
        same = owner_of(saved.get("owned")) == owner_of(own["owned"])
        owned = _residuals(saved["owned"] if same else {}, own["owned"], "owner's residual")
        fitting["owned"] = {**own["owned"], "residuals": owned}
    if "velocity" in saved and "velocity" not in own:
        log.warning("TopKEF: the checkpoint's velocities of momentum correction are of no use here")
    if "velocity" in own:
        velocity = _residuals(saved.get("velocity", {}), own["velocity"], "velocity")
        fitting["velocity"] = {**own["velocity"], "residuals": velocity}
    for part in parts_of(own):
        if own[part].get(OPTIONAL):  # no loss, if it does not fit
            fitting[part] = saved.get(part, _at_zero(own[part]))
        elif part.startswith(METHOD_STATE):
            kept = _residuals(saved.get(part, {}), own[part], part.removeprefix(METHOD_STATE))
            fitting[part] = {**own[part], "residuals": kept}
    return fitting


def _residuals(saved: Mapping[str, Any], own: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Saved arrays by tensor name; zeros and a warning for those that are missing or do not fit."""
    fitting = {}
    for name, mine in own["residuals"].items():
        same = saved.get("shapes", {}).get(name) == own["shapes"][name]
        fits = same and name in saved["residuals"]
        fitting[name] = saved["residuals"][name] if fits else mine - mine
        if not fits:
            log.warning("TopKEF: the checkpoint has no %s of %s that fits: it is zero", what, name)
    return fitting
