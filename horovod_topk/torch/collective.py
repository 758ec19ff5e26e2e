"""Horovod's collectives for PyTorch behind the core's interface."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from horovod_topk.core.exchange.agreement import gather_bytes, in_rows
from horovod_topk.core.exchange.meeting import wait_until
from horovod_topk.core.exchange.protocol import check_gathered, ordered_sum
from horovod_topk.core.plan.payload import check_counts
from horovod_topk.core.run.timing import StepTimer
from horovod_topk.core.state.state_dict import converted
from horovod_topk.ops.torch import TorchOps
from horovod_topk.process_sets import ProcessSetRanks

UNCHECKED = 1 << 19  # bytes: Horovod can count as many from each of 4,095 ranks
_PAUSE = 50e-6  # seconds between the first two polls of a running collective
_LONGER = 1.05  # and so much longer each time, so that a wait ends at most 5% late: fewer wake-ups
_LONGEST = 1e-3  # seconds


def rest_until_done(handle: int) -> None:
    """Sleep until a collective is done, without fetching its result.

    Horovod's own wait takes a whole core, which a background thread of this or another rank may
    need to run the collective: with more ranks than cores each message waits for a time slice.
    """
    pause = _PAUSE
    while not hvd.poll(handle):
        time.sleep(pause)
        pause = min(_LONGER * pause, _LONGEST)


def result_of(handle: int) -> Any:
    """Wait for a collective and return its result."""
    rest_until_done(handle)
    return hvd.synchronize(handle)


@dataclass(frozen=True)
class _Handle:
    """A running Horovod collective."""

    handle: int
    timer: StepTimer
    name: str = ""
    summed: int | None = None  # elements of each rank's part; None: they are not added

    def wait(self) -> Tensor:
        began, pause = time.perf_counter(), _PAUSE
        while not hvd.poll(self.handle):  # `rest_until_done` inlined, to save a call
            time.sleep(pause)
            pause = min(_LONGER * pause, _LONGEST)
        self.timer.last = time.perf_counter()
        self.timer.exposed += self.timer.last - began
        result: Any = hvd.synchronize(self.handle)
        received: Tensor = result[0] if isinstance(result, tuple) else result
        if self.summed is None:
            return received
        counts: list[int] = result[1].tolist()
        check_counts(counts, self.summed, self.name)
        total: Tensor = ordered_sum(received.view(len(counts), self.summed), len(counts))
        return total


class HorovodCollective(ProcessSetRanks):
    """`core.exchange.Collective` over a Horovod process set.

    Args:
        timer: counts the seconds that this process waits for collectives; None: nobody reads them.
    """

    horovod = hvd

    def __init__(self, process_set: hvd.ProcessSet, timer: StepTimer | None = None) -> None:
        super().__init__(process_set, timer or StepTimer())

    def allgather(self, payload: Tensor, name: str, counts: Sequence[int] | None = None) -> _Handle:
        """Start a named allgather of a uint8 tensor; does not block."""
        if payload.nbytes > UNCHECKED:
            check_gathered(payload.nbytes * self.size if counts is None else sum(counts), name)
        timer, process_set = self.timer, self._process_set
        timer.first = timer.first or time.perf_counter()  # `_start` inlined, to save a call
        return _Handle(hvd.allgather_async(payload, name=name, process_set=process_set), timer)

    def meet(self, data: bytes, name: str, *, patient: bool = False) -> list[bytes]:
        """`Meets.meet`: by an allgather."""
        array = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        handle = hvd.allgather_async(array, name=name, process_set=self._process_set)
        wait_until(lambda: bool(hvd.poll(handle)), name, self.rank, patient=patient)
        gathered: Tensor = hvd.synchronize(handle)
        return in_rows(bytes(gathered.tolist()), len(data), self.size, self.rank)

    def alltoall(self, payloads: Tensor, name: str) -> _Handle:
        """Start a named alltoall of equal stretches of a uint8 tensor; does not block."""
        equal = payloads.numel() // self.size
        splits = torch.full([self.size], equal, dtype=torch.int32, device="cpu")
        return self._start(name, hvd.alltoall_async, payloads, splits)

    def reduce_scatter(self, array: Tensor, counts: Sequence[int], name: str) -> _Handle:
        """Start a named alltoall whose parts `wait()` adds in rank order; does not block.

        Horovod's own reduce-scatter only supports equal parts.
        """
        splits = torch.tensor(counts, dtype=torch.int32, device="cpu")
        return self._start(name, hvd.alltoall_async, array, splits, summed=counts[self.rank])

    def allreduce(self, array: Tensor, name: str) -> _Handle:
        """Start a named allreduce in place; does not block."""
        return self._start(name, hvd.allreduce_async_, array, op=hvd.Sum)

    def _start(
        self, name: str, verb: Any, *sent: Tensor, summed: int | None = None, **options: Any
    ) -> _Handle:
        self.timer.first = self.timer.first or time.perf_counter()
        handle: int = verb(*sent, name=name, process_set=self._process_set, **options)
        return _Handle(handle, self.timer, name, summed)


class HorovodTalk:
    """`horovod_topk.elastic.Talk` among all of Horovod's ranks."""

    def gather(self, data: bytes, name: str) -> list[bytes]:
        """Gather the bytes of every rank, of equal length."""
        return gather_bytes(data, name, TorchOps(), HorovodCollective(hvd.global_process_set))

    def broadcast(self, state: Mapping[str, Any], root: int, name: str) -> Mapping[str, Any]:
        """The state dict of rank `root`; its arrays are on the host."""
        mine = converted(state, Tensor.cpu)
        received: Mapping[str, Any] = hvd.broadcast_object(mine, root, name=name)
        return received

    def average(self, array: Tensor, name: str) -> Tensor:
        """The mean of an array over all ranks."""
        mean: Tensor = result_of(hvd.allreduce_async(array, name=name, op=hvd.Average))
        return mean

    def beside(self, array: Tensor, other: Tensor) -> Tensor:
        """Copy an array to the device of another one."""
        return array.to(other.device)
