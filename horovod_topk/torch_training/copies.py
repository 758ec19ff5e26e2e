"""Copies of a state: what a copied or pickled DDP model keeps of its residuals."""

from __future__ import annotations

from typing import Any

from horovod_topk.errors import NotAttachedError
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
        self._stand_for_nothing(state["label"], "its model was copied or unpickled: attach anew")
        self.is_copy, self._saved = True, state["saved"]
