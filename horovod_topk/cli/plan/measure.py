"""`--measure`: measures the constants of this job's network and this machine's CPU kernels.

Every rank runs it, under horovodrun or torchrun. Rank 0 first times kernels, while the others wait
for it in `begin()`. Then all ranks time named allreduces and allgathers of several sizes; the
slowest rank's time is used. Least squares fit the constants to these times (`cost.fit`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from horovod_topk.cli.frameworks import NO_FRAMEWORK, Framework, find
from horovod_topk.cli.machine import cpu_model
from horovod_topk.cli.plan import kernels
from horovod_topk.cli.plan.arguments import Asked
from horovod_topk.cli.timing import clocked, repeated, slowest
from horovod_topk.core.plan.nodes import Nodes, nodes_of
from horovod_topk.cost.collective_cost import CollectiveCost, negotiation, ring_allreduce
from horovod_topk.cost.fit import Sample, fit
from horovod_topk.cost.machine import Kernels, Machine, Network
from horovod_topk.cost.quantities import count
from horovod_topk.reporting import launched_rank

FLOAT = 4  # bytes
ALLREDUCED = (1, 2**14, 2**17, 2**20, 2**22)  # float32: 4 bytes to 16 MiB
GATHERED = (2**6, 2**14, 2**18, 2**20, 2**22)  # bytes of each rank
WARM_UP, REPEATS = 3, 21  # for each size: the first ones negotiate, later ones are cached
ENOUGH_SECONDS = 2.0  # larger sizes are skipped once a collective took longer
LARGE = 2**20  # bytes above which fewer repeats are enough
LARGE_REPEATS = 5
UNKNOWN = Network(bandwidth=1.0, latency=0.0, overhead=0.0)  # until it is measured


def measure(asked: Asked) -> tuple[Machine, Nodes] | None:
    """Measure on all ranks; return the constants and the nodes on rank 0, None on other ranks."""
    rank, framework = launched_rank(), find()
    if rank is None:
        raise ValueError(
            "--measure needs ranks: run `horovodrun -np 2 horovod-topk plan ...`, or without "
            "Horovod `torchrun --nproc-per-node 2 -m horovod_topk.cli plan ...`"
        )
    if framework is None:
        raise ValueError(NO_FRAMEWORK.format("--measure"))
    config = replace(asked.config, ratios=None)  # they name the model's tensors, not the timed one
    computed = kernels.measure(framework, config) if rank == 0 else None
    framework.begin()
    try:
        return _together(framework, computed, asked)
    finally:
        framework.end()


def _together(
    framework: Framework, computed: Kernels | None, asked: Asked
) -> tuple[Machine, Nodes] | None:
    """Time collectives with all ranks; computed: kernel times, on rank 0 only."""
    if framework.size < 2:
        raise ValueError("--measure: there is 1 rank: start 2 or more")
    nodes = nodes_of(framework.gather(framework.location, "topkef.plan.nodes"))
    samples = list(timed(framework, nodes))
    if computed is None:
        return None
    found = Machine(UNKNOWN, computed, asked.args.cores, asked.args.crowd, _origin(nodes))
    network = _network(samples, nodes, found.slowdown(max(nodes.sizes)), asked)
    return replace(found, network=network), nodes


def _network(
    samples: Iterable[tuple[CollectiveCost, float]], nodes: Nodes, slowdown: float, asked: Asked
) -> Network:
    """Fit the network's constants; on one node, the bandwidth is the one within the node."""
    alone = len(nodes.ranks) == 1
    known = None if alone else asked.args.bandwidth
    network = fit([Sample(collective, took, slowdown, known) for collective, took in samples])
    local = asked.args.local_bandwidth or (network.bandwidth if alone else None)
    return replace(network, local_bandwidth=local)


def timed(framework: Framework, nodes: Nodes) -> Iterator[tuple[CollectiveCost, float]]:
    """Time collectives: their cost, and the first quartile of the slowest rank's seconds.

    Other programs on a machine make some repeats longer, and none shorter.
    """
    for elements in ALLREDUCED:
        run = framework.allreduce(elements, f"topkef.plan.allreduce.{elements}")
        took = _seconds(framework, run, FLOAT * elements)
        yield ring_allreduce(FLOAT * elements, nodes), took
        if took > ENOUGH_SECONDS:
            break
    for size in GATHERED:
        run = framework.allgather(size, f"topkef.plan.allgather.{size}")
        took = _seconds(framework, run, size)
        yield gathered(size, nodes), took
        if took > ENOUGH_SECONDS:
            break


def gathered(size: int, nodes: Nodes) -> CollectiveCost:
    """The cost of an allgather of `size` bytes a rank: a ring, as in `core.exchange`."""
    ranks = sum(nodes.sizes)
    sent = (ranks - 1) * size
    return CollectiveCost(
        collectives=1,
        rounds=ranks - 1 + negotiation(ranks),
        network_bytes=sent if len(nodes.ranks) > 1 else 0,
        local_bytes=sent if max(nodes.sizes) > 1 else 0,
        sent_bytes=sent,
    )


def _seconds(framework: Framework, run: Callable[[], object], size: int) -> float:
    measure = clocked(run, before=framework.barrier)
    mine = repeated(measure, LARGE_REPEATS if size > LARGE else REPEATS, WARM_UP)
    everyone = framework.gather(mine, "topkef.plan.seconds")
    return float(statistics.quantiles(slowest(everyone), n=4)[0])


def _origin(nodes: Nodes) -> str:
    where = f"{count(sum(nodes.sizes), 'rank')} on {count(len(nodes.ranks), 'node')}"
    return f"measured with {where}, {cpu_model()}, {time.strftime('%Y-%m-%d')}"
