"""Exchanges: how payloads cross the network. One file each, over the protocol in protocol.py.

`core.exchange.selection` makes the exchange that a setting names.
"""

from horovod_topk.core.exchange.protocol import (
    BucketExchange,
    Collective,
    Exchange,
    Pending,
    Storage,
    Traffic,
    ring_allreduce_bytes,
)

__all__ = [
    "BucketExchange",
    "Collective",
    "Exchange",
    "Pending",
    "Storage",
    "Traffic",
    "ring_allreduce_bytes",
]
