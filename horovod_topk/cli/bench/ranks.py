"""The ranks that run `bench`: those of horovodrun, or those of torchrun, which need no Horovod."""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence

import torch
from torch import distributed as dist

from horovod_topk.cli.bench.nic import address

SETTLE = 0.2  # seconds for threads of Gloo to end
TCPStore = dist.TCPStore  # type: ignore[attr-defined]  # public, but not declared


class HorovodRanks:
    """The ranks that horovodrun or mpirun has started; Horovod is initialised."""

    def __init__(self) -> None:
        self._hvd = hvd = importlib.import_module("horovod.torch")
        self._collective = importlib.import_module("horovod_topk.torch.collective")
        self.rank, self.size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self.hosts = hvd.cross_size()  # hosts with a local rank 0, which is all of them

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Gather equally many values of each rank. Sleeps while it waits, as all ranks share cores.

        In `hvd.barrier()` a waiting rank occupies a whole core. With more ranks than cores, ranks
        that have ended their step would slow down the others.
        """
        mine = torch.tensor([values], dtype=torch.float64)
        handle = self._hvd.allgather_async(mine, name=f"bench.gather.{len(values)}")
        found: list[list[float]] = self._collective.result_of(handle).tolist()
        return found

    @contextlib.contextmanager
    def process_group(self, interface: str | None) -> Iterator[None]:
        """torch's process group of all ranks, over Gloo; rank 0 runs a store on a free port.

        interface: the network card of the ranks; it has to be known.
        """
        if interface is None:
            raise ValueError(
                "which network card ranks use is not known: horovodrun has named none. "
                "Pass --interface, such as --interface eth0"
            )
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        store, place = None, None
        if self.rank == 0:
            host = address(interface)
            store = TCPStore(host, 0, self.size, is_master=True, wait_for_workers=False)
            place = host, store.port
        host, port = self._hvd.broadcast_object(place, root_rank=0, name="bench.store")
        if store is None:
            store = TCPStore(host, port, self.size, is_master=False)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)
        yield
        barrier(self)  # a rank that ends earlier would break connections, and rank 0 the store
        time.sleep(SETTLE)
        dist.destroy_process_group()
        barrier(self)


class TorchRanks:
    """The ranks that torchrun has started, over Gloo."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.hosts = int(os.environ.get("GROUP_WORLD_SIZE", 1))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Gather equally many values of each rank."""
        mine = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine)
        return [each.tolist() for each in found]

    @contextlib.contextmanager
    def process_group(self, interface: str | None) -> Iterator[None]:
        """torch's process group, which exists, and is left at the end.

        Threads of PyTorch 2.13's Gloo drop the tensors of the last collective after it has ended. A
        process that ends meanwhile aborts.
        """
        yield
        barrier(self)
        time.sleep(SETTLE)
        dist.destroy_process_group()


Ranks = HorovodRanks | TorchRanks


def barrier(ranks: Ranks) -> None:
    """Wait until all ranks have called it."""
    ranks.gather([0.0])


def most(ranks: Ranks, values: Sequence[float]) -> list[float]:
    """The largest value of all ranks, for each place."""
    return [max(each) for each in zip(*ranks.gather(values), strict=True)]


def mean(ranks: Ranks, values: Sequence[float]) -> list[float]:
    """The mean over ranks, for each place."""
    return [statistics.fmean(each) for each in zip(*ranks.gather(values), strict=True)]
