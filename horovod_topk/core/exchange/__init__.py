"""How payloads cross the network: one file an exchange, over the protocol in protocol.py.

`horovod_topk.core.exchange.selection` says which one a setting names.
"""

from horovod_topk.core.exchange.protocol import (
    BucketExchange,
    Collective,
    Exchange,
    Pending,
    Traffic,
    ring_allreduce_bytes,
)

__all__ = [
    "BucketExchange",
    "Collective",
    "Exchange",
    "Pending",
    "Traffic",
    "ring_allreduce_bytes",
]
