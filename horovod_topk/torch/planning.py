"""The plan of a Horovod optimizer: which gradients are exchanged in which bucket.

Reads private attributes that Horovod's constructor sets; writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import horovod.torch as hvd
from horovod.torch.optimizer import split_list
from torch import Tensor

from horovod_topk.core.plan.buckets import Plan
from horovod_topk.core.run.reductions import reduction_of
from horovod_topk.methods.protocol import Method
from horovod_topk.torch_training import specs


def plan_of(optimizer: Any, config: Method) -> Plan:
    """Plan the buckets: the user's groups, then default ones in the order of the backward pass."""
    reduction = reduction_of(optimizer.op, hvd)
    names = optimizer._parameter_names
    return specs.plan_of(optimizer, names, config, reduction, _asked_groups(optimizer))


def _asked_groups(optimizer: Any) -> Iterator[Sequence[Tensor]]:
    """The user's `groups=` as lists of parameters; Horovod splits them if it is a number."""
    if isinstance(optimizer._groups, list):
        yield from optimizer._groups
    elif optimizer._groups is not None:
        groups = (group["params"] for group in optimizer.param_groups)
        trained = [p for parameters in groups for p in parameters if p.requires_grad]
        yield from split_list(trained, optimizer._groups)
