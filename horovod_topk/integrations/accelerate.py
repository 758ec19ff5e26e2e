"""Compression for Accelerate: `Accelerator(kwargs_handlers=[TopKEFKwargs()])`."""

from functools import partial
from typing import Any

from horovod_topk import checkpoint
from horovod_topk.errors import AdapterImportError, ConfigError
from horovod_topk.integrations.compression import Compression, inner, load
from horovod_topk.integrations.waiting import before_every_step, before_first_forward, living

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs
except ImportError as error:
    cure = "pip install accelerate; plain PyTorch needs horovod_topk.ddp alone"
    raise AdapterImportError(f"Accelerate cannot be imported: {error}", cure=cure) from error

CURE = "Prepare model and optimizer, call what prepare returns, and leave FSDP and DeepSpeed out"


class TopKEFKwargs(DistributedDataParallelKwargs):  # type: ignore[misc]
    """Compresses the gradients of the models that `Accelerator.prepare` wraps in DDP.

    It attaches before a model's first forward. `accelerator.save_state` saves residuals, too.

    Args:
        compressor: such as `TopKEF(ratio=0.01)` of `horovod_topk.ddp`; None: `TopKEF()`.
        strict: whether `load_state` raises an error if no residuals fit; else they begin at zero.
        ddp: settings of `DistributedDataParallelKwargs`, without a hook.
    """

    __slots__ = ("_found", "compressions", "compressor", "strict")  # `__dict__` goes to DDP

    def __init__(self, compressor: Any = None, *, strict: bool = True, **ddp: Any) -> None:
        super().__init__(**ddp)
        self.compressor, self.strict = compressor, strict
        self._found: Any = None
        self.compressions: dict[Any, Compression] = {}  # by model; of None for one process
        before_every_step(self._before_step)

    __class__ = property(lambda self: DistributedDataParallelKwargs)  # subclasses are refused

    @property
    def accelerator(self) -> Any:
        """The Accelerator that was given this handler, which it does not tell."""
        if self._found is None:
            cure = "Write Accelerator(kwargs_handlers=[TopKEFKwargs()])"
            found = self._found = living(Accelerator, lambda each: each.ddp_handler is self, cure)
            found.register_save_state_pre_hook(self._with_each(checkpoint.save))
            found.register_load_state_pre_hook(self._with_each(partial(load, strict=self.strict)))
        return self._found

    def register_comm_hook(self, model: Any) -> None:
        """Attach before the first forward of a model that Accelerate has wrapped in DDP."""
        super().register_comm_hook(model)  # one of Accelerate's is an error in `attach`
        self.compressions[model] = Compression(self.compressor)
        before_first_forward(model, lambda _: self._attach(model))
        _ = self.accelerator  # whose checkpoints have residuals from now on

    def _attach(self, model: Any) -> None:
        optimizers, scaler = self.accelerator._optimizers, self.accelerator.scaler
        self.compressions[model].attach(model, optimizers, scaler)

    def _before_step(self, optimizer: Any) -> None:
        """Refuse a step on gradients that no compressor has seen."""
        ours = any(inner(each) is optimizer for each in self.accelerator._optimizers)
        if not ours or any(each.has(optimizer) for each in self.compressions.values()):
            return
        if self.accelerator.num_processes > 1:
            raise ConfigError("the optimizer steps, and no model in DDP was called", cure=CURE)
        self.compressions[None] = Compression(self.compressor)
        self._attach(None)

    def _with_each(self, act: Any) -> Any:
        def hook(models: Any, *others: Any) -> None:  # the last one is the checkpoint's folder
            for i, model in enumerate(self.compressions):
                self._attach(model)
                act(others[-1], self.compressions[model].state, name=f"topkef{i or ''}")

        return hook
