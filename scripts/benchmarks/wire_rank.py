"""One rank: the bytes that its host's card sends with each method. Rank 0 writes all results.

    PYTHONPATH=scripts HOROVOD_TIMELINE=DYNAMIC scripts/netlab --hosts 4 -- horovodrun --gloo
        python scripts/benchmarks/wire_rank.py --json found.json --count-cycles

Between two barriers every rank makes some steps. Then it idles for as long as the slowest rank
needed, and sends Horovod's negotiation alone. (It idles a few seconds at most; the rest is
extrapolated.) A cycle with an exchange lasts longer than an idle one. To subtract negotiation, both
are repeated while Horovod's cycles are counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import horovod.torch as hvd
import torch

from benchmarks.shapes import Shapes, training
from benchmarks.wire import DENSE, HALF, Way, ways
from cluster.host import INTERFACE
from horovod_topk.cli.bench.nic import Sent, scheduled
from horovod_topk.torch import TopKEF

IDLE_SECONDS = 3.0  # at most
WARM_UP = 2  # steps: Horovod's cache learns the names, residuals fill
WRITER_SECONDS = 60.0  # limit for Horovod's timeline to reach the disk
MARGIN_SECONDS = 0.3  # all ranks know of the timeline's start or end by then
START, ORIGIN = "CYCLE_START", "start_time_since_epoch_in_micros"


def sent() -> Sent:
    """What this host has sent so far, by the packet scheduler of its shaped link.

    The card's own counters are of bundles of up to 64 KiB, with one header for all packets of one.
    """
    found = scheduled(INTERFACE)
    assert found is not None
    return found


def step_of(way: Way, model: Shapes) -> tuple[Callable[[], None], Any]:
    """A step of training in this way, and its optimizer."""
    own = {DENSE: hvd.Compression.none, HALF: hvd.Compression.fp16}
    settings = asdict(way) | {"warmup": None}
    compression = own[way.exchange] if way.exchange in own else TopKEF(**settings)
    directions = model.noise(torch.Generator().manual_seed(hvd.rank()))
    return training(model, compression, partial(model.loss, directions))


@dataclass(frozen=True)
class Watched:
    """What this host's card sent while all ranks did something, and when that was."""

    sent: Sent
    began: float  # as `time.time` has it
    ended: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


def during(action: Callable[[], None]) -> Watched:
    """Watches the card."""
    hvd.barrier()
    before, began = sent(), time.time()
    action()
    hvd.barrier()  # what this rank has sent may still be on its way
    return Watched(sent() - before, began, time.time())


def measure(way: Way, model: Shapes, steps: int, timeline: Path | None) -> dict[str, Any]:
    """Of one way, on this host, per step.

    timeline: where Horovod may write one; without it cycles are not counted.
    """
    step, optimizer = step_of(way, model)
    for _ in range(WARM_UP):
        step()

    def several() -> None:
        for _ in range(steps):
            step()

    active = during(several)
    longest = float(hvd.allreduce(torch.tensor(active.seconds), op=hvd.Max, name="longest"))
    pause = partial(time.sleep, min(longest, IDLE_SECONDS))
    idle = during(pause)
    found = {
        "seconds": longest / steps,
        "packets": active.sent.packets / steps,
        "bytes": active.sent.bytes / steps,
        "payload": active.sent.payload / steps,
        "idle_bytes": idle.sent.bytes * longest / idle.seconds / steps,
        "stats": _leaves_host(way, optimizer),
    }
    return found if timeline is None else found | counted(several, pause, steps, timeline)


def counted(
    several: Callable[[], None], pause: Callable[[], None], steps: int, timeline: Path
) -> dict[str, float]:
    """Bytes beyond negotiation, and the number of cycles, per step."""
    with Cycles(timeline) as cycles:
        active, idle = during(several), during(pause)
    counts = [cycles.between(each.began, each.ended) for each in (active, idle)]
    counts = hvd.broadcast_object(counts, name="cycles")
    return beyond_negotiation(active.sent, idle.sent, counts, steps)


def beyond_negotiation(
    active: Sent, idle: Sent, cycles: Sequence[int], steps: int
) -> dict[str, float]:
    """Bytes less those of as many idle cycles; `cycles` has the counts of both."""
    share = cycles[0] / cycles[1]
    return {
        "cycles": cycles[0] / steps,
        "exchanged_bytes": (active.bytes - share * idle.bytes) / steps,
        "exchanged_payload": (active.payload - share * idle.payload) / steps,
    }


def _leaves_host(way: Way, optimizer: Any) -> int | None:
    """Bytes a step, of all ranks of a host, as `stats()` has it; None: the way is Horovod's own."""
    if way.exchange in (DENSE, HALF):
        return None
    stats = TopKEF.of(optimizer).stats()
    known: int | None = stats.sent_bytes if hvd.local_size() == 1 else stats.node_bytes
    return known


class Cycles:
    """Counts the cycles of a job while its ranks run in step; used on every rank.

    Counting adds messages to each cycle, so bytes on the card meanwhile are higher than otherwise.
    The job needs `HOROVOD_TIMELINE=DYNAMIC`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts: list[float] = []  # in seconds since the epoch, by rank 0's clock

    def __enter__(self) -> Self:
        hvd.barrier()
        hvd.start_timeline(str(self._path), mark_cycles=True)
        time.sleep(MARGIN_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(MARGIN_SECONDS)
        hvd.stop_timeline()
        if hvd.rank() == 0:
            self._starts = starts_in(_written(self._path))
            self._path.unlink()

    def between(self, began: float, ended: float) -> int:
        """Number of cycles that began between two readings of rank 0's `time.time`; 0 elsewhere."""
        return sum(began <= start < ended for start in self._starts)


def starts_in(timeline: str) -> list[float]:
    """Start of each cycle of a timeline, in seconds since the epoch."""
    events = json.loads(timeline)
    (origin,) = (e["args"][ORIGIN] for e in events if ORIGIN in e.get("args", {}))
    return [(origin + e["ts"]) / 1e6 for e in events if e.get("name") == START]


def _written(path: Path) -> str:
    """A timeline's text, once its writer has closed the list."""
    deadline = time.monotonic() + WRITER_SECONDS
    while time.monotonic() < deadline:
        text = path.read_text().rstrip() if path.exists() else ""
        if text.endswith("]"):
            return text
        time.sleep(0.2)
    raise RuntimeError(f"{path}: Horovod has written no timeline; set HOROVOD_TIMELINE=DYNAMIC")


def all_ways(steps: int, timeline: Path | None) -> Iterator[dict[str, Any]]:
    """One after the other: together their residuals would not fit in memory."""
    model = Shapes()
    for way in ways(hvd.local_size()):
        found = measure(way, model, steps, timeline)
        hosts = hvd.allgather_object(found, name="found")
        yield {"way": way.name, **asdict(way), "hosts": hosts}
        gc.collect()


def main() -> None:
    """Measure; rank 0 writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--count-cycles", action="store_true", help="of Horovod, in its timeline")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    timeline = args.json.with_suffix(".timeline") if args.count_cycles else None
    found = {
        "ranks": hvd.size(),
        "slots": hvd.local_size(),
        "steps": args.steps,
        "ways": list(all_ways(args.steps, timeline)),
    }
    if hvd.rank() == 0:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
