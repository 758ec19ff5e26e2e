"""Commits, restores and resizes the residuals of one optimizer in an elastic job."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import math
import os
import struct
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from horovod_topk.checkpoint import parts
from horovod_topk.core.control.schedule import Clock
from horovod_topk.core.exchange.agreement import mismatch
from horovod_topk.core.run.attached import Attached
from horovod_topk.core.run.stats import Stats
from horovod_topk.core.state.reshard import rescaling
from horovod_topk.elastic.rank_status import UNKNOWN, Membership, RankStatus
from horovod_topk.elastic.residual_store import ResidualStore
from horovod_topk.errors import CheckpointError, ConfigError, StateDictError

log = logging.getLogger("horovod_topk")

_LIVE: weakref.WeakSet[Manager] = weakref.WeakSet()

State = Attached[Any]

_COUNT = struct.Struct("<I")


def free_name(name: str | None) -> str:
    """A name for the next manager's collectives, from its optimizer's name or a number."""
    gc.collect()  # so that the count of managers is equal on all ranks
    return f"topkef.elastic.{name or len(_LIVE)}"


class Talk(Protocol):
    """Communication of all ranks when ranks have changed."""

    def gather(self, data: bytes, name: str) -> list[bytes]:
        """Gather the bytes of every rank, of equal length. A collective."""

    def broadcast(self, state: Mapping[str, Any], root: int, name: str) -> Mapping[str, Any]:
        """The state dict of rank `root`. A collective."""

    def average(self, array: Any, name: str) -> Any:
        """The mean of an array over all ranks. A collective."""

    def beside(self, array: Any, other: Any) -> Any:
        """Copy an array to the device of another one."""


@dataclass(frozen=True)
class _Commit:
    state: dict[str, Any]
    clock: Clock
    units: int
    pooled: bool
    absorbed: tuple[str, ...]
    lost: int
    lost_norm: float


class Manager:
    """Commits, restores and resizes the residuals of one `TopKEF`.

    Args:
        states: returns the states of its optimizers, oldest first: one, or none before the first
            step.
        commit_dir: folder for commits that other ranks can read; None: no files.
        forget: drops a state dict that was loaded before there was a state, on a rank that joins.
    """

    def __init__(
        self,
        states: Callable[[], Sequence[State]],
        talk: Talk,
        name: str,
        commit_dir: str | os.PathLike[str] | None = None,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._states, self._talk, self._name = states, talk, name
        self._forget = forget
        self._store: ResidualStore | None = None
        self.store_in(commit_dir)
        self._member, self._job = uuid.uuid4().bytes, bytes(16)
        self.units = 0  # number of ranks that the residual is scaled for; 0: not joined yet
        self.clock: Clock = Clock(0)  # at the last `reconcile`
        # `shared_state` that other ranks sent in the last `reconcile`, until this rank has a state.
        self.shared: Mapping[str, Any] = {}
        self._pooled = False
        self._absorbed: tuple[str, ...] = ()
        self._saved: _Commit | None = None
        self._lost, self._lost_norm = 0, 0.0
        _LIVE.add(self)

    def store_in(self, commit_dir: str | os.PathLike[str] | None) -> None:
        """Write later commits to a folder; None: write none."""
        folder = None if commit_dir is None else Path(commit_dir)
        self._store = None if folder is None else ResidualStore(folder, self._name)

    # Called by Horovod's elastic states.

    def save(self) -> None:
        """Commit: copy this rank's residuals, and write them to `commit_dir` if there is one.

        Local: it does not wait for other ranks.
        """
        state = self._state()
        self._saved = None if state is None else self._commit(state)
        if state is not None and self._saved is not None:
            self._write(self._saved, state.framework)

    def restore(self) -> None:
        """Go back to the last commit. Local. Files absorbed since then will be absorbed again."""
        state, saved = self._state(), self._saved
        if state is None:
            return
        if saved is None:  # no commit: residuals were zero
            state.forget()
            state.resume(self.clock, self.units)
            state.take_shared(self.shared)
            return
        own = state.state_dict()
        fits = own["shapes"] == saved.state["shapes"]
        state.load_state_dict(saved.state if fits else parts.fitting(saved.state, own))
        self.units, self._pooled, self._absorbed = saved.units, saved.pooled, saved.absorbed
        self._lost, self._lost_norm = saved.lost, saved.lost_norm
        state.resume(saved.clock, self.units)

    def reconcile(self) -> None:
        """Rescale residuals after ranks have changed. A collective: call it on every rank.

        A rank that joins, or that went back to another commit, gets the method's shared state.
        """
        said = self._talk.gather(self._status().pack(), f"{self._name}.reconcile")
        present = Membership([RankStatus.unpack(each) for each in said])
        if present.plans_differ:
            self._refuse_plans(present)
        eldest = present.eldest
        if eldest.units:
            self._job = eldest.job
            self._take_on(present)
            if not self.units:  # other ranks have the residuals that this one may have loaded
                self._forget()
                if (state := self._state()) is not None:
                    state.forget()
            self._share(present)
        else:
            self._job = eldest.member
        self.units, self._pooled, self.clock = present.ranks, False, eldest.clock
        if (state := self._state()) is not None:
            state.resume(eldest.clock, present.ranks)

    def hand_over(self) -> None:
        """Give every rank the mean residual, as some ranks are about to leave. A collective.

        So no residual is lost with ranks that leave. With `commit_dir`, every rank writes its file
        instead, and other ranks later take on the files of ranks that left.
        """
        state = self._state()
        if self._store is not None:
            if state is not None:
                self._write(current := self._commit(state), state.framework)
                self._replace(current)
            return
        kept = state.state_dict() if state is not None and self.units else None
        if self._have_equal_tensors(kept) and state is not None and kept is not None:
            kept["residuals"] = {
                name: self._talk.average(kept["residuals"][name], f"{self._name}.pool.{name}")
                for name in sorted(kept["residuals"])
            }
            state.load_state_dict(kept)
            self._pooled = True
            self._replace(self._commit(state))

    def _share(self, present: Membership) -> None:
        """Give every rank the method's shared state of the first rank that stayed."""
        state, (root, *_) = self._state(), present.old
        is_root = self._member == present.eldest.member
        mine = state.shared_state() if state is not None and is_root else {}
        self.shared = self._talk.broadcast(mine, root, f"{self._name}.shared")
        if state is not None:
            state.take_shared(self.shared)
            self.shared = {}

    def counted(self, stats: Stats) -> Stats:
        """Add the number and the norm of lost residuals to statistics."""
        return replace(stats, lost_ranks=self._lost, lost_norm=self._lost_norm)

    def _refuse_plans(self, present: Membership) -> NoReturn:
        """Raise an error with the rank and field of a plan that differs; nothing has changed."""
        state = self._state()
        plan = None if state is None else state.agreed
        fields = {} if plan is None else plan.fields()
        texts = self._gather_texts(json.dumps(fields).encode(), "plans")
        found = {rank: json.loads(text) for rank, text in enumerate(texts)}
        place = [each.member for each in present.statuses].index(self._member)
        raise mismatch({rank: each for rank, each in found.items() if each}, place)

    def _gather_texts(self, text: bytes, label: str) -> list[bytes]:
        """Gather every rank's text, padded with blanks. A collective."""
        sizes = self._talk.gather(_COUNT.pack(len(text)), f"{self._name}.{label}.size")
        longest = max(_COUNT.unpack(each)[0] for each in sizes)
        return self._talk.gather(text.ljust(longest), f"{self._name}.{label}")

    def _have_equal_tensors(self, kept: Mapping[str, Any] | None) -> bool:
        """Whether all ranks have residuals of the same tensors, which can be averaged."""
        shapes = {} if kept is None else kept["shapes"]
        mine = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).digest()
        alike = len(set(self._talk.gather(mine, f"{self._name}.pool"))) == 1
        if not alike:
            log.warning("TopKEF: ranks have residuals of different tensors, which are not averaged")
        return alike and bool(shapes)

    def _write(self, commit: _Commit, framework: str) -> None:
        """Write a commit to `commit_dir`, if there is one, after the first `reconcile`."""
        if self._store is not None and self.units:
            place = {"units": self.units, "clock": commit.clock, "absorbed": self._absorbed}
            self._store.write(self._job, self._member, {**commit.state, **place}, framework)

    def _replace(self, commit: _Commit) -> None:
        """Replace the last commit by another one of the same step."""
        if self._saved is not None and self._saved.clock == commit.clock:
            self._saved = commit

    def _state(self) -> State | None:
        if len(self._states()) > 1:
            gc.collect()  # optimizers are reference cycles: delete unreachable ones first
        states = self._states()
        if len(states) > 1:
            raise ConfigError(
                f"{len(states)} optimizers share one TopKEF in an elastic job",
                cure="Give each a TopKEF of its own, and pass all of these to the elastic state",
            )
        return states[0] if states and states[0].active else None

    def _commit(self, state: State) -> _Commit:
        place = self.units, self._pooled, self._absorbed
        return _Commit(state.state_dict(), state.clock, *place, self._lost, self._lost_norm)

    def _status(self) -> RankStatus:
        state = self._state()
        clock = Clock(0) if state is None else state.clock
        norm = 0.0 if state is None else state.stats().residual_norm
        known = self._member, self._job, self.units, clock, norm
        plan = None if state is None else state.agreed
        digest = UNKNOWN if plan is None else plan.digest
        return RankStatus(*known, self._lost, self._lost_norm, self._pooled, digest)

    def _take_on(self, present: Membership) -> None:
        """Rescale residuals and take on those of lost ranks; count those that cannot be found."""
        files = self._files_of_lost(present)
        taken = self._fit(present, files)
        if files:
            counts = self._talk.gather(_COUNT.pack(taken), f"{self._name}.taken")
            taken = sum(_COUNT.unpack(each)[0] for each in counts)
        lost, eldest = max(0, present.missing - taken) + len(present.astray), present.eldest
        self._lost = eldest.lost + lost
        self._lost_norm = math.hypot(eldest.lost_norm, math.sqrt(lost) * present.typical_norm)
        if lost:
            log.warning(
                "TopKEF lost residuals of %d of %d ranks (norm about %.3g); commit_dir= keeps them",
                lost,
                eldest.units,
                math.sqrt(lost) * present.typical_norm,
            )

    def _fit(self, present: Membership, files: Sequence[str]) -> int:
        """Rescale this rank's residual, add those of lost ranks, and return how many it added."""
        state = self._state()
        if state is None or not self.units:
            return 0
        factor = rescaling(state.residual_reduction, self.units, present.ranks)
        if self._pooled:  # the remaining ranks have a share of the residuals of ranks that left
            factor *= self.units / len(present.old)
        place = [present.statuses[rank].member for rank in present.old].index(self._member)
        if present.old[place] in present.astray:  # its commit is of another step than the model
            factor = 0.0
        kept = state.state_dict()
        inherited = self._read(files[place :: len(present.old)], kept["shapes"], state.framework)
        residuals = {name: e * factor for name, e in kept["residuals"].items()}
        for contents in inherited.values():
            share = rescaling(state.residual_reduction, contents["units"], present.ranks)
            for name, e in contents["residuals"].items():
                mine = residuals[name]
                residuals[name] = mine + share * self._talk.beside(e, mine)
        if inherited or factor != 1.0:
            state.load_state_dict({**kept, "residuals": residuals})
        for name, contents in inherited.items():  # so that these files are not added again
            self._absorbed = (*self._absorbed, name, *contents["absorbed"])
        return len(inherited)

    def _read(self, files: Sequence[str], shapes: Any, framework: str) -> dict[str, Any]:
        """Read the files that this rank takes on; log an error for each that cannot be used."""
        found = {}
        for name in files:
            assert self._store is not None  # files are found in the store only
            try:
                contents = self._store.read(self._job, name, framework)
                if contents["shapes"] != shapes:
                    raise StateDictError(
                        f"{name} is of other tensors", cure="Give each job a commit_dir of its own"
                    )
                found[name] = contents
            except (OSError, CheckpointError, StateDictError) as error:
                log.error("TopKEF cannot take on the residuals of a lost rank: %s", error)
        return found

    def _files_of_lost(self, present: Membership) -> list[str]:
        """Files of lost ranks to take on, as found by the first rank that stayed."""
        if self._store is None:
            return []
        text = b""
        if self._member == present.eldest.member:
            committed = present.eldest.clock[0]
            living = {each.member for each in present.statuses}
            text = json.dumps(self._store.of_lost(self._job, living, committed)).encode()
        texts = self._gather_texts(text, "files")
        files: list[str] = json.loads(texts[present.old[0]])
        return files
