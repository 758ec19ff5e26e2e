"""The function that DistributedDataParallel calls for each of its buckets.

PyTorch compares the annotations of such a function with types: in this file they must not be
strings (`from __future__ import annotations`).
"""

import torch
from torch import distributed as dist

from horovod_topk.ddp.state import DDPState


def exchange(
    state: DDPState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Compress and exchange a bucket of gradients: a hook for `register_comm_hook`.

    Args:
        state: what `TopKEF().hook(model, optimizer)` returned beside this function.
        bucket: gradients of this rank, not divided by the number of ranks.

    Returns:
        A future of the bucket's memory with the mean of all ranks' gradients, as they were sent.
    """
    return state.take(bucket)
