"""A rank of the benchmark `wire`: the bytes that its host's card sends with each method."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

from benchmarks.shapes import Shapes, training
from benchmarks.wire import DENSE, HALF, Setting, Way, ways
from cluster.host import INTERFACE
from horovod_topk.cli.bench.nic import Sent, scheduled
from horovod_topk.torch import TopKEF

WARM_UP = 2  # steps: Horovod's cache learns the names, residuals fill


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


def counted(way: Way, model: Shapes, steps: int) -> dict[str, Any]:
    """Count the bytes of one setting's steps on this host, between two barriers."""
    step, optimizer = step_of(way, model)
    for _ in range(WARM_UP):
        step()
    hvd.barrier()
    before = sent()
    for _ in range(steps):
        step()
    hvd.barrier()  # what this rank has sent may still be on its way
    return {"bytes": (sent() - before).bytes / steps, "stats": _leaves_host(way, optimizer)}


def _leaves_host(way: Way, optimizer: Any) -> int | None:
    """Bytes a step, of all ranks of a host, as `stats()` has it; None: the way is Horovod's own."""
    if way.exchange in (DENSE, HALF):
        return None
    stats = TopKEF.of(optimizer).stats()
    known: int | None = stats.sent_bytes if hvd.local_size() == 1 else stats.node_bytes
    return known


def all_ways(steps: int) -> Iterator[dict[str, Any]]:
    """One after the other: together their residuals would not fit in memory."""
    model = Shapes()
    for way in ways(hvd.local_size()):
        hosts = hvd.allgather_object(counted(way, model, steps), name="found")
        yield {"way": way.name, **asdict(way), "hosts": hosts}
        gc.collect()


def measure(setting: Setting, args: argparse.Namespace) -> dict[str, Any] | None:
    """Measure all methods; rank 0 returns them."""
    torch.set_num_threads(1)
    hvd.init()
    found = {"ranks": hvd.size(), "slots": hvd.local_size(), "ways": list(all_ways(args.steps))}
    return found if hvd.rank() == 0 else None
