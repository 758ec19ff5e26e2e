"""Horovod's collectives as the core wants them, within a graph or at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.mpi_ops import _allreduce

from horovod_topk import process_sets
from horovod_topk.core.agreement import gather_bytes
from horovod_topk.core.nodes import Location
from horovod_topk.ops.tensorflow import Array, Buffer, TensorFlowOps
from horovod_topk.tensorflow.timing import GraphTimer
from horovod_topk.tensorflow.variables import apart


@dataclass(frozen=True)
class _Gathered:
    """A collective's result; a graph waits for it where it is used."""

    tensor: Any  # uint8, one payload a rank

    def wait(self) -> Array:
        return Buffer(self.tensor)


class HorovodCollective:
    """`horovod_topk.core.exchange.Collective` over a Horovod process set.

    Args:
        process_set: the ranks that exchange.
        resizable: leave the number of ranks to the run, not to the trace (elastic training).
        timer: notes when collectives start and end; None: nobody asks.
    """

    def __init__(
        self, process_set: Any, *, resizable: bool = False, timer: GraphTimer | None = None
    ) -> None:
        self._process_set, self.timer = process_set, timer or GraphTimer()
        self._resizable = resizable

    @property
    def rank(self) -> int:
        """Rank within the process set."""
        return int(self._process_set.rank())

    @property
    def size(self) -> int:
        """Ranks in the process set."""
        return int(self._process_set.size())

    @property
    def location(self) -> Location:
        """Where this rank runs, as Horovod's launcher numbers local ranks."""
        return process_sets.location(hvd.rank(), hvd.local_rank())

    def allgather(
        self, payload: Array, name: str, counts: Sequence[int] | None = None
    ) -> _Gathered:
        """A named allgather of a uint8 array; at once where no graph is being built."""
        if tf.executing_eagerly():  # Horovod takes names from a graph's operations alone
            graph = tf.function(lambda tensor: self._gather(tensor, name), autograph=False)
            tensor = tf.convert_to_tensor(payload.value)
            gathered = _Gathered(graph.get_concrete_function(tensor)(tensor))
            self.timer.begin()  # what was noted belongs to that function
            return gathered
        gathered = self._gather(payload.value, name)
        if not self._resizable:
            total = payload.numel * self.size if counts is None else sum(counts)
            gathered = tf.ensure_shape(gathered, [total])
        return _Gathered(gathered)

    def alltoall(self, payloads: Array, name: str) -> _Gathered:
        """A named alltoall of equal stretches of a uint8 array, while a graph is built."""
        received = self._scatter(payloads, [payloads.numel // self.size] * self.size, name)
        return _Gathered(tf.ensure_shape(received, [payloads.numel]))

    def reduce_scatter(self, array: Array, counts: Sequence[int], name: str) -> _Gathered:
        """A named alltoall whose parts are added in rank order, while a graph is built."""
        mine = counts[self.rank]
        received = self._scatter(array, counts, name)
        if mine == 0:  # of unknown length, or a graph would find that there is nothing to do
            tf.raw_ops.Assert(condition=True, data=[received])  # runs although nobody needs it
            return _Gathered(tf.ensure_shape(received, [None]))
        rows = tf.reshape(tf.ensure_shape(received, [mine * self.size]), [self.size, mine])
        total = rows[0]
        for rank in range(1, self.size):
            total = total + rows[rank]
        return _Gathered(total)

    def allreduce(self, array: Array, name: str) -> _Gathered:
        """A named allreduce, while a graph is built."""
        self.timer.note_start(array.value)
        total = _allreduce(
            _at_run_time(array.value),
            name=f"allreduce.{name}",
            op=hvd.Sum,
            ignore_name_scope=True,
            process_set=self._process_set,
        )
        self.timer.note_end(total)
        return _Gathered(tf.ensure_shape(total, [array.numel]))

    def can_split(self, groups: Sequence[Sequence[int]]) -> bool:
        """Whether process sets for these groups are there, or can be added."""
        return process_sets.can_add(self._global(groups), self._process_set)

    def split(self, groups: Sequence[Sequence[int]]) -> list[HorovodCollective | None]:
        """Collectives over process sets, which are added where they are not there yet."""
        found = process_sets.find_or_add(self._global(groups))
        return [
            HorovodCollective(each, timer=self.timer) if each.included() else None for each in found
        ]

    def _gather(self, tensor: Any, name: str) -> Any:
        """Named as `horovod.torch` names it, so that ranks of both frameworks meet."""
        self.timer.note_start(tensor)
        gathered = hvd.allgather(
            _at_run_time(tensor),
            name=f"allgather.{name}",
            ignore_name_scope=True,
            process_set=self._process_set,
        )
        self.timer.note_end(gathered)
        return gathered

    def _scatter(self, array: Array, counts: Sequence[int], name: str) -> Any:
        self.timer.note_start(array.value)
        received, _ = hvd.alltoall(
            _at_run_time(array.value),
            splits=tf.constant(list(counts), tf.int32),
            name=f"alltoall.{name}",
            ignore_name_scope=True,
            process_set=self._process_set,
        )
        self.timer.note_end(received)
        return received

    def _global(self, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """Groups of Horovod's ranks, of ranks within the process set."""
        ranks = self._process_set.ranks
        return [[ranks[rank] for rank in group] for group in groups]


@functools.cache
def _start() -> Any:
    """A variable with the position at which every payload begins, [0]."""
    return apart(_zero)


def _zero() -> Any:
    with tf.device("cpu"):
        return tf.Variable([0], False, dtype=tf.int32)


def _at_run_time(tensor: Any) -> Any:
    """The same flat tensor, not copied, as something that is known only when the graph runs.

    Horovod's operations are not marked as stateful. TensorFlow runs one whose input is a constant,
    such as the payload of a rank that owns nothing of a bucket, while it optimises the graph. Other
    ranks wait in the collectives before it, which this rank never reaches: a deadlock. No optimiser
    can look through a slice that begins where a variable says.
    """
    return tf.slice(tensor, _start().read_value(), [-1])


class HorovodTalk:
    """`horovod_topk.elastic.Talk` among all of Horovod's ranks."""

    def gather(self, data: bytes, name: str) -> list[bytes]:
        """Bytes of every rank, equally many."""
        return gather_bytes(data, name, TensorFlowOps(), HorovodCollective(hvd.global_process_set))

    def average(self, array: Any, name: str) -> Any:
        """Mean over all ranks."""
        return hvd.allreduce(array, op=hvd.Average, name=name)

    def beside(self, array: Any, other: Any) -> Any:
        """The array, on the device of the other one."""
        with tf.device(other.device):
            return tf.identity(array)
