"""Measure what OneBitLamb loses against dense LAMB, on two simulated ranks.

`python scripts/study/onebit_lamb.py` prints a line for each run: the compressor, how many times
fewer bytes it sends once the variance is frozen, after a fifth of 800 steps, and the score. The
learning rate is dense LAMB's best of a sweep by factors of 2 on validation data. A run takes a
quarter of a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

from horovod_topk.cli.compare.simulated import exchanges, training
from horovod_topk.config import fields_of
from horovod_topk.core.run.substitute import Substitute, parse
from horovod_topk.methods import METHODS
from horovod_topk.torch_training.onebit_lamb import OneBitLamb
from study.loops import LOOPS

STEPS, FREEZE, RATE, SEEDS = 800, 160, 0.01, (0, 1)
COMPRESSORS = (
    "none",
    "SignSGD(exchange='sharded',min_numel=0)",
    "TopKEF(ratio=0.06,momentum=0,values='sign')",
    "TopKEF(ratio=0.016,momentum=0,values='sign',min_numel=0)",
)


class OfMomenta(exchanges.Compressed):
    """The exchange of an optimizer that turns gradients into what ranks exchange."""

    def __init__(self, model: nn.Module, optimizer: OneBitLamb, asked: Substitute) -> None:
        method: Any = METHODS[asked.name]
        given = {**method.for_training, **asked.settings}
        settings, deferred = fields_of(method, given, asked.name)
        config = method(**settings)
        names = {p: name for name, p in model.named_parameters()}
        super().__init__(model, 2, optimizer.exchange_settings(config, names))
        self._own, self._parameters = optimizer, list(names)
        if "follow_lr" in deferred:
            self.attach(optimizer)

    def mean(self, gradients: list[exchanges.Gradients]) -> exchanges.Gradients:
        """`Exchange.mean`."""
        first = self.compressors[0]
        self._own.begin_exchange(first.counter.committed, first.ratio)
        for of_rank in gradients:
            self._own.before_exchange(self._parameters, of_rank)
        return super().mean(gradients)


def trained(model: str, compressor: str, seed: int) -> tuple[float, float | None]:
    """Train a model, and return how many times fewer bytes it has sent, and its score."""

    class Loop(LOOPS[model]):
        def optimizer(self, model: nn.Module) -> OneBitLamb:
            freeze = STEPS + 1 if compressor == "none" else FREEZE
            return OneBitLamb(model.parameters(), freeze, lr=RATE)

    job = training.Job(Loop(optimizer="adamw", lr=RATE, steps=STEPS), parse("none"), 2, seed)
    if compressor != "none":
        (optimizer,) = job._optimizers
        job.exchange = OfMomenta(job.model, optimizer, parse(compressor))
    for _ in range(STEPS):
        job.step()
    traffic = job.exchange.traffic()  # of the last step
    (score,) = job.score().values()
    return traffic.dense_bytes / exchanges.counted_bytes(traffic), score


def main() -> None:
    """Train all models with all compressors."""
    torch.set_num_threads(1)
    for model in ("transformer", "residual"):
        for seed in SEEDS:
            for compressor in COMPRESSORS:
                fewer, score = trained(model, compressor, seed)
                print(f"{model:12} seed {seed}  {compressor:56} {fewer:6.1f}x  {score}", flush=True)


if __name__ == "__main__":
    main()
