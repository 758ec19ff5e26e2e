"""What an optimizer or a step is refused for, before any state changes."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from horovod_topk.errors import ConfigError, StepBeforeSynchronizeError, UnsupportedOperationError
from horovod_topk.methods.protocol import Method, Rounds
from horovod_topk.tensorflow.gradients import is_sparse
from horovod_topk.tensorflow.planning import names_of

log = logging.getLogger("horovod_topk")


def refuse_xla() -> None:
    """Refuse to exchange gradients in a graph that XLA compiles."""
    if tf.executing_eagerly():
        return
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UnsupportedOperationError(
            "this training step is compiled by XLA, which cannot run Horovod's operations. Keras 3 "
            "compiles steps unless it is told not to",
            cure="Pass jit_compile=False to model.compile, or to tf.function",
        )


def check_bears_zeros(make: Callable[[], Any], kind: str, config: Method) -> None:
    """Refuse an optimizer that does not survive two updates of a small matrix.

    The first gradient has one element that is not zero, the second has none. Dense gradients seldom
    have rows and columns of zeros, and sparse ones nearly always do.

    make: makes a copy of the optimizer that exchanges nothing.
    """
    if isinstance(config, Rounds) or (config.ratio == 1.0 and not config.withheld()):
        return  # every element is sent
    with tf.init_scope():
        try:
            weights = _updated(make())
        except Exception as error:  # an optimizer that cannot update a matrix by itself
            log.info("TopKEF has not tried %s on sparse gradients: %s", kind, error)
            return
        is_sound = bool(tf.reduce_all(tf.math.is_finite(weights)))
    if not is_sound:
        raise ConfigError(
            f"{kind} makes weights NaN or infinite where rows and columns of a gradient are zero, "
            "as in sparse gradients: it divides by what is zero then",
            cure="Give it a larger epsilon, use another optimizer, or pass TopKEF(ratio=1.0) or "
            "Compression.none",
        )


def _updated(optimizer: Any) -> Any:
    """A matrix after an optimizer's updates."""
    weights = tf.Variable(tf.ones([4, 4]), name="trial")
    one = tf.scatter_nd([[1, 2]], [1.0], [4, 4])
    steps = getattr(optimizer, "gradient_accumulation_steps", None) or 1
    for gradient in [one] * steps + [tf.zeros_like(one)] * steps:
        optimizer.apply_gradients([(gradient, weights)])
    return weights.read_value()


def check_none_left_out(gradients: Sequence[Any], variables: Sequence[Any], config: Method) -> None:
    """Refuse a sparse gradient that would get no momentum or no clipping.

    Args:
        config: settings with the corrected momentum, which the optimizer does not apply itself.
    """
    lost = _lost(config)
    sparse = [i for i, gradient in enumerate(gradients) if is_sparse(gradient)]
    if lost and sparse:
        raise ConfigError(
            "its gradient is sparse (tf.IndexedSlices) and takes Horovod's own way, on which "
            + lost,
            tensor=names_of(variables)[sparse[0]],
            cure="Pass sparse_as_dense=True to the DistributedOptimizer or "
            "DistributedGradientTape, or leave momentum= and clip_norm= of TopKEF out",
        )


def refuse_local(optimizer: Any, config: Method) -> None:
    """Have `register_local_var` of an optimizer refuse to drop momentum or clipping."""
    lost = _lost(config)
    if not lost:
        return

    def register_local_var(var: Any) -> None:
        raise ConfigError(
            "register_local_var() was called: its gradient is not exchanged, and so " + lost,
            tensor=names_of([var])[0],
            cure="Give local variables an optimizer of their own, or leave momentum= and "
            "clip_norm= of TopKEF out",
        )

    optimizer.register_local_var = register_local_var


def _lost(config: Method) -> str:
    """Describe which settings have no effect on uncompressed gradients; "" if none."""
    lost = []
    if config.momentum:
        lost.append(f"nobody would apply the momentum of {config.momentum}")
    if config.clip_norm is not None:
        lost.append(f"it would not be clipped to clip_norm={config.clip_norm}")
    return ", and ".join(lost)


@dataclass
class _Exchange:
    """The last exchange of one variable's gradient."""

    graph: weakref.ref[Any] | None  # the trace with the exchange; None: it ran eagerly
    is_applied: bool = False  # whether that trace also applies the gradient


class Exchanged:
    """The variables whose gradients are exchanged and not applied yet.

    Horovod exchanges gradients in `compute_gradients`, which `fit` and `minimize` call, but a
    custom training loop may not. Python code runs while a tf.function is traced, not in its steps.
    If a trace both exchanges and applies gradients, each run of it does so too. If a trace only
    exchanges and returns them, they may be applied from then on, as each run exchanges again.
    """

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
        """Refuse to apply gradients if one of them is not exchanged."""
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


def refuse_allocation(*, allocates: bool) -> None:
    """Refuse an allocation of bytes to tensors in a graph, which has fixed sizes of payloads."""
    if allocates:
        raise ConfigError(
            "allocation='adaptive' was given in a tf.function, whose graph fixes the sizes of "
            "payloads, and these change",
            cure="Train eagerly, as with compile(run_eagerly=True), or leave allocation= out and "
            "pass ratios by hand, as in ratio={'head*': 0.05, '*': 0.01}",
        )
