"""Names, shapes, dtypes and devices of PyTorch parameters for the core, and their memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from horovod_topk.core.plan.buckets import Plan, TensorSpec, make_plan
from horovod_topk.methods.protocol import Method


def plan_of(
    optimizer: Any,
    names: Mapping[Tensor, str],
    config: Method,
    reduction: str,
    groups: Iterable[Sequence[Tensor]],
) -> Plan:
    """Plan the buckets: the user's groups, then default ones in the order of the backward pass.

    Args:
        optimizer: the optimizer of the parameters.
        names: name of each parameter.
        config: the method's settings.
        reduction: "average" or "sum".
        groups: lists of parameters; parameters that are not trained are left out.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    specs = {p: spec_of(names[p], p) for p in reversed(parameters) if p.requires_grad}
    asked = [[specs[p] for p in group if p in specs] for group in groups]
    planned = list(specs.values()), config, reduction, [group for group in asked if group]
    return make_plan(*planned, names.values())


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """The core's description of a parameter or gradient."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, tuple(tensor.shape), dtype, str(tensor.device))


def describe(spec: TensorSpec) -> str:
    """Shape, dtype and device of a tensor, for messages."""
    return f"{list(spec.shape)} {spec.dtype} on {spec.device}"


def trained_names(module: nn.Module, ignored: Collection[str]) -> dict[Tensor, str]:
    """Names of a module's trained parameters, without the `ignored` names."""
    parameters = module.named_parameters()
    return {p: name for name, p in parameters if p.requires_grad and name not in ignored}


def gradients_in(memory: Tensor, parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters, and the views of their gradients, which are contiguous in flat memory.

    A gradient has its parameter's strides if these are dense, and is row-major otherwise.
    """
    start = 0
    for p in parameters:
        view = memory[start : start + p.numel()]
        start += p.numel()
        is_dense = torch.empty_like(p).stride() == p.stride()
        yield p, view.as_strided(p.shape, p.stride()) if is_dense else view.view(p.shape)


def accumulation_of(p: Tensor) -> Any:
    """Autograd's node that adds to a parameter's gradient; alive while referenced."""
    with torch.enable_grad():
        return p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
