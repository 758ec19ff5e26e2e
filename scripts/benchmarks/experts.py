"""`python scripts/bench.py experts`: residuals of experts that are seldom used (minutes).

Four ranks in this one process train the mixture of experts of `study.experts` on shards that
differ, without the loss that asks for equal use. Writes docs/results/experts.json: for each expert
and rank the share of steps in which a byte of the rank came to it, and norms of its gradient and
residual.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import pages
from benchmarks.residuals_watch import norm_of
from horovod_topk.cli.compare.simulated.exchanges import Compressed, Gradients
from horovod_topk.cli.compare.simulated.training import Job
from horovod_topk.core.run.substitute import parse
from study.experts import workload

RANKS, STEPS, SEED, LR = 4, 600, 0, 0.004
SETTLED = 200  # steps that are not counted: the ratio falls in them
CALLS = {"TopKEF": "TopKEF()", "ratio 0.005": "TopKEF(ratio=0.005)"}


class Watched:
    """Wraps an exchange, and adds up norms of each expert's gradients and residuals.

    Attributes:
        used, gradient, residual: of each rank and expert, [RANKS, experts]: steps with a gradient,
            the sum of its norms, and the sum of the residual's norms over all steps.
    """

    def __init__(self, inner: Compressed, experts: Sequence[Sequence[tuple[int, str]]]) -> None:
        self._inner, self._experts, self._steps = inner, experts, 0
        self.used, self.gradient, self.residual = (
            torch.zeros(RANKS, len(experts), dtype=torch.float64) for _ in range(3)
        )

    def mean(self, gradients: list[Gradients]) -> Gradients:
        """`Exchange.mean`."""
        self._steps += 1
        norms = [[norm_of(each[i] for i, _ in e) for e in self._experts] for each in gradients]
        exchanged = self._inner.mean(gradients)
        if self._steps > SETTLED:
            found = torch.tensor(norms, dtype=torch.float64)
            self.used += found > 0
            self.gradient += found
            self.residual += self._residuals()
        return exchanged

    def _residuals(self) -> Tensor:
        return torch.tensor(
            [
                [norm_of(rank.registry.residual(name) for _, name in e) for e in self._experts]
                for rank in self._inner.compressors
            ],
            dtype=torch.float64,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def watched(call: str) -> dict[str, Any]:
    """Train, and return use, gradient norm and residual norm of each rank and expert."""
    loop = workload(optimizer="adamw", lr=LR, steps=STEPS, shards="skewed", balance=0.0)
    job = Job(loop, parse(call), RANKS, SEED)
    assert isinstance(job.exchange, Compressed)
    named = [(i, name) for i, (name, _) in enumerate(job.model.named_parameters())]
    prefixes = sorted({".".join(n.split(".")[:5]) for _, n in named if ".experts." in n})
    experts = [[(i, n) for i, n in named if n.startswith(f"{each}.")] for each in prefixes]
    watching = Watched(job.exchange, experts)
    job.exchange = watching
    for _ in tqdm(range(STEPS), desc=call, leave=False):
        job.step()
    steps = STEPS - SETTLED
    return {
        "bits_per_byte": job.score()["bits_per_byte"],
        "used": (watching.used / steps).tolist(),
        "gradient": (watching.gradient / watching.used).tolist(),
        "residual": (watching.residual / steps).tolist(),
    }


def main(arguments: Sequence[str]) -> int:
    """Train and write."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args(arguments)
    torch.set_num_threads(1)
    found = {name: watched(call) for name, call in CALLS.items()}
    path = pages.RESULTS / "experts.json"
    path.write_text(json.dumps({"steps": STEPS, "ranks": RANKS, "runs": found}) + "\n")
    print(f"written: {path.relative_to(pages.ROOT)}")
    return 0
