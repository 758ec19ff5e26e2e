"""SGD, Adam and AdamW of Keras 3 whose updates depend on how often elements arrive."""

from __future__ import annotations

from typing import Any

from horovod_topk.tensorflow.arrivals import ByArrivals


def following(optimizer: Any, by: ByArrivals) -> Any:
    """Make the class, of the same name, of a copy whose updates depend on arrivals."""
    base = type(optimizer)
    members = {"__module__": base.__module__, "__doc__": base.__doc__, "_topkef_arrivals": by}
    return type(base.__name__, (_ByArrivals, base), members)


class _ByArrivals:
    """Mixin for a Keras 3 optimizer whose updates depend on arrivals."""

    _topkef_arrivals: ByArrivals

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """As the base class, with a momentum that depends on arrivals."""
        base: Any = super()
        self._topkef_arrivals.update(
            self,
            gradient,
            variable,
            lambda: base.update_step(gradient, variable, learning_rate),
            lambda: learning_rate,
        )
