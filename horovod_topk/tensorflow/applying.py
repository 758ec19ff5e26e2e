"""A check that optimizers of tf-keras apply exchanged gradients only.

Horovod exchanges gradients in `compute_gradients`, which `fit` and `minimize` call, but a custom
training loop may not. Python code runs while a tf.function is traced, not in its steps. If a trace
both exchanges and applies gradients, each run of it does so too. If a trace only exchanges and
returns them, they may be applied from then on, as each run exchanges again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from horovod_topk.errors import StepBeforeSynchronizeError


@dataclass
class _Exchange:
    """The last exchange of one variable's gradient."""

    graph: weakref.ref[Any] | None  # the trace with the exchange; None: it ran eagerly
    is_applied: bool = False  # whether that trace also applies the gradient


class Exchanged:
    """The variables whose gradients are exchanged and not applied yet."""

    def __init__(self) -> None:
        self._of: dict[int, _Exchange] = {}

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def note(self, variables: Iterable[Any]) -> None:
        """Note that the gradients of these variables are exchanged."""
        graph = next(_being_traced(), None)
        for variable in variables:
            self._of[id(variable)] = _Exchange(None if graph is None else weakref.ref(graph))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def check(self, variables: Iterable[Any]) -> None:
        """Refuse to apply gradients if one of them is not exchanged.

        Raises:
            StepBeforeSynchronizeError: a gradient is not exchanged, or was applied before.
        """
        for variable in variables:
            exchange = self._of.get(id(variable))
            if exchange is None or (exchange.is_applied and not _is_in(exchange)):
                raise StepBeforeSynchronizeError(
                    "apply_gradients() was given a gradient that has not been exchanged since one "
                    "was applied",
                    tensor=variable.name,
                    cure="Take it from optimizer.compute_gradients(loss, variables, tape=tape), or "
                    "from hvd.DistributedGradientTape and give it to an undistributed optimizer",
                )

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def note_applied(self, variables: Iterable[Any]) -> None:
        """Note that the gradients of these variables are applied.

        An eager exchange that a trace applies stays noted: TensorFlow may trace a function twice.
        """
        for variable in variables:
            exchange = self._of[id(variable)]
            if exchange.graph is not None:
                exchange.is_applied |= _is_in(exchange)
            elif tf.executing_eagerly():
                del self._of[id(variable)]


def refuse_unexchanged(optimizer: Any) -> None:
    """Have `apply_gradients` of a tf-keras optimizer refuse unexchanged gradients."""
    exchanged = Exchanged()
    allreduce, apply_gradients = optimizer._allreduce, optimizer.apply_gradients

    @functools.wraps(allreduce)
    def noted(grads: Any, vars: Any) -> Any:  # noqa: A002  # Horovod's name
        result = allreduce(grads, vars)
        exchanged.note(vars)
        return result

    @functools.wraps(apply_gradients)
    def checked(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        variables = [variable for gradient, variable in pairs if gradient is not None]
        exchanged.check(variables)
        result = apply_gradients(pairs, *args, **kwargs)
        exchanged.note_applied(variables)
        return result

    optimizer._allreduce, optimizer.apply_gradients = noted, checked


def _is_in(exchange: _Exchange) -> bool:
    """Whether the graph under construction is the exchange's, or a branch or function within it."""
    if exchange.graph is None:
        return False
    return any(exchange.graph() is graph for graph in _being_traced())


def _being_traced() -> Iterator[Any]:
    """The graph under construction and the graphs around it, innermost first."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)
