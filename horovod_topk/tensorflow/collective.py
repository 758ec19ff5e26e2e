"""Horovod's collectives for TensorFlow behind the core's interface, in graphs and eagerly."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.mpi_ops import _allreduce
from tensorflow.python.framework.config import is_op_determinism_enabled

from horovod_topk.core.exchange.agreement import gather_bytes, in_rows
from horovod_topk.core.exchange.meeting import wait_until
from horovod_topk.core.exchange.protocol import check_gathered, ordered_sum
from horovod_topk.core.plan import payload as wire
from horovod_topk.core.run.timing import Seconds
from horovod_topk.ops.tensorflow import Array, Buffer, TensorFlowOps
from horovod_topk.process_sets import ProcessSetRanks
from horovod_topk.tensorflow.variables import own_variable


class GraphTimer:
    """Notes when the parts of a step begin and end, while its graph is built."""

    def __init__(self) -> None:
        self._starts: list[Any] = []  # start time of each collective
        self._ends: list[Any] = []
        self._ready: list[Any] = []  # time at which each bucket's gradients were ready
        self._sent: list[Any] = []  # index of each bucket's first collective

    def begin(self) -> None:
        """Clear all notes, for another graph."""
        for each in (self._starts, self._ends, self._ready, self._sent):
            each.clear()

    def note_ready(self, gradients: Sequence[Any]) -> None:
        """Note that a bucket is encoded from here on; the next collective is its first."""
        self._ready.append(_after(gradients))
        self._sent.append(len(self._starts))

    def note_start(self, tensor: Any) -> None:
        """Note that a collective starts when a tensor is ready; ignored in eager mode."""
        if not tf.executing_eagerly():
            self._starts.append(_after([tensor]))

    def note_end(self, tensor: Any) -> None:
        """Note that a collective ends when a tensor is ready."""
        if not tf.executing_eagerly():
            self._ends.append(_after([tensor]))

    def times(self, exchanged: Sequence[Any]) -> tuple[Any, Callable[[Sequence[float]], Seconds]]:
        """Times in the step that exchanged these gradients, and what makes `Seconds` of them.

        Returns:
            All times, float64; and a function of them, which the host calls.
        """
        times = [*self._starts, *self._ends, *self._ready, _after(exchanged)]
        return tf.stack(times), partial(_seconds, len(self._starts), [*self._sent])


def _seconds(collectives: int, sent: Sequence[int], times: Sequence[float]) -> Seconds:
    """`Seconds` of a step; arguments as in `GraphTimer.times`.

    Exposed time lasts from the last gradient, or the start of the last collective, to the end of
    the last collective.
    """
    starts, ends = times[:collectives], times[collectives : 2 * collectives]
    *ready, done = times[2 * collectives :]
    if not collectives:
        return Seconds()
    pairs = zip(ready, sent, strict=True)
    compress = sum(starts[at] - began for began, at in pairs if at < collectives)
    last = max(ends)
    parts = compress, last - min(starts), last - max(*ready, *starts), done - last
    return Seconds(*(max(0.0, part) for part in parts))


def _after(tensors: Sequence[Any]) -> Any:
    """The time at which these tensors are computed, [] float64.

    It is 0 after `tf.config.experimental.enable_op_determinism()`, which forbids to read a clock.
    """
    if is_op_determinism_enabled():
        return tf.constant(0.0, tf.float64)
    with tf.control_dependencies(list(tensors)):
        return tf.timestamp()


@dataclass(frozen=True)
class _Gathered:
    """A collective's result tensor; a graph waits for it where the tensor is used."""

    tensor: Any  # flat

    def wait(self) -> Array:
        return Buffer(self.tensor)


class HorovodCollective(ProcessSetRanks):
    """`core.exchange.Collective` over a Horovod process set.

    Args:
        process_set: the ranks that exchange.
        resizable: read the number of ranks when the graph runs, not when it is traced (elastic
            training).
        timer: notes when collectives start and end; None: nobody reads it.
    """

    horovod = hvd

    def __init__(
        self, process_set: Any, *, resizable: bool = False, timer: GraphTimer | None = None
    ) -> None:
        super().__init__(process_set, timer or GraphTimer())
        self._resizable = resizable

    def allgather(
        self, payload: Array, name: str, counts: Sequence[int] | None = None
    ) -> _Gathered:
        """Run a named allgather of a uint8 array, or add it to the graph under construction."""
        total = payload.numel * self.size if counts is None else sum(counts)
        check_gathered(total, name)
        if tf.executing_eagerly():
            gathered = _Gathered(self._eagerly(tf.convert_to_tensor(payload.value), name))
            self.timer.begin()  # drop tensors of that function's graph
            return gathered
        gathered = self._gather(payload.value, name)
        if counts is None and not self._resizable:
            gathered = _of_length(gathered, payload.value, self.size)
        elif not self._resizable:
            gathered = tf.ensure_shape(gathered, [total])
        return _Gathered(gathered)

    def meet(self, data: bytes, name: str, *, patient: bool = False) -> list[bytes]:
        """`Meets.meet`: by an allgather in a thread, as a call of TensorFlow blocks.

        The thread runs eagerly, also while this one builds a graph.
        """
        found = list[Any]()

        def gather() -> None:
            try:
                sent = tf.constant(list(data), tf.uint8)
                found.append(self._eagerly(sent, name).numpy().tobytes())
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=gather, daemon=True)
        thread.start()
        wait_until(lambda: not thread.is_alive(), name, self.rank, patient=patient)
        self.timer.begin()  # drop tensors of that function's graph
        if isinstance(found[0], Exception):
            raise found[0]
        return in_rows(found[0], len(data), self.size, self.rank)

    def alltoall(self, payloads: Array, name: str) -> _Gathered:
        """Add a named alltoall of equal stretches of a uint8 array to the graph."""
        part = payloads.numel // self.size
        received = self._scatter(payloads, [part] * self.size, name)
        return _Gathered(_of_length(received, payloads.value[:part], self.size))

    def reduce_scatter(self, array: Array, counts: Sequence[int], name: str) -> _Gathered:
        """Add a named alltoall to the graph whose parts are added in rank order."""
        mine = counts[self.rank]
        received = self._scatter(array, counts, name)
        if mine == 0:  # length unknown on purpose, else the graph's optimiser drops the alltoall
            tf.raw_ops.Assert(condition=True, data=[received])  # keeps the unused result's op
            return _Gathered(tf.ensure_shape(received, [None]))
        rows = tf.reshape(tf.ensure_shape(received, [mine * self.size]), [self.size, mine])
        return _Gathered(ordered_sum(rows, self.size))

    def allreduce(self, array: Array, name: str) -> _Gathered:
        """Add a named allreduce to the graph."""
        total = self._run(_allreduce, array.value, f"allreduce.{name}", op=hvd.Sum)
        return _Gathered(tf.ensure_shape(total, [array.numel]))

    def _eagerly(self, tensor: Any, name: str) -> Any:
        """Gather in a graph of its own: Horovod takes names only from a graph's operations."""
        graph = tf.function(lambda tensor: self._gather(tensor, name), autograph=False)
        return graph.get_concrete_function(tensor)(tensor)

    def _gather(self, tensor: Any, name: str) -> Any:
        """Gather under the same name as `horovod.torch`, so that ranks of both frameworks match."""
        return self._run(hvd.allgather, tensor, f"allgather.{name}")

    def _scatter(self, array: Array, counts: Sequence[int], name: str) -> Any:
        splits = tf.constant(list(counts), tf.int32)
        return self._run(hvd.alltoall, array.value, f"alltoall.{name}", splits=splits)

    def _run(self, verb: Callable[..., Any], tensor: Any, name: str, **options: Any) -> Any:
        """Run one of Horovod's collectives, or add it to the graph, and note when it runs."""
        self.timer.note_start(tensor)
        options |= {"name": name, "ignore_name_scope": True, "process_set": self._process_set}
        result = verb(_at_run_time(tensor), **options)
        received = result[0] if isinstance(result, tuple) else result  # an alltoall, with splits
        self.timer.note_end(received)
        return received


def _of_length(received: Any, own: Any, ranks: int) -> Any:
    """Check the length of received payloads, and stand in for those of other lengths.

    In their place each rank has this rank's payload, with its own facts.

    A graph cannot raise: where the facts of ranks differ, or payloads are missing, the error is
    raised when the payloads are checked.
    """
    total = own.shape[0] * ranks

    def stand_in(received: Any, own: Any) -> Any:
        found = wire.facts_within(received.numpy().tobytes())
        if len(found) != ranks or len({*found}) == 1:
            return tf.zeros([total], tf.uint8)
        rows = [wire.with_facts(own.numpy().tobytes(), each) for each in found]
        return tf.io.decode_raw(b"".join(rows), tf.uint8)

    is_whole = tf.equal(tf.size(received), total)
    other = partial(tf.py_function, stand_in, [received, own], tf.uint8)
    return tf.ensure_shape(tf.cond(is_whole, lambda: received, other), [total])


@functools.cache
def _start() -> Any:
    """A variable that holds the position at which every payload begins, [0]."""
    return own_variable([0], dtype=tf.int32)


def _at_run_time(tensor: Any) -> Any:
    """Hide from graph optimisers that a flat tensor is constant, without copying it.

    Horovod's operations are not marked as stateful. If the input of one is a constant, such as the
    payload of a rank that owns nothing of a bucket, TensorFlow runs it while it optimises the
    graph. Other ranks wait in the collectives before it, which this rank never reaches: a deadlock.
    No optimiser can evaluate a slice whose start is read from a variable.
    """
    return tf.slice(tensor, _start().read_value(), [-1])


class HorovodTalk:
    """`horovod_topk.elastic.Talk` among all of Horovod's ranks."""

    def gather(self, data: bytes, name: str) -> list[bytes]:
        """Gather the bytes of every rank, of equal length."""
        return gather_bytes(data, name, TensorFlowOps(), HorovodCollective(hvd.global_process_set))

    def broadcast(self, state: Mapping[str, Any], root: int, name: str) -> Mapping[str, Any]:
        """The state dict of rank `root`."""
        received: Mapping[str, Any] = hvd.broadcast_object(dict(state), root, name=name)
        return received

    def average(self, array: Any, name: str) -> Any:
        """The mean of an array over all ranks."""
        return hvd.allreduce(array, op=hvd.Average, name=name)

    def beside(self, array: Any, other: Any) -> Any:
        """Copy an array to the device of another one."""
        with tf.device(other.device):
            return tf.identity(array)
