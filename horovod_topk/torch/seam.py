"""The one module that calls and wraps Horovod's private methods.

`hvd.DistributedOptimizer` builds a class from `dict(_DistributedOptimizer.__dict__)` at every
call, so methods that are wrapped here apply to every optimizer built afterwards:

    _DistributedOptimizer.__init__                  attach a state when compression is TopKEF, or
                                                    the optimizer OneBitAdam or OneBitLamb, and
                                                    register hooks on parameters after that
    _DistributedOptimizer._allreduce_grad_async     pass a ready gradient to that state
    _DistributedOptimizer.synchronize               check all gradients before any is exchanged
    _DistributedAdasumOptimizer.__init__            refuse TopKEF before a parameter has changed
    horovod.torch.join                              refuse it while a TopKEF optimizer exists

With any other compressor each calls the original; before that, an optimizer's constructor meets
those of other ranks, of which some may compress. tests/unit/test_seam.py fails when Horovod
changes these methods.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.optimizer import _DistributedAdasumOptimizer, _DistributedOptimizer

from horovod_topk import reporting
from horovod_topk.core.exchange.agreement import agree_on_nothing
from horovod_topk.core.exchange.membership import elastic
from horovod_topk.core.run.base_compressor import BaseCompressor
from horovod_topk.core.run.seams import Function, reduction_of, refusing_join, wrap
from horovod_topk.errors import ConfigError
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch.collective import HorovodCollective
from horovod_topk.torch.compressor import Compressor
from horovod_topk.torch.hooks import check_all_are_known
from horovod_topk.torch.state import OptimizerState
from horovod_topk.torch_training.onebit_adam import OneBitAdam
from horovod_topk.torch_training.state import live_states
from horovod_topk.torch_training.tracing import untraced

_BUILT: weakref.WeakSet[Any] = weakref.WeakSet()  # Horovod's optimizers, compressed or not


def install() -> None:
    """Wrap the five functions, once."""
    wrap(
        (_DistributedOptimizer, "__init__", _wrap_init),
        (_DistributedOptimizer, "_allreduce_grad_async", _wrap_allreduce_grad_async),
        (_DistributedOptimizer, "synchronize", _wrap_synchronize),
        (_DistributedAdasumOptimizer, "__init__", _wrap_adasum_init),
        (hvd, "join", refusing_join(_exchanging)),
    )


def _wrap_init(original: Function) -> Function:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
        asked = arguments["compression"]
        _check_names(arguments["named_parameters"])
        if isinstance(self, OneBitAdam):
            asked = _compression_of_momentum(asked, arguments.get("op", hvd.Average))
        compressor = Compressor.asked(asked)
        _check_shares_nothing(arguments["params"], compresses=compressor is not None)
        if compressor is None:
            _meet_others(arguments.get("process_set", hvd.global_process_set), asked)
            original(self, *args, **kwargs)
            _BUILT.add(self)
            return
        if "op" in arguments:
            reduction_of(arguments["op"], hvd)
        exchanges = _without_hooks(self, lambda: original(self, *args, **kwargs))
        state = OptimizerState(self, compressor)
        self._topkef = self._compression = state
        state.begin(self, self._register_hooks if exchanges else None)
        compressor.attached(state)
        _BUILT.add(self)

    return __init__


def _check_shares_nothing(groups: Any, *, compresses: bool) -> None:
    """Refuse parameters whose gradients another living optimizer of Horovod's exchanges.

    compresses: whether its gradients are compressed. Two others are Horovod's own affair.
    """
    own = {id(p) for group in groups for p in group["params"]}

    def shared() -> str | None:
        others = [each for each in _BUILT if compresses or hasattr(each, "_topkef")]
        named = ((each, p, name) for each in others for p, name in each._parameter_names.items())
        found = (name for each, p, name in named if id(p) in own and p in each._requires_update)
        return next(found, None)

    if shared() is not None:
        gc.collect()  # Horovod's optimizers are reference cycles: delete unreachable ones
    if (name := shared()) is not None:
        raise ConfigError(
            "another hvd.DistributedOptimizer that still exists exchanges its gradient, and both "
            "would change it in each backward()",
            tensor=name,
            cure="Delete the other one first (optimizer = None, and schedulers that refer to it), "
            "or give each parameter to one optimizer",
        )


def _meet_others(ranks: hvd.ProcessSet, compression: Any) -> None:
    """Find out whether other ranks compress, as this one leaves gradients to Horovod."""
    if elastic() or not ranks.included() or ranks.size() == 1:
        return
    kind = compression if isinstance(compression, type) else type(compression)
    agree_on_nothing(f"Horovod's, for {kind.__name__}", TorchOps(), HorovodCollective(ranks))


def _check_names(named_parameters: Any) -> None:
    """Refuse a compressor in the place of the parameters' names, the second argument."""
    kind = named_parameters if isinstance(named_parameters, type) else type(named_parameters)
    if issubclass(kind, BaseCompressor):
        raise ConfigError(
            f"hvd.DistributedOptimizer was given {kind.__name__} as named_parameters=",
            cure=f"Pass it by name: hvd.DistributedOptimizer(optimizer, named_parameters="
            f"model.named_parameters(), compression={kind.__name__})",
        )


def _compression_of_momentum(asked: Any, op: Any) -> Any:
    """The compressor that exchanges the momentum of a OneBitAdam or OneBitLamb.

    asked: the user's `compression=`; Horovod's default selects sharded SignSGD.
    """
    if op == hvd.Sum:
        raise ConfigError(
            "op=hvd.Sum would add up the ranks' momenta, of which the common one is a part",
            cure="Leave op= out",
        )
    if asked is hvd.Compression.none:  # Horovod's default
        return importlib.import_module("horovod_topk.torch").SignSGD(exchange="sharded")
    kind = asked if isinstance(asked, type) else type(asked)
    if not issubclass(kind, Compressor):
        raise ConfigError(
            f"compression={kind.__name__} has Horovod exchange gradients, and this optimizer "
            "exchanges its momentum",
            cure="Leave compression= out, or pass a compressor of horovod_topk.torch",
        )
    return asked


def _without_hooks(optimizer: Any, construct: Callable[[], None]) -> bool:
    """Construct without hooks on parameters; return whether Horovod would have registered them."""
    asked: list[bool] = []
    optimizer._register_hooks = lambda: asked.append(True)
    try:
        construct()
    except (AttributeError, TypeError) as error:
        kind = type(optimizer).__mro__[1]
        raise ConfigError(
            f"Horovod makes a new {kind.__module__}.{kind.__name__} of its parameter groups alone, "
            f"which fails: {error}",
            cure="If it wraps an optimizer, pass that one to hvd.DistributedOptimizer, and wrap "
            "what this returns; else give all arguments of its __init__ but the first a default",
        ) from error
    finally:
        del optimizer._register_hooks
    return bool(asked)


def _wrap_allreduce_grad_async(original: Function) -> Function:
    def _allreduce_grad_async(self: Any, p: torch.Tensor) -> tuple[Any, Any]:
        state: OptimizerState | None = getattr(self, "_topkef", None)
        collect = None if state is None else state.ready(self, p)
        return original(self, p) if collect is None else (collect, None)

    return _allreduce_grad_async


def _wrap_synchronize(original: Function) -> Function:
    @untraced
    def of_ours(self: Any) -> None:
        state: OptimizerState = self._topkef
        if state.active:
            check_all_are_known(self)
        with reporting.waiting():
            original(self)
        if state.active:
            state.synchronized()

    def synchronize(self: Any) -> None:
        if hasattr(self, "_topkef"):
            of_ours(self)
            return
        with reporting.waiting():
            original(self)

    return synchronize


def _wrap_adasum_init(original: Function) -> Function:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
        if Compressor.asked(arguments["compression"]) is not None or isinstance(self, OneBitAdam):
            reduction_of(hvd.Adasum, hvd)
        original(self, *args, **kwargs)

    return __init__


def _exchanging() -> list[OptimizerState]:
    """States of Horovod's optimizers that compress gradients."""
    return [state for state in live_states() if isinstance(state, OptimizerState)]
