"""Horovod's collectives for TensorFlow outside of graphs, in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from horovod_topk.core.run.timing import StepTimer
from horovod_topk.ops.tensorflow import Array, Buffer
from horovod_topk.process_sets import ProcessSetRanks
from horovod_topk.tensorflow.collective import HorovodCollective


class BackgroundCollective(ProcessSetRanks):
    """`core.exchange.Collective` that runs each collective in a thread, eagerly.

    TensorFlow blocks in a collective, and Horovod takes names only from a graph's operations. So
    each collective is traced once, as a graph of its own, and each call of it has a thread.

    Args:
        graphs: adds collectives to graphs.
        timer: counts the seconds that this process waits for collectives; None: a new one.
    """

    horovod = hvd

    def __init__(self, graphs: HorovodCollective, timer: StepTimer | None = None) -> None:
        super().__init__(graphs._process_set, timer or StepTimer())
        self._graphs = graphs
        # Verb and name of a collective -> sizes, and the graph that was traced for them.
        self._traced: dict[tuple[str, str], tuple[object, Callable[[Any], Any]]] = {}

    def meet(self, data: bytes, name: str, *, patient: bool = False) -> list[bytes]:
        """`Meets.meet`."""
        return self._graphs.meet(data, name, patient=patient)

    def allgather(self, payload: Array, name: str, counts: Sequence[int] | None = None) -> _Running:
        """`Collective.allgather`."""
        return self._start("allgather", payload, name, counts)

    def alltoall(self, payloads: Array, name: str) -> _Running:
        """`Collective.alltoall`."""
        return self._start("alltoall", payloads, name)

    def reduce_scatter(self, array: Array, counts: Sequence[int], name: str) -> _Running:
        """`Collective.reduce_scatter`."""
        return self._start("reduce_scatter", array, name, counts)

    def allreduce(self, array: Array, name: str) -> _Running:
        """`Collective.allreduce`."""
        return self._start("allreduce", array, name)

    def split(self, groups: Sequence[Sequence[int]]) -> list[Self | None]:
        """`Collective.split`."""
        parts = self._graphs.split(groups)
        return [None if each is None else type(self)(each, self.timer) for each in parts]

    def _start(
        self, verb: str, array: Array, name: str, counts: Sequence[int] | None = None
    ) -> _Running:
        tensor = tf.convert_to_tensor(array.value)
        sizes = self.size, tensor.shape[0], None if counts is None else tuple(counts)
        known, graph = self._traced.get((verb, name), (None, None))
        if graph is None or known != sizes:
            add, options = getattr(self._graphs, verb), {} if counts is None else {"counts": counts}

            def build(each: Any) -> Any:
                return add(Buffer(each), name=name, **options).tensor

            graph = tf.function(build, autograph=False).get_concrete_function(tensor)
            self._graphs.timer.begin()  # drop tensors of that graph
            self._traced[verb, name] = sizes, graph
        return _Running(graph, tensor, self.timer)


class _Running:
    """A running collective."""

    def __init__(self, graph: Callable[[Any], Any], tensor: Any, timer: StepTimer) -> None:
        self._timer = timer
        self._timer.first = timer.first or time.perf_counter()
        self._thread = threading.Thread(target=self._run, args=(graph, tensor), daemon=True)
        self._thread.start()

    def _run(self, graph: Callable[[Any], Any], tensor: Any) -> None:
        try:
            self._found = graph(tensor)
        except Exception as error:
            self._found = error

    def wait(self) -> Array:
        """`Pending.wait`.

        Raises:
            HorovodInternalError: a rank is lost.
        """
        began = time.perf_counter()
        self._thread.join()
        self._timer.last = time.perf_counter()
        self._timer.exposed += self._timer.last - began
        if isinstance(self._found, tf.errors.OpError):
            raise HorovodInternalError(self._found) from self._found
        if isinstance(self._found, Exception):
            raise self._found
        return Buffer(self._found)
