"""Copies of a state: residuals without an optimizer, as a pickled or copied model holds them."""

from __future__ import annotations

from typing import Any

from horovod_topk.errors import NotAttachedError
from horovod_topk.torch_training.state import TrainingState


class CopiedState(TrainingState):
    """A state whose copies keep its residuals, and compress nothing: they are not `active`.

    Attach a compressor to the copied model, and give `load_state_dict` what the copy's
    `state_dict()` returns.
    """

    is_copy = False

    def state_dict(self) -> dict[str, Any]:
        """As `Attached.state_dict`; of a copy, what its original had."""
        return dict(self._saved) if self.is_copy else super().state_dict()

    def check_is_no_copy(self) -> None:
        """Refuse to exchange gradients by a copy.

        Raises:
            NotAttachedError: this is one.
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
