"""Copies of a state: what a copied or pickled DDP model keeps of its residuals."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch

from horovod_topk.core.run.attached import Attached
from horovod_topk.errors import NotAttachedError, UnsupportedOperationError
from horovod_topk.torch_training.state import TrainingState


class CopiedState(TrainingState):
    """A state whose copies keep its residuals but compress nothing: they are not `active`.

    Attach a compressor to the copied model, and give `load_state_dict` what the copy's
    `state_dict()` returns.
    """

    is_copy = False

    def state_dict(self) -> dict[str, Any]:
        """As `Attached.state_dict`; a copy returns its original's state dict."""
        return dict(self._saved) if self.is_copy else super().state_dict()

    def check_is_no_copy(self) -> None:
        """Refuse to exchange gradients with a copy.

        Raises:
            NotAttachedError: this state is a copy.
        """
        if self.is_copy:
            raise NotAttachedError(
                "the state behind this model was copied or unpickled",
                cure="Call TopKEF().attach(model, optimizer), and load the copy's state_dict()",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"label": self.label, "saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        reason = "its model was copied or unpickled: attach anew"
        Attached.__init__(self, None, "average", state["label"], reason)
        self.is_copy, self._saved = True, state["saved"]


class OfOneModel:
    """Stands in for an attached model's `join_hook`, and keeps copies from training unexchanged.

    PyTorch registers no communication hook with a model that is copied or unpickled, and says
    nothing. The copy of this object, which is one of its attributes, takes the place of its
    `forward`, until a compressor is attached to it.

    Args:
        model: the model that a compressor is attached to.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        if isinstance(getattr(model.forward, "__self__", None), OfOneModel):
            del vars(model)["forward"]

    def __call__(self, **kwargs: Any) -> NoReturn:
        """Refuse join().

        Raises:
            UnsupportedOperationError: always.
        """
        raise UnsupportedOperationError(
            "join() was called for a model whose gradients are compressed: a rank that has joined "
            "takes part with zero gradients, and has no residuals to send",
            cure="Give every rank the same number of steps, as DistributedSampler(drop_last=True) "
            "does",
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model = weakref.ref(state["model"])
        vars(state["model"])["forward"] = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call a copied model, unless gradients are asked for.

        Raises:
            NotAttachedError: it would train with the gradients of each rank alone, or dense.
        """
        model: Any = self._model()
        if model.training and torch.is_grad_enabled():
            raise NotAttachedError(
                "this model is a copy of one whose gradients are compressed, and PyTorch does not "
                "copy communication hooks: it would train without compression",
                cure="Call TopKEF().attach(model, optimizer) with the copy and an optimizer of its "
                "parameters. To train without, DistributedDataParallel(model.module); to evaluate, "
                "model.eval()",
            )
        return type(model).forward(model, *args, **kwargs)
