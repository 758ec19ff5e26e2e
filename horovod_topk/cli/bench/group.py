"""torch's own process group over Gloo, beside Horovod's."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import horovod.torch as hvd
import torch.distributed as dist

from horovod_topk.cli.bench.nic import address

LOOPBACK = "lo"
TCPStore = dist.TCPStore  # type: ignore[attr-defined]  # public, but not declared


def interface_named(chosen: str | None) -> str | None:
    """The network card of the ranks: the user's or the launcher's; None if not known."""
    found = chosen or os.environ.get("HOROVOD_GLOO_IFACE") or _of_nccl()
    return LOOPBACK if found is None and hvd.size() == hvd.local_size() else found


def _of_nccl() -> str | None:
    """The first card in NCCL_SOCKET_IFNAME, which horovodrun sets over MPI.

    A user may have set it to a prefix of names, or, after ^, to cards to exclude: then None.
    """
    first = os.environ.get("NCCL_SOCKET_IFNAME", "").split(",")[0].removeprefix("=")
    return first if first in {name for _, name in socket.if_nameindex()} else None


def require(interface: str | None) -> str:
    """Return the network card, if it is known.

    Raises:
        ValueError: it is not known.
    """
    if interface is None:
        raise ValueError(
            "which network card ranks use is not known: horovodrun has named none. "
            "Pass --interface, such as --interface eth0"
        )
    return interface


@contextlib.contextmanager
def process_group(interface: str) -> Iterator[None]:
    """A process group of all Horovod ranks; rank 0 runs a store on a free port."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    first = hvd.rank() == 0
    store, place = None, None
    if first:
        host = address(interface)
        store = TCPStore(host, 0, hvd.size(), is_master=True, wait_for_workers=False)
        place = host, store.port
    host, port = hvd.broadcast_object(place, root_rank=0, name="bench.store")
    if store is None:
        store = TCPStore(host, port, hvd.size(), is_master=False)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    yield
    hvd.barrier()  # a rank that ends earlier would break connections, and rank 0 the store
    dist.destroy_process_group()
    hvd.barrier()
