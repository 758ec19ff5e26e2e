"""Fit a network's constants to timed collectives, by non-negative least squares."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from horovod_topk.cost.collective_cost import CollectiveCost
from horovod_topk.cost.machine import Network

Row = Sequence[float]
SURPLUS = 1e-9  # share of the error that a further constant has to remove


@dataclass(frozen=True)
class Sample:
    """A timed collective."""

    collective: CollectiveCost
    seconds: float
    slowdown: float = 1.0  # `Machine.slowdown` of its machine
    bandwidth: float | None = None  # bit/s of the network card, if known


def fit(samples: Sequence[Sample]) -> Network:
    """Return the constants with the least squared relative error of the samples' times.

    If samples have the bandwidth of their card, the share of it that they reach (`goodput`) is
    fitted and, with several bandwidths, the cost of a byte that does not depend on bandwidth
    (`copy`); otherwise the bandwidth is fitted. `add` is the time of allreduces of many bytes
    beyond that of allgathers.
    """
    given = [sample.bandwidth for sample in samples if sample.bandwidth]
    if given and len(given) < len(samples):
        raise ValueError(
            f"{len(given)} of {len(samples)} samples know their bandwidth: all, or none"
        )
    rows = [_columns(sample) for sample in samples]
    overhead, latency, bits, copy, add = least_squares(rows, [1.0] * len(rows))
    if bits == 0:
        raise ValueError("these samples do not tell the bandwidth: time larger messages")
    if given:  # samples faster than the stated bandwidth correct it
        reached = 1 / bits
        bandwidth = max(given) * max(1.0, reached)
        return Network(bandwidth, latency, overhead, min(1.0, reached), copy, add)
    return Network(1 / bits, latency, overhead, 1.0, copy, add)


def _columns(sample: Sample) -> Row:
    """The multiples of the constants in a sample's time, divided by that time."""
    collective, slow = sample.collective, sample.slowdown
    bits = collective.network_bits or 8 * collective.sent_bytes  # one node: bits within it
    columns = (
        collective.collectives,
        collective.rounds,
        bits / (sample.bandwidth or 1.0),
        slow * collective.sent_bytes if sample.bandwidth else 0.0,
        slow * collective.added_bytes,
    )
    return [each / sample.seconds for each in columns]


def least_squares(rows: Sequence[Row], wanted: Row) -> list[float]:
    """The non-negative x that makes rows x nearest to `wanted`.

    There are few columns, so all sets of non-zero elements are tried (Lawson, Hanson 1974, chapter
    23, has the method for many columns).
    """
    width, best, least = len(rows[0]), [0.0] * len(rows[0]), sum(w * w for w in wanted)
    for count in range(1, width + 1):
        for used in itertools.combinations(range(width), count):
            solution = _solve([[row[c] for c in used] for row in rows], wanted)
            if solution is None or min(solution) < 0:
                continue
            x = [0.0] * width
            for column, value in zip(used, solution, strict=True):
                x[column] = value
            error = sum((_dot(row, x) - w) ** 2 for row, w in zip(rows, wanted, strict=True))
            if error < least * (1 - SURPLUS):
                best, least = x, error
    return best


def _solve(rows: Sequence[Row], wanted: Row) -> list[float] | None:
    """Solve the normal equations of scaled columns; None if columns are linearly dependent."""
    columns = list(zip(*rows, strict=True))
    scales = [max(map(abs, column)) for column in columns]
    if min(scales) == 0:
        return None
    scaled = [[v / s for v in column] for column, s in zip(columns, scales, strict=True)]
    system = [[*(_dot(a, b) for b in scaled), _dot(a, wanted)] for a in scaled]
    for pivot in range(len(system)):
        best = max(range(pivot, len(system)), key=lambda r: abs(system[r][pivot]))
        system[pivot], system[best] = system[best], system[pivot]
        if abs(system[pivot][pivot]) < 1e-12 * len(rows):
            return None
        for other in range(len(system)):
            if other != pivot:
                factor = system[other][pivot] / system[pivot][pivot]
                pairs = zip(system[other], system[pivot], strict=True)
                system[other] = [a - factor * b for a, b in pairs]
    return [row[-1] / row[i] / scales[i] for i, row in enumerate(system)]


def _dot(left: Row, right: Row) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
