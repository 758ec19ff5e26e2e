"""`python scripts/bench.py experts`: residuals of experts that are seldom used (minutes).

Four ranks in this one process train the mixture of experts of `study.experts` on shards that
differ, without the loss that asks for equal use. Writes docs/results/experts.json: for each expert
and rank the share of steps in which a byte of the rank came to it, and norms of its gradient and
residual.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from tqdm import tqdm

import pages
from benchmarks.watched import Watched
from horovod_topk.cli.compare.simulated.training import Job
from horovod_topk.core.run.substitute import parse
from study.experts import workload

RANKS, STEPS, SEED, LR = 4, 600, 0, 0.004
SETTLED = 200  # steps that are not counted: the ratio falls in them
CALLS = {"TopKEF": "TopKEF()", "ratio 0.005": "TopKEF(ratio=0.005)"}


def watched(call: str) -> dict[str, Any]:
    """Train, and return use, gradient norm and residual norm of each rank and expert."""
    loop = workload(optimizer="adamw", lr=LR, steps=STEPS, shards="skewed", balance=0.0)
    job = Job(loop, parse(call), RANKS, SEED)
    names = [name for name, _ in job.model.named_parameters() if ".experts." in name]
    experts = sorted({".".join(name.split(".")[:5]) for name in names})
    norms = Watched(job, [[n for n in names if n.startswith(f"{each}.")] for each in experts])
    for _ in tqdm(range(STEPS), desc=call, leave=False):
        job.step()
    gradient, residual = (torch.stack(e[SETTLED:]) for e in (norms.gradient, norms.residual))
    used = (gradient > 0).double()
    return {
        "bits_per_byte": job.score()["bits_per_byte"],
        "used": used.mean(dim=0).tolist(),
        "gradient": (gradient.sum(dim=0) / used.sum(dim=0)).tolist(),
        "residual": residual.mean(dim=0).tolist(),
    }


def main(args: argparse.Namespace) -> int:
    """Train and write."""
    torch.set_num_threads(1)
    found = {name: watched(call) for name, call in CALLS.items()}
    path = pages.RESULTS / "experts.json"
    path.write_text(json.dumps({"steps": STEPS, "ranks": RANKS, "runs": found}) + "\n")
    pages.write("does-it-pay")
    return 0
