"""Optimizers of tf-keras apply gradients that have been exchanged, and no others.

Horovod exchanges in `compute_gradients`, which `fit` and `minimize` call, and a loop of one's own
may not. Of a tf.function Python sees the tracing, and not the steps it is for. What a trace both
exchanges and applies is settled with it. What it exchanges and hands out may be applied from then
on, as each of its runs exchanges again.
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
    """Of one variable's gradient, the last one."""

    graph: weakref.ref[Any] | None  # the trace it is in; None: it was at once
    settled: bool = False  # whether that trace applies it, too


class Exchanged:
    """Which variables have exchanged gradients that are still to be applied."""

    def __init__(self) -> None:
        self._of: dict[int, _Exchange] = {}

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def note(self, variables: Iterable[Any]) -> None:
        """Their gradients have been exchanged."""
        graph = next(_being_traced(), None)
        for variable in variables:
            self._of[id(variable)] = _Exchange(None if graph is None else weakref.ref(graph))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def check(self, variables: Iterable[Any]) -> None:
        """Refuse to apply gradients of these, if one is not exchanged.

        Raises:
            StepBeforeSynchronizeError: it is not, or was applied before.
        """
        for variable in variables:
            exchange = self._of.get(id(variable))
            if exchange is None or (exchange.settled and not _is_in(exchange)):
                raise StepBeforeSynchronizeError(
                    "apply_gradients() was given a gradient that has not been exchanged since one "
                    "was applied",
                    tensor=variable.name,
                    cure="Take it from optimizer.compute_gradients(loss, variables, tape=tape), or "
                    "from hvd.DistributedGradientTape and give it to an undistributed optimizer",
                )

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def settle(self, variables: Iterable[Any]) -> None:
        """They have been applied.

        What was exchanged at once and is applied in a trace stays: TensorFlow may trace twice.
        """
        for variable in variables:
            exchange = self._of[id(variable)]
            if exchange.graph is not None:
                exchange.settled |= _is_in(exchange)
            elif tf.executing_eagerly():
                del self._of[id(variable)]


def refuse_unexchanged(optimizer: Any) -> None:
    """Have `apply_gradients` of a distributed optimizer of tf-keras apply exchanged ones alone."""
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
        exchanged.settle(variables)
        return result

    optimizer._allreduce, optimizer.apply_gradients = noted, checked


def _is_in(exchange: _Exchange) -> bool:
    """Whether the graph that is being built is the exchange's, or a branch or function in it."""
    if exchange.graph is None:
        return False
    return any(exchange.graph() is graph for graph in _being_traced())


def _being_traced() -> Iterator[Any]:
    """The graph that is being built, innermost first, with those around it."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)
