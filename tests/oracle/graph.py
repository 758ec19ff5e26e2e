"""TensorFlow's verbs, each run in a graph of its own, for the contract suite.

The arrays are those of `TensorFlowOps`. A call traces the verb with placeholders for them, runs
the graph, and puts what the verb wrote back into the arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from horovod_topk.ops.tensorflow import Buffer, TensorFlowOps, View

AT_ONCE = {
    "view",
    "numel",
    "dtype",
    "device",
    "to_host",
    "same",
    "norm",
    "fused",
}  # make no graph, or answer with a number


class GraphOps:
    """`horovod_topk.ops.Ops`, verb by verb in graphs."""

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        method = getattr(TensorFlowOps(kernels=False), verb)
        return method if verb in AT_ONCE else lambda *args: _in_graph(method, args)


def _in_graph(method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    places = {id(place): place for place in _places(args)}
    raised, arrays = list[Exception](), list[bool]()

    def traced(*tensors: Any) -> Any:
        assert not tf.executing_eagerly()
        inside = {key: Buffer(t) for key, t in zip(places, tensors, strict=True)}
        result = method(*(_swap(arg, inside, raised) for arg in args))
        arrays.append(isinstance(result, Buffer | View))
        return [buffer.value for buffer in inside.values()], _tensors(result)

    try:
        graph = tf.function(traced, autograph=False)
        written, answer = graph(*(place.value for place in places.values()))
    except tf.errors.OpError:
        raise (raised or [AssertionError("a graph failed by itself")])[0] from None
    for place, tensor in zip(places.values(), written, strict=True):
        place.write(0, place.numel, tf.reshape(tensor, [-1]))
    if isinstance(answer, tuple):
        return tuple(Buffer(each) for each in answer)
    if answer is None:
        return None
    return Buffer(answer) if arrays[-1] else [bool(flag) for flag in answer]  # of `validate`


def _tensors(result: Any) -> Any:
    """What a verb returned, as a graph can hand it on."""
    if isinstance(result, tuple):
        return tuple(_tensors(each) for each in result)
    return result.value if isinstance(result, Buffer | View) else result


def _places(value: Any) -> list[Buffer]:
    """The buffers behind all arrays among the arguments."""
    if isinstance(value, list | tuple):
        return [place for each in value for place in _places(each)]
    if isinstance(value, View):
        return [value.buffer]
    return [value] if isinstance(value, Buffer) else []


def _swap(value: Any, inside: dict[int, Buffer], raised: list[Exception]) -> Any:
    """An argument as the graph sees it."""
    if isinstance(value, list | tuple):
        return [_swap(each, inside, raised) for each in value]
    if isinstance(value, Buffer):
        return inside[id(value)]
    if isinstance(value, View):
        return View(inside[id(value.buffer)], value.start, value.stop)
    return _remembering(value, raised) if callable(value) else value


def _remembering(function: Callable[..., Any], raised: list[Exception]) -> Callable[..., Any]:
    """A host function that notes what it raises: a graph hands on the text alone."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            raised.append(error)
            raise

    return call
