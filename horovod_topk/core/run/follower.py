"""`Follower`: what learns from each exchange of a bucket, beside the residuals.

An update of the optimizer may depend on what was exchanged (`horovod_topk.updates`). A step calls
its follower, keeps its states with the method's, and sends its message with the payload. It knows
nothing else of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from horovod_topk.core.state.residual import Arenas

Array = TypeVar("Array")


class Follower(Protocol[Array]):
    """Follows one bucket, step after step. In a step its methods are called in this order.

    States are pairs of arenas: a step reads the present ones and writes the candidates, which a
    commit makes the present ones.
    """

    def begin(self, gradients: Sequence[Array]) -> None:
        """Note this rank's gradients; the exchanged ones replace them after `message`."""

    def squares(self) -> Sequence[Array | None]:
        """Mean squares that Top-K selects by, one for each gradient; empty: there are none."""

    def message(self) -> Array:
        """The numbers that this rank sends, as many as `UpdateRule.numbers` names for each tensor.

        It is called once gradients are encoded.
        """

    def finish(self, exchanged: Sequence[Array], gain: float, ranks: int, message: Any) -> None:
        """Compute the candidates of the states, once gradients are exchanged.

        Args:
            exchanged: the gradients of all ranks, times `gain`; they may be written.
            ranks: number of ranks, whose gradients are added up or averaged.
            message: what the ranks have sent: bytes of float32, one row a rank; None without a
                message.
        """


@dataclass(frozen=True)
class FollowerArenas:
    """Arenas of one bucket that a follower may read, and its own states."""

    residuals: Sequence[Arenas[Any]]  # of this rank: those of the bucket, or of each owner's shards
    owned: Sequence[Arenas[Any]]  # the owner's residuals, if there are owners
    part: int  # this rank's number among the owners
    states: Mapping[str, Arenas[Any]]  # by name


class Followers(Protocol):
    """The followers of all buckets of an optimizer."""

    def begin_step(self) -> None:
        """Note that a step begins, before any bucket does."""

    def follower(self, bucket: Any, memory: FollowerArenas) -> Follower[Any]:
        """Make the follower of a bucket's plan."""
