"""One rank's state dict as a file: its format, and the checks when it is read.

A shard is a safetensors file (https://github.com/huggingface/safetensors), which has no code.
Tensors are named `residuals/NAME`, `owned/NAME` for an owner's residuals, and `velocity/NAME` for
velocities of momentum correction. Its metadata has

    format   "horovod_topk"
    sha256   digest of the whole file with 64 zeros in its place: any changed bit is detected
    state    the state dict without its arrays, as JSON

`contents` checks what a digest cannot show.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from horovod_topk.checkpoint import contents
from horovod_topk.core.state.state_dict import RESIDUALS, parts_of
from horovod_topk.errors import CheckpointError, StateDictError

FORMAT = "horovod_topk"
_LONGEST_HEADER = 100_000_000  # bytes; the limit of safetensors
_UNKNOWN = "0" * 64
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, RecursionError)  # of bad headers
_DIGEST = re.compile(rb'"sha256":"([0-9a-f]{64})"')


def dump(state: Mapping[str, Any], framework: str) -> bytes:
    """Serialise a state dict to the bytes of a file."""
    arrays = {f"{RESIDUALS}/{name}": a for name, a in state[RESIDUALS].items()}
    facts = {**state, RESIDUALS: None}
    for part in parts_of(state):
        arrays |= {f"{part}/{name}": a for name, a in state[part][RESIDUALS].items()}
        facts[part] = {**state[part], RESIDUALS: None}
    metadata = {"format": FORMAT, "sha256": _UNKNOWN, "state": json.dumps(facts, sort_keys=True)}
    data: bytes = _safetensors(framework).save(arrays, metadata)
    match = _find_digest(data)
    assert match is not None  # it was just written
    digest = hashlib.sha256(data).hexdigest().encode()
    return data[: match.start(1)] + digest + data[match.end(1) :]


def make_folder(folder: Path) -> None:
    """Create a folder for files, unless it exists."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"the folder {folder} cannot be created: {error.strerror} ({error.filename})",
            cure="Give a folder, new or not, in which every rank may create files",
        ) from error


def write(path: Path, data: bytes, before: Path | None = None) -> None:
    """Write a file so that a crash leaves either the old or the new one.

    before: where to move the old file; None: it is replaced.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:  # readable as the user's umask allows
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if before is not None:
            path.replace(before)
        draft.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}",
            cure="Give a folder in which every rank may create files, on a disk with free space",
        ) from error


def parse(data: bytes, framework: str, where: str) -> dict[str, Any]:
    """Check a file's bytes, and return its state dict."""
    match = _find_digest(data)
    if match is None:
        raise CheckpointError(
            f"{where} is no shard of a horovod_topk checkpoint, or its beginning is damaged",
            cure="Give the folder that checkpoint.save wrote to, or an older checkpoint",
        )
    zeroed = data[: match.start(1)] + _UNKNOWN.encode() + data[match.end(1) :]
    if hashlib.sha256(zeroed).hexdigest().encode() != match[1]:
        raise CheckpointError(
            f"{where} is damaged or cut short: its {len(data)} bytes do not have the SHA-256 "
            "that it names",
            cure="Copy it again from where it was saved, or load an older checkpoint",
        )
    try:
        facts, tensors = _facts(data), _tensors(data)
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{where} is no shard of a horovod_topk checkpoint, whatever signed it",
            cure="Give the folder that checkpoint.save wrote to",
        ) from error
    contents.check(facts, tensors, where)
    library = _safetensors(framework)
    try:
        arrays = library.load(data)
    except Exception as error:  # safetensors has an error of its own, which is no ValueError
        raise CheckpointError(
            f"{where} is no shard as this version writes them: {error}",
            cure="Give the folder that checkpoint.save wrote to, or an older checkpoint",
        ) from error
    return _assemble(facts, arrays)


def peek(path: Path) -> dict[str, Any]:
    """The state dict without arrays of a file, unchecked; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            facts = _facts(size.to_bytes(8, "little") + file.read(min(size, _LONGEST_HEADER)))
    except _UNREADABLE:
        return {}
    return facts if isinstance(facts, dict) else {}


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add a path to the errors of the block, if they do not name it."""
    try:
        yield
    except (CheckpointError, StateDictError) as error:
        if path.name in error.problem:
            raise
        problem = f"{path}: {error.problem}"
        raise type(error)(problem, cure=error.cure, tensor=error.tensor) from error


def _find_digest(data: bytes) -> re.Match[bytes] | None:
    """Find the digest in the header."""
    return _DIGEST.search(data, 8, min(8 + int.from_bytes(data[:8], "little"), len(data)))


def _header(data: bytes) -> Any:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def _facts(data: bytes) -> Any:
    """The state dict without its arrays, from a file's header."""
    return json.loads(_header(data)["__metadata__"]["state"])


def _tensors(data: bytes) -> dict[str, Any]:
    """Dtype and shape of each array."""
    header = _header(data)
    return {
        name: {"dtype": each["dtype"], "shape": each["shape"]}
        for name, each in header.items()
        if name != "__metadata__"
    }


def _assemble(facts: dict[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    for part, into in ((RESIDUALS, facts), *((part, facts.get(part)) for part in parts_of(facts))):
        if into is not None:
            into[RESIDUALS] = contents.within(part, arrays)
    return facts


def _safetensors(framework: str) -> Any:
    """The safetensors functions for a framework's arrays."""
    try:
        return importlib.import_module(f"safetensors.{framework}")
    except ImportError as error:
        raise CheckpointError(
            "checkpoints need the package safetensors, which cannot be imported",
            cure="Run pip install safetensors",
        ) from error
