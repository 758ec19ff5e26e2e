"""State dicts: their contents, and checks that a state dict fits.

A state dict has the residuals of one rank, flat, by tensor name, with their shapes and the settings
that they depend on; the owner's residuals and the velocities of momentum correction are state dicts
within it, under "owned" and "velocity". Arrays are those of one framework.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NoReturn, TypeGuard

from horovod_topk.core.plan.buckets import TensorSpec
from horovod_topk.core.state.learning_rates import LARGEST as LARGEST_RATES
from horovod_topk.core.state.learning_rates import RATES
from horovod_topk.errors import StateDictError
from horovod_topk.methods.protocol import SHARES
from horovod_topk.ops import Ops
from horovod_topk.schedules import MEMORY

STATE_VERSION = 1
FOREIGN = "Pass what state_dict() of a TopKEF compressor returned"  # cure of malformed entries
MODEL = "Load the state into the model it was saved from, or call reset()"  # of other tensors
RESIDUALS = "residuals"  # key in a state dict: flat arrays by tensor name
COMMITTED = "committed"  # key in a state dict: committed steps, also those before a checkpoint
ASKED = "asked"  # key in a state dict: the ratio of the last `set_ratio`, if there was one
GUARD = "guard"  # key in a state dict: what the guard remembers
ALLOCATION = "allocation"  # key in a state dict: level of each tensor's share of the elements
DECISION = "decision"  # key in a state dict: the schedule's last decision and its memory
RELEASED = "released"  # key in a state dict: tensors that left the plan, without a residual
LOCAL = "local"  # counters of local steps
STEPS = "steps"  # key in a saved shard: how many steps had ended
OWNED, VELOCITY = "owned", "velocity"  # keys of state dicts within a state dict
METHOD_STATE = "state."  # prefix of keys: a method's state, a state dict within a state dict
OPTIMIZERS = "optimizers"  # key in a state dict of several optimizers: the counters of each
VARIABLES = "variables"  # key in a state dict of TensorFlow: names of all variables, in order
SHARED = "shared"  # key in a method's state: whether it is equal on all ranks
OPTIONAL = "optional"  # key in a method's state: it starts at zero where it does not fit
LARGEST = 1e18  # norm of a residual, at most: its square, and sums over ranks, fit float32
ROUNDING = 1e-3  # share by which a value may exceed its range
MOST_STEPS = 2**62  # committed steps that a state dict may count; 64 bits hold them
_COUNTERS = (COMMITTED, ASKED, DECISION, GUARD, STEPS)  # of one optimizer
OWNER = ("ranks", "rank", "nodes")  # keys that identify the owner of residuals of shards


def pack_state(
    ratio: float, specs: Iterable[TensorSpec], residuals: Mapping[str, Any]
) -> dict[str, Any]:
    """Make a state dict from residuals by name."""
    return {
        "version": STATE_VERSION,
        "ratio": ratio,
        "shapes": {spec.name: list(spec.shape) for spec in specs},
        "residuals": dict(residuals),
    }


def parts_of(state: Mapping[str, Any]) -> list[str]:
    """Names of the state dicts within a state dict."""
    return [key for key in state if key in (OWNED, VELOCITY) or key.startswith(METHOD_STATE)]


def nested(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The state dicts within a state dict."""
    return (state[each] for each in parts_of(state))


def converted(state: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A state dict with a function applied to every array."""
    result = dict(state)
    if RESIDUALS in state:
        result[RESIDUALS] = {name: change(e) for name, e in state[RESIDUALS].items()}
    return result | {key: converted(state[key], change) for key in parts_of(state)}


def joined(state: Mapping[str, Any], waiting: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with the tensors of another one added, whose arrays take precedence.

    state: the state dict whose other entries take precedence.
    """
    result = {**waiting, **state}
    for key in {"shapes", RESIDUALS, RATES, LARGEST_RATES, ALLOCATION} & set(result):
        result[key] = {**state.get(key, {}), **waiting.get(key, {})}
    for key in parts_of(state):
        if key in waiting:
            result[key] = joined(state[key], waiting[key])
    return result


def of_several(states: Sequence[tuple[dict[str, Any], int]]) -> dict[str, Any]:
    """Join the state dicts of all optimizers of a model into one.

    That of several has all arrays by tensor name, the counters of the first optimizer, as a model
    with one optimizer can load them, and under `OPTIMIZERS` the counters of each.

    states: state dict and number of ended steps of each optimizer; empty: nothing is compressed.
    """
    result: dict[str, Any] = reduce(joined, (state for state, _ in states), {})
    if len(states) > 1:
        result[OPTIMIZERS] = [
            {**{key: state[key] for key in _COUNTERS if key in state}, STEPS: ended}
            for state, ended in states
        ]
    return result


def shared_out(
    state: Mapping[str, Any], names: Sequence[Collection[str]]
) -> list[Mapping[str, Any]]:
    """Split a state dict of a model into one for each optimizer.

    The model may have had other optimizers: each tensor's arrays go to the optimizer that has it
    now, and the counters of the first one to each if their number differs.

    names: of each optimizer's tensors. What is of no optimizer is left to the first one, to refuse.
    """
    counters = state.get(OPTIMIZERS, [])
    if not (isinstance(counters, list) and all(isinstance(each, dict) for each in counters)):
        raise refused(f"its optimizers have {counters!r:.60}, which are no counters")
    state = {key: value for key, value in state.items() if key != OPTIMIZERS}
    if len(names) == 1:
        return [state]
    every, parts = {name for own in names for name in own}, list[Mapping[str, Any]]()
    for at, own in enumerate(names):
        others = every - set(own)
        if at:
            others |= {*state.get(RESIDUALS, ())} - every
        part = without(state, others)
        if OWNED in part and state[OWNED].get(RESIDUALS) and not part[OWNED][RESIDUALS]:
            del part[OWNED]  # its exchange has no owners
        if len(counters) == len(names):
            part = {key: each for key, each in part.items() if key not in _COUNTERS} | counters[at]
        parts.append(part)
    return parts


def renamed(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict by the names that its variables have in another one, of the same model.

    Keras numbers the layers of a process, and gives the variables of a loaded model other paths;
    their order stays. Names change if both state dicts have as many variables, under other names,
    and if in this order the last parts of the names and the known shapes are equal.

    own: the other state dict's names of all variables, and their shapes.
    """
    theirs, mine = state.get(VARIABLES), own.get(VARIABLES)
    if not (_are_names(theirs) and _are_names(mine) and len(theirs) == len(mine)):
        return dict(state)
    names = dict(zip(theirs, mine, strict=True))
    if set(theirs) == set(mine) or not all(_may_be(*pair, state, own) for pair in names.items()):
        return dict(state)
    return _renamed(state, names)


def _are_names(value: object) -> TypeGuard[list[str]]:
    """Whether a value is a list of different strings."""
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return is_list and len(set(value)) == len(value)  # type: ignore[arg-type,call-overload]


def _may_be(theirs: str, mine: str, state: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether two names may belong to the same variable: by their last part and their shapes."""
    pairs = (state.get("shapes"), theirs), (own.get("shapes"), mine)
    shapes = [known.get(name) for known, name in pairs if isinstance(known, Mapping)]
    ends = {name.rpartition("/")[2].partition("#")[0] for name in (theirs, mine)}
    return len(ends) == 1 and (None in shapes or shapes[0] == shapes[-1])


def _renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    result = dict(state)
    by_name = RESIDUALS, RATES, LARGEST_RATES, ALLOCATION
    for key in ("shapes", "tensors", *by_name, RELEASED, VARIABLES):
        if isinstance(each := state.get(key), Mapping):
            result[key] = {names.get(name, name): value for name, value in each.items()}
        elif _are_names(each):
            result[key] = [names.get(name, name) for name in each]
    return result | {key: _renamed(state[key], names) for key in parts_of(state)}


def without(state: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A state dict without some tensors."""
    result = dict(state)
    for key in {"shapes", RESIDUALS, ALLOCATION} & set(state):
        result[key] = {name: each for name, each in state[key].items() if name not in names}
    return result | {key: without(state[key], names) for key in parts_of(state)}


def has_residuals(state: Mapping[str, Any]) -> bool:
    """Whether a state dict has an array."""
    return bool(state.get(RESIDUALS)) or any(map(has_residuals, nested(state)))


def check_state(
    state: Mapping[str, Any],
    specs: Iterable[TensorSpec],
    ops: Ops[Any],
    besides: Collection[str] = (),
    largest: float = LARGEST,
) -> None:
    """Refuse a state dict that is not of these tensors.

    besides: names of other tensors that the state dict may have.
    largest: the norm that arrays may have, at most.
    """
    absent = {"version", "shapes", "residuals"} - set(state)
    if absent:
        raise StateDictError(
            f"the state dict lacks {', '.join(sorted(absent))}",
            cure=FOREIGN,
        )
    if state["version"] != STATE_VERSION:
        raise StateDictError(
            f"the state dict has version {state['version']!r}, this version reads {STATE_VERSION}",
            cure="Load it with the version of horovod_topk that wrote it",
        )
    known = set[str]()
    for spec in specs:
        _check_tensor(spec, state, ops, largest)
        known.add(spec.name)
    for name in state["residuals"]:
        if name not in known and name not in besides:
            raise StateDictError(
                "the state dict has a residual for it, the optimizer has no such tensor",
                tensor=name,
                cure=MODEL,
            )


def _check_tensor(
    spec: TensorSpec, state: Mapping[str, Any], ops: Ops[Any], largest: float
) -> None:
    def refuse(problem: str, cure: str = MODEL) -> NoReturn:
        raise StateDictError(problem, tensor=spec.name, cure=cure)

    name, expected = spec.name, list(spec.shape)
    if name not in state["residuals"] or name not in state["shapes"]:
        refuse("the state dict has no residual for it")
    shape, residual = state["shapes"][name], state["residuals"][name]
    if not isinstance(shape, list | tuple) or list(shape) != expected:
        refuse(f"the state dict's shape is {shape}, the gradient's {expected}")
    received = ops.numel(residual)
    if received != spec.numel or len(residual.shape) != 1:
        refuse(
            f"the state dict's residual has {received} elements and the shape "
            f"{list(residual.shape)}, the gradient {spec.numel}, of which a flat one is kept"
        )
    kind = "float64" if spec.residual_dtype == "uint8" else spec.residual_dtype
    copy = ops.zeros(spec.numel, kind, "cpu")
    ops.assign(copy, residual)
    norm, earlier = ops.norm(copy), "Load an earlier state"
    if not math.isfinite(norm):
        what = f"a NaN or an infinity, or becomes one in {spec.residual_dtype}"
        refuse(f"the state dict's residual has {what}", f"{earlier}, or call reset()")
    if norm > largest:
        refuse(
            f"the state dict's residual has a norm of {norm:.3g}, and at most {largest:.3g} can be "
            "added to gradients of all ranks and squared without an overflow",
            f"{earlier}, or call reset()",
        )


def check_origin(state: Mapping[str, Any], specs: Iterable[TensorSpec], reduction: str) -> None:
    """Refuse a checkpoint whose tensors had other shapes, or another reduction.

    A node owner's residual has the shape of its shard, and tensors of different shapes may have
    shards of equal shape. So `checkpoint.save` notes the shapes of whole tensors.
    """
    for spec in specs:
        saved, shape = state.get("tensors", {}).get(spec.name), list(spec.shape)
        if saved is not None and list(saved) != shape:
            raise StateDictError(
                f"the state dict is of the shape {list(saved)}, the gradient's is {shape}",
                tensor=spec.name,
                cure=MODEL,
            )
    saved = state.get("reduction", reduction)
    if saved != reduction:
        raise StateDictError(
            f"the state dict is of gradients reduced to their {saved}, these are reduced to their "
            f"{reduction}",
            cure="Pass the same op= as when it was saved",
        )


def check_nothing_is_owed(
    residuals: Mapping[str, Any], released: Iterable[str], ops: Ops[Any]
) -> None:
    """Refuse non-zero residuals of tensors that have left the plan here."""
    for name in sorted({*released} & {*residuals}):
        norm = ops.norm(residuals[name])
        if norm != 0.0:
            raise StateDictError(
                f"its gradient is sparse, and not compressed here: the state dict's residual of "
                f"norm {norm:.3g} would be lost",
                tensor=name,
                cure="Pass sparse_as_dense=True to hvd.DistributedOptimizer, as when it was saved",
            )


def released_of(state: Mapping[str, Any]) -> set[str]:
    """The tensors that had left the plan when a state dict was made."""
    released = state.get(RELEASED, [])
    if not (isinstance(released, list) and all(isinstance(name, str) for name in released)):
        raise refused(f"{released!r} were released, which is no list of names")
    return set(released)


def check_can_apply(state: Mapping[str, Any], method: str, ops: Ops[Any]) -> None:
    """Refuse residuals for a method that keeps none: it would send them once, altered."""
    for part in (state, state.get(OWNED, {})):
        for name, residual in part.get(RESIDUALS, {}).items():
            norm = ops.norm(residual)
            if norm != 0.0:
                raise StateDictError(
                    f"the state dict's residual has a norm of {norm:.3g}, and {method} with these "
                    "settings keeps no residual (error feedback), only zeros",
                    tensor=name,
                    cure="Load it with the compressor that saved it and send all residuals first, "
                    "by set_ratio(1.0) and one step; or pass strict=False to checkpoint.load, "
                    "which starts at zero",
                )


def check_range(
    name: str,
    within_range: tuple[float, float],
    within: Mapping[str, Any],
    specs: Iterable[TensorSpec],
    ops: Ops[Any],
) -> None:
    """Refuse values outside of a state's range; ignore arrays of other shapes, and of integers."""
    least, most = within_range
    for spec in specs:
        array = within.get(RESIDUALS, {}).get(spec.name)
        if array is None or not spec.numel or ops.numel(array) != spec.numel:
            continue
        if ops.dtype(array) == "uint8":
            continue
        flat: Any = ops.zeros(spec.numel, "float64", "cpu")
        ops.assign(flat, array)
        ends: list[float] = []
        if math.isfinite(ops.norm(flat)):
            both = (ops.largest(each, spec.numel) for each in (flat * -1.0, flat))
            low, high = (
                struct.unpack("<f", ops.to_host(ops.pack_values(each, "float32")))[0]
                for each in both
            )
            if least <= -low and high <= most * (1.0 + ROUNDING):
                continue
            ends = [-low, high]
        shown = f"values from {ends[0]:.3g} to {ends[1]:.3g}" if ends else "a NaN or an infinity"
        raise StateDictError(
            f"the state dict's {name} have {shown}, and can only be from {least:g} to {most:g}",
            tensor=spec.name,
            cure="Load an earlier state, or one that this package wrote",
        )


def check_velocity(kept: bool, state: Mapping[str, Any]) -> None:
    """Refuse a state dict that lacks velocities, or whose velocities would be lost."""
    if kept != ("velocity" in state):
        lacks, has = ("lacks", "has momentum=") if kept else ("has", "has none")
        raise StateDictError(
            f"the state dict {lacks} velocities of momentum correction, this compressor {has}",
            cure="Pass the momentum= it was saved with, or call reset() instead of loading it. For "
            "momentum='optimizer' of older versions, pass the optimizer's momentum as a number, "
            "and 0 to the optimizer",
        )


def refused(says: str, cure: str = FOREIGN) -> StateDictError:
    """The error for an entry that no state dict of this package has."""
    return StateDictError(f"the state dict says that {says}", cure=cure)


def committed_of(state: Mapping[str, Any], otherwise: int) -> int:
    """The number of committed steps in a state dict, or `otherwise` if it has none."""
    committed = state.get(COMMITTED, otherwise)
    if type(committed) is not int or not 0 <= committed < MOST_STEPS:
        limits = f"which is no whole number from 0 to {MOST_STEPS - 1}"
        raise refused(f"{committed!r:.60} steps were committed, {limits}")
    return committed


def asked_of(state: Mapping[str, Any]) -> float | None:
    """The ratio of the last `set_ratio` in a state dict; None: there was none."""
    asked = state.get(ASKED)
    if asked is not None and not (type(asked) is float and 0 < asked <= 1):
        raise refused(f"ratio {asked!r} was asked for, which is none in (0, 1]")
    return asked


def decision_of(state: Mapping[str, Any]) -> Sequence[float]:
    """A schedule's last decision and its memory in a state dict; (): none."""
    decision = state.get(DECISION, [])
    if not (are_numbers(decision) and len(decision) <= MEMORY + 1):
        limits = f"which is not a list of {MEMORY + 1} finite numbers at most"
        raise refused(f"a schedule decided {decision!r}, {limits}")
    return decision


def allocation_of(state: Mapping[str, Any]) -> Mapping[str, int]:
    """The level of each tensor's share of the elements in a state dict; empty: none is decided."""
    levels = state.get(ALLOCATION, {})
    is_mapping = isinstance(levels, Mapping) and all(isinstance(name, str) for name in levels)
    if not (is_mapping and all(type(j) is int and j in SHARES for j in levels.values())):
        limits = f"which are no levels from {SHARES[0]} to {SHARES[-1]} by tensor name"
        raise refused(f"tensors were allocated {levels!r:.80}, {limits}")
    return {**levels}


def are_numbers(value: object) -> TypeGuard[list[float]]:
    """Whether a value is a list of finite floats."""
    return isinstance(value, list) and all(type(x) is float and math.isfinite(x) for x in value)


def steps_of(state: Mapping[str, Any], otherwise: int) -> int:
    """The number of ended steps that `checkpoint.save` noted, or `otherwise`."""
    steps = state.get(STEPS, otherwise)
    return steps if type(steps) is int and 0 <= steps < MOST_STEPS else otherwise


def owner_of(owned: Mapping[str, Any] | None) -> Mapping[str, object] | None:
    """The owner of the shards in a state dict; None if it has no shards."""
    return None if owned is None else {key: owned[key] for key in OWNER if key in owned}


def check_owner(here: Mapping[str, object] | None, owned: Mapping[str, Any] | None) -> None:
    """Refuse residuals of shards that belong to another rank, as they would be lost.

    here: `Exchange.owner` of this rank, if its exchange has owners.
    """
    saved = owner_of(owned)
    if here != saved:
        raise StateDictError(
            f"the state dict is of {_describe(saved)}, this is {_describe(here)}",
            cure="Load each rank's own state with the exchange and the ranks and nodes it was "
            "saved with, or call reset()",
        )


def _describe(owner: Mapping[str, object] | None) -> str:
    if owner is None:
        return "an exchange without owners"
    on = f" on nodes {owner['nodes']}" if "nodes" in owner else ""
    return f"rank {owner.get('rank')} of {owner.get('ranks')} that own shards{on}"
