"""Horovod's collectives as the core wants them, within a graph or at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_topk.ops.tensorflow import Array, Buffer


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
    """

    def __init__(self, process_set: Any, *, resizable: bool = False) -> None:
        self._process_set = process_set
        self._resizable = resizable

    @property
    def rank(self) -> int:
        """Rank within the process set."""
        return int(self._process_set.rank())

    @property
    def size(self) -> int:
        """Ranks in the process set."""
        return int(self._process_set.size())

    def allgather(self, payload: Array, name: str) -> _Gathered:
        """A named allgather of a uint8 array; at once where no graph is being built."""
        if tf.executing_eagerly():  # Horovod takes names from a graph's operations alone
            graph = tf.function(lambda tensor: self._gather(tensor, name), autograph=False)
            tensor = tf.convert_to_tensor(payload.value)
            return _Gathered(graph.get_concrete_function(tensor)(tensor))
        gathered = self._gather(payload.value, name)
        if not self._resizable:
            gathered = tf.ensure_shape(gathered, [payload.numel * self.size])
        return _Gathered(gathered)

    def alltoall(self, payloads: Array, name: str) -> _Gathered:
        """A named alltoall of equal stretches of a uint8 array, while a graph is built."""
        size = payloads.numel // self.size
        received, _ = hvd.alltoall(
            payloads.value,
            splits=tf.fill([self.size], size),
            name=f"alltoall.{name}",
            ignore_name_scope=True,
            process_set=self._process_set,
        )
        return _Gathered(tf.ensure_shape(received, [payloads.numel]))

    def _gather(self, tensor: Any, name: str) -> Any:
        """Named as `horovod.torch` names it, so that ranks of both frameworks meet."""
        return hvd.allgather(
            tensor,
            name=f"allgather.{name}",
            ignore_name_scope=True,
            process_set=self._process_set,
        )
