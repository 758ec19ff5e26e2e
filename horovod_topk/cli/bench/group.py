"""Which network card the ranks of `bench` use."""

from __future__ import annotations

import os
import socket

from horovod_topk.cli.bench.ranks import Ranks

LOOPBACK = "lo"


def interface_named(chosen: str | None, ranks: Ranks) -> str | None:
    """The network card of the ranks: the user's or the launcher's; None if not known."""
    told = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME")
    found = chosen or told or _of_nccl()
    return LOOPBACK if found is None and ranks.size == ranks.local_size else found


def _of_nccl() -> str | None:
    """The first card in NCCL_SOCKET_IFNAME, which horovodrun sets over MPI.

    A user may have set it to a prefix of names, or, after ^, to cards to exclude: then None.
    """
    first = os.environ.get("NCCL_SOCKET_IFNAME", "").split(",")[0].removeprefix("=")
    return first if first in {name for _, name in socket.if_nameindex()} else None
