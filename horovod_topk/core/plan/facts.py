"""Facts that all ranks must have in common before a step, in four bytes of a payload's header.

    bits 0-9      number of committed steps, modulo 1,024
    bits 10-13    ratio level: how many levels it is below the ratio of the settings, modulo 16
    bits 14-22    digest of the state that ranks have in common: what was loaded, reset, asked for
                  by `set_ratio` or `probe`, or left out of a commit
    bits 23-31    digest of the learning rates that residuals follow; 0 if they follow none

All ranks compute this state alike from what all have received. So it differs only where one rank
alone has loaded a state, has left out a step, or has changed a setting: with the next payloads
every rank finds this out, and raises an error, before weights of ranks go apart.

Digests are mixed with the number of committed steps: two states whose digests are equal in one step
by chance have other digests in the next.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from horovod_topk.errors import PlanMismatchError

PRIME = 2**31 - 1  # digests are numbers below it
START = 0  # digest of a state that nothing was loaded into
_STEPS, _LEVELS, _DIGESTS = 2**10, 2**4, 2**9  # values of each field

_LOADS = "load states on all ranks, from files that were saved in the same step, or on none"
_FIELDS = {  # what is compared
    "steps": "the number of committed steps (modulo 1,024)",
    "level": "the ratio of this step",
    "state": "a state that was loaded or reset, a ratio or probe asked for, or gradients left out "
    "of a step",
    "rates": "learning rates",
}
_CURES = {
    "steps": f"Call step() on every rank after each exchange, and {_LOADS}",
    "level": f"Call set_ratio() on every rank between the same two steps, and {_LOADS}",
    "state": "Call load_state_dict(), checkpoint.load(), reset(), set_ratio() and probe() on "
    f"every rank between the same two steps, and {_LOADS}: it is not enough to broadcast model and "
    "optimizer",
    "rates": "Set the same learning rate on every rank. In elastic jobs a scheduler has to step "
    "the optimizer of its own rank: docs/elastic.md",
}


def digest_of(data: Iterable[bytes], before: int = START) -> int:
    """A digest of bytes, above 0 and below PRIME; the order counts.

    before: digest of what came earlier.
    """
    checksum = before
    for each in data:
        checksum = zlib.crc32(each, checksum)
    return checksum % (PRIME - 1) + 1


def digest_of_rates(rates: Sequence[float]) -> int:
    """A digest of learning rates."""
    return digest_of([struct.pack(f"<{len(rates)}d", *rates)])


def pack(committed: Any, level: int, state: Any, rates: Any = 0) -> Any:
    """The facts as one number below 2^32: of Python's integers, or of int64 scalars in a graph.

    Args:
        level: how many levels the ratio is below that of the settings.
        state: digest of the state that ranks have in common.
        rates: digest of learning rates; 0: residuals follow none.
    """
    mixed = committed % 65521 + 1
    state = state * mixed % PRIME % _DIGESTS
    if not isinstance(rates, int) or rates:  # a graph needs no operations for zeros
        rates = rates * mixed % PRIME % _DIGESTS
    parts = committed % _STEPS, level % _LEVELS, state, rates
    widths, total = (_STEPS, _LEVELS, _DIGESTS), parts[-1]
    for part, width in zip(parts[-2::-1], widths[::-1], strict=True):
        total = total * width + part
    return total


def with_ratio(state: Any, asked: Any) -> Any:
    """Digest of a state together with the ratio that a user asked for.

    Args:
        state: digest of the state; an int64 scalar in a graph.
        asked: position of that ratio's level; -1: none was asked for.
    """
    return (state + 65537 * (asked + 1)) % PRIME


def mismatch(facts: Mapping[int, int]) -> PlanMismatchError:
    """The error for ranks whose facts differ; it names the first field that differs.

    facts: by rank.
    """
    fields = {rank: _unpack(each) for rank, each in facts.items()}
    parted = [name for name in _FIELDS if len({each[name] for each in fields.values()}) > 1]
    name = parted[0]  # digests differ, too, where the number of steps does
    groups = _groups({rank: each[name] for rank, each in fields.items()})
    texts = [f"{_shown(name, value)}{_listed(ranks)}" for value, ranks in groups]
    return PlanMismatchError(
        f"ranks disagree on {_FIELDS[name]}: {', '.join(texts)}", cure=_CURES[name]
    )


def _shown(name: str, value: int) -> str:
    """A value for messages; empty for a digest, which tells a reader nothing."""
    if name == "steps":
        return f"{value} on "
    if name == "level":
        below = value if value < _LEVELS // 2 else value - _LEVELS
        if not below:
            return "that of the settings on "
        return f"{abs(below)} level{'s' * (abs(below) > 1)} {'below' if below > 0 else 'above'} on "
    return "one on "


def _unpack(facts: int) -> dict[str, int]:
    rest, steps = divmod(facts, _STEPS)
    rest, level = divmod(rest, _LEVELS)
    rates, state = divmod(rest, _DIGESTS)
    return {"steps": steps, "level": level, "state": state, "rates": rates}


def _groups(values: Mapping[int, int]) -> list[tuple[int, list[int]]]:
    """Each value, and the ranks that have it; the most frequent value first."""
    groups = [(v, sorted(r for r in values if values[r] == v)) for v in set(values.values())]
    return sorted(groups, key=lambda group: (-len(group[1]), group[1]))


def _listed(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {listed}"
