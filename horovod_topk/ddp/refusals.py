"""Options of DistributedDataParallel that gradient compression does not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from horovod_topk.errors import ConfigError, UnsupportedOperationError
from horovod_topk.torch_training.replacing import REWRAP

_SHARDED = {"FullyShardedDataParallel", "FSDPModule"}  # by name: importing them takes a second


def check_model(model: Any) -> None:
    """Refuse a model whose gradients DDP does not pass whole to the communication hook.

    Raises:
        ConfigError: with the reason.
    """
    if not isinstance(model, DistributedDataParallel):
        names = {kind.__name__ for kind in type(model).__mro__}
        sharded = "FSDP gives a rank the sum of a shard, and error feedback needs its own gradients"
        raise ConfigError(
            sharded if _SHARDED & names else f"{type(model)} is no DistributedDataParallel",
            cure="Pass the DistributedDataParallel itself: what Accelerate's prepare() returns, or "
            "Lightning's trainer.strategy.model. docs/ddp.md says what FSDP would need",
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
        yield reason, "Leave optimize_ddp at its default", None
    if model._delay_all_reduce_params:
        reason = "delay_all_reduce_named_params= has parameters that no hook sees"
        yield reason, "Leave delay_all_reduce_named_params= out", None


def refuse_join(**kwargs: Any) -> NoReturn:
    """Stand in for the model's `join_hook`, and refuse join().

    Raises:
        UnsupportedOperationError: always.
    """
    raise UnsupportedOperationError(
        "join() was called for a model whose gradients are compressed: a rank that has joined "
        "takes part with zero gradients, and has no residuals to send",
        cure="Give every rank the same number of steps, as DistributedSampler(drop_last=True) does",
    )
