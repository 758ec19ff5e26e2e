"""One rank: what its host's card sends in each way. Rank 0 writes what all found.

    scripts/netlab --hosts 4 -- env PYTHONPATH=scripts HOROVOD_TIMELINE=DYNAMIC horovodrun --gloo
        python scripts/wire/rank.py --json found.json

Between two barriers every rank makes some steps, and afterwards does nothing for as long as the
slowest needed: what it sends then is Horovod's own negotiation. (Longer than a few seconds it is
not watched doing nothing: the rest is reckoned at the same rate.) A cycle that exchanges something
lasts longer than an idle one, so Horovod's cycles are counted in both.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from horovod_topk.torch import TopKEF
from shapes import Shapes
from wire.card import Sent, sent
from wire.cycles import Cycles
from wire.ways import DENSE, HALF, Way, ways

IDLE_SECONDS = 3.0  # at most
MARGIN_SECONDS = 0.5  # before the timeline's end, lest the last cycles be cut off
WARM_UP = 2  # steps: Horovod's cache learns the names, residuals fill


def training(way: Way, model: Shapes) -> tuple[Callable[[], None], Any]:
    """A step of training in this way, and its optimizer."""
    names = model.named_parameters()
    plain = torch.optim.SGD(model.parameters(), lr=1e-9)
    own = {DENSE: hvd.Compression.none, HALF: hvd.Compression.fp16}
    compression = own.get(way.exchange) or TopKEF(
        ratio=way.ratio, values=way.values, exchange=way.exchange, min_numel=way.min_numel
    )
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=names, compression=compression)
    generator = torch.Generator().manual_seed(hvd.rank())
    directions = [torch.randn(weight.shape, generator=generator) for weight in model.weights]

    def step() -> None:
        optimizer.zero_grad()
        model.loss(directions).backward()
        optimizer.step()

    return step, optimizer


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


def measure(way: Way, model: Shapes, steps: int) -> dict[str, Any]:
    """Of one way, on this rank, per step; `windows` are of both times, for `Cycles`."""
    step, optimizer = training(way, model)
    for _ in range(WARM_UP):
        step()

    def several() -> None:
        for _ in range(steps):
            step()

    active = during(several)
    longest = float(hvd.allreduce(torch.tensor(active.seconds), op=hvd.Max, name="longest"))
    idle = during(lambda: time.sleep(min(longest, IDLE_SECONDS)))
    share = longest / idle.seconds / steps
    return {
        "seconds": longest / steps,
        "packets": active.sent.packets / steps,
        "bytes": active.sent.bytes / steps,
        "payload": active.sent.payload / steps,
        "idle_bytes": idle.sent.bytes * share,
        "idle_payload": idle.sent.payload * share,
        "stats": _leaves_host(way, optimizer),
        "windows": [(each.began, each.ended) for each in (active, idle)],
        "watched": [idle.sent.bytes, idle.sent.payload],
    }


def _leaves_host(way: Way, optimizer: Any) -> int | None:
    """Bytes a step, of all ranks of a host, as `stats()` has it; None: the way is Horovod's own."""
    if way.exchange in (DENSE, HALF):
        return None
    stats = TopKEF.of(optimizer).stats()
    known: int | None = stats.sent_bytes if hvd.local_size() == 1 else stats.node_bytes
    return known


def talk(host: dict[str, Any], cycles: Sequence[int], steps: int) -> dict[str, float]:
    """What a host says in a step's cycles if no more is said in them than in idle ones."""
    active, idle = cycles
    said, payload = (each / idle * active / steps for each in host["watched"])
    return {"cycles": active / steps, "talk_bytes": said, "talk_payload": payload}


def all_ways(steps: int, cycles: Cycles) -> Iterator[dict[str, Any]]:
    """One after the other: together their residuals would not fit in memory."""
    model = Shapes()
    cycles.watch()
    measured = []
    for way in ways(hvd.local_size()):
        measured.append((way, hvd.allgather_object(measure(way, model, steps), name="found")))
        gc.collect()
    time.sleep(MARGIN_SECONDS)
    cycles.end()
    if hvd.rank() > 0:
        return
    for way, hosts in measured:
        counts = [cycles.between(*window) for window in hosts[0]["windows"]]  # by rank 0's clock
        told = [host | talk(host, counts, steps) for host in hosts]
        yield {"way": way.name, **asdict(way), "hosts": told}


def main() -> None:
    """Measure; rank 0 writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    cycles = Cycles(args.json.with_suffix(".timeline"))
    found = {
        "ranks": hvd.size(),
        "slots": hvd.local_size(),
        "steps": args.steps,
        "ways": list(all_ways(args.steps, cycles)),
    }
    if hvd.rank() == 0:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
