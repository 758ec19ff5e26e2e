"""An elastic job with PyTorch; see `story`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import story
import torch

import horovod_topk.torch
from horovod_topk.core.run.substitute import parse
from horovod_topk.torch.elastic import TorchState

hvd.init()
torch.manual_seed(os.getpid())
model = torch.nn.Sequential(torch.nn.Linear(50, 60), torch.nn.Linear(60, 9))
kept = os.environ.get("COMMIT_DIR")
asked = parse(os.environ["COMPRESSOR"])
topk = getattr(horovod_topk.torch, asked.name)(**asked.settings)
inner = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
given: Any = {"named_parameters": model.named_parameters(), "compression": topk}
optimizer: Any
if every := os.environ.get("LOCAL_STEPS"):
    outer = horovod_topk.torch.Outer(lr=0.7, momentum=0.5)
    optimizer = horovod_topk.torch.LocalSteps(inner, **given, every=int(every), outer=outer)
else:
    optimizer = hvd.DistributedOptimizer(inner, **given)


def step(middle: Callable[[], None]) -> None:
    """The gradients' first bucket is under way in the middle of it."""
    optimizer.zero_grad()
    loss = model(torch.randn(8, 50)).square().sum()
    loss.backward()
    middle()
    optimizer.step()


def digest(tensors: list[torch.Tensor]) -> str:
    """Of all bits of some tensors."""
    data = b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(data).hexdigest()


def facts() -> dict[str, Any]:
    """What all ranks owe, their weights, and what was lost."""
    state = topk.state_dict()
    residuals = state["residuals"]
    names = [key for key in ("state.q", "state.anchor", "state.outer_momentum") if key in state]
    shared = [array for key in names for _, array in sorted(state[key]["residuals"].items())]
    owed = torch.cat([residuals[name] for name in sorted(residuals)])
    mean = hvd.allreduce(owed, op=hvd.Average, name="owed")
    weights = [float(p.double().sum()) for p in model.parameters()]
    stats = topk.stats()
    return {
        "owed": mean[::50].tolist(),
        "norm": stats.residual_norm,
        "weights": weights,
        "bits": digest([*model.parameters(), *shared]),
        "lost": stats.lost_ranks,
        "ratio": optimizer._topkef.ratio,
    }


@hvd.elastic.run
def train(state: TorchState) -> None:
    """All of it."""
    story.live(state, step, lambda: (hvd.rank(), hvd.size()), facts)


held = {"model": model, "optimizer": optimizer, "compression": topk, "commit_dir": kept}
train(TorchState(**held, step=0, chapter=0, since=0))
