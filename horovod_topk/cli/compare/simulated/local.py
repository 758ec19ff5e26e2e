"""Local steps of simulated ranks: each rank has a model, an optimizer and a schedule of its own.

All ranks' inner steps run one after another in the main thread, so that random numbers are drawn in
the same order in every run. Then all ranks count the step together, each in its thread, since an
outer step waits for other ranks. Nothing draws random numbers there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from horovod_topk.cli.compare.simulated.exchanges import Dense, pairs_of
from horovod_topk.cli.compare.simulated.workload import Workload, scored
from horovod_topk.core.exchange.loopback import Loopback
from horovod_topk.core.run.stats import StepCounters
from horovod_topk.local.call import LocalCall
from horovod_topk.ops.torch import TorchOps
from horovod_topk.torch_training import local_steps
from horovod_topk.torch_training.state import TrainingCompressor, TrainingState

PATIENCE = 600.0  # seconds that a rank waits for others


class Compressor(TrainingCompressor):
    """Base class of the compressors of simulated ranks."""

    adapter = "cli.compare.simulated"

    def attached(self, state: TrainingState) -> None:
        """Remember an optimizer's state; what this process reports is not of simulated ranks."""
        self._states.add(state)


class LocalSteps(local_steps.LocalSteps):
    """`horovod_topk.torch_training.local_steps.LocalSteps` over a loopback network."""

    compressors = Compressor

    def on_exchange(self, callback: Callable[[StepCounters], None]) -> None:
        """Call a function after each exchange, of movements or of buffers."""
        self._topkef.on_step(callback)
        if self._topkef.averages is not None:
            self._topkef.averages.runner.on_step(callback)


@dataclass
class Replica:
    """A rank's model, and what trains it."""

    model: nn.Module
    optimizers: list[Optimizer]
    schedules: list[Any]
    batches: Iterator[Any]
    outer: list[LocalSteps]  # one of each optimizer


class LocalJob:
    """P simulated ranks that train models of their own, with outer steps now and then.

    Attributes:
        replicas: the ranks, in order.
        traffic: bytes so far of rank 0: sent, and those of a dense ring allreduce in every step.
    """

    def __init__(self, workload: Workload, asked: LocalCall, ranks: int, seed: int) -> None:
        self.workload, self.traffic = workload, Counter[str]()
        self._asked, self._clip_norm = asked, getattr(workload, "clip_norm", None)
        self._network = Loopback(ranks, TorchOps(), PATIENCE, pairs_of(ranks))
        self.replicas = [self._replica(rank, ranks, seed) for rank in range(ranks)]
        self._dense = Dense(self.replicas[0].model, ranks).traffic().dense_bytes
        for position in range(len(self.replicas[0].optimizers)):
            self._together(partial(self._begin, position))
        for each in self.replicas[0].outer:
            each.on_exchange(self._count)

    def step(self) -> None:
        """Take an inner step on every rank, and the outer steps that are due."""
        for replica in self.replicas:
            self._inner_step(replica)
        self._together(lambda rank: [each.count() for each in self.replicas[rank].outer])
        self.traffic.update(dense=self._dense)

    def finish(self) -> None:
        """Make an outer step of what ranks have moved since the last one, as scripts do."""
        self._together(lambda rank: [each.synchronize() for each in self.replicas[rank].outer])

    def score(self) -> dict[str, float | None]:
        """Metrics of rank 0's weights by name; all None if a metric or a weight is not finite."""
        return scored(self.workload, self.replicas[0].model)

    def _replica(self, rank: int, ranks: int, seed: int) -> Replica:
        torch.manual_seed(seed)
        model = self.workload.model()
        found = self.workload.optimizer(model)
        optimizers = found if isinstance(found, list) else [found]
        schedules = [self.workload.schedule(each) for each in optimizers]
        return Replica(model, optimizers, schedules, self.workload.batches(rank, ranks, seed), [])

    def _begin(self, position: int, rank: int) -> None:
        """Make a rank's `LocalSteps` of one of its optimizers. A collective."""
        replica = self.replicas[rank]
        compressor = Compressor.named(self._asked.compressor.name, __name__)
        made = LocalSteps(
            replica.optimizers[position],
            replica.model.named_parameters(),
            collective=self._network.collective(rank),
            compression=compressor(**self._asked.compressor.settings),
            named_buffers=replica.model.named_buffers() if position == 0 else (),
            **self._asked.settings,
        )
        made.begin()
        replica.outer.append(made)

    def _inner_step(self, replica: Replica) -> None:
        loss = self.workload.loss(replica.model, next(replica.batches))
        torch.autograd.backward(loss)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(replica.model.parameters(), self._clip_norm)
        for optimizer in replica.optimizers:
            optimizer.step()
            optimizer.zero_grad()  # gradients of one rank at a time are in memory
        for schedule in replica.schedules:
            if schedule is not None:
                schedule.step()

    def _together(self, work: Callable[[int], Any]) -> None:
        """Do something on all ranks at the same time, each in its thread."""
        ranks = range(len(self.replicas))
        with ThreadPoolExecutor(len(ranks)) as threads:  # they end, and with them what they hold
            pending = [threads.submit(work, rank) for rank in ranks]
        for each in pending:
            each.result()

    def _count(self, counters: StepCounters) -> None:
        sent, of_node = counters.sent_bytes, counters.node_bytes
        self.traffic.update(sent=sent if of_node is None else of_node)
