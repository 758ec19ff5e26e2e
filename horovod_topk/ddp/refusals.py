"""Models and optimizers whose gradients cannot be compressed with DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from horovod_topk.errors import ConfigError
from horovod_topk.methods.protocol import Method
from horovod_topk.torch_training.in_backward import check_is_no_optimizer

REWRAP = "wrap the module anew, DistributedDataParallel(model.module), and attach to that"

_SHARDED = {"FullyShardedDataParallel", "FSDPModule"}  # by name: importing them takes a second


def check_model(model: Any) -> None:
    """Refuse a model whose gradients DDP does not pass whole to the communication hook."""
    check_is_no_optimizer(model)
    if not isinstance(model, DistributedDataParallel):
        names = {kind.__name__ for kind in type(model).__mro__}
        sharded = "FSDP gives a rank the sum of a shard, and DistributedDataParallel is not there"
        raise ConfigError(
            sharded if _SHARDED & names else f"{type(model)} is no DistributedDataParallel",
            cure="Pass the DistributedDataParallel itself: what Accelerate's prepare() returns, or "
            "Lightning's trainer.strategy.model, and not what torch.compile returns. For FSDP2: "
            "horovod_topk.fsdp, docs/fsdp.md",
        )
    for reason, cure, tensor in (*_of_parameters(model), *_of_options(model)):
        raise ConfigError(reason, cure=cure, tensor=tensor)


def _of_parameters(model: DistributedDataParallel) -> Iterator[tuple[str, str, str]]:
    """The reason, the cure and the parameter's name for each unsupported parameter."""
    for name, p in model.module.named_parameters():
        if hasattr(p, "_st_info") or type(p.data).__name__ == "DTensor":
            reason = "it is split by tensor parallelism, and ranks have different parts of it"
            yield reason, "Compress models that every rank has whole", name
        if hasattr(p, "_in_backward_optimizers"):
            reason = "its optimizer steps inside backward, before the exchange is over"
            yield reason, "Leave _apply_optimizer_in_backward out", name
    for name, module in model.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            reason = "its gradient is sparse, and DistributedDataParallel puts it in no bucket"
            yield reason, "Pass sparse=False to the layer", f"{name}.weight"


def _of_options(model: DistributedDataParallel) -> Iterator[tuple[str, str, None]]:
    if model.mixed_precision is not None:
        reason = "DistributedDataParallel(mixed_precision=) has a communication hook of its own"
        yield reason, "Use torch.autocast, and values='bfloat16' for what is sent", None
    for hook, state in model._comm_hooks:
        if not getattr(state, "is_copy", False):  # copying a model registers its hook again
            reason = f"the model has a hook, {hook.__qualname__}, and can have only one"
            yield reason, f"To replace a compressor's optimizer, call attach(); else {REWRAP}", None
    if model._use_python_reducer:
        reason = "torch._dynamo.config.optimize_ddp='python_reducer' hands over no buckets"
        yield reason, "Leave optimize_ddp and compiled_autograd at their defaults", None
    if model._delay_all_reduce_params:
        reason = "delay_all_reduce_named_params= has parameters that no hook sees"
        yield reason, "Leave delay_all_reduce_named_params= out", None
    if getattr(model, "skip_all_reduce_unused_params", False):  # not in every PyTorch
        reason = "skip_all_reduce_unused_params=True hands over no buckets of unused parameters"
        yield reason, "Leave skip_all_reduce_unused_params= out", None


def check_trained(model: Any, names: Mapping[Tensor, str]) -> None:
    """Refuse a model whose parameters were frozen, or the reverse, or converted after wrapping.

    DistributedDataParallel exchanges the parameters that were trained when it was constructed.

    names: name of each parameter that is trained now.
    """
    then, now = counted_by(model), (len(names), sum(p.nbytes for p in names))
    if then in (None, now) or not hasattr(model.reducer, "_get_zeros_like_grad_buckets"):
        return
    buckets = model.reducer._get_zeros_like_grad_buckets()  # as large as all gradients
    waits_for = {p: bucket.buffer().dtype for bucket in buckets for p in bucket.parameters()}
    later = next((name for p, name in names.items() if p not in waits_for), None)
    if later is not None:
        raise ConfigError(
            "it was not trained, or no part of the model, when the model was wrapped, so that "
            "DistributedDataParallel does not exchange its gradient",
            tensor=later,
            cure=f"Wrap the model when it is complete; now {REWRAP}",
        )
    other = next((p for p in names if p.dtype != waits_for[p]), None)
    if other is not None:
        raise ConfigError(
            f"it was {waits_for[other]} when the model was wrapped, and is {other.dtype} now, so "
            "that DistributedDataParallel does not exchange its gradient",
            tensor=names[other],
            cure=f"Convert the model before it is wrapped; now {REWRAP}",
        )
    left = waits_for.keys() - names.keys()
    if left and not (model.find_unused_parameters or model.static_graph):
        of_model = (name for name, p in model.module.named_parameters() if p in left)
        raise ConfigError(
            "its requires_grad was set to False, or it was taken out, after the model was wrapped, "
            "and DistributedDataParallel still waits for its gradient in every step",
            tensor=next(of_model, f"of shape {list(next(iter(left)).shape)}"),
            cure="Freeze parameters before wrapping the model, or pass "
            "find_unused_parameters=True to DistributedDataParallel",
        )


def counted_by(model: Any) -> tuple[int, int] | None:
    """Number and bytes of the parameters that DDP exchanges; None: this PyTorch does not tell."""
    facts = model._get_ddp_logging_data()
    try:
        return facts["num_parameter_tensors"], facts["total_parameter_size_bytes"]
    except KeyError:
        return None


def check_inherits(before: Method, config: Method, changed: Collection[str]) -> None:
    """Refuse a new optimizer that cannot inherit the residuals of the one that it replaces."""
    if changed:
        raise ConfigError(
            "its requires_grad was changed since compression was attached",
            tensor=min(changed),
            cure=f"Set it back, or {REWRAP}",
        )
    old, new = (f"{type(c).__name__} with exchange={c.exchange!r}" for c in (before, config))
    if old != new:
        raise ConfigError(
            f"{old} is attached, and {new} cannot take over its residuals",
            cure=f"Attach the same compressor with the same exchange, or {REWRAP}",
        )
