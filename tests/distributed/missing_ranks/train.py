"""One rank compresses, and the others do not even build an optimizer, or attach nothing."""

from __future__ import annotations

import sys

import torch
from torch import nn

if sys.argv[1] == "horovod":
    import horovod.torch as hvd

    from horovod_topk.torch import TopKEF

    hvd.init()
    model = nn.Linear(40, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if hvd.rank() == 0:
        names = model.named_parameters()
        hvd.DistributedOptimizer(optimizer, named_parameters=names, compression=TopKEF)
    hvd.barrier()
else:
    import torch.distributed as dist

    from horovod_topk.ddp import TopKEF as Compressor

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(40, 30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if dist.get_rank() == 0:
        Compressor().attach(model, optimizer)
    model(torch.ones(2, 40)).sum().backward()
