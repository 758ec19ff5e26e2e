"""The collectives of torch.distributed as the core wants them: Gloo, NCCL and MPI.

`torch.distributed` pairs the collectives of a group by the order in which each rank starts them,
and knows no names. Ranks start theirs in one order, which follows from the order in which
DistributedDataParallel hands over its buckets; names are labels in the profiler's trace.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.profiler import record_function

from horovod_topk.core.nodes import Location
from horovod_topk.core.timing import StepTimer

# The same collective, by its name since PyTorch 2.13 or by the one before.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class _Pending:
    """A collective under way, and what to make of the memory that it fills."""

    work: Any  # dist.Work
    received: Tensor
    sent: Tensor  # has to live as long as the collective
    timer: StepTimer
    finish: Callable[[Tensor], Tensor] = field(default=lambda received: received)

    def wait(self) -> Tensor:
        began = time.perf_counter()
        self.work.wait()
        self.timer.last = time.perf_counter()
        self.timer.exposed += self.timer.last - began
        return self.finish(self.received)


class GroupCollective:
    """`horovod_topk.core.exchange.Collective` over a process group.

    Args:
        group: the process group.
        timer: counts the seconds in which it is waited for; None: nobody reads them. With NCCL it
            is the device that waits, and these seconds are none.
    """

    def __init__(self, group: dist.ProcessGroup, timer: StepTimer | None = None) -> None:
        self._group, self.timer = group, timer or StepTimer()
        self._ranks: list[int] = dist.get_process_group_ranks(group)  # in the default group
        backends = dist.get_backend_config(group).split(",")  # cpu:gloo,cuda:nccl
        self._devices = {each.split(":")[0] for each in backends}

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
        rank = dist.get_rank()
        local = int(os.environ.get("LOCAL_RANK", rank))
        return Location(socket.gethostname(), local, rank - local)

    def allgather(
        self, payload: Tensor, name: str, counts: Sequence[int] | None = None
    ) -> _Pending:
        """Start an allgather of a uint8 tensor; does not block. Shorter ones travel padded."""
        largest = payload.numel() if counts is None else max(counts)
        sent = self._placed(payload)
        if sent.numel() < largest:
            sent = torch.cat([sent, sent.new_zeros(largest - sent.numel())])
        received = sent.new_empty(self.size * largest)
        self.timer.first = self.timer.first or time.perf_counter()
        with record_function(name):
            work = _GATHER(received, sent, self._group, async_op=True)

        def finish(received: Tensor) -> Tensor:
            if counts is not None:
                rows = received.view(self.size, largest)
                received = torch.cat([row[:n] for row, n in zip(rows, counts, strict=True)])
            return received.to(payload.device)

        return _Pending(work, received, sent, self.timer, finish)

    def alltoall(self, payloads: Tensor, name: str) -> _Pending:
        """Start an alltoall of equal stretches of a uint8 tensor; does not block."""
        received = torch.empty_like(payloads)
        self.timer.first = self.timer.first or time.perf_counter()
        with record_function(name):
            work = dist.all_to_all_single(received, payloads, group=self._group, async_op=True)
        return _Pending(work, received, payloads, self.timer)

    def reduce_scatter(self, array: Tensor, counts: Sequence[int], name: str) -> _Pending:
        """Start an alltoall whose parts are added in rank order when it is waited for.

        The order in which a reduce-scatter of torch.distributed adds is the library's own.
        """
        count = counts[self.rank]
        received = array.new_empty(self.size * count)
        splits = [count] * self.size, list(counts)
        self.timer.first = self.timer.first or time.perf_counter()
        with record_function(name):
            work = dist.all_to_all_single(
                received, array, *splits, group=self._group, async_op=True
            )

        def add(received: Tensor) -> Tensor:
            rows = received.view(self.size, count)
            for other in rows[1:]:
                rows[0].add_(other)
            return rows[0]

        return _Pending(work, received, array, self.timer, add)

    def allreduce(self, array: Tensor, name: str) -> _Pending:
        """Start an allreduce in place; does not block."""
        self.timer.first = self.timer.first or time.perf_counter()
        with record_function(name):
            work = dist.all_reduce(array, group=self._group, async_op=True)
        return _Pending(work, array, array, self.timer)

    def can_split(self, groups: Sequence[Sequence[int]]) -> bool:
        """Whether process groups can be made: not by some of the ranks alone with MPI."""
        return self._is_all or "mpi" not in dist.get_backend(self._group)

    def split(self, groups: Sequence[Sequence[int]]) -> list[GroupCollective | None]:
        """Collectives over new process groups of the same backend."""
        backend, made = dist.get_backend(self._group), list[GroupCollective | None]()
        for ranks in ([self._ranks[rank] for rank in group] for group in groups):
            if dist.get_rank() not in ranks and not self._is_all:
                made.append(None)  # nobody outside of a group of some ranks is asked
                continue
            group = dist.new_group(
                ranks, backend=backend, use_local_synchronization=not self._is_all
            )
            is_member = dist.get_rank() in ranks
            made.append(GroupCollective(group, self.timer) if is_member else None)
        return made

    @property
    def _is_all(self) -> bool:
        """Whether these are all ranks of the job, which can make groups together."""
        return self.size == dist.get_world_size()

    def _placed(self, array: Tensor) -> Tensor:
        """The array where the backend can send it: what lies on the host may have to move."""
        if array.device.type in self._devices:
            return array
        return array.to(torch.accelerator.current_accelerator())
