"""What a Horovod optimizer will exchange: its parameters as the core's plan.

Reads the private attributes that Horovod's constructor leaves behind; writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import horovod.torch as hvd
from horovod.torch.optimizer import split_list
from torch import Tensor

from horovod_topk.core.plan import Plan, TensorSpec, make_plan
from horovod_topk.core.reductions import reduction_of
from horovod_topk.methods.protocol import Method


def plan_of(optimizer: Any, config: Method) -> Plan:
    """Buckets from the user's groups, and default ones in the order of the backward pass."""
    names = optimizer._parameter_names
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    specs = {p: spec_of(names[p], p) for p in reversed(parameters) if p.requires_grad}
    groups = [[specs[p] for p in group if p in specs] for group in _asked_groups(optimizer)]
    reduction = reduction_of(optimizer.op, hvd)
    asked = [group for group in groups if group]
    return make_plan(list(specs.values()), config, reduction, asked, names.values())


def _asked_groups(optimizer: Any) -> Iterator[Sequence[Tensor]]:
    """`groups=` as lists, or the lists that Horovod makes of a number."""
    if isinstance(optimizer._groups, list):
        yield from optimizer._groups
    elif optimizer._groups is not None:
        groups = (group["params"] for group in optimizer.param_groups)
        trained = [p for parameters in groups for p in parameters if p.requires_grad]
        yield from split_list(trained, optimizer._groups)


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """A parameter or gradient as the core names it."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, tuple(tensor.shape), dtype, str(tensor.device))


def describe(spec: TensorSpec) -> str:
    """Shape, dtype and device, for messages."""
    return f"{list(spec.shape)} {spec.dtype} on {spec.device}"
