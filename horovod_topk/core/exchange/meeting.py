"""Meetings: all ranks exchange a few bytes outside of a step, within a time limit.

Ranks meet when an optimizer is built, whatever its compression, and before the next exchange of a
rank that has changed something which changes what it sends. A rank that no other one comes to meet
raises an error at the limit, instead of waiting for ever. Within a step the limit is that of any
collective, since a rank may be slow; where ranks see that others wait for another collective, they
raise at once.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from horovod_topk.errors import ConfigError, MissingRanksError

log = logging.getLogger("horovod_topk")

VARIABLE = "HOROVOD_TOPK_MEETING_SECONDS"
LIMIT = 60.0  # seconds
IN_A_STEP = 1800.0  # the same, where ranks meet within a step: PyTorch's limit of a collective
SAID = 10.0  # seconds after which a waiting rank says so in the log
_PAUSE, _LONGEST = 1e-4, 1e-2  # seconds between two looks
CURE = (
    "Do on every rank what one rank does: build or compile the optimizer, attach() the compressor, "
    "freeze layers, and call set_ratio(), load_state_dict(), begin() and synchronize() between the "
    "same two steps. "
    f"{VARIABLE} sets the limit"
)


@runtime_checkable
class Meets(Protocol):
    """A collective whose ranks can meet within a time limit."""

    @property
    def in_order(self) -> bool:
        """Whether collectives are matched by their order, and so have to be of equal sizes."""

    def meet(self, data: bytes, name: str, *, patient: bool = False) -> list[bytes]:
        """Gather host bytes of equal length from every rank. A collective.

        patient: wait as long as in a step, for ranks that may still be evaluating, say.

        Raises:
            MissingRanksError: a rank did not come within the limit.
            PlanMismatchError: a rank waits in another exchange, or has sent another length.
        """


def limit() -> float:
    """Seconds that a rank waits in a meeting."""
    text = os.environ.get(VARIABLE, str(LIMIT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0.0:
        raise ConfigError(
            f"{VARIABLE}={text!r} is not a number of seconds above 0",
            cure=f"Set it to a number such as {LIMIT:g}, or leave it out",
        )
    return seconds


def wait_until(
    done: Callable[[], bool],
    name: str,
    rank: int,
    missing: Callable[[], Sequence[int]] = lambda: (),
    *,
    patient: bool = False,
) -> None:
    """Wait until a meeting is over; say so in the log if that takes long.

    missing: returns the ranks that have not come; empty: they are not known.
    patient: see `Meets.meet`.
    """
    seconds = max(limit(), IN_A_STEP) if patient else limit()
    began, pause, is_said = time.monotonic(), _PAUSE, False
    while not done():
        waited = time.monotonic() - began
        if waited > seconds:
            raise MissingRanksError(
                f"rank {rank} waited {seconds:g} s in {name!r}, to which "
                f"{_named(missing())} did not come",
                cure=CURE,
            )
        if waited > SAID and not is_said:
            is_said = True
            who = _named(missing())
            log.warning("TopKEF: rank %d has waited %.0f s in %r for %s", rank, SAID, name, who)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)


def _named(ranks: Sequence[int]) -> str:
    if not ranks:
        return "some other rank"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}"
