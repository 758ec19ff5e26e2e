"""Train the digits network in an elastic job, and log every event for `benchmarks.crashes`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import harness
import horovod.torch as hvd
import pytorch_digits
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.crashes import COMMIT_EVERY, PAUSE
from horovod_topk.torch import TopKEF
from horovod_topk.torch.elastic import TorchState

BATCH = 64  # of all ranks together


class Notes:
    """Lines in a file of this process."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"notes-{os.getpid()}.jsonl").open("a", buffering=1)

    def add(self, event: str, **facts: Any) -> None:
        """One line."""
        line = {"time": time.time(), "pid": os.getpid(), "event": event, **facts}
        self._file.write(json.dumps(line) + "\n")


def rows_of(step: int, seed: int, count: int) -> torch.Tensor:
    """This rank's part of a step's examples, which are the same for any number of ranks."""
    generator = torch.Generator().manual_seed(seed << 20 | step)
    return torch.randint(count, (BATCH,), generator=generator)[hvd.rank() :: hvd.size()]


def main() -> None:
    """Train until the last step, through whatever happens."""
    folder, steps, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = pytorch_digits.DigitsCNN()
    topk = TopKEF(ratio=0.01, values="float32", momentum=0, follow_lr=False, warmup=None)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=topk,
    )
    schedule = LambdaLR(optimizer, harness.warmup_cosine(steps))
    images, labels = pytorch_digits.digits("training")
    notes = Notes(folder)

    def owed() -> list[float]:
        """Some elements of the mean of all ranks' residuals."""
        residuals = topk.state_dict()["residuals"]
        some = torch.cat([residuals[name][::101] for name in sorted(residuals)])
        mean: list[float] = hvd.allreduce(some, op=hvd.Average, name="owed").tolist()
        return mean

    def weights() -> float:
        return sum(float(p.detach().double().abs().sum()) for p in model.parameters())

    @hvd.elastic.run
    def train(state: TorchState) -> None:
        stats = topk.stats()
        schedule.last_epoch = state.step - 1
        schedule.step()
        facts = {"weights": weights(), "owed": owed(), "lost": stats.lost_ranks}
        notes.add("enter", step=state.step, size=hvd.size(), **facts)
        while state.step < steps:
            rows = rows_of(state.step, seed, len(images))
            optimizer.zero_grad()
            cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
            schedule.step()
            state.step += 1
            notes.add("step", step=state.step, size=hvd.size())
            time.sleep(PAUSE)
            if state.step % COMMIT_EVERY == 0:
                notes.add("commit", step=state.step, weights=weights(), owed=owed())
                state.commit()

    held = {"model": model, "optimizer": optimizer, "compression": topk, "step": 0}
    train(TorchState(commit_dir=folder / "commits", **held))
    images, labels = pytorch_digits.digits("held-out")
    with torch.no_grad():
        accuracy = (model(images).argmax(dim=1) == labels).double().mean().item()
    notes.add("end", accuracy=accuracy, weights=weights(), rank=hvd.rank())


if __name__ == "__main__":
    main()
