"""Checkpoints of error feedback, one file a rank, beside the ones of model and optimizer.

    from horovod_topk import checkpoint

    checkpoint.save(folder, TopKEF.of(optimizer))     # on every rank, after a step
    checkpoint.load(folder, TopKEF.of(optimizer))     # on every rank, before the first

In TensorFlow `TopKEF.of` answers after the first step only: give `load` the `TopKEF(...)` itself.

What a rank has not sent yet is a part of all gradients so far: a run that goes on without it has
lost them, and one that goes on with it is bitwise the run that never stopped. Every checkpoint
wants a folder of its own, which all ranks can read.
"""

from __future__ import annotations

import logging
import os
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from horovod_topk.checkpoint import parts, shard
from horovod_topk.checkpoint.contents import check_place
from horovod_topk.checkpoint.naming import naming
from horovod_topk.core.base_compressor import ALONE, BaseCompressor, State
from horovod_topk.core.state_dict import COMMITTED, owner_of
from horovod_topk.errors import CheckpointError, NotAttachedError, StateDictError

log = logging.getLogger("horovod_topk")

__all__ = ["load", "save"]

# What optimizers of this process have saved last: whose each file is, and after how many steps.
_written: dict[Path, tuple[weakref.ref[Any], int]] = {}


def save(folder: str | os.PathLike[str], state: State, *, name: str = "topkef") -> Path | None:
    """Write this rank's shard. Call it on every rank, between two steps.

    The file appears whole or not at all; one of the same name is replaced.

    Args:
        folder: of this checkpoint; made if it is missing.
        state: `TopKEF.of(optimizer)`, or a `TopKEF` that has one optimizer.
        name: the files' first word; in a job with several optimizers each wants its own.

    Returns:
        The file, or None where nothing is compressed and so nothing is kept.

    Raises:
        CheckpointError: another optimizer of this job has saved as much under this name, or it is
            no name for a file.
    """
    _check_name(name)
    state = state.behind if isinstance(state, BaseCompressor) else state
    contents = state.state_dict()
    if not contents:
        log.info("TopKEF keeps no residuals here: nothing to save in %s", folder)
        return None
    rank, ranks = state.place
    path = _path(Path(folder), name, rank, ranks)
    _check_not_anothers(path, state)
    path.parent.mkdir(parents=True, exist_ok=True)
    place = {"rank": rank, "ranks": ranks, "steps": state.steps}
    facts = {**place, "reduction": state.reduction, "tensors": state.tensors}
    shard.write(path, shard.dump({**contents, **facts}, state.framework))
    _note_written(path, state)
    return path


def load(
    folder: str | os.PathLike[str], state: State, *, name: str = "topkef", strict: bool = True
) -> None:
    """Take on what `save` wrote. Call it on every rank, before the first step.

    Where another number of ranks saved, or with another exchange, every rank reads all shards and
    takes its part of what they owe together, so that nothing is lost; see `core.reshard`. Only
    velocities of momentum correction start at zero then.

    Args:
        folder: as given to `save`.
        state: of an optimizer with the same parameters.
        name: as given to `save`.
        strict: refuse what does not fit. If False, only after the first step, nothing is refused
            and a log line names what was lost: tensors without a fitting residual start at zero,
            and the others take on theirs. All of this rank's do where its shard is missing,
            damaged or another one, or holds a NaN; then only what ratios follow from is taken on,
            from any shard that is whole, so that ranks keep to one.

    What ranks of another run saved at the same step, under the same names and shapes, cannot be
    told from this one's: no rank knows of the others' residuals.

    Raises:
        CheckpointError: a shard is missing, damaged, another rank's, of another step or another
            version, or there is one and this job has one rank; nothing has changed.
        StateDictError: residuals do not fit the optimizer; nothing has changed. In TensorFlow,
            before the first step, it is the first step that raises it.
    """
    _check_name(name)
    if not state.active:
        _check_nothing_is_lost(Path(folder), name, state, strict=strict)
        return
    own = _own(state)
    if not strict and not own:
        raise CheckpointError(
            "before the first step it is not known what fits",
            cure="Load with strict=False after the first step, or with strict=True before it",
        )
    try:
        source, contents = _read(Path(folder), name, state, own, strict=strict)
        with naming(source):
            state.load_state_dict(contents if strict else parts.fitting(contents, own))
    except (CheckpointError, StateDictError) as error:
        if strict:
            raise
        log.warning("TopKEF starts with all residuals at zero: %s", error)
        _start_at_zero(Path(folder), name, state)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[^/\\\0]+", name):
        raise CheckpointError(
            f"name={name!r} does not begin the name of a file",
            cure="Pass a word without slashes; folders belong into the first argument",
        )


def _start_at_zero(folder: Path, name: str, state: State) -> None:
    """Forget all residuals, and count steps as the ranks do whose shards are whole."""
    state.reset()
    zeros = state.state_dict()
    for contents in _whole_shards(folder, name, state.framework):
        state.load_state_dict(zeros | parts.common_in(contents, zeros))
        return
    if COMMITTED in zeros:
        log.warning("TopKEF: goes on from %d committed steps", zeros[COMMITTED])


def _check_not_anothers(path: Path, state: State) -> None:
    """Refuse to replace what another optimizer of this job has saved at the same step."""
    saved, steps = _written.get(path.resolve(), (None, None))
    other = None if saved is None or steps != state.steps else saved()
    if other is None or other is state or not path.exists():
        return
    raise CheckpointError(
        f"{path} is of another optimizer of this job, which saved it after as many steps",
        cure="Give each optimizer a name= of its own, to save and to load",
    )


def _note_written(path: Path, state: State) -> None:
    """A file is of this state; what it saved after other steps no longer matters."""
    for known, (saved, steps) in list(_written.items()):
        owner = saved()
        if owner is None or (owner is state and steps != state.steps):
            del _written[known]
    _written[path.resolve()] = weakref.ref(state), state.steps


def _check_nothing_is_lost(folder: Path, name: str, state: State, *, strict: bool) -> None:
    """Refuse a checkpoint of several ranks in a job of one, where nobody takes on what they owe."""
    try:
        alone = state.stats().skipped.get("*") == ALONE
    except NotAttachedError:  # before a first step of TensorFlow's
        alone = True
    try:
        saved = _saved_ranks(folder, name) if alone and strict else 0
    except CheckpointError:  # one rank keeps nothing, and so saves nothing
        saved = 0
    if saved:
        raise CheckpointError(
            f"{folder} has what {saved} ranks owe, and this job's only rank compresses nothing "
            "and would lose it",
            cure="Start two ranks or more, or pass strict=False to go on without it",
        )
    log.warning("TopKEF compresses nothing here, and takes on nothing from %s", folder)


def _whole_shards(folder: Path, name: str, framework: str) -> Iterator[dict[str, Any]]:
    """Those of one step that can be read."""
    try:
        saved = _saved_ranks(folder, name)
        _check_steps([_path(folder, name, each, saved) for each in range(saved)])
    except CheckpointError:
        return
    for each in range(saved):
        with suppress(CheckpointError):
            yield _read_shard(_path(folder, name, each, saved), each, saved, framework)


def _path(folder: Path, name: str, rank: int, ranks: int) -> Path:
    return folder / f"{name}-{rank:05}-of-{ranks:05}.safetensors"


def _read(
    folder: Path, name: str, state: State, own: Mapping[str, Any], *, strict: bool
) -> tuple[Path, dict[str, Any]]:
    """Where from, and this rank's state dict: as saved, or its part of what all ranks saved."""
    rank, ranks = state.place
    saved = _saved_ranks(folder, name)
    _check_steps([_path(folder, name, each, saved) for each in range(saved)])
    if saved == ranks:
        path = _path(folder, name, rank, ranks)
        contents = _read_shard(path, rank, ranks, state.framework)
        if own:
            with naming(path):
                parts.check_reduction(contents, state.reduction)
        if not own or owner_of(contents.get("owned")) == owner_of(own.get("owned")):
            return path, contents
    if not own:
        raise CheckpointError(
            f"{folder} was saved by {saved} ranks, this job has {ranks}, and before its first step "
            "it is not known what they will keep",
            cure=f"Load after the first step, or start {saved} ranks",
        )
    log.warning("TopKEF shares out what %d ranks saved in %s to %d", saved, folder, ranks)
    paths = [_path(folder, name, each, saved) for each in range(saved)]
    shards = (
        (path, _read_shard(path, each, saved, state.framework)) for each, path in enumerate(paths)
    )
    job = parts.Job(ranks, state.reduction, state.tensors, strict)
    return folder, parts.share_out(shards, saved, own, job, state.framework)


def _check_steps(paths: Sequence[Path]) -> None:
    """Refuse shards that were not saved together; others refuse one that cannot be read."""
    steps = {path.name: shard.peek(path).get("steps") for path in paths}
    known = {each for each in steps.values() if type(each) is int}
    if len(known) > 1:
        raise CheckpointError(
            f"{paths[0].parent} has shards of different steps: {steps}",
            cure="Load an older checkpoint, and give each one a folder of its own",
        )


def _saved_ranks(folder: Path, name: str) -> int:
    """How many ranks saved."""
    pattern = re.compile(rf"{re.escape(name)}-\d{{5}}-of-(\d{{5}})\.safetensors")
    counts = {int(match[1]) for file in _files(folder) if (match := pattern.fullmatch(file))}
    if len(counts) == 1:
        return counts.pop()
    found = f"shards of jobs with {sorted(counts)} ranks" if counts else "no shard"
    raise CheckpointError(
        f"{folder} has {found} by the name {name!r}",
        cure="Give each checkpoint a folder of its own, and the one that checkpoint.save wrote to",
    )


def _files(folder: Path) -> list[str]:
    try:
        return [file.name for file in folder.iterdir()]
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read, and no shard by any name in it: {error.strerror}",
            cure="Give the folder that checkpoint.save wrote to, where all ranks can read it",
        ) from error


def _read_shard(path: Path, rank: int, ranks: int, framework: str) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}",
            cure="Save on every rank, and load from a folder that holds the shards of all ranks",
        ) from error
    contents = shard.parse(data, framework, str(path))
    check_place(contents, str(path))
    if (contents["rank"], contents["ranks"]) != (rank, ranks):
        raise CheckpointError(
            f"{path} was saved by rank {contents['rank']} of {contents['ranks']}",
            cure="Undo its renaming: every rank has to get its own residuals back",
        )
    return contents


def _own(state: State) -> Mapping[str, Any]:
    """The optimizer's state dict; empty before a first step that makes it."""
    try:
        own = state.state_dict()
    except NotAttachedError:
        return {}
    return own if own.get("residuals") or "owned" in own else {}
