"""Checkpoints of residuals, one file for each rank, beside those of the model and optimizer.

    from horovod_topk import checkpoint

    checkpoint.save(folder, TopKEF.of(optimizer))     # on every rank, after a step
    checkpoint.load(folder, TopKEF.of(optimizer))     # on every rank, before the first

In TensorFlow `TopKEF.of` works after the first step only: pass `load` the `TopKEF(...)` instance.

Residuals hold the parts of gradients that were not sent yet. A run that resumes without them loses
these parts. A run that resumes with them is bitwise equal to a run that never stopped. Use a new
folder for each checkpoint, which all ranks can read.

`save` is local: it waits for no other rank. A checkpoint exists when the files of all ranks do, and
`load` takes the newest one that is whole. A rank that replaces its file keeps the one before, so
that the last checkpoint stays whole until the next one is.
"""

from __future__ import annotations

import logging
import os
import re
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from horovod_topk.checkpoint import parts, shard
from horovod_topk.checkpoint.contents import check_place, is_count
from horovod_topk.checkpoint.shard import naming
from horovod_topk.core.exchange.membership import ALONE
from horovod_topk.core.run.attached import Attached
from horovod_topk.core.run.base_compressor import BaseCompressor
from horovod_topk.core.state.state_dict import COMMITTED, owner_of, renamed
from horovod_topk.errors import CheckpointError, NotAttachedError, StateDictError

PATIENCE = 3.0  # seconds that `load` waits for the files of other ranks

State = Attached[Any] | BaseCompressor

log = logging.getLogger("horovod_topk")

__all__ = ["load", "save"]

# For each file: the state of this process that saved it last, and after how many steps.
_written: dict[Path, tuple[weakref.ref[Any], int]] = {}


def save(folder: str | os.PathLike[str], state: State, *, name: str = "topkef") -> Path | None:
    """Write this rank's residuals to a file. Call it on every rank, between two steps.

    The file is written completely or not at all. If there is a file of the same name and of another
    step, it is kept under another name until the next save: should another rank fail to write its
    file, `load` goes back to these.

    Args:
        folder: the folder of this checkpoint; created if it is missing.
        state: `TopKEF.of(optimizer)`, or a `TopKEF` instance that one optimizer uses.
        name: first part of the file's name; different for each optimizer of a job.

    Returns:
        The file's path; None if nothing is compressed, so that there are no residuals.

    Raises:
        CheckpointError: another optimizer of this job has saved at the same step under this name,
            the name cannot be part of a file's name, or the file cannot be written.
    """
    _check_name(name)
    _check_is_state(state)
    name += state.part
    state = state.behind if isinstance(state, BaseCompressor) else state
    contents = state.state_dict()
    if not contents:
        log.info("TopKEF keeps no residuals here: nothing to save in %s", folder)
        return None
    rank, ranks = state.rank_and_ranks
    path = _path(Path(folder), name, rank, ranks)
    _check_not_anothers(path, state)
    shard.make_folder(path.parent)
    place = {"rank": rank, "ranks": ranks, "steps": state.steps}
    facts = {**place, "reduction": state.reduction, "tensors": state.tensors}
    known = shard.peek(path).get("steps")
    replaces = type(known) is int and known != state.steps
    before = path.with_suffix(f".before{path.suffix}") if replaces else None
    shard.write(path, shard.dump({**contents, **facts}, state.framework), before)
    _note_written(path, state)
    return path


def load(
    folder: str | os.PathLike[str], state: State, *, name: str = "topkef", strict: bool = True
) -> None:
    """Load the residuals that `save` wrote. Call it on every rank, before the first step.

    The number of ranks and the exchange may differ from those of the saved job. Every rank then
    reads the files of all ranks and takes its share of their residuals, so that no gradient is lost
    (`core.state.reshard`); only the velocities of momentum correction start at zero.

    Files of another run with the same step, names and shapes are not detected.

    Args:
        folder: the folder that was passed to `save`, or the folder of such folders. The newest
            checkpoint that has the files of all ranks is loaded; a warning in the log names a newer
            one that has not.
        state: as for `save`, of an optimizer with the same parameters. In TensorFlow before the
            first step: the `TopKEF` instance.
        name: the name that was passed to `save`.
        strict: raise an error if something does not fit or the values of a residual cannot be
            applied. False: log a warning instead, and start
            each tensor whose saved residual does not fit at zero. If this rank's file is missing,
            damaged or another rank's, or has a NaN, all its residuals start at zero, and only the
            count of committed steps and the ratio are read, from any file that is complete. In
            TensorFlow, False can be passed after the first step only.

    Raises:
        CheckpointError: no checkpoint has the files of all ranks, or a file is damaged, or of
            another rank, step or version; or the
            job now has one rank, which compresses nothing and would lose the residuals. Nothing
            has changed.
        StateDictError: residuals do not fit the optimizer; nothing has changed. In TensorFlow
            before the first step, it is raised by the first step.
    """
    _check_name(name)
    _check_is_state(state)
    name += state.part
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


def _check_is_state(state: object) -> None:
    if isinstance(state, BaseCompressor):
        return
    is_class, kind = isinstance(state, type), type(state).__name__
    if is_class or not (hasattr(state, "load_state_dict") and hasattr(state, "framework")):
        found = f"the class {state.__name__}" if isinstance(state, type) else f"a {kind}"
        raise CheckpointError(
            f"{found} is no state of a compressor",
            cure="Pass TopKEF.of(optimizer), under DDP TopKEF.of(model)",
        )


def _start_at_zero(folder: Path, name: str, state: State) -> None:
    """Set all residuals to zero, and take the step count of any readable file."""
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
    """Note that a state wrote a file, and forget its files of other steps."""
    for known, (saved, steps) in list(_written.items()):
        owner = saved()
        if owner is None or (owner is state and steps != state.steps):
            del _written[known]
    _written[path.resolve()] = weakref.ref(state), state.steps


def _check_nothing_is_lost(folder: Path, name: str, state: State, *, strict: bool) -> None:
    """Refuse a checkpoint of several ranks in a job of one rank, which has no residuals."""
    try:
        alone = state.stats().skipped.get("*") == ALONE
    except NotAttachedError:  # before the first step in TensorFlow
        alone = True
    try:
        saved = len(_newest(folder, name)) if alone and strict else 0
    except CheckpointError:  # a job of one rank saves no files
        saved = 0
    if saved:
        raise CheckpointError(
            f"{folder} has the residuals of {saved} ranks, and this job's only rank compresses "
            "nothing and would lose them",
            cure="Start two ranks or more, or pass strict=False to go on without it",
        )
    log.warning("TopKEF compresses nothing here, and takes on nothing from %s", folder)


def _whole_shards(folder: Path, name: str, framework: str) -> Iterator[dict[str, Any]]:
    """The contents of all readable files of a checkpoint, if all are of one step."""
    try:
        paths = _newest(folder, name, strict=False)
    except CheckpointError:
        return
    for each, path in enumerate(paths):
        with suppress(CheckpointError):
            yield _read_shard(path, each, len(paths), framework)


def _path(folder: Path, name: str, rank: int, ranks: int) -> Path:
    return folder / f"{name}-{rank:05}-of-{ranks:05}.safetensors"


def _read(
    folder: Path, name: str, state: State, own: Mapping[str, Any], *, strict: bool
) -> tuple[Path, dict[str, Any]]:
    """The path, and this rank's state dict: its own, or its share of all ranks' residuals."""
    rank, ranks = state.rank_and_ranks
    paths = _newest(folder, name, strict=strict)
    saved, folder = len(paths), paths[0].parent
    if saved == ranks:
        path = paths[rank]
        contents = renamed(_read_shard(path, rank, ranks, state.framework), own)
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
    shards = (
        (path, renamed(_read_shard(path, each, saved, state.framework), own))
        for each, path in enumerate(paths)
    )
    job = parts.Job(ranks, state.reduction, state.tensors, strict)
    return folder, parts.share_out(shards, saved, own, job, state.framework)


def _newest(folder: Path, name: str, *, strict: bool = True) -> list[Path]:
    """Files of the newest checkpoint that has those of all ranks, in rank order.

    strict: False: if no checkpoint is whole, the only one, with files that are missing.
    """
    try:
        _wait_for_all(folder, name)
        return _newest_in(folder, name, strict=strict)[1]
    except CheckpointError:
        within = list[tuple[int, list[Path]]]()
        for each in (
            sorted(folder.iterdir()) if folder.is_dir() and not _found(folder, name) else ()
        ):
            with suppress(CheckpointError):
                within.append(_newest_in(each, name, strict=True))
        if not within:
            raise
        steps, paths = max(within, key=lambda each: each[0])
        log.warning("TopKEF loads %s, of step %d, the newest whole one", paths[0].parent, steps)
        return paths


def _wait_for_all(folder: Path, name: str) -> None:
    """Wait for files that other ranks still write, or that a shared folder does not show yet."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        found = _found(folder, name)
        ranks, steps = max(found, key=lambda key: key[1], default=(0, 0))
        here = {*found.get((ranks, steps), ()), *found.get((ranks, -1), ())}
        if len(here) == ranks:
            return
        time.sleep(PATIENCE / 30)


def _newest_in(folder: Path, name: str, *, strict: bool) -> tuple[int, list[Path]]:
    """Step and files of the newest checkpoint in one folder; see `_newest`."""
    found = _found(folder, name)
    unreadable = {ranks: each for (ranks, steps), each in found.items() if steps < 0}
    known = {key: unreadable.get(key[0], {}) | each for key, each in found.items()}
    whole = {steps: each for (ranks, steps), each in sorted(known.items()) if len(each) == ranks}
    newest = max((steps for _, steps in known), default=-1)
    if whole:
        steps = max(whole)
        if steps < newest:
            log.warning(
                "TopKEF goes back to step %d in %s: not all ranks have saved step %d. Load the "
                "model and the optimizer of the same step",
                steps,
                folder,
                newest,
            )
        return steps, [whole[steps][rank] for rank in sorted(whole[steps])]
    steps_of = {path.name: steps for (_, steps), each in known.items() for path in each.values()}
    counts = sorted({ranks for ranks, _ in known})
    if len(counts) != 1:
        what = f"shards of jobs with {counts} ranks" if counts else "no shard"
        raise CheckpointError(
            f"{folder} has {what} by the name {name!r}",
            cure="Give each checkpoint a folder of its own, and the one that checkpoint.save wrote "
            "to",
        )
    if len({steps for _, steps in known if steps >= 0}) > 1:
        raise CheckpointError(
            f"{folder} has shards of different steps: {steps_of}",
            cure="Load an older checkpoint, and give each one a folder of its own",
        )
    (ranks,), each = counts, known[counts[0], newest]
    paths = [each.get(rank, _path(folder, name, rank, ranks)) for rank in range(ranks)]
    if strict:
        missing = ", ".join(paths[rank].name for rank in range(ranks) if rank not in each)
        raise CheckpointError(
            f"{folder} is no whole checkpoint: {missing} cannot be read: No such file",
            cure="Save on every rank, and load from a folder that holds the shards of all ranks",
        )
    return newest, paths


def _found(folder: Path, name: str) -> dict[tuple[int, int], dict[int, Path]]:
    """Files by (number of ranks, step) and rank; the step is -1 for files that are unreadable."""
    pattern = re.compile(rf"{re.escape(name)}-(\d{{5}})-of-(\d{{5}})(\.before)?\.safetensors")
    found: dict[tuple[int, int], dict[int, Path]] = {}
    for file in sorted(_files(folder)):
        if match := pattern.fullmatch(file):
            path, place = folder / file, {"rank": int(match[1]), "ranks": int(match[2])}
            facts = shard.peek(path)
            steps = facts.get("steps")
            if type(steps) is int:
                own = {key: facts[key] for key in place if is_count(facts.get(key))}
                _check_not_renamed(path, place | own, place)
            elif match[3]:
                continue
            else:
                steps = -1
            found.setdefault((place["ranks"], steps), {})[place["rank"]] = path
    return found


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
    _check_not_renamed(path, contents, {"rank": rank, "ranks": ranks})
    return contents


def _check_not_renamed(path: Path, facts: Mapping[str, Any], place: Mapping[str, int]) -> None:
    if any(facts[key] != known for key, known in place.items()):
        raise CheckpointError(
            f"{path} was saved by rank {facts['rank']} of {facts['ranks']}",
            cure="Undo its renaming: every rank has to get its own residuals back",
        )


def _own(state: State) -> Mapping[str, Any]:
    """The optimizer's state dict; empty before the first step that creates it."""
    try:
        own = state.state_dict()
    except NotAttachedError:
        return {}
    return own if own.get("residuals") or "owned" in own else {}
