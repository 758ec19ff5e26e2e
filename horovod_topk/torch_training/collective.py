"""Collectives of torch.distributed behind the core's interface: Gloo, NCCL and MPI.

`torch.distributed` matches the collectives of a group by the order in which each rank starts them,
and has no names. All ranks start them in the same order, that of DistributedDataParallel's buckets;
names are labels in the profiler's trace.

Meetings take no collective, but the store that ranks have found each other with: ranks that do not
come run other collectives, which would be taken for it. A rank that waits in a collective for long
looks whether others meet without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    _get_default_timeout,
    _get_process_group_store,
    _new_process_group_helper,
    _world,
)
from torch.profiler import record_function

from horovod_topk.core.exchange.agreement import in_rows
from horovod_topk.core.exchange.meeting import CURE, wait_until
from horovod_topk.core.exchange.protocol import ordered_sum
from horovod_topk.core.plan.nodes import Location, here
from horovod_topk.core.run.timing import StepTimer
from horovod_topk.errors import PlanMismatchError

# all_gather_single is the name since PyTorch 2.13 of all_gather_into_tensor.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_CAME = b"\0"  # in what a rank posts at a meeting: before and after the meeting's name
_PATIENCE = timedelta(seconds=2)  # between two looks for a meeting
# Number of meetings so far.
_MET = weakref.WeakKeyDictionary[dist.ProcessGroup, int]()


@dataclass(frozen=True)
class _Pending:
    """A started collective, and how to finish the memory that it fills."""

    work: Any  # dist.Work
    sent: Tensor  # kept alive until the collective is done
    received: Tensor
    timer: StepTimer
    meeting: Meeting | None  # None: the host does not wait, or cannot meet
    name: str
    finish: Callable[[Tensor], Tensor] | None = None

    def wait(self) -> Tensor:
        began = time.perf_counter()
        if self.meeting is None:
            self.work.wait()
        else:
            self.meeting.wait_for(self.work, self.name)
        if self.received.is_cuda:  # allocated on a stream that could reuse the memory too early
            self.received.record_stream(torch.cuda.current_stream(self.received.device))
        self.timer.last = time.perf_counter()
        self.timer.exposed += self.timer.last - began
        return self.received if self.finish is None else self.finish(self.received)


class GroupCollective:
    """`core.exchange.Collective` over a process group.

    Args:
        timer: counts the seconds that this process waits for collectives; None: nobody reads
            them. With NCCL the device waits, and the count stays near 0.
        within: the meetings of the process group that this one is a part of; None: of no other.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timer: StepTimer | None = None,
        within: Meeting | None = None,
    ) -> None:
        self._group, self.timer = group, timer or StepTimer()
        self._ranks: list[int] = dist.get_process_group_ranks(group)  # in the default group
        backends = dist.get_backend_config(group).split(",")  # cpu:gloo,cuda:nccl
        self._devices = {each.split(":")[0] for each in backends}
        has_store = _get_process_group_store(group) is not None  # MPI has none
        self._meeting = within or (Meeting(group) if has_store else None)

    @property
    def on_host(self) -> bool:
        """Whether the process group has a backend for arrays in the host's memory."""
        return "cpu" in self._devices

    @property
    def rank(self) -> int:
        """Rank within the process group."""
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        """Ranks in the process group."""
        return len(self._ranks)

    @property
    def location(self) -> Location:
        """Where this rank runs, as torchrun numbers local ranks."""
        return here(dist.get_rank(), int(os.environ.get("LOCAL_RANK", dist.get_rank())))

    in_order = True  # `Meets.in_order`

    def meet(self, data: bytes, name: str, *, patient: bool = False) -> list[bytes]:
        """`Meets.meet`."""
        if self._meeting is not None:
            return self._meeting.meet(data, name, patient=patient)
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = self.allgather(sent, name).wait()
        return in_rows(bytes(gathered.tolist()), len(data), self.size, self.rank)

    def allgather(
        self, payload: Tensor, name: str, counts: Sequence[int] | None = None
    ) -> _Pending:
        """Start an allgather of a uint8 tensor; does not block. Shorter payloads are padded."""
        sent, largest = payload, payload.numel() if counts is None else max(counts)
        if payload.device.type not in self._devices:  # a host tensor over NCCL, as in an agreement
            sent = payload.to(torch.accelerator.current_accelerator())
        if sent.numel() < largest:
            sent = torch.cat([sent, sent.new_zeros(largest - sent.numel())])

        def finish(received: Tensor) -> Tensor:
            received = received.to(payload.device)
            if counts is None:
                return received
            rows = received.view(self.size, largest)
            return torch.cat([row[:n] for row, n in zip(rows, counts, strict=True)])

        return self._start(name, _GATHER, sent, self.size * largest, finish)

    def alltoall(self, payloads: Tensor, name: str) -> _Pending:
        """Start an alltoall of equal stretches of a uint8 tensor; does not block."""
        return self._start(name, dist.all_to_all_single, payloads, payloads.numel())

    def reduce_scatter(self, array: Tensor, counts: Sequence[int], name: str) -> _Pending:
        """Start an alltoall whose parts `wait()` adds in rank order."""
        count, verb = counts[self.rank], dist.all_to_all_single
        splits = {"output_split_sizes": [count] * self.size, "input_split_sizes": list(counts)}

        def add(received: Tensor) -> Tensor:
            total: Tensor = ordered_sum(received.view(self.size, count), self.size)
            return total

        return self._start(name, verb, array, self.size * count, add, **splits)

    def allreduce(self, array: Tensor, name: str) -> _Pending:
        """Start an allreduce in place; does not block."""
        return self._pending(name, array, array, partial(dist.all_reduce, array))

    def can_split(self, groups: Sequence[Sequence[int]]) -> bool:
        """Whether these process groups can be made; MPI needs all ranks of the job to take part."""
        return self._is_all or "mpi" not in dist.get_backend(self._group)

    def split(self, groups: Sequence[Sequence[int]]) -> list[GroupCollective | None]:
        """Make new process groups of the same backend, and a collective for each."""
        backend, made = dist.get_backend(self._group), list[GroupCollective | None]()
        name = "" if self._is_all else self._new_name()
        for number, ranks in enumerate([self._ranks[rank] for rank in group] for group in groups):
            part, is_member = cast(Any, None), dist.get_rank() in ranks
            if self._is_all:
                part = dist.new_group(ranks, backend=backend)
            elif is_member:
                part = _new_group(ranks, backend, f"{name}_{number}")
            made.append(GroupCollective(part, self.timer, self._meeting) if is_member else None)
        return made

    def _new_name(self) -> str:
        """Agree on a name that no process group of this job has had. A collective."""
        rows = self.meet(os.urandom(8), "topkef.names")
        return f"horovod_topk_{hashlib.sha256(b''.join(rows)).hexdigest()[:16]}"

    @property
    def _is_all(self) -> bool:
        """Whether the group has all ranks of the job, so that all can call new_group together."""
        return self.size == dist.get_world_size()

    def _start(
        self,
        name: str,
        verb: Callable[..., Any],
        sent: Tensor,
        count: int,
        finish: Callable[[Tensor], Tensor] | None = None,
        **options: Any,
    ) -> _Pending:
        """Start a collective that fills `count` elements of new memory; does not block."""
        received = sent.new_empty(count)
        start = partial(verb, received, sent, **options)
        return self._pending(name, sent, received, start, finish)

    def _pending(
        self,
        name: str,
        sent: Tensor,
        received: Tensor,
        start: Callable[..., Any],
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> _Pending:
        self.timer.first = self.timer.first or time.perf_counter()
        with record_function(name):
            work = start(group=self._group, async_op=True)
        watched = self._meeting if sent.device.type == "cpu" else None
        return _Pending(work, sent, received, self.timer, watched, name, finish)


def _new_group(ranks: Sequence[int], backend: str, name: str) -> Any:
    """Make a process group of this name. Only its members call this.

    With `use_local_synchronization`, `new_group` derives the name from the number of process groups
    that the calling rank is in. Members that are in different numbers of groups then wait for each
    other under different names for ever: https://github.com/pytorch/pytorch/issues/173608.
    """
    kind, everyone = Backend(backend), cast(Any, dist.group.WORLD)
    made, _ = _new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        kind,
        _get_process_group_store(everyone),
        cast(Any, name),
        timeout=_get_default_timeout(kind),
    )
    _world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


class Meeting:
    """Meetings of one process group; see `core.exchange.meeting.Meets`.

    A process group may have the name of a destroyed one, and with it the keys in the store. So the
    last rank to leave a meeting deletes what all ranks have posted.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        self._ranks = range(dist.get_world_size(group))

    def meet(self, data: bytes, name: str, *, patient: bool = False) -> list[bytes]:
        """`Meets.meet`."""
        self._post(_CAME + name.encode() + _CAME + data)
        wait_until(lambda: not self._missing(), name, self._rank, self._missing, patient=patient)
        said = list(map(self._said, self._ranks))
        self._leave()
        elsewhere = [rank for rank in self._ranks if not said[rank].startswith(_CAME)]
        if elsewhere:
            came = [rank for rank in self._ranks if rank not in elsewhere]
            raise _parted(came, elsewhere[0], said[elsewhere[0]].decode())
        rows = [each[1:].split(_CAME, 1) for each in said]
        other = next((rank for rank, (own, _) in enumerate(rows) if own != rows[0][0]), None)
        if other is not None:
            raise PlanMismatchError(
                f"rank 0 meets the others in {rows[0][0].decode()!r}, rank {other} in "
                f"{rows[other][0].decode()!r}",
                cure="Do the same on all ranks, and with several optimizers in the same order",
            )
        rest = b"".join(own for _, own in rows)
        return in_rows(rest, len(data), len(said), self._rank)

    def wait_for(self, work: Any, name: str) -> None:
        """Wait for a collective, a `dist.Work` of this name.

        Raises:
            PlanMismatchError: other ranks meet instead of taking part.
        """
        while True:
            try:
                work.wait(_PATIENCE)
                return
            except RuntimeError:  # it has failed, or waits for other ranks
                if work.is_completed():
                    raise
            missing = self._missing()
            here = [rank for rank in self._ranks if rank not in missing]
            came = [rank for rank in here if self._said(rank).startswith(_CAME)]
            if came:
                self._post(name.encode())
                self._leave()
                raise _parted(came, self._rank, name)

    @property
    def _store(self) -> Any:
        return _get_process_group_store(self._group)

    @property
    def _met(self) -> int:
        return _MET.get(self._group, 0)

    def _missing(self) -> list[int]:
        """Return the ranks that are missing from the present meeting."""
        return [rank for rank in self._ranks if not self._store.check([self._key(rank)])]

    def _said(self, rank: int) -> bytes:
        """Return what a rank has posted for the present meeting; it has to have posted."""
        return bytes(self._store.get(self._key(rank)))

    def _post(self, data: bytes) -> None:
        self._store.set(self._key(self._rank), data)

    def _leave(self) -> None:
        """End the present meeting for this rank, which has posted and read all that it needs."""
        left = self._key("left")
        if self._store.add(left, 1) == len(self._ranks):
            with contextlib.suppress(RuntimeError):  # a few kinds of stores cannot delete
                for key in (*map(self._key, self._ranks), left):
                    self._store.delete_key(key)
        _MET[self._group] = self._met + 1

    def _key(self, of: int | str) -> str:
        return f"horovod_topk/{self._met}/{of}"


def _parted(came: Sequence[int], rank: int, name: str) -> PlanMismatchError:
    """The error where some ranks meet, and another one waits for a collective."""
    return PlanMismatchError(
        f"rank {', '.join(map(str, came))} has loaded or reset a state, called set_ratio(), "
        f"begin() or synchronize(), or made another number of steps, alone: rank {rank} has not, "
        f"and waits for the payloads of {name!r}",
        cure=CURE,
    )
