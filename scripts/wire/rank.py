"""One rank, alone on its host: what its card sends in each way. Rank 0 writes what all found.

    scripts/netlab --hosts 4 -- env PYTHONPATH=scripts horovodrun --gloo
        python scripts/wire/rank.py --json found.json

Between two barriers every rank makes some steps, and afterwards does nothing for as long as the
slowest needed: what it sends then is Horovod's own negotiation. (Longer than a few seconds it is
not watched doing nothing: the rest is reckoned at the same rate.)
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from horovod_topk.torch import TopKEF
from shapes import Shapes
from wire.card import Sent, sent
from wire.ways import DENSE, HALF, Way, ways

IDLE_SECONDS = 3.0  # at most
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


def during(action: Callable[[], None]) -> tuple[Sent, float]:
    """What this rank's card sends while all ranks do something, and how many seconds that takes."""
    hvd.barrier()
    before, began = sent(), time.perf_counter()
    action()
    hvd.barrier()  # what this rank has sent may still be on its way
    return sent() - before, time.perf_counter() - began


def measure(way: Way, model: Shapes, steps: int) -> dict[str, Any]:
    """Of one way, on this rank: all per step."""
    step, optimizer = training(way, model)
    for _ in range(WARM_UP):
        step()

    def several() -> None:
        for _ in range(steps):
            step()

    active, seconds = during(several)
    longest = float(hvd.allreduce(torch.tensor(seconds), op=hvd.Max, name="longest"))
    idle, watched = during(lambda: time.sleep(min(longest, IDLE_SECONDS)))
    share = longest / watched / steps
    planned = None
    if way.exchange not in (DENSE, HALF):
        planned = TopKEF.of(optimizer).stats().sent_bytes
    return {
        "seconds": longest / steps,
        "packets": active.packets / steps,
        "bytes": active.bytes / steps,
        "payload": active.payload / steps,
        "idle_bytes": idle.bytes * share,
        "idle_payload": idle.payload * share,
        "stats": planned,
    }


def all_ways(steps: int) -> Iterator[dict[str, Any]]:
    """One after the other: together their residuals would not fit in memory."""
    model = Shapes()
    for way in ways():
        found = measure(way, model, steps)
        gathered = hvd.allgather_object(found, name="found")
        yield {"way": way.name, **asdict(way), "hosts": gathered}
        gc.collect()


def main() -> None:
    """Measure; rank 0 writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    found = {"ranks": hvd.size(), "steps": args.steps, "ways": list(all_ways(args.steps))}
    if hvd.rank() == 0:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
